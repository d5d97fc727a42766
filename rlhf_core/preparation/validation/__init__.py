"""Validation of prepared data with Great Expectations."""
