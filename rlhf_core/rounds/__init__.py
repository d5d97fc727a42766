"""Rounds of iterative DPO: their pinned inputs, prompts and pairs."""
