"""Training on demonstrations: given, sampled and selected, or marked by their scores."""
