"""A head that is too busy to answer now and then; it is stood in for by a client that fails as Ray's does."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import requests
from ray.job_submission import JobDetails, JobStatus, JobType

from rlhf_core.engines.ray.cluster import (
    SMALLEST_STORE,
    ClusterError,
    HeadLate,
    _live_job,
    _Patience,
    _Pulse,
    _submit,
    _wait_until_up,
    check_head,
    python_path,
    run_job,
    store_bytes,
)
from rlhf_core.stage.job import beat

DROPPED = requests.exceptions.ConnectionError("Remote end closed connection without response")
TAKEN = RuntimeError("Job with submission_id rlhf-1 already exists. Please use a different submission_id.")


class BusyHead:
    """Raises what it is given, in turn, and then answers."""

    def __init__(self, *failures: Exception):
        self._failures = list(failures)

    def submit_job(self, *, submission_id: str) -> str:
        self.answer()
        return submission_id

    def answer(self) -> str:
        if self._failures:
            raise self._failures.pop(0)
        return "answer"


class Jobs:
    """Runs one driver in each folder."""

    def list_jobs(self) -> list[JobDetails]:
        running = {"type": JobType.SUBMISSION, "status": JobStatus.RUNNING}
        return [JobDetails(entrypoint=f"cd {name} && exec driver", submission_id=name, **running) for name in ("a", "b")]


def test_a_stage_follows_the_job_of_its_own_folder():
    assert _live_job(Jobs(), "cd b && exec driver", _Patience(10)) == "b"
    assert _live_job(Jobs(), "cd c && exec driver", _Patience(10)) is None


def soon() -> float:
    return time.monotonic() + 10


def test_a_job_is_submitted_again_when_the_connection_was_dropped():
    assert _submit(BusyHead(DROPPED, RuntimeError("No available agent to submit job")), soon(), submission_id="rlhf-1") == "rlhf-1"


def test_a_job_that_was_taken_although_the_connection_was_dropped_is_not_started_twice():
    assert _submit(BusyHead(DROPPED, TAKEN), soon(), submission_id="rlhf-1") == "rlhf-1"


@pytest.mark.parametrize("failures", [(TAKEN,), (RuntimeError("Failed to parse the entrypoint"),)])
def test_a_refusal_is_an_error_at_once(failures: tuple[Exception, ...]):
    with pytest.raises(ClusterError, match="expected the cluster to accept it"):
        _submit(BusyHead(*failures), soon(), submission_id="rlhf-1")


def test_submission_has_a_deadline():
    with pytest.raises(ClusterError, match="Remote end closed"):
        _submit(BusyHead(DROPPED), time.monotonic() - 1, submission_id="rlhf-1")


def test_a_request_is_repeated_until_the_heads_silence_deadline():
    assert _Patience(10).ask(BusyHead(DROPPED).answer, "Ray job rlhf-1") == "answer"
    with pytest.raises(ClusterError, match=r"Ray job rlhf-1: expected the head to answer within .* got Remote end"):
        _Patience(0.1).ask(BusyHead(*[DROPPED] * 99).answer, "Ray job rlhf-1")


def test_an_address_that_nobody_answers_is_named(tmp_path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and doesn't listen
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        unused = {"name": "", "environment": {}, "pulse": tmp_path / "pulse", "on_output": print, "stop_requested": bool}
        with pytest.raises(ClusterError, match=f"Ray head at {address}: expected the head to answer within"):
            run_job(address, "true", start_timeout=1, silence_timeout=1, **unused)


def test_a_check_tells_a_head_that_is_not_there_from_one_that_is_late():
    with socket.socket() as nobody, socket.create_server(("127.0.0.1", 0)) as late:
        nobody.bind(("127.0.0.1", 0))  # and doesn't listen
        for found, kind, message in ((nobody, ClusterError, "no connection .*refused"), (late, HeadLate, "no answer within 1 s")):
            address, began = f"http://127.0.0.1:{found.getsockname()[1]}", time.monotonic()
            with pytest.raises(ClusterError, match=f"cluster.address: expected Ray's dashboard at {address}, got .*{message}") as caught:
                check_head(address, timeout=1.0)
            assert type(caught.value) is kind and time.monotonic() - began < 20


def test_a_head_that_takes_the_question_and_never_answers_is_lost_too():
    with pytest.raises(ClusterError, match=r"Ray head: expected the head to answer within .* got no answer"):
        _Patience(0.1).ask(threading.Event().wait, "Ray head")


def test_the_store_holds_a_model_beside_batches_and_leaves_the_machine_its_memory():
    assert store_bytes(0) == SMALLEST_STORE
    assert store_bytes(200_000_000) == SMALLEST_STORE + 200_000_000
    assert store_bytes(10**15) == psutil.virtual_memory().total // 3


class Hanging(BaseHTTPRequestHandler):
    """Says its version and nothing else."""

    def do_GET(self):
        if self.path != "/api/version":
            time.sleep(60)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "4", "ray_version": "2", "ray_commit": "", "session_name": ""}')

    def log_message(self, *_):
        pass


def test_a_head_that_hangs_after_its_first_answer_has_the_deadline_of_its_start(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hanging) as server, subprocess.Popen(["sleep", "60"]) as head:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started = time.monotonic()
        with pytest.raises(ClusterError, match="Ray head: expected it up within 1 s, got no answer"):
            _wait_until_up(f"http://127.0.0.1:{server.server_port}", head, tmp_path / "head.log", 1.0)
        assert time.monotonic() - started < 30
        head.kill()
        server.shutdown()


def test_a_head_that_exits_while_another_server_holds_its_port_is_not_waited_for(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hanging) as server, subprocess.Popen(["sh", "-c", "sleep 1; exit 3"]) as head:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started = time.monotonic()
        with pytest.raises(ClusterError, match="Ray head: expected it up within 45 s, got exit code 3"):
            _wait_until_up(f"http://127.0.0.1:{server.server_port}", head, tmp_path / "head.log", 45.0)
        assert time.monotonic() - started < 15
        server.shutdown()


def test_a_check_names_a_server_that_is_not_a_dashboard():
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ClusterError, match="got another server, which answers: 501"):
            check_head(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_a_driver_is_silent_when_its_file_no_longer_changes(tmp_path):
    path = tmp_path / "pulse"
    pulse = _Pulse(path, 0.2, 3600.0)
    assert not pulse.is_silent()  # its start may take long
    began = time.monotonic()
    with beat(path):
        while not path.exists():
            assert not pulse.is_silent()
        assert not pulse.is_silent()
    changed = time.monotonic()
    while not pulse.is_silent():
        assert time.monotonic() < changed + 10
    assert time.monotonic() > began + 0.2
    path.write_text("again")
    assert not pulse.is_silent()


def test_a_job_finds_packages_where_its_submitter_does_and_the_project_first(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/packages:/more")
    assert python_path(Path("/project")) == "/project:/packages:/more"
    monkeypatch.delenv("PYTHONPATH")
    assert python_path(Path("/project")) == "/project"
