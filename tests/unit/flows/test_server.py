"""Processes that the server of this machine is made of."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flows import server
from flows.server import run_prefect, use_home
from rlhf_core.config import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("given", [None, "elsewhere"])
def test_prefects_folder_is_for_its_user_only_however_it_was_made(tmp_path, monkeypatch, given):
    home = tmp_path / (given or ".prefect")
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    if given:
        monkeypatch.setenv("PREFECT_HOME", str(home))
    try:
        assert use_home(tmp_path) == home.resolve() and home.stat().st_mode & 0o777 == 0o700
    finally:
        monkeypatch.setenv("PREFECT_HOME", "")  # so that monkeypatch takes it back


def test_a_child_hears_sigint_even_where_we_ignore_it():
    """As in a shell's background job; Prefect's worker ends itself by that signal."""
    # In a process of its own: one that has run many tests may be too large to be forked.
    program = (
        "import signal, sys; from flows.server import start; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "print(start([sys.executable, '-c', 'import signal; signal.raise_signal(signal.SIGINT)']).wait(timeout=30))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert int(done.stdout.split()[-1]) in (-signal.SIGINT, 130), done.stderr  # Python ends itself by the signal after its traceback


def test_prefects_command_line_has_a_deadline_and_a_reason(tmp_path, monkeypatch):
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/api")
        monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
        with pytest.raises(ConfigError, match="prefect work-pool nonsense: expected to succeed, got: "):
            run_prefect(prefect, tmp_path, "work-pool", "nonsense")
        monkeypatch.setattr(server, "COMMAND_SECONDS", 2.0)
        with pytest.raises(ConfigError, match="prefect --no-prompt work-pool ls: expected an end within 2 s, got none"):
            run_prefect(prefect, tmp_path, "work-pool", "ls")
