"""One clone of the small chain whose stages are killed and stopped in every way: it must end with what the undisturbed run has.

Its rollouts are PyTorch's; test_rl_options.py kills a run and an engine of vLLM's.

The tests share that clone and go on where the one before ended, as a user would; each can also be run alone.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from small_chain import (
    DEADLINE,
    ORDER,
    PYTORCH_ROLLOUTS,
    SMALL,
    actor_process,
    assert_nothing_left,
    await_checkpoint,
    begin,
    change_params,
    clone_chain,
    copy_chain,
    forget,
    job_log,
    newest_checkpoint,
    outcomes,
    output_of,
    ran,
    ray_folders,
    results,
    run,
    stage_process,
    stage_processes,
)
from small_workspace import lay_out_database, wait_until

from rlhf_core.checkpoint.digest import differences, read_digest
from rlhf_core.process import STOPPED_BY_SIGNAL

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def battered(chain, tmp_path_factory) -> Path:
    """A clone with DVC's cache, but for what is trained or judged."""
    workspace = clone_chain(chain.workspace, tmp_path_factory.mktemp("resume") / "battered")
    shutil.copytree(chain.workspace / ".dvc/cache", workspace / ".dvc/cache")
    for module in ("tasks.train_sft", "tasks.train_reward", "tasks.gate_reward", "tasks.train_rl"):
        forget(workspace, module)
    lay_out_database(workspace / ".prefect")
    change_params(workspace, PYTORCH_ROLLOUTS)
    code, printed = run(workspace, "dvc", "repro", "validate_data")
    assert code == 0 and ran(printed) == [], printed
    return workspace


@pytest.fixture(scope="module")
def undisturbed(chain, tmp_path_factory) -> Path:
    """The finished small chain, its policy made anew as the battered one makes it."""
    workspace = copy_chain(chain.workspace, tmp_path_factory.mktemp("resume") / "undisturbed")
    change_params(workspace, PYTORCH_ROLLOUTS)
    code, printed = run(workspace, "dvc", "repro")
    assert code == 0 and ran(printed) == ["check_model", "train_policy", "evaluate", "report"], printed
    return workspace


def going_on(stage: str, step: int) -> str:
    """What the log says when a stage starts again at its checkpoint of `step`."""
    pretraining = SMALL["sft"]["pretrain"]["steps"]
    phase, within = {"train_reward": ("reward", step), "train_policy": ("rl", step)}.get(
        stage, ("pretrain", step) if step < pretraining else ("sft", step - pretraining)
    )
    return f"{phase}: resuming from the checkpoint of step {within}" if within else ""


def went_on(text: str) -> int:
    """How often a job of RL went on from a checkpoint."""
    return len(re.findall(r"rl: resuming from the checkpoint of step [1-9]", text))


def same_results(undisturbed: Path, workspace: Path, *paths: str) -> None:
    expected, got = results(undisturbed), results(workspace)
    chosen = [name for name in expected if name.startswith(paths)]
    assert chosen and {name: got.get(name) for name in chosen} == {name: expected[name] for name in chosen}


def same_digests(undisturbed: Path, workspace: Path, *stages: str) -> None:
    """Each phase's last checkpoint held the same state: weights, optimizer, generators and all that the loop knows."""
    for stage in stages:
        phases = sorted((undisturbed / "reports/digests" / stage).iterdir())
        assert phases, f"{stage}: expected state digests, got none"
        for phase in phases:
            a, b = (read_digest(top / "reports/digests" / stage / phase.name) for top in (undisturbed, workspace))
            assert differences(a, b) == []


def test_killed_sft_resumes_and_ends_with_the_same_bits(chain, battered):
    # DVC, SIGKILL: the stage hears of it and checkpoints.
    repro = begin(battered, "dvc", "repro", "train_sft")
    await_checkpoint(battered, "train_sft", repro)
    repro.kill()
    repro.wait()
    assert_nothing_left(battered)
    assert "train_sft: stopped by a signal; run it again to resume from its checkpoint" in output_of(battered)
    # The stage, SIGTERM.
    stage = begin(battered, "tasks.train_sft")
    await_checkpoint(battered, "train_sft", stage)
    stage.terminate()
    assert stage.wait(timeout=DEADLINE) == STOPPED_BY_SIGNAL
    reached = newest_checkpoint(battered, "train_sft")

    code, printed = run(battered, "dvc", "repro", "train_sft")
    assert code == 0 and ran(printed) == ["train_sft"], printed
    assert going_on("train_sft", reached) in printed
    same_results(chain.workspace, battered, "models/sft", "metrics/train_sft", "plots/train_sft")
    same_digests(chain.workspace, battered, "train_sft")


@pytest.mark.long
def test_a_second_start_waits_for_the_first_and_takes_over_when_it_dies(chain, battered):
    code, printed = run(battered, "dvc", "repro", "train_sft")
    assert code == 0, printed
    first = begin(battered, "dvc", "repro", "--single-item", "train_reward")
    found: list[psutil.Process] = []
    wait_until(lambda: found.extend(stage_processes(battered, "train_reward")) or found, DEADLINE, "the stage")
    await_checkpoint(battered, "train_reward", first)
    trainer = found[0]
    trainer.suspend()  # alive, its lock held, for as long as this takes
    code, printed = run(battered, "dvc", "repro", "--single-item", "train_reward")
    assert code != 0 and ran(printed) == [], f"expected DVC to refuse a second run beside the first, got:\n{printed}"

    second = begin(battered, "tasks.train_reward")
    at = newest_checkpoint(battered, "train_reward")
    lock = str(battered / "scratch/train_reward/lock")
    until = time.monotonic() + DEADLINE
    while lock not in [f.path for f in psutil.Process(second.pid).open_files()]:
        assert second.poll() is None and time.monotonic() < until, output_of(battered)[-2000:]
        time.sleep(0.1)
    time.sleep(2.0)
    assert second.poll() is None and newest_checkpoint(battered, "train_reward") == at
    trainer.kill()
    assert first.wait(timeout=DEADLINE) != 0
    assert second.wait(timeout=DEADLINE) == 0, output_of(battered)[-2000:]
    assert going_on("train_reward", at) in output_of(battered)
    same_results(chain.workspace, battered, "models/reward", "data/reward_heldout", "metrics/train_reward", "plots/train_reward")
    same_digests(chain.workspace, battered, "train_reward")


@pytest.mark.long
def test_killed_rl_resumes_and_the_chain_ends_with_the_same_lock(undisturbed, battered):
    # The stage, SIGKILL; the flow starts it again at once, and it must wait until the first one's Ray is gone.
    repro = begin(battered, "dvc", "repro", "train_policy")
    await_checkpoint(battered, "train_policy", repro)
    stage_process(battered, "train_policy").kill()
    assert repro.wait(timeout=DEADLINE) != 0
    flow = begin(battered, "flows.full_pipeline")
    await_checkpoint(battered, "train_policy", flow)
    (folder,) = ray_folders(battered)  # the killed run's is gone
    assert went_on(job_log(folder)) == 1  # asked of the job: what it says comes to the terminal half a second later
    # The flow, SIGKILL: the stage hears of it, checkpoints, and ends its Ray; then the same command again.
    flow.kill()
    assert flow.wait(timeout=DEADLINE) == -signal.SIGKILL
    assert_nothing_left(battered)
    (curves,) = (battered / "scratch/train_policy").glob("*/curves.csv")
    assert newest_checkpoint(battered, "train_policy") == curves.read_text().count("\n") - 1, "expected a checkpoint of the last step"
    # A trainer rank, SIGKILL: the job crashes, and the flow tries the stage again by itself.
    flow = begin(battered, "flows.full_pipeline")
    start = len(output_of(battered))
    await_checkpoint(battered, "train_policy", flow)
    rank = actor_process(battered, "trainer")
    rank.kill()
    assert flow.wait(timeout=2 * DEADLINE) == 0, output_of(battered)[-3000:]
    printed = output_of(battered)[start:]
    assert ran(printed) == ["train_policy", "train_policy", "evaluate", "report"] and set(outcomes(printed)) == set(ORDER)
    assert "trainer rank 0: expected " in printed and "got a dead process" in printed
    assert went_on(printed) == 2
    assert_nothing_left(battered)

    same_results(undisturbed, battered, "")
    same_digests(undisturbed, battered, "train_sft", "train_reward", "train_policy")
    assert (battered / "dvc.lock").read_text() == (undisturbed / "dvc.lock").read_text()
    code, printed = run(battered, "dvc", "repro")
    assert code == 0 and ran(printed) == []
