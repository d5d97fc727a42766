"""What the gate measures: functions of arrays. Only `probes` and `scoring` ask a model."""
