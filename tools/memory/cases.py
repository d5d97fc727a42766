"""Lists the trainings whose memory is measured, as settings of params.yaml, with the planner's prediction for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_core.config import Params
from rlhf_core.planning.models import of_shape
from rlhf_core.planning.online import rl_ranks
from rlhf_core.planning.remedy import changed
from rlhf_core.planning.shape import ModelShape
from rlhf_core.planning.stages import PLANS, Models
from tools.clerk import clerk_params

ROOT = Path(__file__).parents[2]
LENGTH = 128  # tokens of a sequence
RL = ("ppo", "grpo")
OF_TRAINER = (
    *("ranks", "sequence_parallel", "zero_stage", "offload_optimizer", "offload_parameters", "offload_frozen"),
    "gradient_checkpointing",
)
SHAPES = {
    "2M": ModelShape(2, 128, 352, 4, 4, 32, 4000),
    "20M": ModelShape(6, 384, 1024, 6, 2, 64, 12000),
    "60M": ModelShape(8, 512, 1408, 8, 4, 64, 32000),
}


@dataclass(frozen=True)
class Case:
    """A training of two optimizer steps, each of two micro-batches.

    stage: sft | reward | dpo | kto | ppo | grpo.
    changes: changes of the stage's section of params.yaml, or of rl and rl.trainer.
    rows: sequences of LENGTH tokens in a micro-batch.
    """

    stage: str
    shape: str
    dtype: str
    changes: dict[str, Any] = field(default_factory=dict)
    rows: int = 8

    @property
    def ranks(self) -> int:
        return self.changes.get("ranks", 1)

    @property
    def tokens(self) -> int:
        return self.rows * LENGTH

    @property
    def own_rows(self) -> int:
        """The number of sequences in an optimizer step on each rank, or on each group of ranks that share them."""
        return 2 * self.rows

    @property
    def all_rows(self) -> int:
        """The number of sequences in an optimizer step."""
        return self.own_rows * self.ranks // self.changes.get("sequence_parallel", 1)

    @property
    def settings(self) -> str:
        """The settings in words, such as "ZeRO 2, 2 ranks"."""
        words = [f"ZeRO {self.changes.get('zero_stage', 0)}", f"{self.ranks} rank{'s' * (self.ranks > 1)}"]
        names = {"lora": "LoRA", "gradient_checkpointing": "checkpointing"}
        for key, value in self.changes.items():
            if key not in ("zero_stage", "ranks"):
                named = names.get(key, key.replace("_", " "))
                words.append(named if value is True or isinstance(value, dict) else f"{named} {value}")
        return ", ".join(words)

    @property
    def name(self) -> str:
        return f"{self.stage} {self.shape} {self.dtype} {self.tokens} {self.settings}"

    @property
    def tiny(self) -> Case:
        """The same case with a small model, which takes the same imports."""
        return replace(self, shape="2M", rows=4)


LORA = {"rank": 16, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear"}
TWO = {"ranks": 2}
SHARDED = {"zero_stage": 3, "ranks": 2}


def cases() -> Iterator[Case]:
    """All cases in bfloat16, and each stage's plainest training also in float32."""
    offloaded = {"offload_optimizer": True, "offload_parameters": True}
    changes: dict[str, list[dict[str, Any]]] = {
        "sft": [
            *({}, SHARDED, {"zero_stage": 2}, {"zero_stage": 3}, TWO, {"gradient_checkpointing": True}, {"lora": LORA}),
            *(TWO | {"sequence_parallel": 2}, SHARDED | {"sequence_parallel": 2}),
            *({"zero_stage": 2, "offload_optimizer": True}, SHARDED | {"offload_optimizer": True}, SHARDED | offloaded),
        ],
        "reward": [{}, SHARDED, TWO | {"sequence_parallel": 2}],
        "dpo": [{"reference": "live"}, {"reference": "precomputed"}, SHARDED | {"reference": "live"}, {"reference": "live", "lora": LORA}],
        "kto": [{"reference": "live"}, {"reference": "precomputed"}],
        "ppo": [
            *({}, SHARDED, TWO | {"zero_stage": 2}, {"gradient_checkpointing": True}),
            *(SHARDED | {"offload_frozen": True}, SHARDED | {"offload_optimizer": True}),
        ],
        "grpo": [{}, SHARDED, {"lora": LORA}],
    }
    for stage, settings in changes.items():
        for number, changed_keys in enumerate(settings):
            for dtype in ("bfloat16", "float32")[: 2 - bool(number)]:
                yield Case(stage, "20M", dtype, changed_keys)
    yield Case("sft", "20M", "float32", TWO | {"zero_stage": 2})
    for changed_keys in ({}, {"zero_stage": 2}, {"zero_stage": 3}, SHARDED, {"gradient_checkpointing": True}, {"lora": LORA}):
        yield Case("sft", "60M", "bfloat16", changed_keys, rows=16)


def params_of(case: Case) -> Params:
    settings: dict[str, Any] = {"model.dtype": case.dtype, "model.max_length": LENGTH}
    if case.stage in RL:
        own = {"samples_per_step": case.all_rows, "minibatch_size": case.all_rows, "trainer.microbatch_tokens": case.tokens, "steps": 2}
        settings |= {"alignment.method": "rl", "rl.algorithm": case.stage, "rl.rollout.max_new_tokens": LENGTH - 8}
        own |= {f"trainer.{key}" if key in OF_TRAINER else key: value for key, value in case.changes.items()}
        prefix = "rl"
    else:
        paired = case.stage in ("dpo", "reward")
        own = {"microbatch_tokens": case.tokens, "batch_size": case.all_rows // (2 if paired else 1), **case.changes}
        own |= {"epochs": 1.0} if case.stage == "reward" else {"steps": 2}
        prefix = case.stage
    return changed(clerk_params(), settings | {f"{prefix}.{key}": value for key, value in own.items()})


def predict(case: Case) -> float:
    """The bytes that the preflight expects a rank to need."""
    params, model = params_of(case), of_shape(SHAPES[case.shape], stored=case.dtype, plain_llama=True)
    if case.stage in RL:
        (rank,) = rl_ranks(params.rl, params.model, Models(model, model, (model,)), on_gpu=False)
        return rank.needed
    ((process,),) = PLANS[f"train_{case.stage}" if case.stage in ("sft", "reward") else case.stage](params, Models(model), on_gpu=False)
    return process.needed
