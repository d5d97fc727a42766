"""Stages of rounds/dvc.yaml: one round of iterative DPO."""
