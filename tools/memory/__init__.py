"""Peak memory of training processes beside the planner's prediction: python -m tools.memory."""
