"""wandb, TensorBoard and MLflow are filled from the files of a run, by a process of their own each (docs/trackers.md)."""
