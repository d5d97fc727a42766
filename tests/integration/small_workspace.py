"""A small project for tests of the flow: a git repository with DVC and four cheap stages.

The stages use the real frame (rlhf_core.stage.run.Stage) under names of params.yaml. They compute little; train_sft can be slowed down, so
that it can be killed in the middle.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML

from tools.clerk import clerk_tree

ROOT = Path(__file__).parents[2]

WORK = '''"""One of four stages: python work.py <stage>."""

import os
import sys
import time
from pathlib import Path

from rlhf_core.paths import METRICS
from rlhf_core.stage.files import publish, write_json
from rlhf_core.process import Interrupted
from rlhf_core.stage.run import Stage, StageRefused


def prepare_data(stage):
    folder = stage.scratch / "prepared"
    folder.mkdir()
    (folder / "rows.txt").write_text(str(stage.params.seed))
    publish(folder, Path("data/prepared"))
    write_json(METRICS / "prepare_data.json", {"rows": {"sft": {"train": 7, "test": 3}}})


def train_sft(stage):
    """One step is 50 ms; each is noted in a checkpoint, and steps.log tells which process did which step."""
    crash = Path(os.environ.get("CRASH_ONCE", "nowhere"))
    if crash.exists():
        crash.unlink()
        raise RuntimeError("the disk said no")
    checkpoint = stage.scratch / "step"
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    for step in range(done, stage.params.sft.steps):
        time.sleep(0.05)
        with open("steps.log", "a") as log:
            log.write(f"{os.getpid()} {step}\\n")
        aside = checkpoint.with_name("step.tmp")
        aside.write_text(str(step + 1))
        aside.replace(checkpoint)
        if stage.stop_requested:
            raise Interrupted
    result = stage.scratch / "model"
    result.mkdir(exist_ok=True)
    (result / "weights").write_text(f"{stage.params.seed} {stage.params.sft.steps}")
    publish(result, Path("models/sft"))
    write_json(METRICS / "train_sft.json", {"heldout_loss": 1.0 / stage.params.sft.steps})


def gate_reward(stage):
    accuracy, threshold = 0.9, stage.params.gate.min_accuracy
    message = f"accuracy {accuracy} against {threshold}" + (stage.params.gate.override or "")
    verdict = {"needed": True, "passed": accuracy >= threshold, "message": message}
    verdict |= {"accuracy": accuracy, "low": accuracy, "threshold": threshold, "override": stage.params.gate.override}
    write_json(METRICS / "gate.json", verdict)
    if not verdict["passed"]:
        raise StageRefused(message)


def report(stage):
    Path("reports").mkdir(exist_ok=True)
    if "--stopped-at" in sys.argv:
        Path("reports/stopped.html").write_text(" ".join(sys.argv[2:]))
        return
    Path("reports/report.html").write_text(f"<h1>{stage.params.report.title}</h1>")


if __name__ == "__main__":
    with Stage(sys.argv[1]) as stage:
        globals()[sys.argv[1]](stage)
'''

DVC = """
artifacts:
  reward-model: {path: models/sft, type: model}
stages:
  report:  # first in the file, last in the chain
    cmd: exec python work.py report
    params: [report]
    deps: [work.py, metrics/gate.json]
    outs: [reports/report.html]
  prepare_data:
    cmd: exec python work.py prepare_data
    params: [seed, data, model]
    deps: [work.py]
    outs: [data/prepared]
    metrics: [{metrics/prepare_data.json: {cache: false}}]
  train_sft:
    cmd: exec python work.py train_sft
    params: [seed, model, sft]
    deps: [work.py, data/prepared]
    outs: [models/sft]
    metrics: [{metrics/train_sft.json: {cache: false}}]
  gate_reward:
    cmd: exec python work.py gate_reward
    params: [gate]
    deps: [work.py, models/sft]
    metrics: [{metrics/gate.json: {cache: false}}]
"""

SERVER_SECONDS = 150.0  # a Prefect server on SQLite can stall for sixty seconds
ORDER = ["prepare_data", "train_sft", "gate_reward", "report"]


def lay_out_database(home: Path) -> None:
    """Copy a ready database into a Prefect home, which saves its first server seven seconds; all tests of a run share it.

    Elsewhere the server creates its own.
    """
    if "RLHF_TESTS_DATABASE" not in os.environ:
        return
    database = Path(os.environ["RLHF_TESTS_DATABASE"])
    database.parent.mkdir(exist_ok=True)
    with database.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not database.exists():
            first = database.with_suffix(".home")
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
            subprocess.run(command, env=environment(PREFECT_HOME=str(first)), check=True, capture_output=True, timeout=120)
            (first / database.name).rename(database)
    home.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(database, home)


def make_workspace(folder: Path, *, steps: int = 3, retries: int = 1, laid_out: bool = True) -> Path:
    """A committed project in `folder`; training takes `steps` times 50 ms. laid_out: with a ready Prefect database."""
    folder.mkdir(parents=True)
    if laid_out:
        lay_out_database(folder / ".prefect")
    shutil.copytree(ROOT / "flows", folder / "flows", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("tmp", "cache", "config.local"))
    (folder / "data").mkdir()
    for name in (".gitignore", "data/.gitignore", ".dvcignore", "prefect.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    never_on_schedule(folder)
    with (folder / ".gitignore").open("a") as file:
        file.write("/steps.log\n")
    (folder / "work.py").write_text(WORK)
    (folder / "dvc.yaml").write_text(DVC)
    params = clerk_tree()
    params["sft"]["steps"] = steps
    params["flow"] |= {"retries": retries, "retry_delay": 0, "environment": ["CRASH_ONCE"]}
    with (folder / "params.yaml").open("w") as file:
        YAML(typ="safe", pure=True).dump(params, file)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "-m", "A small project")
    return folder


def never_on_schedule(folder: Path) -> None:
    """Remove the schedule, so that a test at three in the morning gets no extra round, and its recipes, as the params are whole."""
    file = folder / "prefect.yaml"
    text = file.read_text()
    assert 'cron: "0 3 * * *"' in text and "recipes: [recipes/clerk.yaml]" in text
    file.write_text(text.replace('"0 3 * * *"', '"0 0 29 2 *"').replace("recipes: [recipes/clerk.yaml]", "recipes: []"))


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def environment(**extra: str) -> dict[str, str]:
    """A user's environment with this checkout's code and without settings of another Prefect server.

    SHELL is /bin/sh: DVC runs stages through it, and unlike bash it doesn't replace itself by the stage.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    return {**inherited, "SHELL": "/bin/sh", "PYTHONPATH": str(ROOT), **extra}


def run_flow(workspace: Path, *arguments: str, timeout: float = 120, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.full_pipeline", *arguments]
    return subprocess.run(command, cwd=workspace, env=environment(**extra), capture_output=True, text=True, timeout=timeout, check=False)


def refuse_flow(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line where it refuses its arguments, which is before it starts a server or imports Prefect; forked with its imports."""
    import warm_python  # programs of tools/ that import this module haven't the folder of that one in their path

    command = [sys.executable, "-m", "flows.full_pipeline", *arguments]
    return warm_python.run(command, cwd=workspace, env=environment(PREFECT_HOME="/proc/nowhere"))


@contextmanager
def serving(workspace: Path, log: Path, **extra: str) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Server, worker and deployments of a project, as `make server` starts them.

    Yields a function that runs Prefect's command line in the project's folder; its `ask` sends requests to the server at `url`.
    No process may be left at the end. extra: environment variables of the server.
    """
    command = [sys.executable, "-m", "flows.server", "--port", "0"]
    often = {"PREFECT_WORKER_QUERY_SECONDS": "2"}  # the worker looks for runs every ten seconds otherwise
    with log.open("w") as file:
        server = subprocess.Popen(command, cwd=workspace, env=environment(**often, **extra), stdout=file, stderr=subprocess.STDOUT)
    ready = workspace / ".prefect/server.json"
    try:
        wait_until(lambda: ready.exists() or server.poll() is not None, 120, "server, pool and deployment")
        assert server.poll() is None, log.read_text()
        url = json.loads(ready.read_text())["url"]

        def prefect(*arguments: str) -> subprocess.CompletedProcess[str]:
            extra = {"PREFECT_HOME": str(log.parent / "elsewhere"), "COLUMNS": "400"}
            command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
            return subprocess.run(
                command, cwd=workspace, env=environment(**extra), capture_output=True, text=True, timeout=180, check=False
            )

        def ask(path: str, **body: Any) -> Any:
            return ask_server(url, path, password=(workspace / ".prefect/auth").read_text().strip(), **body)

        prefect.ask, prefect.url = ask, url
        yield prefect
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=240)
    assert code == 0, log.read_text()
    wait_until(lambda: not processes_in(workspace), 60, "the end of everything")


def ask_server(url: str, path: str, *, password: str | None = None, **body: Any) -> Any:
    """A Prefect server's answer to a POST; retried on 503, while its services lock the database."""
    headers = {"Content-Type": "application/json"}
    if password is not None:
        headers["Authorization"] = f"Basic {base64.b64encode(password.encode()).decode()}"
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), headers)
    until = time.monotonic() + SERVER_SECONDS
    while True:
        try:
            with urllib.request.urlopen(request, timeout=SERVER_SECONDS) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > until:
                raise
            time.sleep(0.2)


def flow_runs(prefect: Any, deployment: str) -> list[dict]:
    """All runs of a deployment, scheduled ones included. prefect: from `serving`."""
    return prefect.ask("flow_runs/filter", deployments={"name": {"any_": [deployment]}})


def wait_until(condition: Callable[[], bool], seconds: float, what: str, *, every: float = 0.1) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what}: expected within {seconds} s, got nothing"
        time.sleep(every)


def steps_done(workspace: Path) -> list[tuple[int, int]]:
    """(process, step) of each training step so far, in order."""
    log = workspace / "steps.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(p), int(s)) for p, s in (line.split() for line in lines if line.count(" ") == 1)]


def outcomes(printed: str) -> dict[str, str]:
    """Stage -> last column of the printed table."""
    return {line.split()[0]: " ".join(line.split()[-2:]) if line.endswith("not reached") else line.split()[-1]
            for line in printed.splitlines() if line.split() and line.split()[0] in ORDER and not line.rstrip().endswith(":")}  # fmt: skip


def processes_in(workspace: Path) -> list[psutil.Process]:
    """Living processes that work in this folder: stages, DVC, flows."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(workspace) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def command_line(process: psutil.Process) -> list[str]:
    """Empty if the process has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def dvc_process(workspace: Path) -> psutil.Process | None:
    return next((p for p in processes_in(workspace) if "repro" in command_line(p)), None)


def training_has_begun(workspace: Path, steps: int = 3) -> Callable[[], bool]:
    return lambda: len(steps_done(workspace)) >= steps


def assert_resumed(workspace: Path, total: int, *, processes: int, repeated: int = 0) -> None:
    """Assert that the steps were done in order, once each but for `repeated` ones, by that many consecutive processes."""
    done = steps_done(workspace)
    pids = [pid for pid, _ in done]
    turns = [pid for i, pid in enumerate(pids) if i == 0 or pids[i - 1] != pid]
    assert len(turns) == len(set(turns)) == processes
    steps = [step for _, step in done]
    assert steps == sorted(steps) and set(steps) == set(range(total)) and len(steps) <= total + repeated
