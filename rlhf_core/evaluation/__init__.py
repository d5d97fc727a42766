"""Two models on the same held-out prompts: their answers, and what the answers show."""
