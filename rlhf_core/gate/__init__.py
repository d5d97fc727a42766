"""The gate of the reward model: functions of arrays. Only `probes` and `scoring` run a model."""
