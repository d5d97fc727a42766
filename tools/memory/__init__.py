"""Compares the peak memory of training processes with the planner's prediction: python -m tools.memory."""
