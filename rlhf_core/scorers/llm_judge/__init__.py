"""Scores by a language model behind an OpenAI-compatible address (kind llm_judge)."""
