"""Measures this project's speed beside TRL's (peers.py) and the machine's limits (limits.py); growth.py varies the size."""
