"""vLLM: the rollout engine and its processes, how weights reach it, models that it refuses, and the server of `rlhf_core.use`."""
