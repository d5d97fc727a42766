"""Direct alignment: the DPO family on pairs, KTO on single responses."""
