"""Online RL: the driver of a Ray job, its actors, and the loop."""
