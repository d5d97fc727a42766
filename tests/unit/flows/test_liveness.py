"""Liveness where nothing is known: the server answers every request with an empty list."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from flows.runs.liveness import SIGNS, crash_orphaned_command_lines

ROOT = Path(__file__).parents[3]
DIE = "import os, pathlib, sys; from flows.runs.liveness import liveness_tag as s; s(pathlib.Path(sys.argv[1]), None).__enter__(); os._exit(9)"  # noqa: E501


class Empty(BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    server = HTTPServer(("127.0.0.1", 0), Empty)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_unreadable_sign_of_life_is_removed_and_those_after_it_are_read(tmp_path, url):
    folder = tmp_path / SIGNS
    folder.mkdir()
    for name, content in {"a-empty": b"", "b-torn": b'{"host": "x"', "c-list": b"[]", "d-short": b"{}", "e-bytes": b"\xff"}.items():
        (folder / f"{name}.json").write_bytes(content)
    living = folder / "f-living.json"
    living.touch()
    assert subprocess.run([sys.executable, "-c", DIE, str(tmp_path)], cwd=ROOT, check=False).returncode == 9
    with living.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert crash_orphaned_command_lines(tmp_path, url, None, None) == []
        assert list(folder.iterdir()) == [living]
