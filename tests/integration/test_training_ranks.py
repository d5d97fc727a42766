"""SFT on two ranks of a Ray job: the figures of one rank; stopped, killed and resumed, the bits of an undisturbed run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import psutil
import pytest
from small_chain import (
    ACTOR_TITLES,
    DEADLINE,
    SMALL,
    alive_processes,
    await_checkpoint,
    begin,
    change_params,
    copy_chain,
    newest_checkpoint,
    output_of,
    results,
    run,
)
from small_workspace import command_line, wait_until

from rlhf_core.checkpoint.digest import differences, read_digest
from rlhf_core.process import STOPPED_BY_SIGNAL
from rlhf_core.stage.run import CRASHED

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
TWO_RANKS = {"sft": {"ranks": 2, "zero_stage": 2, "steps": 120, "checkpoint_every": 10}}
PATHS = ("models/sft", "metrics/train_sft", "plots/train_sft")


def train_sft(workspace: Path, *changes: dict) -> str:
    """Run the stage to its end. Returns its output."""
    change_params(workspace, *changes)
    code, printed = run(workspace, "tasks.train_sft")
    assert code == 0, f"exit code {code}:\n{printed}"
    return printed


def copied(chain: Path, folder: Path) -> Path:
    workspace = copy_chain(chain, folder)
    shutil.rmtree(workspace / "models/sft")
    return workspace


@pytest.fixture(scope="module")
def undisturbed(chain, cluster, tmp_path_factory) -> Path:
    """What two ranks make of the small chain's data."""
    workspace = copied(chain.workspace, tmp_path_factory.mktemp("ranks") / "undisturbed")
    printed = train_sft(workspace, TWO_RANKS, cluster)
    assert "train_sft: training on 2 ranks on the Ray cluster at " in printed and "train_sft: starting 2 ranks; waiting " in printed
    return workspace


def test_two_ranks_end_with_the_losses_of_one(chain, undisturbed, tmp_path):
    alone = copied(chain.workspace, tmp_path / "alone")
    train_sft(alone, TWO_RANKS, {"sft": {"ranks": 1, "zero_stage": 0}})
    mine, theirs = (pd.read_csv(workspace / "plots/train_sft.csv") for workspace in (undisturbed, alone))
    assert mine["step"].tolist() == theirs["step"].tolist()
    for name in ("loss", "heldout_loss", "grad_norm"):
        assert mine[name].dropna().tolist() == pytest.approx(theirs[name].dropna().tolist(), rel=1e-3)  # 144 steps; six digits
    figures = [json.loads((workspace / "metrics/train_sft.json").read_text()) for workspace in (undisturbed, alone)]
    setups = [of.pop("setup") for of in figures]
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)
    assert [(setup["ranks"], setup["zero_stage"]) for setup in setups] == [(2, 2), (1, 0)]


def test_a_stopped_and_a_killed_run_on_two_ranks_end_with_the_bits_of_an_undisturbed_one(chain, undisturbed, cluster, tmp_path):
    workspace = copied(chain.workspace, tmp_path / "battered")
    change_params(workspace, TWO_RANKS, cluster)
    stage = begin(workspace, "tasks.train_sft")
    await_checkpoint(workspace, "train_sft", stage)
    stage.terminate()
    assert stage.wait(timeout=DEADLINE) == STOPPED_BY_SIGNAL, output_of(workspace)[-3000:]
    reached = max(newest_checkpoint(workspace, "train_sft"), SMALL["sft"]["pretrain"]["steps"])
    stage = begin(workspace, "tasks.train_sft")
    wait_until(lambda: newest_checkpoint(workspace, "train_sft") > reached, DEADLINE, "another checkpoint of SFT")
    wait_until(lambda: "resuming from the checkpoint" in output_of(workspace), DEADLINE, "what the rank that is killed has printed")
    ranks: list[psutil.Process] = []
    wait_until(lambda: ranks.extend(rank_processes(workspace)) or len(ranks) >= 2, DEADLINE, "two ranks")
    ranks[0].kill()
    assert stage.wait(timeout=DEADLINE) == CRASHED, output_of(workspace)[-3000:]
    assert "expected its work to finish, got a dead process" in output_of(workspace)
    assert output_of(workspace).count("resuming from the checkpoint of step ") == 1

    code, printed = run(workspace, "tasks.train_sft")
    assert code == 0 and "sft: resuming from the checkpoint of step " in printed, f"exit code {code}:\n{printed}"
    expected, got = results(undisturbed), results(workspace)
    chosen = [name for name in expected if name.startswith(PATHS)]
    assert chosen and {name: got.get(name) for name in chosen} == {name: expected[name] for name in chosen}
    for phase in ("pretrain", "sft"):
        a, b = (read_digest(top / "reports/digests/train_sft" / phase) for top in (undisturbed, workspace))
        assert differences(a, b) == []


def rank_processes(workspace: Path) -> list[psutil.Process]:
    return [p for p in alive_processes(workspace) if re.search(ACTOR_TITLES["rank"], " ".join(command_line(p)))]
