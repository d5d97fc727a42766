"""Runs and their worktrees."""
