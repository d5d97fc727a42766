"""Starts and ends the processes that fill trackers, so that a tracker that is down neither stops nor slows a run.

A run never waits for them but at its end, for at most END_SECONDS. `rlhf track` sends later what a tracker missed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import flows
from flows.chain.children import stop_session
from flows.chain.stages import dvc_environment
from flows.trackers.sinks import CREDENTIALS, configured
from rlhf_core.config import ConfigError, TrackingConfig, shown
from rlhf_core.environment import keep_visible
from rlhf_core.process import end_with_parent, module_command

END_SECONDS = 30.0  # from the end of a run to that of its trackers
STOP_SECONDS = 2.0  # the same after a signal
SEND_SECONDS = 600.0  # of `rlhf track`
# Deadlines of the clients, unless the environment has others.
PATIENCE = {
    "WANDB_INIT_TIMEOUT": "30",
    "WANDB_SILENT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

Child = tuple[subprocess.Popen[str], IO[str]]  # and its output

log = logging.getLogger("rlhf.flows")


@contextmanager
def tracked(workspace: Path, config: TrackingConfig) -> Iterator[None]:
    """Send the run's files to the configured trackers while the block runs. The run's record must have its outcome when the block ends."""
    children = {name: _start(name, workspace, config, since=time.time()) for name in configured(config)}
    seconds = STOP_SECONDS
    try:
        yield
        seconds = END_SECONDS
    finally:
        until = time.monotonic() + seconds
        for name, child in children.items():
            _end(name, child, until, workspace)


def send(workspace: Path, config: TrackingConfig) -> list[str]:
    """Send once what the configured trackers lack of a run.

    Returns:
        The names of the trackers that have got all.
    """
    children = {name: _start(name, workspace, config, since=None) for name in configured(config)}
    until = time.monotonic() + SEND_SECONDS
    return [name for name, child in children.items() if _end(name, child, until, workspace)]


def check_installed(config: TrackingConfig) -> None:
    """Check that the packages of the configured trackers are installed.

    Raises:
        ConfigError: one isn't; names the extra that has it.
    """
    for name in configured(config):
        if (spec := importlib.util.find_spec(name)) is None or spec.origin is None:  # a folder wandb/ has a spec too
            raise ConfigError(f"tracking: expected the package of {name}, got none; `pip install -e '.[track]'` installs it")


def _start(name: str, workspace: Path, config: TrackingConfig, *, since: float | None) -> Child:
    """Start the process of one tracker in the checkout, in which its relative paths begin."""
    code = Path(flows.__file__).resolve().parents[1]
    environment = {**PATIENCE, **_environment(name, workspace, code)}
    root = workspace.resolve().parents[1] if workspace.resolve().parent.name == "runs" else workspace
    output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by _end)
    child = subprocess.Popen(
        module_command("flows.trackers", name, str(workspace.resolve())),
        cwd=root,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        start_new_session=True,
        preexec_fn=partial(end_with_parent, os.getpid()),
    )
    child.stdin.write(json.dumps({"tracking": config.model_dump(), "since": since}))
    child.stdin.close()
    return child, output


def _environment(name: str, workspace: Path, code: Path) -> Mapping[str, str]:
    """The environment of a stage, with the tracker's credentials alone."""
    kept = dvc_environment(workspace) | {"PYTHONPATH": str(code)}
    settings = {key: value for key, value in kept.items() if key.startswith("MLFLOW_") and key not in CREDENTIALS[name]}
    keep_visible(CREDENTIALS[name], environment=kept)
    kept.pop("WANDB_SERVICE", None)  # of a program that tracks itself: it would serve our run too
    return {**settings, **kept} if name == "mlflow" else kept


def _end(name: str, started: Child, until: float, workspace: Path) -> bool:
    """Wait for a tracker's process, end it at the deadline, and return whether it has sent all."""
    child, output = started
    try:
        child.wait(max(0.0, until - time.monotonic()))
        late = False
    except subprocess.TimeoutExpired:
        late = True
    stop_session(child, 1.0)
    with output:
        output.seek(0)
        problem = output.read().strip() or ("it didn't take everything in time" if late else "it ended early")
    if late or child.returncode:
        log.warning("tracking: %s: %s; the results are whole, `rlhf track %s` sends the rest", name, shown(problem, 600), workspace.name)
    return not late and child.returncode == 0
