"""What is done to a stage at work. Each function waits for its moment, strikes, and returns what undoes it before the stage runs again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from small_chain import change_params, log_of
from small_workspace import ROOT, wait_until

from flows.chain.children import stop_session
from tools.faults.lab import Scene, made_by

Undo = Callable[[], None]
Strike = Callable[[Scene], Undo]

FULL_BYTES = 64 << 20  # of the small disk
CLOCK_STEP = 3600  # seconds
CLOCK_LIBRARY = Path(__file__).with_name("clock_jump.c")


def nothing() -> None:
    """There is nothing to undo."""


def send(number: signal.Signals, role: str | None = None, *, checkpointed: bool = True) -> Strike:
    """A signal to one process of a role (None: of the stage itself), after its first checkpoint or at any moment."""

    def strike(scene: Scene) -> Undo:
        scene.after_checkpoint() if checkpointed else scene.at_work()
        process = scene.process(role or scene.stage)
        process.send_signal(number)
        if number != signal.SIGSTOP:
            return nothing

        def go_on() -> None:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)

        return go_on

    return strike


def send_to_command(number: signal.Signals, *, seconds: float = 0.0) -> Strike:
    """A signal to the process that was started, such as the flow; SIGSTOP for so many seconds."""

    def strike(scene: Scene) -> Undo:
        scene.after_checkpoint()
        scene.child.send_signal(number)
        if number == signal.SIGSTOP:
            time.sleep(seconds)
            scene.child.send_signal(signal.SIGCONT)
        return nothing

    return strike


def full_disk(scene: Scene) -> Undo:
    """The disk that the stage's checkpoints are on has no byte left. `small_disk` has to be there."""
    scene.after_checkpoint()
    filler = scene.workspace / "scratch" / scene.stage / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    return lambda: filler.unlink()


def just_run(scene: Scene) -> Undo:
    """What was prepared is the fault."""
    return nothing


def corrupt_checkpoint(change: Callable[[Path], None]) -> Strike:
    """The stage is killed, and its newest checkpoint is not what it was."""

    def strike(scene: Scene) -> Undo:
        scene.after_checkpoint()
        scene.process(scene.stage).kill()
        scene.child.wait()
        change(scene.newest_checkpoint())
        return nothing

    return strike


def flip_a_bit(folder: Path) -> None:
    """In the middle of the largest file."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    flip(path)


def flip(path: Path) -> None:
    mode = path.stat().st_mode
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    path.chmod(mode)


def tear_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:40])


def jump(scene: Scene) -> Undo:
    """The clock of every process jumps; `preload_clock` has to be there."""
    scene.after_checkpoint()
    (scene.workspace.with_suffix(".jump")).touch()
    return nothing


# What has to be there before the stage starts


def small_disk(workspace: Path, stage: str) -> Undo:
    folder = workspace / "scratch" / stage
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FULL_BYTES}", "tmpfs", str(folder)], check=True)
    return lambda: unmount(folder)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def read_only(*names: str) -> Callable[[Path, str], Undo]:
    """Folders of the workspace that nobody can write to, root neither."""

    def prepare(workspace: Path, _: str) -> Undo:
        for name in names:
            folder = workspace / name
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
            subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        return lambda: [unmount(workspace / name) for name in names] and None

    return prepare


def full_models(workspace: Path, _: str) -> Undo:
    """The disk that finished models go to has room for those that are there, and for no other."""
    folder, aside = workspace / "models", workspace.with_suffix(".models")
    shutil.copytree(folder, aside)
    blocks = sum(-(-p.stat().st_size // 4096) + 1 for p in aside.rglob("*")) + 8
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={blocks * 4}k", "tmpfs", str(folder)], check=True)
    shutil.copytree(aside, folder, dirs_exist_ok=True)
    shutil.rmtree(aside)
    return lambda: unmount(folder)


def preload_clock(seconds: int) -> Callable[[Path, str], Undo]:
    """A library before all others that gives another time of day once a file is there."""

    def prepare(workspace: Path, _: str) -> Undo:
        library = workspace.with_suffix(".so")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(CLOCK_LIBRARY), "-ldl"], check=True)
        change_params(workspace, {"flow": {"environment": ["CLOCK_JUMP_FILE", "CLOCK_JUMP_SECONDS"]}})
        os.environ.update(LD_PRELOAD=str(library), CLOCK_JUMP_FILE=str(workspace.with_suffix(".jump")), CLOCK_JUMP_SECONDS=str(seconds))

        def undo() -> None:
            for name in ("LD_PRELOAD", "CLOCK_JUMP_FILE", "CLOCK_JUMP_SECONDS"):
                del os.environ[name]
            workspace.with_suffix(".jump").unlink(missing_ok=True)

        return undo

    return prepare


def corrupt_cache(workspace: Path, stage: str) -> Undo:
    """A bit has flipped in DVC's copy of the largest file that the stage made, and the file itself is gone from the workspace."""
    folder = max(made_by(workspace, stage), key=lambda path: sum(p.stat().st_size for p in path.rglob("*")) if path.is_dir() else 0)
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    md5 = hashlib.md5(largest.read_bytes(), usedforsecurity=False).hexdigest()
    flip(workspace / ".dvc/cache/files/md5" / md5[:2] / md5[2:])
    shutil.rmtree(folder)
    return nothing


def nodes(count: int) -> Callable[[Path, str], Undo]:
    """A cluster of so many nodes with one CPU each, and a head without any, that the job is sent to."""

    def prepare(workspace: Path, _: str) -> Undo:
        folder = Path(tempfile.mkdtemp(prefix="rn"))
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
        with log_of(workspace).open("a") as log:
            command = [sys.executable, "-m", "tools.faults.nodes", str(folder), str(count)]
            cluster = subprocess.Popen(command, cwd=workspace, env=environment, stdout=log, stderr=log, start_new_session=True)
        ready = folder / "cluster.json"
        wait_until(lambda: ready.exists() or cluster.poll() is not None, 240, "a cluster")
        where = json.loads(ready.read_text())
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=where["token"])
        change_params(workspace, {"cluster": {"address": "ADDRESS"}})
        params = workspace / "params.yaml"
        params.write_text(params.read_text().replace("ADDRESS", json.dumps(where["address"])))  # DVC wants a colon in quotes

        def undo() -> None:
            cluster.terminate()
            try:
                cluster.wait(60)
            finally:
                stop_session(cluster, grace=5.0)
                for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
                    del os.environ[name]
                shutil.rmtree(folder, ignore_errors=True)
                change_params(workspace, {"cluster": {"address": None}})

        return undo

    return prepare


def lose_node_of(role: str) -> Strike:
    """The node that an actor of a role works on is gone: SIGKILL for its raylet, whose workers end with it."""

    def strike(scene: Scene) -> Undo:
        scene.after_checkpoint()
        scene.process(role).parent().kill()
        return nothing

    return strike
