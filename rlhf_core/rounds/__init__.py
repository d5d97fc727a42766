"""Rounds of iterative DPO: what each is pinned to, its prompts and its pairs."""
