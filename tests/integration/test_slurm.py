"""The script for Slurm, with commands in Slurm's place that start both nodes on this machine. Ray, the script and its job are real."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_workspace import ROOT, wait_until

from rlhf_core.engines.ports import free_ports

SCRIPT = ROOT / "recipes/cluster/slurm.sh"
DEADLINE = 180  # seconds for two nodes on a busy machine
SCONTROL = """#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then tr , '\\n' <<<"$3"; else echo "$*" >>"$ASKED"; fi
"""
SRUN = """#!/usr/bin/env bash
for option; do
    case $option in --ntasks=*) count=${option#*=} ;; --*) ;; *) break ;; esac
    shift
done
for ((task = 0; task < count; task++)); do "$@" & tasks+=($!); done
trap 'kill -TERM "${tasks[@]}"' TERM
while kill -0 "${tasks[@]}" 2>/dev/null; do wait; done
"""
pytestmark = pytest.mark.timeout(2 * DEADLINE)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a Slurm job of two nodes."""
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    ray_port, dashboard = free_ports(2)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "HF_"))},
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}",
        "PYTHON": sys.executable,
        "ASKED": str(tmp_path / "asked"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "one,two",
        "RAY_PORT": str(ray_port),
        "DASHBOARD_PORT": str(dashboard),
        "START_TIMEOUT": str(DEADLINE),
        "TMPDIR": str(tmp_path),
    }


@pytest.mark.long
def test_a_flow_runs_on_all_nodes_outlives_one_and_is_queued_again_when_time_is_up(slurm, tmp_path):
    seen, log = tmp_path / "seen.json", tmp_path / "log"
    with log.open("w") as output, subprocess.Popen([SCRIPT, "slurm_probe", seen], env=slurm, stdout=output, stderr=output) as script:
        try:
            wait_until(lambda: seen.exists() or script.poll() is not None, DEADLINE, "the flow on two nodes")
            assert seen.exists(), log.read_text()
            lost = after_the_loss_of_a_node(slurm, tmp_path)
            script.send_signal(signal.SIGUSR1)
            assert script.wait(DEADLINE) == 143, log.read_text()
        finally:
            script.terminate()
    assert re.search(r"expected 2 nodes within 1 s, got 1: \S+; see", lost) and "Ray on " in log.read_text()
    found = json.loads(seen.read_text())
    assert len(found["nodes"]) == 2 and found["ran_on"] == found["nodes"]
    address = f"http://127.0.0.1:{slurm['DASHBOARD_PORT']}"
    assert found["given"] == {"cluster.address": address, "flow.stop_grace": "300"} and found["grace"] == "295"
    assert found["hub"] == [str(tmp_path / "cache/huggingface"), "0"]
    assert found["told"] == {"RAY_AUTH_TOKEN": False, "RAY_AUTH_TOKEN_PATH": True}
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    wait_until(lambda: not (processes(slurm["RAY_PORT"]) or list(tmp_path.glob("rlhf-*"))), 30, "the end of Ray and of its token")


def after_the_loss_of_a_node(slurm: dict[str, str], folder: Path) -> str:
    """What is said of two nodes once the second has ended, by somebody with the flow's token."""
    (second,) = [line.split()[0] for line in processes(slurm["RAY_PORT"]) if "python -m ray.scripts" in line and "--address=" in line]
    os.kill(int(second), signal.SIGTERM)
    wait_until(lambda: not Path(f"/proc/{second}").exists(), 60, "the end of a node")
    (token,) = folder.glob("rlhf-flow-*/token")
    command = [sys.executable, "-m", "rlhf_core.engines.ray.wait", f"http://127.0.0.1:{slurm['DASHBOARD_PORT']}", "2", "1"]
    told = {**slurm, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    return subprocess.run(command, env=told, capture_output=True, text=True, timeout=60, check=False).stderr


def processes(port: str) -> list[str]:
    """Command lines that name the port of Ray's head."""
    done = subprocess.run(["pgrep", "-af", f"[:=]{port}( |$)"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, [], "expected a flow and its arguments, got none"),
        ({"PYTHON": "/nowhere/python"}, ["slurm_probe"], "PYTHON: expected the project's Python, got /nowhere/python"),
        ({"PYTHON": "/bin/false", "HEAD_IP": "10.0.0.1"}, ["slurm_probe"], "Ray: expected 1 of 2 nodes, got the error above"),
    ],
)
def test_what_cannot_start_ends_with_the_reason(slurm, tmp_path, changes, arguments, message):
    done = subprocess.run([SCRIPT, *arguments], env={**slurm, **changes}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and message in done.stderr and not list(tmp_path.glob("rlhf-*"))
