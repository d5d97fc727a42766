"""Weights on their way from trainers to rollout engines."""
