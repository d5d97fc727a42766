"""Ray: clusters, jobs, places on nodes and GPUs, groups of actors, and ranks in a process group."""
