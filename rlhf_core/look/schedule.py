"""Chooses how long to train from the number of rows: batches, epochs, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.config import Params
from rlhf_core.look.facts import DataFacts, MachineFacts
from rlhf_core.look.methods import Choice
from rlhf_core.planning.chain import Rows
from rlhf_core.planning.remedy import changed

# Epochs by the number of training rows: the first limit that is at least the rows.
# SFT: 3 as of Alpaca (52,000) and LIMA's follow-ups, 2 as of Tulu 3, 1 for more; preferences: 1 to 3, as Zephyr (arXiv 2310.16944) and
# Tulu 3 (arXiv 2411.15124), fewer than SFT because held-out accuracy falls earlier.
EPOCHS = {"sft": ((10_000, 3.0), (100_000, 2.0)), "dpo": ((5_000, 2.0),), "kto": ((5_000, 2.0),)}
BATCHES = {"sft": (8, 128), "dpo": (16, 128), "kto": (32, 128)}  # fewest and most rows of an optimizer step
STEPS = {"sft": 200, "dpo": 100, "kto": 100}  # wanted of small data, whose batches are smaller for it
HELD_OUT = {"validation": 500, "test": 1000}  # prompts that are enough
FEW_PROMPTS, SHARES_OF_FEW = 1000, {"validation": 0.1, "test": 0.2}  # of fewer a larger share judges
EPOCHS_BEFORE_RL = 2.0  # Cobbe et al. 2021 (arXiv 2110.14168): solutions that are sampled get less diverse after two
GROUP = 8  # samples of a prompt, as most GRPO recipes have
PROMPTS, CPU_PROMPTS = 64, 8  # of a rollout batch
FEWEST_BATCHES = 150  # rollout batches of a run, in several passes over few prompts
EVALUATIONS, CHECKPOINTS = 10, 5  # of a stage
FEWEST_BETWEEN = 5  # steps between evaluations


@dataclass(frozen=True)
class Schedule:
    """The proposed schedule.

    settings: keys and values. rows: for each use the training rows that remain with these settings.
    """

    settings: Mapping[str, Any]
    rows: Mapping[str, Rows]


def propose_schedule(data: DataFacts, choice: Choice, machine: MachineFacts, params: Params) -> Schedule:
    """Batch sizes, epochs, evaluations, checkpoints and held-out shares for the method.

    Args:
        params: with the settings of the method.
    """
    settings: dict[str, Any] = {"data.promotion_fraction": 0.0} | held_out(data, params)  # no rounds of iterative DPO
    params = changed(params, settings)
    rows = data.training_rows(params)
    if choice.sft and "sft" in rows:
        settings |= supervised_schedule("sft", rows["sft"].train, machine.ranks, most=EPOCHS_BEFORE_RL if choice.name == "grpo" else None)
    if choice.name in ("dpo", "kto"):
        settings |= supervised_schedule(choice.name, rows["preference"].train, machine.ranks)
    if choice.name == "grpo":
        settings |= rl_schedule(rows["prompt"].train, machine)
        settings["evaluation.prompts"] = max(1, min(HELD_OUT["test"], round(data.rows("prompt") * params.data.test_fraction)))
    return Schedule(settings, rows)


def held_out(data: DataFacts, params: Params) -> dict[str, float]:
    """Smaller held-out shares for large data, because each evaluation reads the whole validation split."""
    prompts = max(data.rows("prompt"), data.rows("preference"), 1)
    given = {"validation": params.data.validation_fraction, "test": params.data.test_fraction}
    if prompts < FEW_PROMPTS:
        return {f"data.{split}_fraction": max(share, SHARES_OF_FEW[split]) for split, share in given.items()}
    return {f"data.{split}_fraction": min(share, max(0.01, round(HELD_OUT[split] / prompts, 2))) for split, share in given.items()}


def supervised_schedule(key: str, train: int, ranks: int, *, most: float | None = None) -> dict[str, Any]:
    """Epochs (at most `epochs`) and batch size of a supervised stage, with about ten evaluations and five checkpoints."""
    epochs = next((epochs for rows, epochs in EPOCHS[key] if train <= rows), 1.0)
    epochs = epochs if most is None else min(epochs, most)
    fewest, largest = BATCHES[key]
    batch = max(fewest, min(largest, power_of_two(train * epochs / STEPS[key])))
    batch = -(-batch // ranks) * ranks
    steps = max(1, round(train * epochs / batch))
    settings = {"epochs": epochs, "steps": None, "batch_size": batch}
    settings |= {"eval_every": every(steps, EVALUATIONS), "checkpoint_every": every(steps, CHECKPOINTS)}
    return {f"{key}.{name}": value for name, value in settings.items()}


def rl_schedule(train: int, machine: MachineFacts) -> dict[str, Any]:
    """Sizes of rollout batches with one optimizer step each, so that every sample comes from the policy that is trained."""
    on_gpu = bool(machine.memory.gpus)
    prompts = min(PROMPTS if on_gpu else CPU_PROMPTS, max(1, train))
    prompts = -(-prompts // machine.ranks) * machine.ranks
    samples = prompts * GROUP
    passes = max(1, -(-FEWEST_BATCHES * prompts // max(1, train)))
    steps = passes * max(1, train) // prompts
    return {
        "rl.grpo.group_size": GROUP,
        "rl.samples_per_step": samples,
        "rl.minibatch_size": samples,
        "rl.epochs": float(passes),
        "rl.steps": None,
        "rl.evaluation.every": every(steps, EVALUATIONS),
        "rl.checkpoint_every": every(steps, CHECKPOINTS),
    }


def every(steps: float, times: int) -> int:
    """Return a round number of steps between events of which there should be about so many."""
    return nice(max(FEWEST_BETWEEN, steps / times))


def power_of_two(number: float) -> int:
    """Return the largest power of two that isn't above the number; at least 1."""
    return 1 << max(0, int(number).bit_length() - 1)


def nice(number: float) -> int:
    """Return the number rounded down to its first digit, as 80 for 87 and 4 for 4.9; at least 1."""
    whole = max(1, int(number))
    ten = 10 ** (len(str(whole)) - 1)
    return whole // ten * ten
