"""Checks on a small copy, before anything is trained, that the configured model computes the same here as in its own library."""
