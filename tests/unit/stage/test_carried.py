"""What becomes of the state of work that other work resumes: refused before anything is copied, begun anew by name, or kept."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.config import read_yaml, set_key
from rlhf_core.stage.carried import Carried, carried
from rlhf_core.stage.scratch import StageInputs

DEFAULTS = read_yaml(CLERK_PARAMS)
JUDGE = {"name": "judge", "kind": "judge", "weight": 0.0}
LENGTH = {"name": "length", "kind": "length", "weight": 0.0, "target_length": 8}
RL = ("seed", "model", "sft.train_on", "sft.train_on_thoughts", "rl")
FILES = {"models/sft/model.safetensors": "a", "models/sft/README.md": "b", "models/reward/model.safetensors": "c", "rewards/mine.py": "d"}
FILES |= {"data/prepared/prompt.parquet": "e", "rlhf_core/trainers/rl/loop.py": "f"}
POLICY, PPO = ["driver.json", "policy/mp_rank_00_model_states.pt", "rng-0.pt"], ["critic/mp_rank_00_model_states.pt"]
LORA = {"rank": 8, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear"}
OF_SCORES = {"best", "frontier", "score_tracks", "start"}


def work(sections: tuple[str, ...], changes: dict[str, Any], files: dict[str, str] | None = None) -> StageInputs:
    tree = copy.deepcopy(DEFAULTS)
    for key, value in changes.items():
        set_key(tree, key, copy.deepcopy(value))
    params = {}
    for name in sections:
        node = tree
        for part in name.split("."):
            node = node[part]
        params[name] = node
    return StageInputs("exec python -m tasks.train", params, FILES if files is None else files)


def rl(now: dict[str, Any], before: dict[str, Any] | None = None, *, files: list[str] | None = None, step: int = 4, **changed) -> Carried:
    before = before or {}
    older, newer = work(RL, before), work(RL, before | now, FILES | changed)
    return carried(newer, older, phase="checkpoints", step=step, files=POLICY + PPO if files is None else files)


def supervised(section: str, now: dict[str, Any], before: dict[str, Any] | None = None, *, phase: str, step: int = 4) -> Carried:
    before, sections = before or {}, ("seed", "model", section)
    return carried(work(sections, before | now), work(sections, before), phase=phase, step=step, files=[])


KEPT = (
    {"rl.learning_rate": 1e-5}, {"rl.clip_high": 0.3}, {"rl.steps": 80}, {"rl.kl.target": 6.0}, {"rl.trainer.ranks": 2}, {"seed": 3},
    {"rl.ppo.gamma": 0.9}, {"rl.monitor": {"kl": {"above": 2.0}}}, {"rl.rollout.backend": "pytorch"}, {"rl.evaluation.every": 5},
)  # fmt: skip


@pytest.mark.parametrize("now", KEPT, ids=str)
def test_what_means_the_same_is_kept(now: dict[str, Any]):
    assert rl(now) == Carried([], {})


@pytest.mark.parametrize(
    ("now", "fields"),
    [
        ({"rl.evaluation.metric": "judge"}, {"best"}),
        ({"rl.evaluation.prompts": 8}, {"best", "score_tracks"}),
        ({"rl.reward.scorers.0.weight": 2.0}, OF_SCORES),
        ({"rl.kl.coef": 0.3}, {"kl_coef"}),
        ({"rl.rollout.temperature": 0.7}, {"ahead", "frontier", "kl_tracks", "score_tracks", "start", "tracks"}),
        ({"rl.dynamic_sampling.enabled": True}, {"frontier", "score_tracks", "start"}),
        ({"model.max_length": 300}, OF_SCORES | {"ahead"}),
        ({"rl.reward.clip": None}, {"score_tracks"}),
    ],
    ids=lambda given: str(sorted(given)),  # the order of a set differs between processes
)
def test_what_means_something_else_begins_anew(now: dict[str, Any], fields: set[str]):
    found = rl(now)
    assert found.refusals == [] and found.begun_anew == {field: [key.replace(".0.", ".reward_model.") for key in now] for field in fields}
    found = rl({}, **{"data/prepared/prompt.parquet": "other", "rlhf_core/trainers/rl/loop.py": "other"})
    assert found == Carried([], {field: ["data/prepared/prompt.parquet"] for field in OF_SCORES | {"ahead"}})


def test_scorers_are_known_by_name_whatever_their_order():
    own = DEFAULTS["rl"]["reward"]["scorers"][0]
    before = {"rl.reward.scorers": [own, JUDGE, LENGTH]}
    assert rl({"rl.reward.scorers": [LENGTH, own, JUDGE]}, before) == Carried([], {})
    fewer = rl({"rl.reward.scorers": [own, LENGTH]}, before)
    assert fewer.refusals == [] and fewer.begun_anew.keys() == OF_SCORES | {"curriculum"}
    assert "rl.reward.scorers.judge.kind" in fewer.begun_anew["best"]


REFUSED = [
    ({"rl.lora": LORA}, {}, {}, 'rl.lora.alpha: expected null, as for the weights in the checkpoint, got 16.0'),
    ({"rl.lora.rank": 4}, {"rl.lora": LORA}, {}, "rl.lora.rank: expected 8, as for the weights in the checkpoint, got 4"),
    ({"rl.optimizer": "lion"}, {}, {}, 'rl.optimizer: expected "adamw", as for the optimizer in the checkpoint, got "lion"'),
    ({"rl.trainer.zero_stage": 2}, {}, {}, "rl.trainer.zero_stage: expected 0, as for the weights in the checkpoint"),
    ({"model.dtype": "bfloat16"}, {}, {}, 'model.dtype: expected "float32", as for the weights'),
    ({"rl.algorithm": "ppo"}, {"rl.algorithm": "grpo"}, {"files": POLICY},
     "rl.algorithm: expected one without a critic, as the checkpoint of grpo has none, got ppo"),
    ({"rl.ppo.critic_init": "sft"}, {}, {}, 'rl.ppo.critic_init: expected "reward_model_trunk", as for the critic in the checkpoint'),
    ({"rl.ema_decay": 0.9}, {}, {}, "rl.ema_decay: expected null, as the checkpoint has no average of the weights, got 0.9"),
    ({"rl.kl.refresh_reference_every": None}, {"rl.kl.refresh_reference_every": 2}, {"files": [*POLICY, *PPO, "reference.pt"]},
     "rl.kl.refresh_reference_every: expected a number, as the reference of the checkpoint isn't the SFT model any more, got null"),
    ({"rl.reward.scorers.0.normalization": "none"}, {}, {}, "rl.reward.scorers: expected to normalise those of the checkpoint"),
    ({"rl.reward.scorers.0.normalization": "running"}, {}, {},
     'rl.reward.scorers.reward_model.normalization: expected "initial", as for the moments in the checkpoint'),
    ({"rl.steps": 3}, {}, {}, "rl.steps: expected at least the 4 of the checkpoint, got 3"),
    ({}, {}, {"models/sft/model.safetensors": "new"}, "models/sft/model.safetensors: expected the same file, as for the"),
    ({}, {}, {"models/reward/model.safetensors": "new"}, "models/reward/model.safetensors: expected the same file, as for the"),
]  # fmt: skip


@pytest.mark.parametrize(("now", "before", "how", "message"), REFUSED, ids=[str(case[0] or case[2]) for case in REFUSED])
def test_what_the_checkpoint_cannot_give_is_refused(now: dict[str, Any], before: dict[str, Any], how: dict[str, Any], message: str):
    refusals = rl(now, before, **how).refusals
    assert any(line.startswith(message) for line in refusals), refusals
    assert all("; set it back, or set" in line or "; raise it, or set" in line for line in refusals)


def test_a_setting_of_something_that_the_checkpoint_does_not_have_is_not_refused():
    grpo = {"rl.algorithm": "grpo"}
    assert rl({"rl.algorithm": "rloo"}, grpo, files=POLICY) == Carried([], {})
    assert rl({"rl.algorithm": "grpo"}) == Carried([], {}), "the critic is left out"
    assert rl({"rl.ppo.critic_init": "sft"}, grpo, files=POLICY) == Carried([], {})
    assert rl({"rl.kl.refresh_reference_every": 2}) == Carried([], {}), "the reference has been the SFT model so far"
    assert rl({"rl.lora.dropout": 0.1}, {"rl.lora": LORA}) == Carried([], {})
    assert rl({}, **{"models/sft/README.md": "new"}) == Carried([], {}), "the model's card"
    raw = {"rl.reward.scorers.0.normalization": "none"}
    new = rl({}, raw, **{"models/reward/model.safetensors": "new", "rewards/mine.py": "new"})
    assert new.refusals == [] and new.begun_anew.keys() == OF_SCORES | {"curriculum"}, "nothing is normalised by the model's scores"
    assert rl({}, **{"rewards/mine.py": "new"}).refusals == [], "the normalised scorer is a model"


def test_supervised_stages_begin_their_best_loss_anew_or_are_refused():
    assert supervised("dpo", {"dpo.beta": 0.1, "dpo.learning_rate": 1e-5}, phase="preference") == Carried([], {"best_loss": ["dpo.beta"]})
    assert supervised("sft", {"sft.batch_size": 8, "sft.ranks": 2}, phase="sft") == Carried([], {})
    (line,) = supervised("kto", {"kto.lora": LORA}, phase="preference").refusals
    assert line.startswith("kto.lora.alpha: expected null, as for the weights in the checkpoint")
    (line,) = supervised("sft", {"sft.pretrain.steps": 900}, phase="sft").refusals
    assert line.startswith("sft.pretrain.steps: expected 600, as for the pretraining in the checkpoint, got 900")
    assert supervised("sft", {"sft.pretrain.steps": 900}, phase="pretrain") == Carried([], {})
    (line,) = supervised("sft", {"sft.pretrain.steps": 3}, phase="pretrain").refusals
    assert line.startswith("sft.pretrain.steps: expected at least the 4 of the checkpoint, got 3")
    assert supervised("reward", {"reward.margin": 0.5, "reward.ensemble": 2}, phase="reward").begun_anew == {"best_loss": ["reward.margin"]}


def test_sections_that_one_of_the_works_lacks_are_of_another_version():
    older, newer = work(RL, {}), work(RL, {})
    assert carried(replace(newer, params={"seed": 0}), older, phase="checkpoints", step=1, files=POLICY) == Carried([], {})
