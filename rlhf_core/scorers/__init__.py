"""Scorers of responses: reward models, comparisons with a label, patterns, judges, and users' functions."""
