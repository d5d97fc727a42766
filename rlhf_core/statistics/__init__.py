"""Intervals, exact tests and error budgets."""
