"""A look at data before anything runs: what format it has, what would be trained on, what would be dropped, and the YAML to paste."""
