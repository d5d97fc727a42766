"""Training of a model that sees, of whose ranks only one has a picture in a step."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from seeing_models import rows, seeing
from tiny_models import settings

from rlhf_core.config import VisionTraining
from rlhf_core.data.pictures import Picture
from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.models.build import load_language_model, new_scalar_model
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.trainers.reward.train import encode_comparisons, reward_phase
from rlhf_core.trainers.sft.train import sft_phase
from rlhf_core.trainers.supervised.demonstrations import encode_demonstrations


class Case(NamedTuple):
    """pictures: those that are stored beside the model. reward: a reward model is trained, in place of SFT."""

    zero_stage: int
    pictures: list[Picture]
    vision: VisionTraining = "trained"
    reward: bool = False
    kind: str = "sees"


STEPS = ([0, 1], [4, 3])  # pairs of rows of which one has a picture


def trained(case: Case, model: Path) -> dict[str, torch.Tensor]:
    """Return the weights after two steps."""
    tokenizer, sight = seeing(model, model.parent)
    sizes = {"steps": 2, "batch_size": 2, "pad_id": 0, "microbatch_tokens": 400, "sight": sight}
    if case.reward:
        module = ScalarModule(new_scalar_model(model, tokenizer, trust_remote_code=False, vision=case.vision))
        pairs = list(encode_comparisons(rows(case.pictures), tokenizer, max_length=256, max_shared_tokens=0)[0])
        phase = reward_phase(pairs, [], margin=0.0, centering_coef=0.01, **sizes)
    else:
        module = PolicyModule(load_language_model(model, vision=case.vision))
        examples = list(encode_demonstrations(rows(case.pictures), tokenizer, max_length=256)[0])
        phase = sft_phase("sft", examples, [], **sizes)
    engine = TrainEngine(module, settings(disable_dropout=True, zero_stage=case.zero_stage))
    for chosen in STEPS:
        phase.train_batch(engine, chosen)
        engine.step()
    return engine.state_dict(every_rank=True)
