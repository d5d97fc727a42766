"""Prefect's server on this machine: a temporary one for a run from the command line, and `make server` with a worker.

Both store their data in the project's .prefect/ (PREFECT_HOME) or in PostgreSQL (flows/database.py), listen on the loopback address only,
require a password and end with this process. The password is in .prefect/auth, which only this user may read. Processes get it by their
environment, never by a command line.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from flows.chain.children import stop_session
from flows.chain.worktree import COMMAND_SECONDS, run_within
from flows.database import NAME, forget_addresses, take_database, use_database
from flows.runs.liveness import ask, crash_orphaned_command_lines, crash_orphaned_runs
from rlhf_core.commands import run_module
from rlhf_core.config import ConfigError, shown
from rlhf_core.engines.ports import free_ports
from rlhf_core.files import lock_file
from rlhf_core.process import configure_process, end_with_parent, module_command

HOST = "127.0.0.1"
WORK_POOL = "local"
FORMER_NAMES = ["scheduled", "reward-model", "policy"]  # of the deployments in prefect.yaml
START_DEADLINE = 120.0  # seconds
LOOK_SECONDS = 10.0  # between looks for killed command lines
log = logging.getLogger("rlhf.flows")
_QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",  # stages' lines are printed unbuffered
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_CLI_PROMPT": "false",
}


def use_home(root: Path) -> Path:
    """Return Prefect's folder: PREFECT_HOME, or .prefect of the project."""
    configure_process()
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    home = Path(os.environ.setdefault("PREFECT_HOME", str(root.resolve() / ".prefect")))
    if not (home / "logging.yml").exists():  # a user's own
        os.environ.setdefault("PREFECT_LOGGING_SETTINGS_PATH", str(Path(__file__).with_name("logging.yml")))
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:  # may already exist, made by Prefect or by hand
        home.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"{home}: expected a folder owned by this user, got {error.strerror}; set PREFECT_HOME to one") from error
    return home


def _server_logging(home: Path) -> dict[str, str]:
    """Write Prefect's default logging settings where Prefect looks for a user's, so that the server doesn't import this code."""
    return {"PREFECT_LOGGING_SETTINGS_PATH": str(home / "logging.yml")}


def auth_string(home: Path) -> str:
    """Return user:password of the project's server: PREFECT_SERVER_API_AUTH_STRING, or one generated once and stored in `home`."""
    if own := os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        return own
    path = home / "auth"
    if not path.exists():
        aside = home / f"auth.{os.getpid()}"
        write_private(aside, f"rlhf:{secrets.token_urlsafe(32)}\n")
        with contextlib.suppress(FileExistsError):  # if two processes create it, the first one wins
            os.link(aside, path)
        aside.unlink()
    return path.read_text(encoding="utf-8").strip()


def write_private(path: Path, text: str) -> None:
    """Create a file that only this user can ever read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


@contextlib.contextmanager
def use_server(root: Path) -> Iterator[None]:
    """Set PREFECT_API_URL to a server: the one that it already names, the one of `make server`, or one that ends with this process.

    A new server starts while the block runs, which should import Prefect (seconds); it answers when the block has ended.
    Enter the block before importing Prefect: exit handlers run in reverse order, so the server ends after Prefect has sent its last logs.

    Raises:
        ConfigError: the server exited, or didn't answer in time.
    """
    home = use_home(root)
    if given := os.environ.get("PREFECT_API_URL"):
        forget_addresses()
        _end_lost(home, given, given)
        yield
        return
    os.environ["PREFECT_API_AUTH_STRING"] = auth_string(home)
    if server := running_server(home):
        url = os.environ["PREFECT_API_URL"] = server["url"]
        forget_addresses()
        use_database(server["database"])
        _end_lost(home, url, None)
        yield
        return
    database = take_database(None)
    (port,) = free_ports(1)
    url = os.environ["PREFECT_API_URL"] = f"http://{HOST}:{port}/api"
    # The services of Prefect's own ephemeral server: those that record a run, without a scheduler that starts others.
    environment = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_UI_ENABLED": "0"}
    environment |= {"PREFECT_SERVER_API_AUTH_STRING": os.environ["PREFECT_API_AUTH_STRING"], **_server_logging(home), **database}
    factory = ["--factory", "prefect.server.api.server:create_app", "--host", HOST, "--port", str(port), "--log-level", "error"]
    with first_start(home):
        server = start(module_command("uvicorn", *factory, "--lifespan", "on"), **environment)
        atexit.register(stop, server)
        yield
        wait_for(url, server)
    _end_lost(home, url, None)


def _end_lost(home: Path, url: str, given_url: str | None) -> None:
    """Set the runs of killed command lines to Crashed. A failure to do so doesn't prevent this run."""
    try:
        for name in crash_orphaned_command_lines(home, url, os.environ.get("PREFECT_API_AUTH_STRING"), given_url):
            log.warning("Run %s: its process is gone; it is now Crashed, and the same command resumes it", name)
    except (OSError, ValueError, KeyError) as error:
        log.warning("Runs of killed command lines: expected to set them to Crashed, got: %s; the next start retries", error)


def _end_orphaned(url: str, secret: str, patience: float = 0.0) -> None:
    """Set the runs of deployments whose process is gone to Crashed, unless another machine's worker shares the database."""
    for name in [] if NAME in os.environ else crash_orphaned_runs(url, secret, patience=patience):
        print(f"Run {name}: its process is gone; it is now Crashed, and `prefect flow-run retry` resumes it", flush=True)


def delete_former_deployments(url: str, secret: str) -> None:
    """Delete the deployments of prefect.yaml under names that they no longer have: `scheduled` would start a second round each night."""
    wanted = {"deployments": {"name": {"any_": FORMER_NAMES}}, "work_pools": {"name": {"any_": [WORK_POOL]}}}
    for deployment in ask(url, secret, "deployments/filter", wanted):
        if (deployment["entrypoint"] or "").startswith("flows/"):
            ask(url, secret, f"deployments/{deployment['id']}", method="DELETE")


@contextlib.contextmanager
def first_start(home: Path) -> Iterator[None]:
    """Let one server at a time create the database: if two create it at once, one fails.

    Starts with an existing database don't wait for each other.
    """
    database = f"{hashlib.sha256(os.environ[NAME].encode()).hexdigest()[:16]}-" if NAME in os.environ else ""
    laid_out = home / f"database-{database}of-{importlib.metadata.version('prefect')}"
    if laid_out.exists():
        yield
        return
    with (home / "first-start.lock").open("a+") as lock:
        lock_file(lock, math.inf)
        yield
        laid_out.touch()


def running_server(home: Path) -> dict[str, Any] | None:
    """Return the address of this project's `make server` and that of its database, if it runs, else None."""
    with contextlib.suppress(OSError, json.JSONDecodeError, KeyError):
        server = json.loads((home / "server.json").read_text())
        return {"database": None, **server} if answers(server["url"]) else None
    return None


def answers(url: str) -> bool:
    with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as response:
        return response.status == 200
    return False


def wait_for(url: str, server: subprocess.Popen) -> None:
    until = time.monotonic() + START_DEADLINE
    while not answers(url):
        if server.poll() is not None:
            raise ConfigError(
                f"Prefect's server: expected to start, got exit code {server.returncode}; see the lines above or .prefect/server.log; "
                "with SQLite deleting .prefect/ helps"
            )
        if time.monotonic() > until:
            raise ConfigError(
                f"Prefect's server: expected an answer from {url} within {START_DEADLINE:.0f} s, got none; is the machine very busy?"
            )
        time.sleep(0.1)


def start(command: list[str], log: IO[str] | None = None, **environment: str) -> subprocess.Popen:
    """Start a child with its own session, which gets SIGTERM when this process dies. Its output goes to `log` or this process's output."""
    parent = os.getpid()

    def prepare() -> None:
        # A shell starts background jobs with SIGINT ignored, and children inherit that. A Prefect worker would then never end, since it
        # answers SIGTERM with a SIGINT to itself.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        end_with_parent(parent)

    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT if log else None,
        preexec_fn=prepare,
    )


def stop(child: subprocess.Popen, grace: float = 10.0) -> None:
    """Send SIGTERM and, after the grace (seconds), kill the child's whole session."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=grace)
    stop_session(child, grace)


def serve(root: Path, port: int, database: str | None = None) -> int:
    """Run server, work pool, deployments and worker until Ctrl-C or until one of them exits."""
    home = use_home(root)
    if server := running_server(home):
        raise ConfigError(f"make server: expected no running server in this project, got one at {server['url']}; use it or stop it")
    profile = home / "profiles.toml"
    if profile.exists() and _MARK not in profile.read_text(encoding="utf-8"):
        raise ConfigError(f"{profile}: expected no such file, since `make server` writes its own, got one of yours; move it away")
    connection = take_database(database)
    url = os.environ["PREFECT_API_URL"] = f"http://{HOST}:{port}/api"
    os.environ.setdefault("PREFECT_SERVER_UI_API_URL", url)
    secret = os.environ["PREFECT_API_AUTH_STRING"] = auth_string(home)
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    children: list[subprocess.Popen] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        # Not to the terminal: with SQLite the services log long errors about a locked database.
        with first_start(home), (home / "server.log").open("w") as log:
            command = [*prefect, "server", "start", "--host", HOST, "--port", str(port)]
            protection = {"PREFECT_SERVER_API_AUTH_STRING": secret, "PREFECT_SERVER_LOGGING_LEVEL": "WARNING", **_server_logging(home)}
            children.append(start(command, log, **protection, **connection))
            wait_for(url, children[0])
        _end_orphaned(url, secret)
        _end_lost(home, url, None)
        run_prefect(prefect, root, "work-pool", "create", WORK_POOL, "--type", "process", "--overwrite")
        run_prefect(prefect, root, "deploy", "--all")
        delete_former_deployments(url, secret)
        write_private(profile, _PROFILE.format(url=json.dumps(url), secret=json.dumps(secret)))
        (home / "server.json.new").write_text(json.dumps({"url": url, "database": os.environ.get(NAME)}))
        (home / "server.json.new").replace(home / "server.json")  # written atomically, so that readers find it complete
        # The worker starts flows in temporary folders, where Prefect's logging needs this code before it loads the flow.
        code = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        worker = [*prefect, "worker", "start", "--pool", WORK_POOL, "--name", f"local-{os.getpid()}"]
        children.append(start(worker, PYTHONPATH=code))
        print(_WELCOME.format(ui=url.removesuffix("/api")), flush=True)
        looked = time.monotonic()
        while all(child.poll() is None for child in children):
            time.sleep(0.5)
            if time.monotonic() > looked + LOOK_SECONDS:
                _end_lost(home, url, None)
                looked = time.monotonic()
        ended = next(c for c in children if c.poll() is not None)
        print(f"make server: {' '.join(ended.args[4:6])} ended with code {ended.returncode}; stopping the rest", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # further signals are ignored; the shutdown has deadlines
        for path in (home / "server.json", profile):
            path.unlink(missing_ok=True)
        for child in reversed(children):  # the worker first, since it reports to the server
            if child is children[0] and child.poll() is None:  # no worker is left that could start a run
                with contextlib.suppress(OSError):  # else the next start does it
                    _end_orphaned(url, secret, patience=60.0)
                    _end_lost(home, url, None)
            stop(child, grace=60.0)


def run_prefect(prefect: list[str], root: Path, *arguments: str) -> None:
    """Run Prefect's command line in the project's folder.

    Raises:
        ConfigError: it fails, or doesn't end in time.
    """
    done = run_within(COMMAND_SECONDS, [*prefect, *arguments], root, dict(os.environ))
    if done.returncode:
        got = shown(" ".join((done.stderr or done.stdout).split()), 1000)
        raise ConfigError(
            f"prefect {' '.join(arguments)}: expected to succeed, got: {got}; see .prefect/server.log, and correct prefect.yaml"
        )


# Prefect's command line finds it from the project's folder (pyproject.toml says where to look) or by PREFECT_HOME.
_MARK = "# Written by `make server`, and removed when it ends."
_PROFILE = f"""\
{_MARK}
active = "rlhf"

[profiles.rlhf]
PREFECT_API_URL = {{url}}
PREFECT_API_AUTH_STRING = {{secret}}
"""
_WELCOME = """
Prefect is ready: {ui}  (it asks for what is in .prefect/auth; the server's log: .prefect/server.log)

In another terminal, from this folder:
  .venv/bin/prefect deployment run rlhf/full-pipeline --params '{{"overrides": {{"rl.algorithm": "grpo"}}}}'

Ctrl-C ends server, worker and runs."""


def start_server(*, port: int = 4200, database: str | None = None) -> int:
    """Run server, worker and deployments until Ctrl-C.

    Args:
        port: of the server; 0 takes a free one.
        database: keep runs in PostgreSQL at this address without password, such as postgresql://rlhf@db.example/prefect; by default
            PREFECT_SERVER_DATABASE_CONNECTION_URL, or SQLite.
    """
    try:
        return serve(Path.cwd(), port or free_ports(1)[0], database)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


main = partial(run_module, "server")

if __name__ == "__main__":
    sys.exit(main())
