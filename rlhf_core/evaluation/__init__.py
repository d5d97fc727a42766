"""Evaluation of two models on the same held-out prompts: answers and figures."""
