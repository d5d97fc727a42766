"""Prefect's server on this machine: a passing one for a run from the command line, and `make server` with a worker.

Both keep their data in .prefect/ of the project (PREFECT_HOME), listen on the loopback address only and end with us.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from flows.stages import end_with, stop_session
from rlhf_core.config import ConfigError
from rlhf_core.quiet import be_quiet

HOST = "127.0.0.1"
WORK_POOL = "local"
START_DEADLINE = 120.0  # seconds
_QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",  # the stages' lines are printed as they come
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_CLI_PROMPT": "false",
}


def use_home(root: Path) -> Path:
    """Where Prefect keeps its things: PREFECT_HOME, or .prefect of the project."""
    be_quiet()
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    home = Path(os.environ.setdefault("PREFECT_HOME", str(root.resolve() / ".prefect")))
    home.mkdir(parents=True, exist_ok=True)
    return home


def use_server(root: Path) -> None:
    """Set PREFECT_API_URL to a server: the one that it names already, the one of `make server`, or one that ends with this process.

    To be called before Prefect is imported: what is registered for the exit first ends last, after Prefect has sent its last logs.
    """
    home = use_home(root)
    if "PREFECT_API_URL" in os.environ:
        return
    if url := running_server(home):
        os.environ["PREFECT_API_URL"] = url
        return
    port = free_port()
    url = os.environ["PREFECT_API_URL"] = f"http://{HOST}:{port}/api"
    # As Prefect starts its own ephemeral server: only the services that record a run, no scheduler that starts others.
    environment = {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_UI_ENABLED": "0"}
    factory = ["--factory", "prefect.server.api.server:create_app", "--host", HOST, "--port", str(port), "--log-level", "error"]
    server = start([sys.executable, "-m", "uvicorn", *factory, "--lifespan", "on"], **environment)
    atexit.register(stop, server)
    import prefect  # noqa: F401  (two seconds, while the server starts)

    wait_for(url, server)


def running_server(home: Path) -> str | None:
    """The address of the server that `make server` keeps running in this project."""
    with contextlib.suppress(OSError, json.JSONDecodeError, KeyError):
        url = json.loads((home / "server.json").read_text())["url"]
        return url if answers(url) else None
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
                f"Prefect's server: expected to start, got exit code {server.returncode}; look at the lines above, or delete .prefect/"
            )
        if time.monotonic() > until:
            raise ConfigError(
                f"Prefect's server: expected an answer from {url} within {START_DEADLINE:.0f} s, got none; is the machine very busy?"
            )
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def start(command: list[str], log: IO[str] | None = None, **environment: str) -> subprocess.Popen:
    """A child in a session of its own, told by SIGTERM when we die. It writes to `log`, or where we write."""
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT if log else None,
        preexec_fn=_listens(end_with(os.getpid())),
    )


def _listens(ask: Callable[[], None]) -> Callable[[], None]:
    """Between fork and exec: `ask`, and SIGINT as usual. A shell starts what it puts into the background with SIGINT ignored, children
    inherit that, and a Prefect worker then never ends: it answers SIGTERM by a SIGINT to itself.
    """

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        ask()

    return prepare


def stop(child: subprocess.Popen, grace: float = 10.0) -> None:
    """SIGTERM, and after the grace (seconds) the end of all that the child has started."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=grace)
    stop_session(child, grace=5.0)


def serve(root: Path, port: int) -> int:
    """Server, work pool, deployments and worker, until Ctrl-C or until one of them ends."""
    home = use_home(root)
    if url := running_server(home):
        raise ConfigError(f"make server: expected none in this project, got one at {url}; use it or stop it")
    url = os.environ["PREFECT_API_URL"] = f"http://{HOST}:{port}/api"
    os.environ.setdefault("PREFECT_SERVER_UI_API_URL", url)
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    children: list[subprocess.Popen] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with (home / "server.log").open(
            "w"
        ) as log:  # not the terminal: on SQLite some passes of its services find the database locked and say so at length
            command = [*prefect, "server", "start", "--host", HOST, "--port", str(port)]
            children.append(start(command, log, PREFECT_SERVER_LOGGING_LEVEL="WARNING"))
        wait_for(url, children[0])
        subprocess.run(
            [*prefect, "work-pool", "create", WORK_POOL, "--type", "process", "--overwrite"], check=True, stdout=subprocess.DEVNULL
        )
        subprocess.run([*prefect, "deploy", "--all"], check=True, stdout=subprocess.DEVNULL, cwd=root)
        (home / "server.json").write_text(json.dumps({"url": url}))
        children.append(start([*prefect, "worker", "start", "--pool", WORK_POOL, "--name", f"local-{os.getpid()}"]))
        print(_WELCOME.format(ui=url.removesuffix("/api"), url=url), flush=True)
        while all(child.poll() is None for child in children):
            time.sleep(0.5)
        ended = next(c for c in children if c.poll() is not None)
        print(f"make server: {' '.join(ended.args[4:6])} ended with code {ended.returncode}; stopping the rest", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one Ctrl-C is enough; the end itself has deadlines
        (home / "server.json").unlink(missing_ok=True)
        for child in reversed(children):  # the worker first: it still reports to the server
            stop(child, grace=60.0)


_WELCOME = """
Prefect is ready: {ui}  (the server's log: .prefect/server.log)

In another terminal:
  export PREFECT_API_URL={url}
  .venv/bin/prefect deployment run rlhf/full-pipeline --params '{{"overrides": {{"rl.algorithm": "grpo"}}}}'

Ctrl-C ends server, worker and runs."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.server", description=serve.__doc__)
    parser.add_argument("--port", type=int, default=4200, help="0 takes a free one (default: %(default)s)")
    port = parser.parse_args().port
    try:
        return serve(Path.cwd(), port or free_port())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
