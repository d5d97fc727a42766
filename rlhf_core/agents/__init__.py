"""Conversations of several turns: what a user's `play` gets, tools, and the tokens between turns."""
