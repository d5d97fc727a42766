"""Ray: clusters, jobs, places on nodes and GPUs, groups of actors, and the ranks of Ray Train."""
