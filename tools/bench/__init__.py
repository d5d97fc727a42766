"""Speed of this project's trainers compared with TRL's (peers.py) and the machine's limits (limits.py); growth.py varies the size."""
