"""Training with DeepSpeed, and the ranks that train together."""
