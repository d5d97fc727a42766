"""A small version of the real chain: this checkout's files in a new repository, with params that take seconds per stage.

Nothing is replaced: DVC, Prefect, Great Expectations, DeepSpeed, Ray and vLLM run as for a user. The model is too small to learn anything;
other tests cover results.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from ruamel.yaml import YAML
from small_workspace import ROOT, command_line, git, never_on_schedule, processes_in, wait_until

from flows.chain.stages import dvc_environment
from tools.clerk import clerk_text

ORDER = [  # after hash_inputs
    *("prepare_data", "validate_data", "check_model", "train_sft", "train_reward", "gate_reward"),
    *("train_policy", "evaluate", "report"),
]
RUN_NAME = r"(?:\S+ \| )?"  # under `make server` lines begin with the run's name
DEADLINE = 400.0  # seconds for anything that starts a stage; ten times the time on two idle cores
SMALL = {
    "model": {"architecture": {"hidden_size": 64, "intermediate_size": 128, "layers": 1, "heads": 2}},
    "sft": {"steps": 24, "batch_size": 16, "checkpoint_every": 6, "eval_every": 12, "pretrain": {"steps": 24, "batch_size": 16}},
    "reward": {"epochs": 1.0, "checkpoint_every": 3, "eval_every": 4},
    "data": {"test_fraction": 0.12, "promotion_fraction": 0.06},
    "gate": {"min_accuracy": 0.3, "min_pairs": 100},
    "rl": {
        "steps": 60,  # enough for three interruptions, a tenth of a second each
        "samples_per_step": 16,
        "minibatch_size": 16,
        "checkpoint_every": 5,
        "reward": {"normalization_samples": 32},
        "rollout": {"max_new_tokens": 16, "engines": 1, "max_concurrent_sequences": 32},
    },
    "evaluation": {"prompts": 20, "max_new_tokens": 16, "table_rows": 8},
    "flow": {"retry_delay": 0.0},
    "cluster": {"threads": 1},  # waiting threads spin and slow the other worker
}
# For tests that need no vLLM: starts in a fifth of its time.
PYTORCH_ROLLOUTS = {"rl": {"rollout": {"backend": "pytorch"}}}
ACTOR_TITLES = {  # Regular expressions of Ray's process titles: an actor's class while idle, its name and method in a call
    "trainer": "ray::(TrainerRank|trainer[.])",
    "rollout": "ray::(RolloutActor|rollout[.])",
    "scorer": "ray::(TextScorers|scorer[.])",
    "rank": "ray::(Rank|training[.])",
}
# A user's secrets in the environment of everything that runs here; nothing may show or store them.
PLANTED = {name: f"planted-{name.lower()}-5f1d0c" for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")}
# Likewise; visible only where a test names it in flow.environment.
NAMED = {"SCORER_API_KEY": "named-scorer_api_key-77ab31"}
SMALL_CLERK = {"pretrain_lines": 400, "demonstrations": 300, "prompts": 240}


def make_chain(folder: Path, *recipes: dict) -> Path:
    """A committed project in `folder` with this checkout's files (tracked or untracked) and the clerk's params, made small.

    It has no results of this checkout's own runs, which a flow would take for the previous run.
    """
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "metrics/", "plots/", "dvc.lock")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "baselines.json").write_text('{"previous": null, "promoted": null}')
    (folder / "params.yaml").write_text(clerk_text(), encoding="utf-8")
    never_on_schedule(folder)
    change_params(folder, *(recipes or (SMALL, {"data": {"sources": {0: {"clerk": SMALL_CLERK}}}})))
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "-m", "A small chain")
    return folder


def clone_chain(chain: Path, folder: Path) -> Path:
    """The same commit in a fresh clone without results."""
    subprocess.run(["git", "clone", "--quiet", str(chain), str(folder)], check=True)
    return folder


def copy_chain(chain: Path, folder: Path) -> Path:
    """A copy of a workspace with its results and its own cache."""
    shutil.copytree(chain, folder, symlinks=True)
    return folder


def forget(workspace: Path, module: str) -> None:
    """Remove a stage's results from DVC's run cache, so that it runs again.

    The folder goes too, because DVC fails on an empty one.
    """
    known = [path.parent for path in sorted((workspace / ".dvc/cache/runs").rglob("*")) if path.is_file() and module in path.read_text()]
    assert known, f"{module}: expected it in DVC's run cache"
    for folder in known:
        shutil.rmtree(folder)


def change_params(workspace: Path, *changes: dict) -> None:
    path = workspace / "params.yaml"
    params = YAML(typ="safe", pure=True).load(path.read_text())
    for change in changes:
        _merge(params, change)
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False  # DVC can't read an address in flow style
    with path.open("w") as file:
        yaml.dump(params, file)


def _merge(node: dict | list, change: dict) -> None:
    for key, value in change.items():
        known = node[key] if isinstance(node, list) else node.get(key)  # a monitor's limit may be new
        if isinstance(value, dict) and value and known is not None:
            _merge(known, value)
        else:
            node[key] = value


def begin(workspace: Path, *command: str) -> subprocess.Popen:
    """Start a Python module in the background in its own session; its output is appended to <workspace>.log."""
    environment = {k: v for k, v in dvc_environment(workspace).items() if not k.startswith("PREFECT_")}
    with log_of(workspace).open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=workspace,
            env=environment | PLANTED | NAMED | {"SHELL": "/bin/sh", "PYTHONPATH": str(workspace), "TMPDIR": str(temporary(workspace))},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run(workspace: Path, *command: str, deadline: float = DEADLINE) -> tuple[int, str]:
    """Run a Python module to its end: exit code and output. It is ended in any case."""
    start = len(output_of(workspace))
    child = begin(workspace, *command)
    try:
        code = child.wait(timeout=deadline)
    finally:
        child.kill()
    return code, output_of(workspace)[start:]


def log_of(workspace: Path) -> Path:
    return workspace.with_name(workspace.name + ".log")


def output_of(workspace: Path) -> str:
    """All output of this workspace's processes."""
    return log_of(workspace).read_text(errors="replace") if log_of(workspace).exists() else ""


def outcomes(printed: str) -> dict[str, str]:
    """Stage -> last column of the last table printed: ran, cached, restored, failed or not reached."""
    rows = re.findall(rf"^{RUN_NAME}({'|'.join(ORDER)}) .*?(ran|cached|restored|failed|not reached)$", printed, re.MULTILINE)
    return dict(rows)


def ran(printed: str) -> list[str]:
    """Stages that DVC ran, in order, without hash_inputs, which it always runs."""
    return [stage for stage in re.findall(rf"^{RUN_NAME}Running stage '(.+)':", printed, re.MULTILINE) if stage != "hash_inputs"]


def results(workspace: Path) -> dict[str, str]:
    """sha256 of every file that DVC tracks in a workspace: outs, metrics and plots."""
    found = {}
    for top in ("data", "checks", "models", "metrics", "plots", "reports/report.html"):
        for path in [workspace / top, *sorted((workspace / top).rglob("*"))]:
            if path.is_file() and path.suffix != ".py":
                found[str(path.relative_to(workspace))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def newest_checkpoint(workspace: Path, stage: str) -> int:
    """Steps in the newest complete checkpoint of a stage; pretraining steps precede SFT's."""
    steps = [0]
    for path in (workspace / "scratch" / stage).glob("*/*/step-*/manifest.json"):
        before = SMALL["sft"]["pretrain"]["steps"] if path.parts[-3] == "sft" else 0
        steps.append(before + int(path.parent.name.removeprefix("step-")))
    return max(steps)


def await_checkpoint(workspace: Path, stage: str, child: subprocess.Popen) -> None:
    """Wait until `child` has written a new checkpoint."""
    before = newest_checkpoint(workspace, stage)
    until = time.monotonic() + DEADLINE
    while newest_checkpoint(workspace, stage) <= before:
        assert child.poll() is None, f"{stage}: ended with {child.returncode} before it was interrupted:\n{output_of(workspace)[-3000:]}"
        assert time.monotonic() < until, f"{stage}: expected a checkpoint after step {before}, got none:\n{output_of(workspace)[-3000:]}"
        time.sleep(0.02)


def stage_process(workspace: Path, stage: str) -> psutil.Process:
    """The only process that runs a stage here; a second one would be a second trainer."""
    (process,) = stage_processes(workspace, stage)
    return process


def stage_processes(workspace: Path, stage: str) -> list[psutil.Process]:
    module = "tasks.train_rl" if stage == "train_policy" else f"tasks.{stage}"
    return [p for p in processes_in(workspace) if command_line(p)[-2:] == ["-m", module] and "python" in p.name()]


def driver_process(workspace: Path) -> psutil.Process:
    """The only driver of an RL job of this workspace, on any head."""
    (process,) = [p for p in alive_processes(workspace) if "rlhf_core.stage.driver" in command_line(p)]
    return process


def actor_process(workspace: Path, role: str, *, of: int = 1) -> psutil.Process:
    """A process of a Ray actor's role, which has `of` processes; retried, because Ray changes their titles around each call."""
    found: list[psutil.Process] = []

    def all_are_there() -> bool:
        found[:] = [p for p in alive_processes(workspace) if re.search(ACTOR_TITLES[role], " ".join(command_line(p)))]
        return len(found) == of

    wait_until(all_are_there, 10, f"{of} actors {role}")
    return found[0]


@functools.cache
def temporary(workspace: Path) -> Path:
    """A folder for temporary files of this workspace, with a short name because of Ray's deep socket paths."""
    folder = Path(tempfile.mkdtemp(prefix="rl"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def ray_folders(workspace: Path) -> list[Path]:
    return list(temporary(workspace).glob("rlhf-ray-*"))


def job_log(folder: Path) -> str:
    """The log of the only job of a Ray head in this folder."""
    (log,) = folder.glob("r/session_2*/logs/job-driver-*.log")
    return log.read_text()


def alive(workspace: Path) -> list[str]:
    """Command lines of `alive_processes`."""
    return [line for p in alive_processes(workspace) if (line := " ".join(command_line(p)))]


def alive_processes(workspace: Path) -> list[psutil.Process]:
    """Living stages, heads, jobs and actors whose working folder, command line or imports are in this folder or its temporary one."""
    found = {p.pid: p for p in processes_in(workspace)}
    for process in psutil.process_iter(["cmdline", "environ"]):
        line = " ".join(process.info["cmdline"] or [])
        ours = f"{workspace}/" in line or f"{temporary(workspace)}/" in line
        imports = (process.info["environ"] or {}).get("PYTHONPATH", "").split(os.pathsep)
        if (ours or str(workspace) in imports) and process.pid != os.getpid():
            found[process.pid] = process
    return list(found.values())


def assert_nothing_left(workspace: Path) -> None:
    """Assert that within a minute all processes of this workspace end, Ray's included, and Ray's folder is removed."""
    wait_until(lambda: not alive(workspace) and not ray_folders(workspace), 60, f"the end of {alive(workspace)}")
