"""Usual learning rates: what null means, where it is refused, and which values are pointed out."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from clerk_params import CLERK_PARAMS, ROOT

from rlhf_core.config import ConfigError, Params, load_params, overridden, parse_params, read_text, read_yaml, unusual, with_usual_rates
from rlhf_core.config.base import with_defaults
from rlhf_core.config.usual import LEARNING_RATES, SMALL_MODEL, nulls, usual

SOURCE = {"name": "mine", "kind": "file", "path": "mine.jsonl", "format": "preference", "uses": ["sft", "preference", "prompt"]}
PRETRAINED = {"model.path": "some/model", "data.sources": [SOURCE]}


def params(**changes: Any) -> Params:
    """params.yaml for a pretrained model; keys are dotted, with __ for the dots."""
    given = PRETRAINED | {key.replace("__", "."): value for key, value in changes.items()}
    return overridden(read_text(ROOT / "params.yaml"), given, subject="params.yaml")[1]


def refused(tree: dict[str, Any], **how: bool) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_params(tree, "params.yaml", **how)
    return str(caught.value).splitlines()


def test_null_is_the_rate_of_full_training_and_with_adapters_of_lora():
    full = params()
    assert (full.sft.learning_rate, full.reward.learning_rate, full.dpo.learning_rate, full.kto.learning_rate) == (2e-5, 1e-5, 1e-6, 1e-6)
    assert (full.rejection_sampling.learning_rate, full.conditional_sft.learning_rate, full.rl.learning_rate) == (2e-5, 2e-5, 1e-6)
    lora = params(training__lora={}, rl__lora={})
    assert (lora.sft.learning_rate, lora.reward.learning_rate, lora.dpo.learning_rate, lora.kto.learning_rate) == (2e-4, 1e-4, 1e-5, 1e-5)
    assert (lora.rejection_sampling.learning_rate, lora.conditional_sft.learning_rate, lora.rl.learning_rate) == (2e-4, 2e-4, 1e-5)
    assert full.rl.ppo.critic_learning_rate == lora.rl.ppo.critic_learning_rate == 1e-5  # the critic has no adapters
    only_dpo = params(dpo__lora={"rank": 16})
    assert (only_dpo.dpo.learning_rate, only_dpo.sft.learning_rate) == (1e-5, 2e-5)


def test_a_round_of_iterative_dpo_has_the_rate_of_dpo():
    assert params(dpo__lora={}).iterative.learning_rate == 1e-5
    assert params(dpo__learning_rate=3e-6).iterative.learning_rate == 3e-6
    assert params(iterative__learning_rate=2e-6).iterative.learning_rate == 2e-6


def test_lion_has_a_fifth_of_the_rate():
    assert params(sft__optimizer="lion").sft.learning_rate == pytest.approx(4e-6, rel=1e-12)
    assert usual("sft.learning_rate", lora=False, optimizer="lion").high == pytest.approx(4e-6, rel=1e-12)


def test_the_tree_is_left_as_it_is_and_its_defaults_have_numbers():
    tree = read_yaml(ROOT / "params.yaml")
    before = copy.deepcopy(tree)
    assert set(nulls(tree)) == set(LEARNING_RATES) and nulls(with_usual_rates(tree)) == []
    assert tree == before
    assert with_defaults(Params, tree)["rl"]["ppo"]["critic_learning_rate"] == 1e-5
    assert with_usual_rates({"sft": None, "rl": {"ppo": 3}, "dpo": {}}) == {"sft": None, "rl": {"ppo": 3}, "dpo": {}}


def test_params_yaml_alone_is_refused_with_one_sentence():
    tree = read_yaml(ROOT / "params.yaml")
    assert refused(tree) == [
        "params.yaml: model.path and data.sources: expected your model and your data, got none; add --params and a recipe that names both, "
        "such as recipes/clerk.yaml, or the one that `rlhf data check FILE --recipe mine.yaml` writes for your data"
    ]
    assert load_params(ROOT / "params.yaml", complete=False).sft.learning_rate == 2e-5
    tree["model"]["path"] = "some/model"
    (line,) = refused(tree)
    assert line.startswith("params.yaml: data.sources: expected your data, got none;")


def test_a_model_from_scratch_needs_numbers_in_the_sections_that_it_uses():
    tree = read_yaml(CLERK_PARAMS)
    for section in ("sft", "dpo", "iterative"):
        tree[section]["learning_rate"] = None
    tree["rl"]["ppo"]["critic_learning_rate"] = None
    expected = "expected a number without model.path, got null; write one, because null is the usual rate of pretrained models"
    assert refused(tree) == [f"params.yaml: {key}: {expected}" for key in ("rl.ppo.critic_learning_rate", "sft.learning_rate")]
    tree["rl"]["algorithm"] = "grpo"
    assert refused(tree) == [f"params.yaml: sft.learning_rate: {expected}"]
    assert f"params.yaml: dpo.learning_rate: {expected}" in refused(tree, rounds=True)


def test_a_rate_that_wrecks_a_pretrained_model_is_pointed_out_with_the_usual_range():
    wrecking = params(sft__learning_rate=2e-3, rl__learning_rate=5e-4, dpo__learning_rate=1.0)
    assert unusual(wrecking, 135_000_000) == [
        "sft.learning_rate: full training at 0.002; usual 5e-6 to 2e-5 (docs/training.md)",
        "rl.learning_rate: full training at 0.0005; usual 3e-7 to 1e-6 (docs/training.md)",
    ]  # no run of RL uses dpo
    assert unusual(wrecking, None) == unusual(wrecking, SMALL_MODEL)
    assert unusual(wrecking, SMALL_MODEL - 1) == []
    assert unusual(params(), None) == []
    (line,) = unusual(params(sft__lora={}, sft__learning_rate=3e-3), None)
    assert line == "sft.learning_rate: LoRA training at 0.003; usual 5e-5 to 2e-4 (docs/training.md)"
    critic = params(rl__algorithm="ppo", rl__lora={}, rl__ppo__critic_learning_rate=1e-3)
    assert unusual(critic, None) == ["rl.ppo.critic_learning_rate: full training at 0.001; usual 5e-6 to 1e-5 (docs/training.md)"]
    in_rounds = unusual(params(iterative__learning_rate=1e-4), None, rounds=True)
    assert in_rounds == ["iterative.learning_rate: full training at 0.0001; usual 5e-7 to 1e-6 (docs/training.md)"]


def test_a_model_from_scratch_has_no_usual_rate():
    assert unusual(load_params(CLERK_PARAMS), None) == []


@pytest.mark.parametrize("key", LEARNING_RATES)
def test_each_rate_is_in_its_range_and_loras_are_about_ten_times_the_full_ones(key):
    rates = LEARNING_RATES[key]
    assert rates.full.low <= rates.full.rate <= rates.full.high
    if rates.lora is not None:
        assert rates.lora.low <= rates.lora.rate <= rates.lora.high and rates.lora.rate == pytest.approx(10 * rates.full.rate)


def test_the_page_has_the_same_table():
    page = (ROOT / "docs/training.md").read_text()
    number = r"([\d.e-]+)"
    cell = rf"{number} \({number} to {number}\)"
    rows = re.findall(rf"^\| (`[^|]+`) \| {cell} \| (?:{cell}|) *\|", page, re.MULTILINE)
    told = {key: row[1:] for row in rows for key in re.findall(r"`([\w.]+)`", row[0])}
    assert set(told) == set(LEARNING_RATES)
    for key, numbers in told.items():
        rates = LEARNING_RATES[key]
        known = [(u.rate, u.low, u.high) for u in (rates.full, rates.lora) if u is not None]
        assert [float(n) for n in numbers if n] == [n for row in known for n in row], key


def test_the_clerks_settings_are_those_of_its_published_results():
    """docs/results.md: other numbers would be another experiment."""
    clerk = load_params(CLERK_PARAMS)
    assert nulls(read_yaml(CLERK_PARAMS)) == []
    assert (clerk.model.dtype, clerk.model.max_length, clerk.model.path) == ("float32", 96, None)
    assert (clerk.sft.steps, clerk.sft.batch_size, clerk.sft.learning_rate, clerk.sft.pretrain.steps) == (250, 64, 2e-3, 600)
    assert (clerk.reward.epochs, clerk.reward.batch_size, clerk.reward.learning_rate) == (2.5, 16, 1e-3)
    rl = clerk.rl
    assert (rl.algorithm, rl.steps, rl.samples_per_step, rl.minibatch_size, rl.learning_rate) == ("ppo", 60, 256, 256, 5e-4)
    assert (rl.kl.coef, rl.kl.placement, rl.kl.estimator, rl.ppo.critic_learning_rate, rl.warmup_steps) == (0.15, "reward", "k1", 1e-3, 2)
    assert (clerk.dpo.steps, clerk.dpo.beta, clerk.dpo.nll_coef, clerk.dpo.learning_rate) == (200, 0.3, 0.5, 3e-4)
    assert {s.min_learning_rate_fraction for s in (clerk.sft, clerk.reward, clerk.dpo, clerk.kto)} == {0.05}
    assert clerk.gate.min_accuracy == 0.75 and "category" in clerk.gate.slices
