"""Two data-parallel ranks of SFT, reward of pairs and steps, DPO and KTO train as one does: losses, metrics, weights, stop and resume."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from supervised_ranks import STEPS, Case, loss_difference, run_case, run_ranks
from tiny_models import largest_difference
from whole_matrix import cells, is_chosen

from rlhf_core.checkpoint.digest import differences, read_digest
from rlhf_core.config.model import LoraConfig

pytestmark = pytest.mark.usefixtures("world")
KINDS = ("sft", "reward", "steps", "dpo", "kto")
OF_REWARD = ("reward", "steps")
STAGES = (0, 3)
LOSSES, WEIGHTS = 1e-4, 3e-4  # relative; a tenth of a step, since Adam divides tiny gradients by their own size
# Fewer held-out examples than ranks, prompts longer than a micro-batch, references computed with every step, one prompt for all pairs.
EDGES = {
    "sft": {"heldout": 1, "changes": {"microbatch_tokens": 1}},
    **{kind: {"heldout": 1, "changes": {"ensemble": 2}} for kind in OF_REWARD},
    "dpo": {
        "heldout": 1,
        "changes": {
            "reference": "live",
            "microbatch_tokens": 10_000,
            "batch_size": 2,
            "zero_stage": 3,
            "offload_parameters": True,
            "gradient_checkpointing": True,
        },
    },
    "kto": {"heldout": 1, "changes": {"reference": "live", "batch_size": 2}},
}

# References whose weights are on the host while they compute nothing.
OFFLOADED = {"zero_stage": 3, "reference": "live", "offload_frozen": True}

# A live reference is then the policy without its adapters, and a precomputed one a copy of the model.
ADAPTED = {"lora": LoraConfig(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear"), "learning_rate": 1e-2}

# Lion with steps that are far too large, so that the held-out loss rises from step 4 on, and the best average is what the phase ends with.
SETTLED = {"optimizer": "lion", "steps": 8, "learning_rate": 0.3, "schedule": "constant", "ema_decay": 0.5, "keep_best": True}


# What `make test` runs: each kind at one ZeRO stage, fewer held-out examples than ranks, and what these are compared with.
PLAIN = {("sft", "3"), ("reward", "0"), ("steps", "3"), ("dpo", "3"), ("kto", "0"), ("reward", "edge"), ("dpo", "edge")}
QUICK_ADAPTED = {("dpo", 3)}


def is_quick(name: str) -> bool:
    kind, *rest = name.split()
    if kind in KINDS:
        adapted = rest[0] == "adapted"
        return (kind, int(rest[1])) in QUICK_ADAPTED if adapted else (kind, rest[0]) in PLAIN or name == "dpo offloaded"
    return rest == [] or rest[-1] != "0"


def cases(out: Path, *, whole: bool) -> dict[str, Case]:
    """Name -> case. The stopped ones come before those that resume from them. whole: all, or those of `make test`."""
    found = {f"{kind} {stage}": Case(kind, str(out / f"{kind}-{stage}"), {"zero_stage": stage}) for kind in KINDS for stage in STAGES}
    found |= {
        f"{kind} edge": Case(kind, str(out / f"{kind}-edge"), heldout=edge["heldout"], changes=edge["changes"])
        for kind, edge in EDGES.items()
    }
    found |= {f"{kind} offloaded": Case(kind, str(out / f"{kind}-offloaded"), OFFLOADED) for kind in ("dpo", "kto")}
    for kind, stage, reference in itertools.product(("dpo", "kto"), STAGES, ("live", "precomputed")):
        name = f"{kind} adapted {stage} {reference}"
        found[name] = Case(kind, str(out / name.replace(" ", "-")), ADAPTED | {"zero_stage": stage, "reference": reference})
    for stage in STAGES:
        where = {"scratch": str(out / f"stopped-{stage}"), "changes": {"zero_stage": stage, "disable_dropout": False}}
        found |= {f"stopped {stage}": Case("sft", stop_after=2, **where), f"resumed {stage}": Case("sft", **where)}
        found[f"shrunk {stage}"] = Case("sft", str(out / f"shrunk-{stage}"), {"zero_stage": stage}, stop_after=2)
        settled = {"zero_stage": stage, **SETTLED}
        found[f"settled {stage}"] = Case("sft", str(out / f"settled-{stage}"), settled)
        where = {"scratch": str(out / f"settled-stopped-{stage}"), "changes": settled}
        found |= {f"settled stopped {stage}": Case("sft", stop_after=6, **where), f"settled resumed {stage}": Case("sft", **where)}
    timed = {"scratch": str(out / "timed"), "changes": {"max_minutes": 2.5, "schedule": "constant", "warmup_fraction": 0.0}}
    found |= {"timed stopped": Case("sft", stop_after=2, **timed), "timed": Case("sft", **timed), "timed again": Case("sft", **timed)}
    found["store"] = Case("store", str(out / "store"))
    found["not finite"] = Case("sft", str(out / "not-finite"), {"learning_rate": 1e30})
    return {name: case for name, case in found.items() if whole or is_quick(name)}


def numbers(of: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in of.items() if isinstance(value, int | float)}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("supervised-ranks")


@pytest.fixture(scope="module")
def ranks(sft_folder: Path, out: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    named = cases(out / "two", whole=is_chosen(request))
    results = run_ranks(2, sft_folder, list(named.values()), out)
    return [dict(zip(named, of_rank, strict=True)) for of_rank in results]


@pytest.fixture(scope="module")
def alone(sft_folder: Path, out: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What one rank gets, without ZeRO."""
    named, edges = cases(out / "one", whole=True), [f"{kind} edge" for kind in KINDS if is_chosen(request) or (kind, "edge") in PLAIN]
    wanted = [*(f"{kind} 0" for kind in KINDS), *edges, "settled 0"]
    return {name: run_case(named[name], sft_folder) for name in wanted}


@pytest.mark.parametrize(("kind", "case"), cells(itertools.product(KINDS, [*map(str, STAGES), "edge"]), PLAIN))
def test_two_ranks_have_the_losses_metrics_and_weights_of_one(ranks, alone, kind: str, case: str):
    first, second = (rank[f"{kind} {case}"] for rank in ranks)
    expected = alone[f"{kind} {'0' if case != 'edge' else case}"]
    assert loss_difference(first["curves"], expected["curves"]) < LOSSES
    for mine, theirs in zip(first["curves"], expected["curves"], strict=True):
        if mine["step"] == 0 and kind in ("dpo", "kto"):  # policy and reference are equal, so rounding decides
            mine, theirs = mine | {"reward_accuracy": 0.5}, theirs | {"reward_accuracy": 0.5}
        assert numbers(mine) == pytest.approx(numbers(theirs), rel=LOSSES, abs=1e-5, nan_ok=True)
    scores = [of.get("scores", []) for of in (first["metrics"], expected["metrics"])]
    assert numbers(first["metrics"]) == pytest.approx(numbers(expected["metrics"]), rel=LOSSES, abs=1e-5, nan_ok=True)
    assert scores[0] == pytest.approx(scores[1], abs=1e-4) and (kind in OF_REWARD) == bool(scores[0])
    assert largest_difference(first["weights"], expected["weights"]) < WEIGHTS
    if kind in OF_REWARD:  # saved by rank 0 alone
        assert second["weights"] == {}
    else:
        assert largest_difference(first["weights"], second["weights"]) == 0


@pytest.mark.parametrize("kind", cells(("dpo", "kto"), ["dpo"]))
def test_two_ranks_whose_live_reference_is_offloaded_train_as_with_a_precomputed_one(ranks, kind: str):
    """The reference is computed from the same weights in other micro-batches, so that rounding differs."""
    for rank in ranks:
        found, expected = rank[f"{kind} offloaded"], rank[f"{kind} 3"]
        assert loss_difference(found["curves"], expected["curves"]) < LOSSES
        assert numbers(found["metrics"]) == pytest.approx(numbers(expected["metrics"]), rel=LOSSES, abs=1e-5)
        assert largest_difference(found["weights"], expected["weights"]) < WEIGHTS


@pytest.mark.parametrize(("kind", "stage"), cells(itertools.product(("dpo", "kto"), STAGES), QUICK_ADAPTED))
def test_two_ranks_whose_reference_is_the_policy_without_adapters_train_as_with_a_copy(ranks, kind: str, stage: int):
    for rank in ranks:
        found, expected = (rank[f"{kind} adapted {stage} {reference}"] for reference in ("live", "precomputed"))
        assert loss_difference(found["curves"], expected["curves"]) < 1e-5
        assert numbers(found["metrics"]) == pytest.approx(numbers(expected["metrics"]), rel=1e-5, abs=1e-6)
        assert largest_difference(found["weights"], expected["weights"]) < 1e-5
        assert abs(found["curves"][-1]["reward_margin"]) > 1e-3


@pytest.mark.parametrize("stage", cells(STAGES, [3]))
def test_a_stop_of_rank_0_stops_both_and_the_resumed_run_has_the_bits_of_an_undisturbed_one(ranks, out: Path, stage: int):
    for rank in ranks:
        stopped, resumed, whole = (rank[f"{name} {stage}"] for name in ("stopped", "resumed", "sft"))
        assert len(stopped["curves"]) == 2 and "weights" not in stopped
        assert stopped["curves"] + resumed["curves"] == whole["curves"]
        assert largest_difference(resumed["weights"], whole["weights"]) == 0
    digests = [read_digest(out / "two" / name / "sft") for name in (f"stopped-{stage}", f"sft-{stage}")]
    assert differences(*digests) == []


def test_minutes_are_those_of_rank_0_and_a_resumed_run_counts_on(ranks):
    """By the clock of rank 1 the first step would be the last. A run that is started once more has nothing left to train."""
    for rank in ranks:
        stopped, resumed, again = (rank[name] for name in ("timed stopped", "timed", "timed again"))
        assert [len(of["curves"]) for of in (stopped, resumed, again)] == [2, 1, 0]
        assert resumed["metrics"] == again["metrics"]
        assert {"steps": 3, "planned_steps": STEPS, "ended_by": "max_minutes"}.items() <= resumed["metrics"].items()
        assert resumed["curves"][-1]["heldout_loss"] == pytest.approx(resumed["metrics"]["heldout_loss"], rel=1e-6)
        assert largest_difference(resumed["weights"], again["weights"]) == 0


@pytest.mark.parametrize("stage", cells(STAGES, [3]))
def test_one_rank_resumes_from_a_checkpoint_of_two_within_rounding(ranks, sft_folder: Path, out: Path, stage: int, caplog):
    resumed = run_case(Case("sft", str(out / "two" / f"shrunk-{stage}"), {"zero_stage": stage}), sft_folder)
    whole = ranks[0][f"sft {stage}"]
    assert "sft: the checkpoint of step 2 has ranks=2 and is resumed with 1" in caplog.text
    assert len(resumed["curves"]) == STEPS - 2 and loss_difference(resumed["curves"], whole["curves"][2:]) < LOSSES
    assert largest_difference(resumed["weights"], whole["weights"]) < WEIGHTS


@pytest.mark.parametrize("stage", cells(STAGES, [3]))
def test_two_ranks_end_with_the_best_average_of_one_also_after_a_stop(ranks, alone, stage: int):
    expected = alone["settled 0"]
    assert expected["metrics"]["best_step"] == 4
    for rank in ranks:
        whole, stopped, resumed = (rank[f"settled{name} {stage}"] for name in ("", " stopped", " resumed"))
        assert loss_difference(whole["curves"], expected["curves"]) < 1e-2  # Lion takes signs, which rounding may turn
        assert numbers(whole["metrics"]) == pytest.approx(numbers(expected["metrics"]), rel=1e-2)
        assert len(stopped["curves"]) == 6 and stopped["curves"] + resumed["curves"] == whole["curves"]
        assert resumed["metrics"] == whole["metrics"]
        assert largest_difference(resumed["weights"], whole["weights"]) == 0


def test_an_average_is_not_resumed_on_another_number_of_ranks_with_zero(ranks, sft_folder: Path, out: Path):
    """A rank that has loaded nothing is refused before it trains."""
    scratch = out / "two" / "settled-3"
    with pytest.raises(ValueError, match="expected as many ranks as it was saved with, because with ZeRO only adamw without ema_decay"):
        run_case(Case("sft", str(scratch), {"zero_stage": 3, **SETTLED}), sft_folder)


def test_a_loss_that_is_not_finite_is_refused_on_both_ranks_alike(ranks):
    first, second = (rank["not finite"]["refused"] for rank in ranks)
    assert first == second and "expected a finite loss, got nan" in first


def test_a_checkpoint_that_one_rank_cannot_write_fails_on_all_and_leaves_the_one_before(ranks):
    """A damaged file of rank 1 is found by its own check; rank 0 alone sees that the disk is full."""
    first, second = (rank["store"]["outcomes"] for rank in ranks)
    lost = "no answer from the disk of rank"
    assert first[0] == f"RuntimeError: checkpoint: expected rank 1 to save its part, got OSError: {lost} 1"
    assert second[0] == f"OSError: {lost} 1"
    assert first[1] == f"OSError: {lost} 0"
    assert second[1] == f"RuntimeError: checkpoint: expected rank 0 to save its part, got OSError: {lost} 0"
    assert first[2] == second[2] == "step 1"
    assert first[3].startswith("NoSpace: checkpoint of step 5: expected ")
    assert second[3].startswith("RuntimeError: checkpoint of step 5: expected rank 0 to make its folder, got NoSpace: ")
