"""Faults in a running stage. Each function waits for its moment, causes the fault, and returns a function that undoes it."""

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
from collections.abc import Callable, Sequence
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
    """Undo nothing, for a fault that needs no undoing."""


def send(number: signal.Signals, role: str | None = None, *, checkpointed: bool = True) -> Strike:
    """Return a fault that sends a signal to a process of a role (None: the stage itself), after its next checkpoint or at any moment."""

    def strike(scene: Scene) -> Undo:
        scene.after_checkpoint() if checkpointed else scene.at_work(role or scene.stage)
        return sent(scene.process(role or scene.stage), number)

    return strike


def sent(process: psutil.Process, number: signal.Signals) -> Undo:
    """Send a signal to a process, and return how to undo it: a stopped process continues."""
    process.send_signal(number)
    if number != signal.SIGSTOP:
        return nothing

    def resume() -> None:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)

    return resume


def send_in_transfer(number: signal.Signals, role: str) -> Strike:
    """Return a fault that sends a signal to an actor in the middle of a weight transfer, after the next checkpoint."""

    def strike(scene: Scene) -> Undo:
        scene.after_checkpoint()
        with scene.held_transfer() as held:
            return sent(scene.chance.choice(held.ranks if role == "trainer" else held.engines), number)

    return strike


def kill_one_of_the_engines(scene: Scene) -> Undo:
    """Kill an engine in the middle of a weight transfer.

    Raises:
        RuntimeError: another engine's connections to the trainer's ranks have changed afterwards.
    """
    scene.after_checkpoint()
    with scene.held_transfer() as held:
        lost = scene.chance.choice(held.engines)
        before = {engine: connections(engine, held.ranks) for engine in held.engines if engine != lost}
        lost.kill()
    scene.after_checkpoint()
    for engine, expected in before.items():
        if not expected or expected - (got := connections(engine, held.ranks)):
            raise RuntimeError(f"engine that wasn't killed: expected it to keep its connections {expected}, got {got}")
    return nothing


def connections(process: psutil.Process, others: Sequence[psutil.Process]) -> set[tuple]:
    """Return the TCP connections of a process to some others, each as its own address and theirs."""
    theirs = {(c.raddr, c.laddr) for other in others for c in other.net_connections("tcp") if c.raddr}
    return {(c.laddr, c.raddr) for c in process.net_connections("tcp") if c.raddr} & theirs


def send_to_command(number: signal.Signals, *, seconds: float = 0.0) -> Strike:
    """Return a fault that sends a signal to the started command, such as the flow. SIGSTOP lasts `seconds`."""

    def strike(scene: Scene) -> Undo:
        scene.after_checkpoint()
        scene.child.send_signal(number)
        if number == signal.SIGSTOP:
            time.sleep(seconds)
            scene.child.send_signal(signal.SIGCONT)
        return nothing

    return strike


def full_disk(scene: Scene) -> Undo:
    """Fill the disk of the stage's checkpoints. Needs `small_disk`."""
    scene.after_checkpoint()
    filler = scene.workspace / "scratch" / scene.stage / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    return lambda: filler.unlink()


def just_run(scene: Scene) -> Undo:
    """Do nothing: `prepare` has caused the fault."""
    return nothing


def corrupt_checkpoint(change: Callable[[Path], None]) -> Strike:
    """Return a fault that kills the stage and damages its newest checkpoint."""

    def strike(scene: Scene) -> Undo:
        scene.after_checkpoint()
        scene.process(scene.stage).kill()
        scene.child.wait()
        change(scene.newest_checkpoint())
        return nothing

    return strike


def flip_a_bit(folder: Path) -> None:
    """Flip a bit in the middle of the largest file."""
    flip(max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size))


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
    """Change the clock of every process. Needs `preload_clock`."""
    scene.after_checkpoint()
    (scene.workspace.with_suffix(".jump")).touch()
    return nothing


# Set-up before the stage starts


def small_disk(workspace: Path, stage: str) -> Undo:
    folder = workspace / "scratch" / stage
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FULL_BYTES}", "tmpfs", str(folder)], check=True)
    return lambda: unmount(folder)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def read_only(*names: str) -> Callable[[Path, str], Undo]:
    """Mount folders of the workspace read-only, for root too."""

    def prepare(workspace: Path, _: str) -> Undo:
        for name in names:
            folder = workspace / name
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
            subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        return lambda: [unmount(workspace / name) for name in names] and None

    return prepare


def full_models(workspace: Path, _: str) -> Undo:
    """Mount a disk on models/ with room for only the existing models."""
    folder, aside = workspace / "models", workspace.with_suffix(".models")
    shutil.copytree(folder, aside)
    blocks = sum(-(-p.stat().st_size // 4096) + 1 for p in aside.rglob("*")) + 8
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={blocks * 4}k", "tmpfs", str(folder)], check=True)
    shutil.copytree(aside, folder, dirs_exist_ok=True)
    shutil.rmtree(aside)
    return lambda: unmount(folder)


def preload_clock(seconds: int) -> Callable[[Path, str], Undo]:
    """Preload a library that shifts the time of day by `seconds` once a file exists."""

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
    """Flip a bit in the cached copy of the stage's largest file, and delete the stage's output from the workspace."""
    folder = max(made_by(workspace, stage), key=lambda path: sum(p.stat().st_size for p in path.rglob("*")) if path.is_dir() else 0)
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    md5 = hashlib.md5(largest.read_bytes(), usedforsecurity=False).hexdigest()
    flip(workspace / ".dvc/cache/files/md5" / md5[:2] / md5[2:])
    shutil.rmtree(folder)
    return nothing


def nodes(count: int, *, cpus: int = 1) -> Callable[[Path, str], Undo]:
    """Start a cluster of `count` nodes with `cpus` CPUs each and a head without CPUs, and set cluster.address to it."""

    def prepare(workspace: Path, _: str) -> Undo:
        folder = Path(tempfile.mkdtemp(prefix="rn"))
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
        with log_of(workspace).open("a") as log:
            command = [sys.executable, "-m", "tools.faults.nodes", str(folder), str(count), str(cpus)]
            cluster = subprocess.Popen(command, cwd=workspace, env=environment, stdout=log, stderr=log, start_new_session=True)
        ready = folder / "cluster.json"
        wait_until(lambda: ready.exists() or cluster.poll() is not None, 240, "a cluster")
        where = json.loads(ready.read_text())
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=where["token"])
        change_params(workspace, {"cluster": {"address": "ADDRESS"}})
        params = workspace / "params.yaml"
        params.write_text(params.read_text().replace("ADDRESS", json.dumps(where["address"])))  # DVC needs quotes around a colon

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
    """Return a fault that kills the raylet of an actor's node; the node's workers end with it."""

    def strike(scene: Scene) -> Undo:
        scene.after_checkpoint()
        scene.process(role).parent().kill()
        return nothing

    return strike
