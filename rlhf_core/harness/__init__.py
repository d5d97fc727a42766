"""lm-evaluation-harness on the chain's own models, as part of stage evaluate. The package lm_eval is the extra `eval`."""
