"""A Ray cluster for one job: a local head if no address is configured, submission, logs, and a clean shutdown."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from rlhf_core.engines.ports import free_ports
from rlhf_core.process import socket_folder

if TYPE_CHECKING:
    from ray.exceptions import AuthenticationError

log = logging.getLogger("rlhf")

HEAD_STOP_SECONDS = 20
ANSWER_SECONDS = 5.0
CHECK_SECONDS = 10.0
HEAD_STARTS = 3  # starts, each with other ports
TAKEN = ("address already in use", "already occupied")  # Ray's error about a port
SMALLEST_STORE = 300_000_000
MARK = "RLHF_RAY_HEAD"  # environment variable of a head's processes: the head's folder
POLL_SECONDS = 0.5  # polling costs the head's dashboard and agent CPU time
# Variables that Ray prefers to the address it is given, and those of a Ray job that this process may be part of.
OF_ANOTHER_CLUSTER = (
    *("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_NAMESPACE"),
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
)
# The longest path of a socket below a head's folder; the session's name has date, time and a process id.
_SOCKET = "rlhf-ray-xxxxxxxx/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1"


class Readable(Protocol):
    """A file, or an object with a file's `exists` and `read_bytes`."""

    def read_bytes(self) -> bytes: ...


class ClusterError(RuntimeError):
    """The cluster didn't start, refused the job or lost it. The message names what to check."""


class HeadRefused(ClusterError):
    """The cluster doesn't accept this process's token: another try would fail too."""


class HeadLate(ClusterError):
    """The head didn't answer in time, but may answer later."""


@contextlib.contextmanager
def local_head(
    *, cpus: int, start_timeout: float, weights: int = 0, stop_grace: float = 20.0, keep_open: tuple[int, ...] = ()
) -> Iterator[str]:
    """Start a Ray head on free loopback ports, yield its dashboard address, and end it with all its processes.

    Other heads on the machine are left alone: nothing here calls `ray stop`. The head dies with this process.

    Args:
        weights: bytes of a model whose weights go through the object store.
        stop_grace: seconds between SIGTERM and SIGKILL, in which the job writes its checkpoint.
        keep_open: file descriptors that stay open until the head's last process is gone, even if this process is killed.
    Raises:
        ClusterError: the head isn't ready after `start_timeout` seconds.
    """
    forget_other_clusters()
    try:
        place = socket_folder(len(_SOCKET))
    except OSError as error:
        raise ClusterError(f"Ray head: {error}") from error
    # Readable by this user only; Ray makes its folder inside readable by all.
    folder = Path(tempfile.mkdtemp(prefix="rlhf-ray-", dir=place))
    spilled = [] if place == tempfile.gettempdir() else [Path(tempfile.mkdtemp(prefix="rlhf-spilled-"))]
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token), RAY_JOB_STOP_WAIT_TIME_S=f"{stop_grace:.0f}")
    # Without this setting Ray treats 127.0.0.1 as "this machine" and listens on its external address.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # or its workers run at a low priority
    # Prestarted workers would never be used, since the actors have their own environments.
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # The dashboard's process metrics aren't used and cost CPU time.
    os.environ.setdefault("REPORTER_UPDATE_INTERVAL_MS", "60000")
    os.environ.setdefault("METRICS_RECORD_INTERVAL_S", "60")
    # Ray serves metrics without authentication on two ports. The second can't be switched off; -1 is no port.
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    os.environ.setdefault("DASHBOARD_METRIC_PORT", "-1")
    environment = {**os.environ, MARK: str(folder)} | ({"TMPDIR": place} if spilled else {})  # Python's sockets are there too
    head = None
    try:
        deadline = time.monotonic() + start_timeout
        for attempt in range(1, HEAD_STARTS + 1):
            dashboard, command = _head_command(folder, cpus, store_bytes(weights))
            command += [f"--object-spilling-directory={path}" for path in spilled]
            keeper = [sys.executable, "-m", "rlhf_core.engines.ray.head", str(folder), str(os.getpid()), *command]
            head = subprocess.Popen(keeper, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=keep_open)
            try:
                _wait_until_up(f"http://127.0.0.1:{dashboard}", head, folder / "head.log", deadline - time.monotonic())
                break
            except ClusterError as error:
                if not any(words in str(error) for words in TAKEN) or head.poll() is None or attempt == HEAD_STARTS:
                    raise
                log.warning("Ray head: a free port was taken meanwhile; starting again with other ports")
        try:
            yield f"http://127.0.0.1:{dashboard}"
        except ClusterError:
            if head.poll() is not None:
                log.error("Ray head: ended by itself; its output ends with:\n%s", _end_of(folder / "head.log"))
            raise
    finally:
        if head is not None:
            _stop_head(head, folder)
        for path in (folder, *spilled):
            shutil.rmtree(path, ignore_errors=True)


def forget_other_clusters() -> list[str]:
    """Remove OF_ANOTHER_CLUSTER from the environment of this process and its children, and return the names that were set."""
    return [name for name in OF_ANOTHER_CLUSTER if os.environ.pop(name, None)]


def python_path(root: Path) -> str:
    """Return PYTHONPATH for a job's processes: the project's folder, then this process's entries, which may have packages."""
    return os.pathsep.join(dict.fromkeys([str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))


def store_bytes(weights: int) -> int:
    """Return the size of Ray's object store, for a model's weights and for batches, of which a response token takes 33 bytes in the update.

    Ray spills excess objects to the disk, which is slow.
    """
    return min(SMALLEST_STORE + weights, psutil.virtual_memory().total // 3)


def _head_command(folder: Path, cpus: int, store: int) -> tuple[int, list[str]]:
    """Return the dashboard's port, and the command of a head that listens on loopback only, on currently free ports."""
    port, dashboard, agent, client, metrics = free_ports(5)
    return dashboard, [
        sys.executable, "-m", "rlhf_core.engines.ray.start", "start", "--head", "--block", "--disable-usage-stats", "--log-style=record",
        f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=true", "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}",
        f"--metrics-export-port={metrics}", f"--temp-dir={folder / 'r'}", f"--num-cpus={cpus}", f"--object-store-memory={store}",
        "--no-monitor",  # of the autoscaler, which isn't used
    ]  # fmt: skip


def _wait_until_up(address: str, head: subprocess.Popen, output: Path, timeout: float) -> None:
    import requests
    from ray._raylet import AuthenticationTokenLoader
    from ray.job_submission import JobSubmissionClient

    AuthenticationTokenLoader.instance().reset_cache()  # it keeps the token of this process's previous head
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and head.poll() is None:
        try:
            requests.get(f"{address}/api/version", timeout=ANSWER_SECONDS)  # Ray's client has no deadline
            left = max(0.0, deadline - time.monotonic())
            _within(left, lambda: JobSubmissionClient(address).list_jobs(), unless=lambda: head.poll() is not None)
            return
        except (OSError, RuntimeError):
            time.sleep(0.3)
    raise ClusterError(
        f"Ray head: expected it up within {timeout:.0f} s, got {'no answer' if head.poll() is None else f'exit code {head.returncode}'}; "
        f"its output ends with:\n{_end_of(output)}"
    )


def _end_of(output: Path) -> str:
    return output.read_text(errors="replace")[-1500:] if output.exists() else "nothing"


def _stop_head(keeper: subprocess.Popen, folder: Path) -> None:
    keeper.terminate()
    try:
        keeper.wait(HEAD_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        log.warning("Ray head: its keeper is still there %d s after SIGTERM; killing it", HEAD_STOP_SECONDS)
        keeper.kill()
        keeper.wait()
    if keeper.returncode < 0:  # a killed keeper has ended no process
        _end_marked(folder)


def _end_marked(folder: Path) -> None:
    """End all processes of a head, even reparented ones: all inherit an environment variable that names the head's folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder):
                process.kill()


def check_head(address: str, timeout: float = CHECK_SECONDS) -> None:
    """Ask a head once for its jobs, to check that it answers and accepts this process.

    Raises:
        HeadRefused: the head doesn't accept this process's token.
        HeadLate: no answer within `timeout` seconds.
        ClusterError: nothing listens there, or something else.
    """
    import requests
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient
    from urllib3.exceptions import NewConnectionError

    expected = f"cluster.address: expected Ray's dashboard at {address}, got"
    todo = "start the cluster, or correct the address, or set it to null if no job is left to run (docs/cluster.md)"

    forget_other_clusters()

    def ask() -> None:
        requests.get(f"{address}/api/version", timeout=timeout)  # Ray's client has no deadline
        JobSubmissionClient(address).list_jobs()

    try:
        _within(timeout, ask)
    except AuthenticationError as error:
        raise HeadRefused(token_refusal(address, error)) from error
    except (TimeoutError, requests.exceptions.Timeout) as error:
        raise HeadLate(f"{expected} no answer within {timeout:.0f} s; {todo}") from error
    except (requests.exceptions.ProxyError, requests.exceptions.SSLError) as error:
        proxy = ", or name its host in no_proxy" * isinstance(error, requests.exceptions.ProxyError)
        raise ClusterError(f"{expected} {type(error).__name__}: {_last_cause(error)}; {todo}{proxy}") from error
    except requests.exceptions.ConnectionError as error:
        if any(isinstance(cause, NewConnectionError) for cause in _causes(error)):
            raise ClusterError(f"{expected} no connection ({_last_cause(error)}); {todo}") from error
        raise ClusterError(f"{expected} a connection without an answer, as from another of Ray's ports; {todo}") from error
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ClusterError(f"{expected} another server, which answers: {' '.join(str(error).split())[:200]}; {todo}") from error


def token_refusal(address: str, error: AuthenticationError) -> str:
    """Return why a cluster refused this process's token, and what to do."""
    set_one = "set RAY_AUTH_MODE=token in this shell, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
    got = "RAY_AUTH_MODE is not set" if os.environ.get("RAY_AUTH_MODE") != "token" else error.message.partition("\n")[0]
    return f"cluster at {address}: expected it to accept the token, got: {got}; {set_one} (docs/cluster.md)"


def _last_cause(error: BaseException) -> str:
    *_, last = _causes(error)
    return " ".join(str(last).split())[:200]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that it arose from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def run_job(
    address: str,
    entrypoint: str,
    *,
    name: str,
    environment: dict[str, str],
    code: Path | None = None,
    start_timeout: float,
    silence_timeout: float,
    pulse: Readable,
    on_output: Callable[[str], None],
    stop_requested: Callable[[], bool],
) -> int:
    """Submit a job, or find the running one with this entrypoint, and follow it to its end.

    Args:
        entrypoint: the driver's shell command, by which a running job is found. It names the job's folder, since other folders may do the
            same work on the cluster.
        name: the beginning of the job's id.
        code: folder that Ray brings to every node as the working folder and on Python's path; None: nodes see the project's folder.
        silence_timeout: seconds without an answer of the head, or without a change of `pulse`, after which it counts as lost.
        pulse: file that the driver changes regularly (rlhf_core/stage/job.py: beat).
        on_output: function that gets the driver's output in chunks.
        stop_requested: once it returns True, the job gets SIGTERM; the head's grace lets it write a checkpoint.
    Returns:
        The driver's exit code.
    Raises:
        ClusterError: the job didn't start within `start_timeout` seconds, or the head or the driver is silent.
    """
    from ray.job_submission import JobSubmissionClient

    forget_other_clusters()
    patience = _Patience(silence_timeout)
    client = patience.ask(lambda: JobSubmissionClient(address), f"Ray head at {address}")
    job = _live_job(client, entrypoint, patience)
    if job is None:
        job = _submit(
            client,
            time.monotonic() + start_timeout,
            submission_id=f"rlhf-{name}-{secrets.token_hex(4)}",
            entrypoint=entrypoint,
            runtime_env={"env_vars": environment} | ({} if code is None else {"working_dir": str(code)}),
        )
    else:
        log.info("Ray job %s: already at work on this; following it", job)
    return _follow(client, job, patience, _Pulse(pulse, silence_timeout, start_timeout), start_timeout, on_output, stop_requested)


def _submit(client, deadline: float, **job: Any) -> str:
    """Submit a job and return its id.

    Retries while the agent of a new head isn't ready, and when a busy head closes the connection; the job's id then shows whether the head
    accepted it anyway.
    """
    dropped = False
    while True:
        try:
            return client.submit_job(**job)
        except (OSError, RuntimeError) as error:
            if dropped and "already exists" in str(error):
                return job["submission_id"]
            dropped = dropped or isinstance(error, OSError)
            passing = isinstance(error, OSError) or "No available agent" in str(error)
            if not passing or time.monotonic() > deadline:
                raise ClusterError(f"Ray job: expected the cluster to accept it, got {error}; is the head still running?") from error
            time.sleep(0.3)


def _live_job(client, entrypoint: str, patience: _Patience) -> str | None:
    for details in patience.ask(client.list_jobs, "Ray head"):
        if details.submission_id and details.entrypoint == entrypoint and not details.status.is_terminal():
            return details.submission_id
    return None


@dataclass(frozen=True)
class _Patience:
    """Sends requests to a head that may be busy, and then closes connections, or stopped, and then never answers.

    seconds: deadline of an answer in seconds.
    """

    seconds: float

    def ask(self, question: Callable[[], Any], subject: str) -> Any:
        """Return the answer to a question. Raises ClusterError if there is none within the deadline."""
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                return _within(max(0.0, deadline - time.monotonic()), question)
            except (OSError, RuntimeError) as error:  # ConnectionErrors of requests and of Ray
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"{subject}: expected the head to answer within cluster.silence_timeout={self.seconds:.0f} s, got "
                        f"{error or type(error).__name__}; is it still running?"
                    ) from error
                time.sleep(min(1.0, self.seconds))


def _within(seconds: float, question: Callable[[], Any], *, unless: Callable[[], bool] = lambda: False) -> Any:
    """Return the result of a call that has no deadline of its own, made in a daemon thread.

    Args:
        unless: function that returns True once waiting is useless, such as after the end of the process that was to answer.
    Raises:
        TimeoutError: no result within the deadline, or before `unless` returned True.
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((question(), None))
        except BaseException as error:  # raised again in the waiting thread
            answers.put((None, error))

    threading.Thread(target=ask, daemon=True).start()
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer, error = answers.get(timeout=max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))
            break
        except queue.Empty:
            if time.monotonic() >= deadline or unless():
                raise TimeoutError("no answer") from None
    if error is not None:
        raise error
    return answer


class _Pulse:
    """Tells whether a driver is alive, by a file that it changes regularly. Only changes count, so no clocks are compared."""

    def __init__(self, path: Readable, seconds: float, start_seconds: float):
        self._path, self._seconds, self._start_seconds = path, seconds, start_seconds
        self._last: bytes | None = None
        self._until = 0.0

    def is_silent(self) -> bool:
        """Return whether the file hasn't changed for the allowed seconds, which are more at first. Call it while the job runs."""
        now = b""
        with contextlib.suppress(OSError):
            now = self._path.read_bytes()
        if now != self._last:
            patience = self._seconds if self._last is not None else max(self._seconds, self._start_seconds)
            self._last, self._until = now, time.monotonic() + patience
        return time.monotonic() > self._until


def _follow(
    client,
    job: str,
    patience: _Patience,
    pulse: _Pulse,
    start_timeout: float,
    on_output: Callable[[str], None],
    stop_requested: Callable[[], bool],
) -> int:
    from ray.job_submission import JobStatus

    deadline = time.monotonic() + start_timeout
    seen, stopping = 0, False
    while True:
        details = patience.ask(lambda: client.get_job_info(job), f"Ray job {job}")
        output = patience.ask(lambda: client.get_job_logs(job), f"Ray job {job}")
        on_output(output[seen:])
        seen = len(output)
        if details.status.is_terminal():
            return details.driver_exit_code if details.driver_exit_code is not None else 1
        if details.status == JobStatus.PENDING and time.monotonic() > deadline:
            client.stop_job(job)
            raise ClusterError(
                f"Ray job {job}: expected it to start within {start_timeout:.0f} s, got PENDING; does the cluster have a free CPU?"
            )
        if details.status == JobStatus.RUNNING and pulse.is_silent():
            patience.ask(lambda: client.stop_job(job), f"Ray job {job}")
            raise ClusterError(
                f"Ray job {job}: expected a sign of life of its driver within cluster.silence_timeout={patience.seconds:.0f} s, got none; "
                "it was stopped or its node is overloaded"
            )
        if stop_requested() and not stopping:
            stopping = True
            patience.ask(lambda: client.stop_job(job), f"Ray job {job}")
        time.sleep(POLL_SECONDS)
