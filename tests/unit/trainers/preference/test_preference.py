"""Preference training: the naive loss over pairs one by one, whatever is shared, cut, precomputed or interrupted."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from preference_runs import TRAIN, config, rows, run_of
from tiny_models import MAX_LENGTH, PAD, largest_difference, save_tiny_dropout, sequences, tensor_bytes, tiny_params
from torch import nn
from transformers import PreTrainedTokenizerFast
from whole_matrix import cells

from rlhf_core.algorithms.preference_losses import PREFERENCE_LOSSES, PairLogprobs, kto
from rlhf_core.engines.deepspeed.frozen import FrozenModel
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.lora import quantize_base
from rlhf_core.process import Interrupted
from rlhf_core.trainers.preference import train
from rlhf_core.trainers.preference.objectives import (
    Continuation,
    Example,
    Pair,
    PairObjective,
    ResponseForward,
    ResponseObjective,
    no_reference,
    ordered_share,
)
from rlhf_core.trainers.preference.train import (
    example_items,
    live_reference,
    precomputed_reference,
    train_on_examples,
    train_on_pairs,
)

pytestmark = pytest.mark.usefixtures("world")
PROMPTS = [tuple(ids) for ids in sequences(4, seed=1, shortest=6)]
RESPONSES = [tuple(ids) for ids in sequences(12, seed=2, shortest=1)]
# Of four prompts 3, 2, 1 and 2 pairs; responses come again, once on both sides of one pair.
PAIRS = [
    Pair(Continuation(PROMPTS[p], RESPONSES[a]), Continuation(PROMPTS[p], RESPONSES[b]))
    for p, a, b in [(0, 0, 1), (1, 4, 5), (0, 1, 2), (2, 6, 7), (3, 9, 8), (0, 0, 2), (1, 5, 3), (3, 10, 10)]
]
EXAMPLES = [Example(side, side is pair.chosen) for pair in PAIRS[:6] for side in pair]


class Recorder:
    """In the place of an engine's training: what the backward passes add up to."""

    def __init__(self, folder: Path):
        self.module = PolicyModule(load_language_model(folder))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, share: torch.Tensor) -> None:
        share.backward()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.module.named_parameters()}


def reference_module(folder: Path) -> PolicyModule:
    """Another model than the one that is trained, so that the log ratios aren't all zero."""
    model = load_language_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    return PolicyModule(model).requires_grad_(False)


def whole_reference(module: PolicyModule) -> FrozenModel:
    return FrozenModel(module, dtype="float32", zero_stage=0, offload=False)


def naive_sum(module: PolicyModule, item: Continuation) -> torch.Tensor:
    return module(collate_tokens([[*item.prompt_ids, *item.response_ids]], [len(item.prompt_ids)], pad_id=PAD)).logprobs.sum()


def forward(tokens: int = 10_000, *, shares_prefix: bool = True) -> ResponseForward:
    return ResponseForward(PAD, shares_prefix, tokens)


def pair_objective(folder: Path, how: ResponseForward, **changes: Any) -> PairObjective:
    config = tiny_params(**{f"dpo__{name}": value for name, value in changes.items()}).dpo
    return PairObjective(config, how, live_reference(whole_reference(reference_module(folder)), how))


LOSSES = [
    {"loss": "sigmoid", "nll_coef": 0.5},
    {"loss": "sigmoid", "length_normalize": True},
    {"loss": "robust", "label_smoothing": 0.1, "nll_coef": 0.0},
    {"loss": "orpo", "nll_coef": 0.0},
    *({"loss": name} for name in ("hinge", "ipo", "simpo", "apo_zero", "apo_down")),
]


@pytest.mark.parametrize("changes", LOSSES, ids=lambda c: "-".join(map(str, c.values())))
def test_every_loss_is_that_of_pairs_one_by_one_and_so_is_its_gradient(sft_folder: Path, changes: dict[str, Any]):
    objective = pair_objective(sft_folder, forward(60), **changes)
    config, naive, ref = objective.config, Recorder(sft_folder), reference_module(sft_folder)
    total = torch.zeros(())
    num_chosen_tokens = sum(len(p.chosen.response_ids) for p in PAIRS)
    options = {"label_smoothing": config.label_smoothing} if config.loss in ("sigmoid", "robust") else {}
    options |= {"simpo_margin": config.simpo_margin} if config.loss == "simpo" else {}
    for pair in PAIRS:
        sums = [naive_sum(module, side)[None] for module in (naive.module, ref) for side in pair]
        if config.length_normalize:
            sums = [s / len(side.response_ids) for s, side in zip(sums, (*pair, *pair), strict=True)]
        lengths = [torch.tensor([len(side.response_ids)]) for side in pair]
        total = total + PREFERENCE_LOSSES[config.loss](PairLogprobs(*sums, *lengths), beta=config.beta, **options).losses[0] / len(PAIRS)
        total = total - config.nll_coef * naive_sum(naive.module, pair.chosen) / num_chosen_tokens
    total.backward()
    engine = Recorder(sft_folder)
    metrics = objective.train_batch(engine, PAIRS)
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    scale = max(float(g.abs().max()) for g in naive.gradients().values())
    assert largest_difference(engine.gradients(), naive.gradients()) < 1e-4 * scale
    with torch.no_grad():
        assert objective.evaluate(engine, PAIRS)["heldout_loss"] == pytest.approx(metrics["loss"], rel=1e-5)


def test_loss_and_gradient_of_pairs_do_not_depend_on_microbatches_or_sharing(sft_folder: Path):
    made = []
    for tokens, shares_prefix in ((10_000, True), (10_000, False), (45, True), (1, True), (1, False)):
        engine = Recorder(sft_folder)
        objective = pair_objective(sft_folder, forward(tokens, shares_prefix=shares_prefix))
        made.append((objective.train_batch(engine, PAIRS), engine.gradients()))
    (expected, gradients), *others = made
    scale = max(float(g.abs().max()) for g in gradients.values())
    for metrics, cut in others:
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert largest_difference(cut, gradients) < 1e-5 * scale


def test_metrics_of_pairs_by_hand(sft_folder: Path):
    """beta 0.5: rewards are half the log ratios; the pair of one response with itself is a tie, and half a point."""
    objective = pair_objective(sft_folder, forward(50), beta=0.5)
    policy, ref = PolicyModule(load_language_model(sft_folder)), reference_module(sft_folder)
    with torch.no_grad():
        sums = [[float(naive_sum(module, side)) for side in pair] for pair in PAIRS for module in (policy, ref)]
    chosen = [0.5 * (p[0] - r[0]) for p, r in zip(sums[::2], sums[1::2], strict=True)]
    rejected = [0.5 * (p[1] - r[1]) for p, r in zip(sums[::2], sums[1::2], strict=True)]
    metrics = objective.train_batch(Recorder(sft_folder), PAIRS)
    right = sum(c > r for c, r in zip(chosen[:-1], rejected[:-1], strict=True))
    assert metrics["reward_accuracy"] == (right + 0.5) / 8
    assert metrics["chosen_reward"] == pytest.approx(sum(chosen) / 8, rel=1e-4)
    assert metrics["reward_margin"] == pytest.approx((sum(chosen) - sum(rejected)) / 8, rel=1e-4)
    tokens = sum(len(p.chosen.response_ids) for p in PAIRS)
    assert metrics["chosen_logprob"] == pytest.approx(sum(p[0] for p in sums[::2]) / tokens, rel=1e-4)
    assert metrics["tokens"] == sum(len(side.prompt_ids) + len(side.response_ids) for p in PAIRS for side in p)


# The reference


def test_a_sharded_reference_is_freed_once_its_logprobs_are_known(sft_folder: Path, tmp_path: Path):
    def sharded() -> FrozenModel:
        return FrozenModel(PolicyModule(load_language_model(sft_folder)), dtype="float32", zero_stage=3, offload=False)

    weights = sum(p.nbytes for p in load_language_model(sft_folder).parameters())
    before = tensor_bytes()
    precomputed_reference(sharded, [side for pair in PAIRS for side in pair], forward(), path=tmp_path / "reference.pt")
    assert tensor_bytes() - before < 0.1 * weights


def test_reference_logprobs_precomputed_are_those_of_the_live_model(sft_folder: Path, tmp_path: Path):
    module, how = reference_module(sft_folder), forward(70)
    items = [side for pair in PAIRS for side in pair]
    precomputed = precomputed_reference(lambda: whole_reference(module), items, forward(40), path=tmp_path / "a" / "reference.pt")
    shares = how.microbatches(items, together=2)
    assert len(shares) > 1
    expected = [torch.stack([naive_sum(module, item) for group in share.groups for item in group.items]) for share in shares]
    engine = Recorder(sft_folder)
    live = live_reference(whole_reference(module), how)(engine, shares)
    torch.testing.assert_close(live, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(precomputed(engine, shares), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(no_reference(engine, shares), [torch.zeros(len(of_share)) for of_share in expected], rtol=0, atol=0)


def test_precomputed_logprobs_are_kept_for_the_same_items_and_no_others(sft_folder: Path, tmp_path: Path):
    path, requested = tmp_path / "reference.pt", []

    def make() -> FrozenModel:
        requested.append(1)
        return whole_reference(reference_module(sft_folder))

    items = [side for pair in PAIRS for side in pair]
    first = precomputed_reference(make, items, forward(), path=path)
    again = precomputed_reference(make, items, forward(), path=path)
    assert len(requested) == 1
    (share,) = shares = forward().microbatches(items)
    engine = Recorder(sft_folder)
    assert share.counts and torch.equal(first(engine, shares)[0], again(engine, shares)[0])
    precomputed_reference(make, items[:-2], forward(), path=path)
    assert len(requested) == 2


# Single responses


def response_objective(folder: Path, how: ResponseForward, **changes: Any) -> ResponseObjective:
    config = tiny_params(**{f"kto__{name}": value for name, value in changes.items()}).kto
    return ResponseObjective(config, how, live_reference(whole_reference(reference_module(folder)), how), MAX_LENGTH)


def test_kto_is_that_of_responses_one_by_one_with_the_baseline_of_the_whole_step(sft_folder: Path):
    naive, ref = Recorder(sft_folder), reference_module(sft_folder)
    items = [e.continuation for e in EXAMPLES]
    shifted = [Continuation(a.prompt_ids, b.response_ids) for a, b in zip(items, [*items[1:], items[0]], strict=True)]
    ratios = [float((naive_sum(naive.module, i) - naive_sum(ref, i)).detach()) for i in shifted]
    kl = max(0.0, sum(ratios) / len(ratios))
    total = torch.zeros(())
    for example in EXAMPLES:
        sums = [naive_sum(module, example.continuation)[None] for module in (naive.module, ref)]
        options = {"beta": 0.3, "kl": torch.tensor(kl), "desirable_weight": 1.5, "undesirable_weight": 0.5}
        total = total + kto(*sums, torch.tensor([example.desirable]), **options).losses[0] / len(EXAMPLES)
    total.backward()
    scale = max(float(g.abs().max()) for g in naive.gradients().values())
    for tokens in (10_000, 45, 1):
        engine = Recorder(sft_folder)
        objective = response_objective(sft_folder, forward(tokens), beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
        metrics = objective.train_batch(engine, EXAMPLES)
        assert metrics["kl"] == pytest.approx(kl, rel=1e-4, abs=1e-6)
        assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-5)
        assert largest_difference(engine.gradients(), naive.gradients()) < 1e-4 * scale


def test_a_loss_without_a_baseline_has_none(sft_folder: Path):
    metrics = response_objective(sft_folder, forward(45), loss="apo_zero_unpaired").train_batch(Recorder(sft_folder), EXAMPLES)
    assert metrics["kl"] == 0.0
    config = response_objective(sft_folder, forward(), loss="apo_zero_unpaired").config
    assert list(example_items(EXAMPLES, [], [[0, 1]], config, max_length=64)) == [e.continuation for e in EXAMPLES[:2]]


def test_a_step_without_bad_responses_has_no_accuracy_and_a_loss_all_the_same(sft_folder: Path):
    metrics = response_objective(sft_folder, forward(45)).train_batch(Recorder(sft_folder), [e for e in EXAMPLES if e.desirable])
    assert math.isfinite(metrics["loss"]) and math.isnan(metrics["reward_accuracy"]) and math.isnan(metrics["rejected_logprob"])


@pytest.mark.parametrize(
    ("higher", "lower", "expected"),
    # Of six couples: 1 > 0, 3 > 0, 3 > 2 and 2 > 0 in order, 2 = 2 half, 1 < 2 not.
    [([1.0, 3.0, 2.0], [2.0, 0.0], 4.5 / 6), ([1.0], [1.0], 0.5), ([5.0], [1.0, 2.0], 1.0), ([], [1.0], math.nan), ([1.0], [], math.nan)],
)
def test_ordered_share_by_hand(higher: list[float], lower: list[float], expected: float):
    assert ordered_share(torch.tensor(higher), torch.tensor(lower)) == pytest.approx(expected, nan_ok=True)


# From rows to a trained engine


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_precomputed_and_live_references_give_the_same_training(sft_folder: Path, tmp_path: Path, method: str):
    made = []
    for kind in ("precomputed", "live"):
        scratch = tmp_path / kind
        trained = TRAIN[method](rows(10), rows(3), config(method, reference=kind), run_of(sft_folder, scratch))
        made.append((trained.engine.state_dict(), trained.metrics, (scratch / "curves.csv").read_text().splitlines()))
        assert (scratch / "reference.pt").exists() == (kind == "precomputed")
    (weights, metrics, curves), (live_weights, live_metrics, live_curves) = made
    assert largest_difference(weights, live_weights) < 3e-5  # four steps of 3e-3 each
    assert metrics["heldout_loss"] == pytest.approx(live_metrics["heldout_loss"], abs=1e-6)
    assert len(curves) == len(live_curves) == 5


class Watched(FrozenModel):
    """Counts uses of models, of which each brings weights from the host to the device."""

    uses: ClassVar[list[tuple[bool, bool]]] = []  # sharded, offloaded

    def __init__(self, *args: Any, offload: bool, **how: Any):
        self._is_offloaded = offload
        super().__init__(*args, offload=offload, **how)

    @contextmanager
    def in_use(self) -> Iterator[nn.Module]:
        self.uses.append((self.sharded, self._is_offloaded))
        with super().in_use() as module:
            yield module


OFFLOADED = {("dpo", "live", 3), ("kto", "live", 0), ("kto", "precomputed", 3)}


@pytest.mark.parametrize(("method", "kind", "zero_stage"), cells(product(["dpo", "kto"], ["precomputed", "live"], [0, 3]), OFFLOADED))
def test_an_offloaded_reference_changes_no_bit_and_comes_to_the_device_once_a_pass(
    sft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, kind: str, zero_stage: int
):
    monkeypatch.setattr(train, "FrozenModel", Watched)
    made = []
    for offload in (False, True):
        monkeypatch.setattr(Watched, "uses", [])
        how = config(method, reference=kind, zero_stage=zero_stage, offload_frozen=offload, microbatch_tokens=40)
        trained = TRAIN[method](rows(10), rows(3), how, run_of(sft_folder, tmp_path / str(offload)))
        made.append((trained.engine.state_dict(), trained.metrics, (tmp_path / str(offload) / "curves.csv").read_text()))
        # At the start, to find attention's layers; then once, or in 4 steps and 3 evaluations, with KTO for its baseline too.
        passes = 1 if kind == "precomputed" else 7 * (2 if method == "kto" else 1)
        assert Watched.uses == [(zero_stage == 3, offload)] * (1 + passes)
    (weights, *others), (found, *found_others) = made
    assert largest_difference(weights, found) == 0.0 and others == found_others


def test_a_run_ends_in_the_step_in_which_its_minutes_are_over(sft_folder: Path, tmp_path: Path):
    run = run_of(sft_folder, tmp_path)
    found = TRAIN["dpo"](rows(10), rows(3), config("dpo"), replace(run, loop=replace(run.loop, max_minutes=1e-9))).metrics
    assert {"steps": 1, "planned_steps": 4, "ended_by": "max_minutes", "epochs": 0.6}.items() <= found.items() and "heldout_loss" in found


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(sft_folder: Path, tmp_path: Path, method: str):
    whole = TRAIN[method](rows(10), rows(3), config(method), run_of(sft_folder, tmp_path / "whole"))
    with pytest.raises(Interrupted):
        TRAIN[method](rows(10), rows(3), config(method), run_of(sft_folder, tmp_path / "cut", stop_after=2))
    resumed = TRAIN[method](rows(10), rows(3), config(method), run_of(sft_folder, tmp_path / "cut"))
    assert largest_difference(resumed.engine.state_dict(), whole.engine.state_dict()) == 0.0
    assert resumed.metrics == whole.metrics
    assert (tmp_path / "cut" / "curves.csv").read_text() == (tmp_path / "whole" / "curves.csv").read_text()


def test_adapters_learn_pairs_are_exported_merged_and_resumed(sft_folder: Path, tmp_path: Path):
    lora = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear"}
    how, start = config("dpo", lora=lora, learning_rate=1e-2), load_language_model(sft_folder).state_dict()
    whole = train_on_pairs(rows(10), rows(3), how, run_of(sft_folder, tmp_path / "whole"))
    with pytest.raises(Interrupted):
        train_on_pairs(rows(10), rows(3), how, run_of(sft_folder, tmp_path / "cut", stop_after=2))
    resumed = train_on_pairs(rows(10), rows(3), how, run_of(sft_folder, tmp_path / "cut"))
    weights = whole.engine.state_dict()
    assert largest_difference(resumed.engine.state_dict(), weights) == 0.0 < largest_difference(weights, start)
    assert torch.equal(weights["model.embed_tokens.weight"], start["model.embed_tokens.weight"])  # which has no adapter
    assert whole.metrics["heldout_margin"] > 0.0


LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear"}


ADAPTED = {
    "plain": ("llama", {}),
    "zero 3": ("llama", {"zero_stage": 3}),
    "quantized": ("llama", {"lora": LORA | {"quantize": "nf4"}}),
    "averaged": ("llama", {"ema_decay": 0.5, "keep_best": True, "gradient_checkpointing": True}),
    "dropout of adapters": ("gpt2", {"lora": LORA | {"dropout": 0.3}}),
    "dropout": ("gpt2", {"disable_dropout": False}),
}
QUICK_ADAPTED = {("dpo", "zero 3"), ("kto", "quantized"), ("dpo", "averaged"), ("kto", "dropout of adapters")}


@pytest.mark.parametrize(("method", "adapted"), cells(product(["dpo", "kto"], ADAPTED), QUICK_ADAPTED))
def test_the_policy_without_its_adapters_is_the_reference_that_a_second_copy_is(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, adapted: str
):
    family, changes = ADAPTED[adapted]
    folder, _ = save_tiny_dropout(tmp_path / "model", tokenizer, family)
    how = config(method, **{"reference": "live", "lora": LORA, "learning_rate": 1e-2, **changes})

    def second_copy(forward: ResponseForward) -> Any:
        model = load_language_model(folder)
        quantize_base(model, how.lora)
        return live_reference(FrozenModel(PolicyModule(model), dtype="float32", zero_stage=how.zero_stage, offload=False), forward)

    def no_copy(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a copy of the model was made")

    made = []
    for name, changed, by in (("policy", "FrozenModel", no_copy), ("copy", "policy_reference", second_copy)):
        with monkeypatch.context() as patch:
            patch.setattr(train, changed, by)
            trained = TRAIN[method](rows(10), rows(3), how, run_of(folder, tmp_path / name))
        made.append((read_curves(tmp_path / name / "curves.csv"), trained.metrics, trained.engine.state_dict()))
    (curves, metrics, weights), (expected, expected_metrics, expected_weights) = made
    assert len(curves) == 4 and curves == [pytest.approx(row, abs=1e-6, rel=1e-6, nan_ok=True) for row in expected]
    assert metrics.pop("untrained") == pytest.approx(expected_metrics.pop("untrained"), abs=1e-6)
    assert metrics == pytest.approx(expected_metrics, abs=1e-6)
    assert largest_difference(weights, expected_weights) < 1e-6
    assert abs(curves[-1]["reward_margin"]) > 1e-3  # the adapters have moved the policy away


def read_curves(path: Path) -> list[dict[str, float]]:
    with path.open() as file:
        return [{name: float(value) for name, value in row.items() if name != "phase" and value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("kind", ["precomputed", "live"])
def test_with_4_bits_the_reference_is_what_training_starts_from(sft_folder: Path, tmp_path: Path, kind: str):
    """The rounded model: were it the SFT model itself, the first loss would be another than log 2."""
    lora = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear", "quantize": "nf4"}
    train_on_pairs(rows(10), rows(3), config("dpo", lora=lora, reference=kind, nll_coef=0.0), run_of(sft_folder, tmp_path, steps=2))
    with (tmp_path / "curves.csv").open() as file:
        first, *_ = csv.DictReader(file)
    assert float(first["loss"]) == pytest.approx(math.log(2), abs=1e-6) and float(first["reward_margin"]) == pytest.approx(0, abs=1e-5)


def test_training_prefers_the_chosen_on_rows_it_has_not_seen(sft_folder: Path, tmp_path: Path):
    for loss in ("sigmoid", "simpo"):
        trained = train_on_pairs(rows(40)[:30], rows(40)[30:], config("dpo", loss=loss), run_of(sft_folder, tmp_path / loss, steps=12))
        assert trained.metrics["heldout_accuracy"] == 1.0 and trained.metrics["heldout_margin"] > 0.05
        counted = {"loss": loss, "steps": 12, "pairs": 30, "dropped_too_long": 0}
        assert trained.metrics.items() >= counted.items()
        assert (tmp_path / loss / "reference.pt").exists() == (loss == "sigmoid")


def test_rows_that_leave_nothing_to_train_on_are_refused(sft_folder: Path, tmp_path: Path):
    unpaired = [{**row, "rejected": None} for row in rows(4)]
    with pytest.raises(ValueError, match=r"expected rows with a chosen and a rejected response .* got none of 4; .* method kto"):
        train_on_pairs(unpaired, [], config("dpo"), run_of(sft_folder, tmp_path))
    long = [{**row, "chosen": "14 " * 60, "rejected": None} for row in rows(4)]
    with pytest.raises(ValueError, match="expected responses of at most 64 tokens with their prompt, got none in 4 rows"):
        train_on_examples(long, [], config("kto"), run_of(sft_folder, tmp_path))
    assert "examples" in train_on_examples(unpaired, [], config("kto"), run_of(sft_folder, tmp_path, steps=1)).metrics


def test_held_out_losses_stand_beside_those_of_a_policy_that_is_its_reference(sft_folder: Path):
    how, module = forward(), Recorder(sft_folder).module
    same = PairObjective(tiny_params().dpo, how, live_reference(whole_reference(module.requires_grad_(False)), how))
    with torch.no_grad():
        untrained = same.evaluate(module, PAIRS)["untrained"]
        moved = pair_objective(sft_folder, how, nll_coef=0.5).evaluate(module, PAIRS)
        without = pair_objective(sft_folder, how, nll_coef=0.0).evaluate(module, PAIRS)
        simpo = pair_objective(sft_folder, how, loss="simpo").evaluate(module, PAIRS)
    assert untrained == {"loss": pytest.approx(math.log(2)), "gain": 0.0, "gain_error": 0.0, "accuracy_error": pytest.approx(0.5 / 8**0.5)}
    # The likelihood of nll_coef is in the loss, and not in the gain.
    assert moved["untrained"]["gain"] == pytest.approx(math.log(2) - without["heldout_loss"], abs=1e-6) != 0.0
    assert "untrained" not in simpo


def test_held_out_kto_losses_stand_beside_those_of_a_policy_that_is_its_reference(sft_folder: Path):
    with torch.no_grad():
        found = response_objective(sft_folder, forward()).evaluate(Recorder(sft_folder).module, EXAMPLES)
    # 1 - sigmoid(0) of each response, 6 good and 6 bad; the variance of Mann-Whitney's statistic is (6 + 6 + 1) / (12 * 6 * 6).
    assert found["untrained"]["loss"] == pytest.approx(0.5)
    assert found["untrained"]["gain"] == pytest.approx(0.5 - found["heldout_loss"], abs=1e-6)
    assert found["untrained"]["accuracy_error"] == pytest.approx((13 / 432) ** 0.5)
