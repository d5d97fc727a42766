"""Reward models as scorers."""
