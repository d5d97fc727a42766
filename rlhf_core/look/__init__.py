"""Inspection of data before anything runs: its format, what would be trained on, what would be dropped, and YAML for params.yaml."""
