"""The flow `rlhf`: the whole chain, each stage through DVC."""
