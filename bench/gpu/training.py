"""Part training: steps of SFT, reward model and DPO in bfloat16: tokens/s, model FLOPs utilization, memory beside the planner's.

python -m bench.gpu.training --out FILE.json [--rehearse]
"""

from __future__ import annotations

import sys

from bench.gpu.step_cases import Choice, main

# In the order of what is most worth knowing. Full training of 7B takes 114 GiB for its states alone: its passes are short, so that a GPU of
# 140 GB may hold it.
CHOICES = (
    *(Choice(method, "1.5B", 8192) for method in ("sft", "dpo", "reward")),
    *(Choice(method, "0.5B", 8192) for method in ("sft", "dpo", "reward")),
    Choice("sft", "7B", 2048),
)

if __name__ == "__main__":
    sys.exit(main("bench.gpu.training", __doc__, CHOICES))
