"""Simulations of the decisions that docs/statistics.md describes: python -m tools.simulate."""
