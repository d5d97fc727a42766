"""Two ranks that share each sequence train as one rank does: SFT, reward, DPO and KTO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from supervised_ranks import Case, loss_difference, run_case, run_ranks
from tiny_models import assert_weights_agree
from whole_matrix import cells, is_chosen

from rlhf_core.config.model import LoraConfig

pytestmark = pytest.mark.usefixtures("world")
LOSSES = 1e-5  # relative
# Each without and with something that could differ in parts: recomputed layers, sharded weights, adapters, a reference computed every step.
FURTHER = {
    "sft": {"zero_stage": 3, "gradient_checkpointing": True},
    "reward": {"zero_stage": 2, "lora": LoraConfig(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear")},
    "dpo": {"zero_stage": 3, "reference": "live"},
    "kto": {"reference": "live"},
}
FOUR = ("sft plain", "kto further")
QUICK = tuple(f"{kind} further" for kind in FURTHER)
CHANGES = {f"{kind} {case}": changes for kind, further in FURTHER.items() for case, changes in (("plain", {}), ("further", further))}


def cases(out: Path, **changes: Any) -> dict[str, Case]:
    return {name: Case(name.split()[0], str(out / name.replace(" ", "-")), {**own, **changes}) for name, own in CHANGES.items()}


@pytest.fixture(scope="module")
def results(
    sft_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of one rank without ZeRO, and of each of two."""
    out = tmp_path_factory.mktemp("sequence-parallel")
    chosen = CHANGES if is_chosen(request) else QUICK
    alone = {name: case for name, case in cases(out / "one", zero_stage=0, gradient_checkpointing=False).items() if name in chosen}
    shared = {name: case for name, case in cases(out / "two", sequence_parallel=2).items() if name in chosen}
    ranks = run_ranks(2, sft_folder, list(shared.values()), out)
    return {name: run_case(case, sft_folder) for name, case in alone.items()}, [dict(zip(shared, rank, strict=True)) for rank in ranks]


@pytest.mark.parametrize("name", cells(CHANGES, QUICK))
def test_ranks_that_share_sequences_have_losses_norms_and_weights_of_one(results, name: str):
    alone, (first, second) = results
    for key, weight in second[name]["weights"].items():  # of a reward model rank 0 alone returns any
        assert torch.equal(first[name]["weights"][key], weight)
    assert loss_difference(first[name]["curves"], alone[name]["curves"]) < LOSSES
    assert_weights_agree(first[name]["weights"], alone[name]["weights"])
    numbers = {key: value for key, value in alone[name]["metrics"].items() if isinstance(value, int | float)}
    assert {key: first[name]["metrics"][key] for key in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-5)
    others = {key: value for key, value in numbers.items() if key in second[name]["metrics"]}  # rank 0 alone scores held-out pairs
    assert others and {key: second[name]["metrics"][key] for key in others} == pytest.approx(others, rel=1e-4, abs=1e-5)


@pytest.mark.long
def test_two_groups_of_two_ranks_train_on_parts_of_their_own_micro_batches(results, sft_folder: Path, tmp_path: Path):
    alone = results[0]
    shared = {name: case for name, case in cases(tmp_path, sequence_parallel=2).items() if name in FOUR}
    for rank in run_ranks(4, sft_folder, list(shared.values()), tmp_path):
        for name, found in zip(shared, rank, strict=True):
            assert loss_difference(found["curves"], alone[name]["curves"]) < LOSSES
            assert_weights_agree(found["weights"], alone[name]["weights"])
