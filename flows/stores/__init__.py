"""Runs and registered versions in stores: their files in a DVC remote, their commits, branches and tags in a git remote."""
