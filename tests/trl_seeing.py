"""TRL's losses and gradients of a model that sees, printed as JSON: python trl_seeing.py MODEL REFERENCE PREPARED ROWS.jsonl"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from seeing_models import seeing
from transformers import AutoModelForImageTextToText
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from rlhf_core.data.pictures import pictures_of

SHARED = {
    "max_length": None,
    "use_cpu": True,
    "report_to": "none",
    "per_device_train_batch_size": 8,
    "gradient_checkpointing": False,
    "bf16": False,
}
BETA = 0.3


def main(model: Path, reference: Path, prepared: Path, rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    tokenizer, sight = seeing(model, prepared)
    processor = tokenizer.vision.processor
    processor.chat_template = tokenizer.chat_template
    with_pictures = [row | {"images": [sight.read(picture) for picture in pictures_of(row["messages"])]} for row in rows]
    asked = [{"role": "user", "content": "Which shape is it?"}]
    pairs = [
        {
            "prompt": asked,
            "images": row["images"],
            **{side: [{"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")},
        }
        for row in with_pictures
    ]
    demonstrations = [{"prompt": asked, "images": pair["images"], "completion": pair["chosen"]} for pair in pairs]
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, records in (("sft", demonstrations), ("dpo", pairs)):
            own = AutoModelForImageTextToText.from_pretrained(model)
            common = {"train_dataset": Dataset.from_list(records), "processing_class": processor}
            if name == "sft":
                trainer = SFTTrainer(own, SFTConfig(scratch, completion_only_loss=True, **SHARED), **common)
            else:
                other = AutoModelForImageTextToText.from_pretrained(reference)
                trainer = DPOTrainer(own, other, DPOConfig(scratch, beta=BETA, **SHARED), **common)
            batch = trainer.data_collator([dict(record) for record in records])
            loss = trainer.compute_loss(own.eval(), batch)
            loss.backward()
            language = [p.grad.norm() for p in [*own.get_decoder().parameters(), own.get_output_embeddings().weight] if p.grad is not None]
            found[name] = (float(loss), float(sum(norm**2 for norm in language)) ** 0.5)
    return found


if __name__ == "__main__":
    folders, path = [Path(name) for name in sys.argv[1:4]], Path(sys.argv[4])
    print(json.dumps(main(*folders, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])))
