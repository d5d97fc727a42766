"""Cells for Prefect's server and worker: a fault during a deployment's run of four cheap stages, then `make server` again and a retry."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, Signals

import psutil
from small_workspace import (
    ask_server,
    command_line,
    environment,
    make_workspace,
    processes_in,
    steps_done,
    training_has_begun,
    wait_until,
)

from flows.chain.children import stop_session

STEPS = 240  # of 50 ms
RUN = "mine"
STOP_SECONDS = 12.0
END_SECONDS = 120.0
MODULES = {"Prefect worker": "prefect --no-prompt worker start", "Prefect server": "prefect --no-prompt server start"}


@dataclass(frozen=True)
class ServerCell:
    """A fault of the server or worker.

    message: regular expression of what `make server` prints when it ends; None: the run succeeds, and `make server` continues.
    """

    process: str
    fault: str
    number: Signals
    message: str | None

    stage = "train_sft"

    @property
    def name(self) -> str:
        return f"{self.process}-{self.fault}".replace(" ", "-")


def server_cells() -> list[ServerCell]:
    cells = []
    for process, command in (("Prefect worker", "worker start"), ("Prefect server", "server start")):
        for number in (SIGKILL, SIGTERM):
            cells.append(ServerCell(process, number.name, number, f"make server: {command}.* ended with code"))
        cells.append(ServerCell(process, f"SIGSTOP for {STOP_SECONDS:.0f} s", SIGSTOP, None))
    return cells


@dataclass
class Outcome:
    exit_code: int
    left: list[str]
    problems: list[str]


def try_out_server(cell: ServerCell, workspace: Path) -> Outcome:
    make_workspace(workspace, steps=STEPS)
    worktree, problems = workspace / "runs" / RUN, []
    with serving(workspace) as (server, url):
        created = prefect(workspace, "deployment", "run", "rlhf/full-pipeline", "--params", json.dumps({"run": RUN}))
        assert created.returncode == 0, created.stderr
        wait_until(training_has_begun(worktree, 20), END_SECONDS, "training")
        (process,) = [p for p in processes_in(workspace) if MODULES[cell.process] in " ".join(command_line(p))]
        process.send_signal(cell.number)
        if cell.number == SIGSTOP:
            time.sleep(STOP_SECONDS)
            process.send_signal(SIGCONT)
            state = final_state(workspace, url)
            problems += [] if state == "COMPLETED" else [f"state {state}"]
        else:
            server.wait(END_SECONDS)
            with suppress(AssertionError):
                wait_until(lambda: not processes_in(workspace), 60, "the end of all processes")
    code, left = server.returncode, [" ".join(command_line(p)) for p in processes_in(workspace)]
    if cell.number != SIGSTOP:
        problems += retry(workspace)
    weights = worktree / "models/sft/weights"
    done = [step for _, step in steps_done(worktree)]
    if not weights.exists() or weights.read_text() != f"0 {STEPS}":
        problems.append("models/sft differs from an undisturbed run's")
    if sorted(set(done)) != list(range(STEPS)) or len(done) > STEPS + 1:
        problems.append(f"steps: expected each once, got {len(done)}")
    return Outcome(code, left, problems + [f"left: {line}" for line in left])


def retry(workspace: Path) -> list[str]:
    """Start `make server` again, retry the run as a user would, and return the problems."""
    with serving(workspace) as (_, url):
        (run,) = runs(workspace, url)
        retried = prefect(workspace, "flow-run", "retry", run["id"])
        if retried.returncode:
            return [f"retry of a run in state {run['state']['name']}: {(retried.stdout + retried.stderr).strip()[-200:]}"]
        state = final_state(workspace, url)
        return [] if state == "COMPLETED" else [f"state {state} after the retry"]


def runs(workspace: Path, url: str) -> list[dict]:
    """All runs of the deployment."""
    password = (workspace / ".prefect/auth").read_text().strip()
    return ask_server(url, "flow_runs/filter", password=password, deployments={"name": {"any_": ["full-pipeline"]}})


def final_state(workspace: Path, url: str) -> str:
    until = time.monotonic() + END_SECONDS
    while (state := runs(workspace, url)[0]["state_type"]) in ("RUNNING", "PENDING", "SCHEDULED") and time.monotonic() < until:
        time.sleep(1.0)
    return state


@contextmanager
def serving(workspace: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """Run `make server`, with output in <workspace>.log. Yields the process and its address."""
    ready = workspace / ".prefect/server.json"
    ready.unlink(missing_ok=True)
    with workspace.with_name(workspace.name + ".log").open("a") as log:
        command = [sys.executable, "-m", "flows.server", "--port", "0"]
        server = subprocess.Popen(command, cwd=workspace, env=environment(), stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: ready.exists() or server.poll() is not None, END_SECONDS, "server and worker")
        yield server, json.loads(ready.read_text())["url"]
    finally:
        if server.poll() is None:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(90)
        stop_session(server, grace=5.0)


def prefect(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    extra = {"PREFECT_HOME": str(workspace / ".prefect"), "COLUMNS": "400"}
    command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
    return subprocess.run(command, cwd=workspace, env=environment(**extra), capture_output=True, text=True, timeout=120, check=False)


def end_all(workspace: Path) -> None:
    """Kill the processes that a failed cell has left."""
    for process in processes_in(workspace):
        with suppress(psutil.Error):
            process.kill()
