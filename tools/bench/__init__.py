"""Our trainers beside TRL's: the same work handed to both (work.py), one module for each side, and the measurement (peers.py)."""
