"""The section training and the sections that take it over, keys that params.yaml leaves at their default, and renamed keys."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from clerk_params import CLERK_PARAMS
from ruamel.yaml import YAML

from flows.chain.overrides import check
from rlhf_core.config import (
    DEFAULT_LIMITS,
    ConfigError,
    LoraConfig,
    SharedTrainingConfig,
    TrainingConfig,
    apply_overrides,
    load_overlaid,
    load_params,
    overridden,
    parse_params,
    parse_yaml,
    read_yaml,
    set_key,
)

DEFAULT = CLERK_PARAMS
TRAINED = ("sft", "reward", "dpo", "kto", "rejection_sampling", "conditional_sft")
# Values by section, in the order of TRAINED; one value is that of every section.
EFFECTIVE: dict[str, tuple[Any, ...]] = {
    "batch_size": (64, 16, 64, 128, 64, 128),
    "epochs": (2.0, 2.5, 1.0, 1.0, 1.0, 1.0),
    "steps": (250, None, 200, 200, 150, 700),
    "learning_rate": (2e-3, 1e-3, 3e-4, 3e-4, 1e-3, 2e-3),
    "max_minutes": (None,) * 6,
    "schedule": ("cosine",) * 6,
    "warmup_fraction": (0.05, 0.05, 0.1, 0.1, 0.05, 0.05),
    "min_learning_rate_fraction": (0.05,) * 6,
    "decay_fraction": (0.2,) * 6,
    "optimizer": ("adamw",) * 6,
    "betas": ([0.9, 0.95],) * 6,
    "eps": (1e-8,) * 6,
    "ema_decay": (None,) * 6,
    "weight_decay": (0.0,) * 6,
    "max_grad_norm": (1.0,) * 6,
    "microbatch_tokens": (4096,) * 6,
    "ranks": (1,) * 6,
    "sequence_parallel": (1,) * 6,
    "zero_stage": (0,) * 6,
    "offload_optimizer": (False,) * 6,
    "offload_parameters": (False,) * 6,
    "gradient_checkpointing": (False,) * 6,
    "checkpoint_every": (100, 100, 50, 50, 50, 50),
    "eval_every": (50, 100, 50, 50, 50, 50),
    "keep_best": (False,) * 6,
    "disable_dropout": (False, True, True, True, False, False),
    "lora": (None,) * 6,
}
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear"}


@pytest.fixture
def params_file(tmp_path) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(DEFAULT.read_text())
    return path


def values(params, key: str) -> tuple[Any, ...]:
    return tuple(getattr(getattr(params, section), key) for section in TRAINED)


def test_every_section_has_its_effective_training_values():
    params = load_params(DEFAULT)
    assert {key: values(params, key) for key in EFFECTIVE} == EFFECTIVE
    assert set(EFFECTIVE) == set(TrainingConfig.model_fields)
    assert set(read_yaml(DEFAULT)["training"]) == set(SharedTrainingConfig.model_fields)


def test_a_shared_key_reaches_the_sections_that_have_no_value_of_their_own(params_file):
    params = apply_overrides(params_file, {"training.checkpoint_every": 7, "training.zero_stage": 2, "kto.zero_stage": 1})
    assert params == load_params(params_file)
    assert values(params, "checkpoint_every") == (100, 100, 7, 7, 7, 7)
    assert values(params, "zero_stage") == (2, 2, 2, 1, 2, 2)
    assert params == check(DEFAULT, {"training.checkpoint_every": 7, "training.zero_stage": 2, "kto.zero_stage": 1})
    assert params_file.read_text().count("\n  <<: *training\n") == len(TRAINED)
    assert values(apply_overrides(params_file, {"training.zero_stage": 3}), "zero_stage") == (3, 3, 3, 1, 3, 3)


def test_a_key_of_a_section_changes_no_other_section_even_inside_a_shared_mapping(params_file):
    apply_overrides(params_file, {"training.lora": LORA})
    params = apply_overrides(params_file, {"dpo.lora.rank": 16, "sft.max_grad_norm": 0.5})
    assert [lora.rank for lora in values(params, "lora")] == [4, 4, 16, 4, 4, 4]
    assert values(params, "max_grad_norm") == (0.5, 1.0, 1.0, 1.0, 1.0, 1.0) and params.training.lora.rank == 4
    params = apply_overrides(params_file, {"training.lora.rank": 2})
    assert [lora.rank for lora in values(params, "lora")] == [2, 2, 16, 2, 2, 2]


def test_a_new_key_stands_in_its_section_and_comments_stay(params_file):
    apply_overrides(params_file, {"kto.weight_decay": 0.1, "rl.monitor.kl.above": 2.0})
    before, after = DEFAULT.read_text().splitlines(), params_file.read_text().splitlines()
    assert "  weight_decay: 0.1" in after[after.index("kto:") : after.index("kto:") + 3]
    assert [line for line in before if line.startswith("#")] == [line for line in after if line.startswith("#")]
    assert YAML(typ="safe", pure=True).load(params_file.read_text())["kto"] | {"weight_decay": 0.0} == read_yaml(DEFAULT)["kto"]


def test_a_recipe_may_change_the_shared_section_and_be_a_whole_file(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("training: {microbatch_tokens: 512}\nsft: {microbatch_tokens: 256}\n")
    assert values(load_overlaid(DEFAULT, recipe), "microbatch_tokens") == (256, 512, 512, 512, 512, 512)
    recipe.write_text(DEFAULT.read_text().replace("microbatch_tokens: 4096   #", "microbatch_tokens: 64     #"))
    assert values(load_overlaid(DEFAULT, recipe), "microbatch_tokens") == (64,) * 6


def test_a_section_without_the_shared_keys_says_how_to_take_them_over():
    before, kto = DEFAULT.read_text().split("\nkto:\n")
    text = f"{before}\nkto:\n{kto.replace('  <<: *training', '', 1)}"
    with pytest.raises(ConfigError) as error:
        overridden(text, {}, subject="params.yaml")
    (line,) = (line for line in str(error.value).splitlines() if "kto.zero_stage" in line)
    assert line.endswith("expected a value, got nothing; take it from the default params.yaml, or take over the section training with "
                         "`<<: *training`")  # fmt: skip


@pytest.mark.parametrize("section", TRAINED)
@pytest.mark.parametrize(
    ("key", "stages", "remedy"),
    [("offload_optimizer", (0,), "set zero_stage to 1, 2 or 3"), ("offload_parameters", (0, 1, 2), "set zero_stage to 3")],
)
def test_every_section_refuses_to_offload_what_its_zero_stage_does_not_partition(section: str, key: str, stages: tuple, remedy: str):
    for stage in range(4):
        changed = getattr(load_params(DEFAULT), section).model_copy(update={key: True, "zero_stage": stage})
        found = [conflict for conflict in changed.conflicts() if conflict.startswith(f"{key}: ")]
        expected = f"{key}: expected false with zero_stage={stage}, got true; {remedy}, or {key} to false"
        assert found == ([expected] if stage in stages else [])


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("checkpoints.go_on_from", "checkpoints.resume_from"),
        ("rl.reward.mask_cut_off", "rl.reward.mask_truncated"),
        ("rl.monitor.cut_off", "rl.monitor.truncated"),
        ("rl.rollout.one_step_off_policy", "rl.rollout.max_lag (1 for true, 0 for false)"),
    ],
)
def test_an_old_key_is_refused_with_its_new_name(key: str, new: str):
    with pytest.raises(ConfigError, match=f"override {key}: expected {re.escape(new)}, got the key's old name; rename it"):
        check(DEFAULT, {key: None})
    tree = copy.deepcopy(read_yaml(DEFAULT))
    section, _, last = key.rpartition(".")
    holder = tree
    for part in section.split("."):
        holder = holder[part]
    holder[last] = None
    with pytest.raises(ConfigError, match=f"params: {key}: .*; rename it"):
        parse_params(tree)


def test_a_limit_of_an_old_column_is_refused_with_its_new_name():
    limit = {"metric": "cut_off_fraction", "above": 0.5, "action": "warn"}
    with pytest.raises(ConfigError, match=r"rl.monitor.mine.metric: expected a column .*; rename it to truncated_fraction"):
        check(DEFAULT, {"rl.monitor": {"mine": limit}})


def test_items_of_lists_take_their_defaults_and_lack_no_required_key():
    overrides = {
        "data.sources": [{"name": "clerk", "kind": "clerk", "uses": ["sft", "prompt", "preference", "pretrain"]}],
        "rl.reward.scorers": [{"name": "reward_model", "kind": "reward_model"}],
        "gate.external": [{"name": "other", "path": "a/file.jsonl"}],
    }
    params = check(DEFAULT, overrides)
    assert params.data.sources[0].weight == 1.0 and params.data.sources[0].clerk.prompts == 6000
    (scorer,) = params.rl.reward.scorers
    assert (scorer.weight, scorer.normalization, scorer.members) == (1.0, "none", 1)
    assert params.gate.external[0].format == "preference"
    for key, item, missing in (
        ("data.sources", {"name": "a", "kind": "clerk"}, "uses"),
        ("rl.reward.scorers", {"name": "a"}, "kind"),
        ("gate.external", {"name": "a"}, "path"),
    ):
        with pytest.raises(ConfigError, match=f"override: {key}.0.{missing}: expected a value, got nothing"):
            check(DEFAULT, {key: [item]})


def test_keys_that_the_file_leaves_at_their_default_can_be_set(params_file):
    keys = {"data.sources.0.clerk.prompts": 50, "rl.deadlines.step": 5.0, "gate.max_ece": 0.1, "rl.reward.scorers.0.members": 1}
    params = apply_overrides(params_file, keys)
    assert (params.data.sources[0].clerk.prompts, params.data.sources[0].clerk.label_noise) == (50, 0.08)
    assert (params.rl.deadlines.step, params.rl.deadlines.start, params.gate.max_ece) == (5.0, 300.0, 0.1)
    with pytest.raises(ConfigError, match=r"override rl.deadlines.stepp: .*; did you mean rl.deadlines.step\?"):
        check(params_file, {"rl.deadlines.stepp": 1.0})


def test_limits_of_the_monitor_are_laid_over_the_default_limits():
    assert load_params(DEFAULT).rl.monitor == DEFAULT_LIMITS
    mine = {"metric": "entropy", "below": 0.1, "action": "stop"}
    monitor = check(DEFAULT, {"rl.monitor.kl.above": 2.0, "rl.monitor.ratio": None}).rl.monitor
    assert monitor["kl"] == DEFAULT_LIMITS["kl"].model_copy(update={"above": 2.0}) and monitor["ratio"] is None
    monitor = check(DEFAULT, {"rl.monitor": {"mine": mine, "entropy": mine}}).rl.monitor
    assert monitor["mine"] == monitor["entropy"] and monitor["entropy"].window == 1 and monitor["kl"] == DEFAULT_LIMITS["kl"]
    with pytest.raises(ConfigError, match=r"rl.monitor.klx: expected a limit, got null, which only switches off .*; did you mean kl\?"):
        check(DEFAULT, {"rl.monitor": {"klx": None}})


def test_a_plain_tree_refuses_to_set_a_shared_key():
    """Its sections don't know which values they took over."""
    with pytest.raises(AssertionError, match="expected a tree with YAML's merge keys"):
        set_key(read_yaml(DEFAULT), "training.zero_stage", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sft.ranks": 3, "sft.sequence_parallel": 2}, "sft.sequence_parallel: expected a divisor of ranks=3, got 2; change one of them"),
        (
            {"sft.ranks": 8, "sft.sequence_parallel": 2, "sft.batch_size": 3},
            "sft.batch_size: expected at least ranks=8 / sequence_parallel=2, got 3; raise it, so that each rank has an example",
        ),
    ],
)
def test_ranks_that_share_sequences_must_divide_the_ranks_and_have_an_example(changes: dict, message: str):
    with pytest.raises(ConfigError) as error:
        overridden(DEFAULT.read_text(), changes, subject="params.yaml")
    assert message in str(error.value)


def test_a_batch_needs_an_example_for_each_group_that_shares_sequences():
    changes = {"sft.ranks": 8, "sft.sequence_parallel": 4, "sft.batch_size": 2}
    _, params = overridden(DEFAULT.read_text(), changes, subject="params.yaml")
    assert params.sft.data_parallel_size == 2


def test_adapters_have_the_documented_defaults(params_file):
    documented = re.search(r"lora: (\{.*?\}) +# the defaults", (Path(__file__).parents[3] / "docs/lora.md").read_text(encoding="utf-8"))[1]
    assert LoraConfig() == LoraConfig(**parse_yaml(documented, "docs/lora.md"))
    params = apply_overrides(params_file, {"training.lora": {}, "rl.lora": {"rank": 4}})
    assert params.dpo.lora == LoraConfig() and params.rl.lora == LoraConfig(rank=4)
    assert apply_overrides(params_file, {"rl.lora.alpha": 2.0}).rl.lora == LoraConfig(rank=4, alpha=2.0)
