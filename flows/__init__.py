"""Prefect flows: order, schedule, retries, approval. What a stage computes is in tasks/ and rlhf_core/."""
