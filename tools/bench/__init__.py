"""Speed of this project's trainers beside TRL's (peers.py) and beside the machine's limits (limits.py); growth.py varies the size."""
