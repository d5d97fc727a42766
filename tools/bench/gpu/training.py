"""Part training: steps of SFT, reward model and DPO in bfloat16: tokens/s, model FLOPs utilization, memory beside the planner's.

python -m tools.bench.gpu.training --out FILE.json [--rehearse]
"""

from __future__ import annotations

import sys

from tools.bench.gpu.step_cases import Choice, main

# The most useful first. Full training of 7B needs 142 GiB in the optimizer step and isn't started with less.
CHOICES = (
    *(Choice(method, "1.5B", 8192) for method in ("sft", "dpo", "reward")),
    *(Choice(method, "0.5B", 8192) for method in ("sft", "dpo", "reward")),
    Choice("sft", "7B", 2048),
)

if __name__ == "__main__":
    sys.exit(main("tools.bench.gpu.training", __doc__, CHOICES))
