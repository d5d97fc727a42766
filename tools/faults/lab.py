"""Makes workspaces for faults, each a copy of a finished small chain in which one stage has to run, and checks them after a fault."""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
from ruamel.yaml import YAML
from small_chain import (
    ACTOR_TITLES,
    DEADLINE,
    SMALL,
    SMALL_CLERK,
    alive,
    await_checkpoint,
    change_params,
    copy_chain,
    log_of,
    make_chain,
    output_of,
    ray_folders,
    results,
    run,
    temporary,
)
from small_workspace import command_line, git, processes_in

from rlhf_core.files import try_lock
from rlhf_core.process import beside
from tools.faults.transfer import Held, held_transfer

FAULTS = {  # changes to the small chain: short deadlines, and a scorer with its own actor
    "rl": {
        "steps": 30,
        "checkpoint_every": 4,
        "deadlines": {"start": 100, "step": 40},
        "max_replacements": 2,
        "reward": {
            "scorers": [
                {"name": "reward_model", "kind": "reward_model", "weight": 1.0, "normalization": "initial"},
                {"name": "brief", "kind": "length", "target_length": 4, "weight": 0.1, "normalization": "none", "timeout": 30.0},
            ]
        },
    },
    "sft": {"steps": 60, "checkpoint_every": 10},
    "reward": {"epochs": 4.0},
    "cluster": {"silence_timeout": 20, "start_timeout": 300},
}


@dataclass(frozen=True)
class Variant:
    """Changes to the params of one stage, which then has its own undisturbed run.

    ranks: number of ranks of that stage's job.
    """

    stage: str
    changes: dict[str, Any]
    ranks: int = 1


VARIANTS = {
    "one": Variant("train_policy", {}),
    "two": Variant("train_policy", {"rl": {"trainer": {"ranks": 2}, "rollout": {"engines": 2}}}, ranks=2),
    "sharded": Variant("train_policy", {"rl": {"trainer": {"ranks": 2, "zero_stage": 3}}}, ranks=2),
    "none": Variant("train_policy", {"rl": {"max_replacements": 0}}),
    "longer": Variant("train_policy", {"rl": {"steps": 150}}),  # actors outlive their node's raylet by seconds
    "ranks": Variant("train_sft", {"sft": {"ranks": 2, "zero_stage": 2}, "cluster": {"rank_timeout": 40}}, ranks=2),
    "inference": Variant("evaluate", {"cluster": {"inference_ranks": 2, "rank_timeout": 120}}, ranks=2),
}
SECONDS_TO_END = 60.0
POLL_SECONDS = 1.0


class Laboratory:
    """Makes the undisturbed chain once, and a workspace for each cell.

    Args:
        folder: folder of all workspaces. Undisturbed chains that exist there are reused.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def undisturbed(self, variant: str) -> Path:
        workspace = self._folder / f"undisturbed-{variant}"
        whole = workspace.with_suffix(".whole")
        if whole.exists():
            return workspace
        shutil.rmtree(workspace, ignore_errors=True)
        if variant == "one":
            workspace.mkdir()
            make_chain(workspace, SMALL, {"data": {"sources": {0: {"clerk": SMALL_CLERK}}}}, FAULTS)
            self._run(workspace, "repro")
        else:
            copy_chain(self.undisturbed("one"), workspace)
            change_params(workspace, VARIANTS[variant].changes)
            forget(workspace, VARIANTS[variant].stage)
            self._run(workspace, "repro", "--single-item", VARIANTS[variant].stage)
        git(workspace, "add", "--all")
        git(workspace, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "-m", "Undisturbed")
        whole.touch()
        return workspace

    def _run(self, workspace: Path, *command: str) -> None:
        code, printed = run(workspace, "dvc", *command, deadline=3 * DEADLINE)
        if code:
            raise RuntimeError(f"undisturbed chain: expected to end with 0, got {code}:\n{printed[-3000:]}")

    def workspace(self, name: str, stage: str, variant: str) -> Path:
        """Return a copy of the chain in which `stage` has to run and the stages before it are up to date."""
        workspace = self.copy(name, variant)
        forget(workspace, stage)
        return workspace

    def copy(self, name: str, variant: str) -> Path:
        """Return a copy of the chain in which every stage is up to date."""
        workspace = self._folder / name
        shutil.rmtree(workspace, ignore_errors=True)
        log_of(workspace).unlink(missing_ok=True)
        return copy_chain(self.undisturbed(variant), workspace)


def lock_of(workspace: Path) -> dict[str, Any]:
    return YAML(typ="safe", pure=True).load((workspace / "dvc.lock").read_text())["stages"]


def made_by(workspace: Path, stage: str) -> list[Path]:
    return [workspace / out["path"] for out in lock_of(workspace)[stage]["outs"]]


def forget(workspace: Path, stage: str) -> None:
    """Remove all traces of a stage: its outs, its entry in dvc.lock, the run cache and the scratch folder."""
    for path in made_by(workspace, stage):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    yaml = YAML(typ="safe", pure=True)
    tree = yaml.load((workspace / "dvc.lock").read_text())
    del tree["stages"][stage]
    with (workspace / "dvc.lock").open("w") as file:
        yaml.dump(tree, file)
    shutil.rmtree(workspace / ".dvc/cache/runs", ignore_errors=True)
    shutil.rmtree(workspace / "scratch", ignore_errors=True)


def same_result(workspace: Path, undisturbed: Path, stage: str) -> str | None:
    """The first difference from the undisturbed run in a stage's entry of dvc.lock or its files; None if they are the same."""
    got, expected = lock_of(workspace).get(stage), lock_of(undisturbed)[stage]
    if got != expected:
        return "dvc.lock has another entry"
    made = tuple(str(path.relative_to(workspace)) for path in made_by(workspace, stage))
    files, wanted = results(workspace), results(undisturbed)
    differ = [name for name, digest in wanted.items() if name.startswith(made) and files.get(name) != digest]
    return f"{differ[0]} differs" if differ else None


ROLES = {  # regular expression that matches the command line of each role's processes
    "dvc": " dvc repro",
    "keeper": "rlhf_core.engines.ray.head",
    "driver": r"-m rlhf_core\.stage\.driver ",
    **ACTOR_TITLES,
}
SYSTEM = {"raylet": "raylet/raylet ", "gcs": "gcs/gcs_server ", "dashboard": "dashboard/dashboard.py "}  # Ray's, outside the workspace


def processes(workspace: Path, role: str) -> list[psutil.Process]:
    """Living processes of a role in a workspace, oldest first."""
    if role in SYSTEM:
        found = [p for p in psutil.process_iter() if SYSTEM[role] in (line := _line(p)) and f"{temporary(workspace)}/" in line]
    else:
        module = "train_rl" if role == "train_policy" else role
        pattern = ROLES.get(role, f"-m tasks.{module} ")
        found = [p for p in processes_in(workspace) if re.search(pattern, f"{_line(p)} ")]
    return sorted((p for p in found if "python" in p.name() or role in (*SYSTEM, *ACTOR_TITLES, "rank")), key=_age)


def _line(process: psutil.Process) -> str:
    return " ".join(command_line(process))


def _age(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return process.create_time()
    return 0.0


@dataclass
class Watch:
    """Polls the processes of a workspace.

    trainers: largest number of processes at once, by role. segments: shared memory that any process has mapped.
    """

    workspace: Path
    trainers: dict[str, int] = field(default_factory=dict)
    segments: set[str] = field(default_factory=set)

    def watching(self) -> AbstractContextManager[None]:
        return beside(self._watch)

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(POLL_SECONDS):
            with suppress(psutil.Error):
                for role in ("trainer", "rank", "driver"):
                    self.trainers[role] = max(self.trainers.get(role, 0), len(processes(self.workspace, role)))
            for process in processes_in(self.workspace):
                with suppress(OSError, psutil.Error):
                    maps = Path(f"/proc/{process.pid}/maps").read_text()
                    self.segments |= {path for path in re.findall(r"/dev/shm/\S+", maps) if not path.endswith("(deleted)")}

    def left_segments(self) -> list[str]:
        return sorted(path for path in self.segments if Path(path).exists())


def alive_processes(workspace: Path) -> list[psutil.Process]:
    """Living processes that descend from a workspace's commands, recognised by TMPDIR in their environments."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(temporary(workspace)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def leftovers(workspace: Path, watch: Watch) -> list[str]:
    """Processes, folders and shared memory that still exist after SECONDS_TO_END."""
    until = time.monotonic() + SECONDS_TO_END
    while True:
        orphans = [_line(process) for process in alive_processes(workspace)]
        left = sorted({*alive(workspace), *orphans, *map(str, ray_folders(workspace)), *watch.left_segments()})
        if not left or time.monotonic() > until:
            return left
        time.sleep(POLL_SECONDS)


def locks_held(workspace: Path) -> list[str]:
    """Locked lock files of stages, and entries of living processes in DVC's rwlock, or a note if that file is truncated.

    DVC itself removes the entries of dead processes.
    """
    held = []
    for path in (workspace / "scratch").glob("*/lock"):
        with path.open("a+") as file:
            if not try_lock(file):
                held.append(str(path.relative_to(workspace)))
    rwlock = workspace / ".dvc/tmp/rwlock"
    if rwlock.exists():
        try:
            locks = json.loads(rwlock.read_text())
            entries = locks.get("read", {}) | {name: [entry] for name, entry in locks.get("write", {}).items()}
            held += [f"rwlock: {name}" for name, found in entries.items() if any(psutil.pid_exists(e["pid"]) for e in found)]
        except json.JSONDecodeError:
            held.append("rwlock, truncated")
    return held


@dataclass
class Scene:
    """A running stage in its workspace, the target of a fault."""

    workspace: Path
    stage: str
    child: Popen
    chance: random.Random

    def at_work(self, role: str) -> None:
        """Wait until a process of a role runs, and for a random moment more."""
        self._until(lambda: processes(self.workspace, role), f"{role} at work")
        time.sleep(self.chance.uniform(0.0, 1.5))

    def after_checkpoint(self) -> None:
        await_checkpoint(self.workspace, self.stage, self.child)
        time.sleep(self.chance.uniform(0.0, 0.5))

    def process(self, role: str) -> psutil.Process:
        """A random process of a role."""
        self._until(lambda: processes(self.workspace, role), f"a process of role {role}")
        return self.chance.choice(processes(self.workspace, role))

    def held_transfer(self) -> AbstractContextManager[Held]:
        """Return a context that holds the next weight transfer in the middle."""
        return held_transfer(lambda role: processes(self.workspace, role), ended=lambda: self.child.poll() is not None, deadline=DEADLINE)

    def newest_checkpoint(self) -> Path:
        found = sorted((self.workspace / "scratch" / self.stage).glob("*/*/step-*/manifest.json"), key=lambda p: p.stat().st_mtime)
        return found[-1].parent

    def _until(self, condition, what: str) -> None:
        until = time.monotonic() + DEADLINE
        while not condition():
            if self.child.poll() is not None or time.monotonic() > until:
                raise RuntimeError(
                    f"{what}: expected before the end, got exit code {self.child.poll()}:\n{output_of(self.workspace)[-2000:]}"
                )
            time.sleep(0.05)
