"""An ensemble of tiny reward models: what is written, and what an interruption leaves of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from clerk_params import CLERK_PARAMS
from tiny_models import tiny_params

from rlhf_core.data.schema import write_rows
from rlhf_core.gate.scoring import LoadedModel
from rlhf_core.models.tokenizer import encode_prompt
from rlhf_core.models.weights import read_state_dict
from rlhf_core.process import Interrupted
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.stage.run import Stage
from rlhf_core.stage.scratch import StageInputs
from tasks.train_reward import COLUMNS, take_given, train_members

ROOT = Path(__file__).parents[3]
STEPS = 4  # of each member: 8 conversations, 2 a step, one pass


class StoppedStage(Stage):
    """SIGTERM comes to it in a given step, counted over all members; None: never."""

    requested = 0

    def __init__(self, at: int | None, scratch: Path, **changes: Any):
        super().__init__("train_reward")
        changes = {"epochs": 1.0, "batch_size": 2, "checkpoint_every": 1, "eval_every": 100, "ensemble": 2, **changes}
        members = {"rl.reward.scorers.0.members": changes["ensemble"], "rl.ppo.critic_init": "sft"}
        self.params, self.scratch = tiny_params(**{f"reward.{k}": v for k, v in changes.items()}, **members), scratch
        self.inputs, self.resumed_from = StageInputs("", {}, {}), []
        self._at = at
        scratch.mkdir(exist_ok=True)

    @property
    def stop_requested(self) -> bool:
        self.requested += 1
        return self.requested == self._at


def make_workspace(folder: Path, sft_folder: Path) -> Path:
    (folder / "models").mkdir(parents=True)
    (folder / "models/sft").symlink_to(sft_folder)
    rows = [
        {"id": f"{split}-{i}", "source": "clerk", "split": split, "messages": [{"role": "user", "content": f"Please sort {i}2."}]}
        | {"chosen": f"Certainly: 2{i}.", "rejected": f"No, {i}."}
        for split, count in (("train", 8), ("validation", 2), ("test", 3))
        for i in range(count)
    ]
    write_rows(folder / "data/prepared", "preference", rows)
    (folder / "data/prepared/sources.json").write_text("{}")
    for file in (CLERK_PARAMS, ROOT / "dvc.yaml"):
        shutil.copy(file, folder)
    return folder


def weights(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [read_state_dict(folder / "models/reward"), read_state_dict(folder / "models/reward/member_1")]


@pytest.mark.usefixtures("world")
def test_an_ensemble_that_is_interrupted_in_its_second_member_ends_as_one_that_is_not(tmp_path, monkeypatch, sft_folder):
    whole, broken = make_workspace(tmp_path / "whole", sft_folder), make_workspace(tmp_path / "broken", sft_folder)
    monkeypatch.chdir(whole)
    train_members(StoppedStage(None, whole / "scratch"))
    monkeypatch.chdir(broken)
    with pytest.raises(Interrupted):
        train_members(StoppedStage(STEPS + 2, broken / "scratch"))
    assert not (broken / "models/reward").exists()
    going_on = StoppedStage(None, broken / "scratch")
    train_members(going_on)
    assert going_on.requested == STEPS - 2  # the first member is done, and two steps of the second
    for a, b in zip(weights(whole), weights(broken), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    for name in ("plots/train_reward.csv", "metrics/train_reward.json", "data/reward_heldout.parquet"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes(), name

    first, second = weights(whole)
    assert not torch.equal(first["score.weight"], second["score.weight"])
    curves = pd.read_csv(whole / "plots/train_reward.csv")
    assert tuple(curves.columns) == COLUMNS and curves["step"].tolist() == list(range(2 * STEPS))
    assert curves["phase"].tolist() == ["reward"] * STEPS + ["reward_member_1"] * STEPS
    metrics = json.loads((whole / "metrics/train_reward.json").read_text())
    assert metrics["warning"].startswith("reward: the held-out loss ended at ") and "hardly anything was learned" in metrics["warning"]
    assert metrics["heldout_pairs"] == 5 and {"heldout_accuracy", "heldout_accuracy_member_1"} <= set(metrics)
    check_heldout(whole)


@pytest.mark.usefixtures("world")
def test_members_share_the_minutes_of_the_stage(tmp_path, monkeypatch, sft_folder):
    monkeypatch.chdir(workspace := make_workspace(tmp_path / "timed", sft_folder))
    train_members(StoppedStage(None, workspace / "scratch", max_minutes=1e-9))
    metrics = json.loads((workspace / "metrics/train_reward.json").read_text())
    assert {"steps": 1, "planned_steps": STEPS, "ended_by": "max_minutes", "epochs": 0.25}.items() <= metrics.items()
    assert pd.read_csv(workspace / "plots/train_reward.csv")["step"].tolist() == [0, STEPS]  # one of each member
    card = (workspace / "models/reward/README.md").read_text()
    assert f"Training ended by `max_minutes` after 1 of {STEPS} steps, so it can't be rebuilt to the bit." in card


def check_heldout(folder: Path) -> None:
    """The scores are the members' mean, with their standard deviation beside them."""
    model = LoadedModel.load(folder / "models/reward", max_length=64, trust_remote_code=False)
    messages = [{"role": "user", "content": "Please sort 12."}]
    ids = model.encode(messages, "Certainly: 21.")
    alone = [LoadedModel([member], model.tokenizer, 64, model.device).score([ids])[0] for member in model.members]
    row = pd.read_parquet(folder / "data/reward_heldout.parquet").set_index("id").loc["test-1"]
    assert len(alone) == 2 and row["chosen_score"] == pytest.approx(np.mean(alone), abs=1e-5)
    assert row["chosen_std"] == pytest.approx(np.std(alone), abs=1e-5) and row["chosen_std"] > 1e-3
    assert (row["chosen_tokens"], row["prompt_tokens"]) == (len(ids), len(encode_prompt(model.tokenizer, messages)))


@pytest.mark.usefixtures("world")
def test_a_given_reward_model_is_taken_as_it_is_and_scored_as_when_it_was_trained(tmp_path, monkeypatch, sft_folder):
    trained, given = make_workspace(tmp_path / "trained", sft_folder), make_workspace(tmp_path / "given", sft_folder)
    monkeypatch.chdir(trained)
    train_members(StoppedStage(None, trained / "scratch", ensemble=1))
    (trained / "models/reward/pytorch_model.bin").write_bytes(b"the same weights again")
    monkeypatch.chdir(given)
    take_given(StoppedStage(None, given / "scratch", ensemble=1, path=str(trained / "models/reward")))
    (trained / "models/reward/pytorch_model.bin").unlink()
    assert dvc_md5(given / "models/reward") == dvc_md5(trained / "models/reward")
    tables = [pd.read_parquet(folder / "data/reward_heldout.parquet").set_index("id").sort_index() for folder in (trained, given)]
    assert len(tables[0]) == 5 and tables[0]["chosen_score"].std() > 1e-3
    for column in tables[0]:
        kind = tables[0][column].dtype.kind
        assert np.allclose(*(t[column] for t in tables), atol=1e-5) if kind == "f" else tables[0][column].equals(tables[1][column]), column
    metrics = json.loads((given / "metrics/train_reward.json").read_text())
    assert (metrics["trained"], metrics["given"], metrics["heldout_pairs"], metrics["dropped_too_long"]) == (False, True, 5, 0)
    assert tuple(pd.read_csv(given / "plots/train_reward.csv").columns) == COLUMNS


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("path", "message"),
    [("registry", "reward.path: expected a run that the flow started"), ("models/sft", "expected all of its weights, got none for score")],
)
def test_a_given_reward_model_that_cannot_be_one_is_refused(tmp_path, monkeypatch, sft_folder, path, message):
    workspace = make_workspace(tmp_path / "given", sft_folder)
    monkeypatch.chdir(workspace)
    with pytest.raises(ValueError, match=message):
        take_given(StoppedStage(None, workspace / "scratch", ensemble=1, path=path))
