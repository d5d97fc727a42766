"""Part lora: steps of SFT with adapters, on a base in bfloat16 and on one of 4 bits: tokens/s and memory beside the planner's.

python -m tools.bench.gpu.lora --out FILE.json [--rehearse]
"""

from __future__ import annotations

import sys

from tools.bench.gpu.step_cases import Choice, main

LORA = {"rank": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": "all-linear", "quantize": None}
QLORA = {**LORA, "quantize": "nf4"}
CHOICES = tuple(
    choice
    for shape, tokens in (("1.5B", 8192), ("7B", 4096))
    for choice in (Choice("sft", shape, tokens, LORA, "peft"), Choice("sft", shape, tokens, QLORA, "bitsandbytes"))
)

if __name__ == "__main__":
    sys.exit(main("tools.bench.gpu.lora", __doc__, CHOICES))
