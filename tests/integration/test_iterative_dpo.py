"""Rounds of iterative DPO on the real parts, small: through a server, on schedule, killed half-way, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML
from small_chain import DEADLINE, await_checkpoint, begin, change_params, copy_chain, forget, newest_checkpoint, output_of, ran, run
from small_workspace import flow_runs, git, processes_in, serving, wait_until

from flows.rounds.series import round_stages
from rlhf_core.data.schema import read_rows
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.rounds.pins import read_rounds

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

STEPS = 60
SMALL_ROUNDS = {
    "iterative": {
        "steps": STEPS,
        "sampling": {"backend": "pytorch", "prompts": 24, "samples_per_prompt": 3, "max_new_tokens": 16},
        "min_margin": 0.0,
        "min_pairs": 4,
        "promotion": {"prompts": 20},
    },
    "dpo": {"batch_size": 8, "checkpoint_every": 5},
}
STARTED, AT_WORK = ("RUNNING", "COMPLETED"), ("PENDING", "RUNNING")


@pytest.fixture(scope="module")
def workspace(chain, tmp_path_factory) -> Path:
    """The finished small chain, with small rounds."""
    folder = copy_chain(chain.workspace, tmp_path_factory.mktemp("rounds") / "project")
    change_params(folder, SMALL_ROUNDS)
    git(folder, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "-m", "Small rounds", "-a")
    return folder


@pytest.fixture(scope="module")
def prefect(workspace) -> Iterator[Callable]:
    """Prefect's command line, and the server of `make server`, for all that runs in the workspace."""
    often = {"PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5"}  # it looks once a minute for what is to be scheduled
    with serving(workspace, workspace.with_name("server.log"), **often) as prefect:
        yield prefect


def verdict(worktree: Path, number: int = 1) -> dict:
    return json.loads((worktree / f"rounds/{number}/metrics/evaluate.json").read_text())


def recorded(worktree: Path, stage: str) -> dict:
    """What dvc.lock says of a stage of round 1."""
    return YAML(typ="safe", pure=True).load((worktree / "rounds/dvc.lock").read_text())["stages"][f"{stage}@1"]


@pytest.fixture(scope="module")
def killed(workspace, prefect) -> Path:
    """The worktree of a first round that was killed in training, and went on."""
    worktree = workspace / "runs/killed"
    child = begin(workspace, "flows.iterative_dpo", "--series", "killed")
    try:
        await_checkpoint(worktree, "train_round@1", child)
    finally:
        child.kill()
        child.wait()
    wait_until(lambda: not processes_in(worktree), 60, "the end of DVC and the stage")
    assert 0 < newest_checkpoint(worktree, "train_round@1") < STEPS and not (worktree / "rounds/1/policy").exists()

    code, printed = run(workspace, "flows.iterative_dpo", "--series", "killed")
    assert code == 0, output_of(workspace)[-3000:]
    assert ran(printed) == round_stages(1)[2:]
    assert len(read_rounds(worktree)) == 1
    return worktree


def test_a_round_whose_pairs_are_refused_trains_nothing_and_ends_the_run(workspace, prefect):
    few = ("--set", "iterative.min_pairs=1000")
    code, printed = run(workspace, "flows.iterative_dpo", "--series", "refused", "--rounds", "2", *few)
    assert code == 4, output_of(workspace)[-3000:]
    worktree = workspace / "runs/refused"
    assert "RoundRefused: round 1: the round's pairs were refused: preference: min_pairs" in printed
    assert not verdict(worktree)["accepted"] and (worktree / "rounds/1/policy/not_trained.json").is_file()
    assert len(read_rounds(worktree)) == 1
    code, printed = run(workspace, "flows.iterative_dpo", "--series", "refused", "--set", "iterative.min_pairs=4")
    assert code == 2 and "expected the params that its rounds were made with, got others in iterative" in printed


def said_by_server(workspace: Path) -> str:
    return workspace.with_name("server.log").read_text()[-3000:]


def check_first_round(worktree: Path) -> None:
    """Pinned by DVC's own hashes, committed, and shown."""
    entry, found = read_rounds(worktree)[1], verdict(worktree)
    assert found["trained"] and isinstance(found["accepted"], bool) and found["win_rate"]["sampled"]["n"] == 20
    assert found["promotion"]["split"] == "promotion" and found["promotion"]["level"] == pytest.approx(entry.budget.level, rel=1e-5)
    assert entry.budget.level in (pytest.approx(0.04 / 30), pytest.approx(2 * 0.04 / 30))  # twice if another series has accepted
    sampled = {row["id"] for row in pq.read_table(worktree / "rounds/1/data/samples.parquet").to_pylist()}
    assert len(sampled) == 24 and sampled <= {row["id"] for row in read_rows(worktree / "data/prepared", "prompt", "train")}
    inputs = {dep["path"]: dep["md5"] for dep in recorded(worktree, "sample_round")["deps"]}
    for pin in (entry.policy, entry.gate, entry.reward_models["reward_model"]):
        assert inputs[pin.path] == pin.md5
    assert {"Results of round 1", "Begin round 1 from models/sft"} <= set(git(worktree, "log", "--format=%s").splitlines())
    committed = git(worktree, "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    assert {"rounds/rounds.svg", "rounds/rounds.md", "rounds/dvc.lock", "rounds/1/metrics/evaluate.json"} <= set(committed)
    assert not any(path.startswith(("rounds/1/data", "rounds/1/policy")) for path in committed)


def test_a_round_on_demand_ends_as_the_killed_one_others_are_cancelled_and_one_comes_on_schedule(workspace, prefect, killed):
    """What was sampled comes from the run cache, training is computed anew, and the same policy is judged at another level."""
    forget(workspace, "tasks.rounds.train_round")

    def runs(*, scheduled: bool) -> list[dict]:
        found = [r for r in flow_runs(prefect, "run-nightly-round") if r["auto_scheduled"] == scheduled]
        return sorted(found, key=lambda r: r["created"])

    def ask() -> None:
        created = prefect("deployment", "run", "iterative-dpo/run-nightly-round")
        assert created.returncode == 0, created.stderr

    def becomes(state: Callable[[], bool], seconds: float, what: str) -> None:
        wait_until(state, seconds, what, every=1.0)  # the server computes for each answer

    ask()
    becomes(lambda: runs(scheduled=False)[0]["state_type"] in STARTED, 180, "the start of the run that was asked for")
    ask()
    becomes(lambda: runs(scheduled=False)[1]["state_type"] == "CANCELLED", 180, "the end of the second run")
    becomes(lambda: runs(scheduled=False)[0]["state_type"] not in AT_WORK, DEADLINE, "the end of the first run")
    assert runs(scheduled=False)[0]["state"]["name"] == "Completed", said_by_server(workspace)

    assert ran(workspace.with_name("server.log").read_text()) == round_stages(1)[2:]
    whole = workspace / "runs/iterative-dpo"
    check_first_round(whole)
    first, second = read_rounds(killed)[1], read_rounds(whole)[1]
    assert second.budget.comparison == first.budget.comparison + 1, "both improve the same model"
    assert second.model_copy(update={"budget": first.budget}) == first
    assert dvc_md5(killed / "rounds/1/policy") == dvc_md5(whole / "rounds/1/policy")
    assert recorded(killed, "train_round") == recorded(whole, "train_round")
    assert verdict(killed)["win_rate"] == verdict(whole)["win_rate"]

    created = prefect("deployment", "schedule", "create", "iterative-dpo/run-nightly-round", "--interval", "20", "--replace", "-y")
    assert created.returncode == 0, created.stdout + created.stderr
    becomes(lambda: any(r["state_type"] in STARTED for r in runs(scheduled=True)), 240, "a run on schedule")
