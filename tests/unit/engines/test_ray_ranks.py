"""What the driver of ranks tells of those that failed, how it stops them, and which network interface its processes use."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS
from ray.exceptions import ActorDiedError, RayTaskError

from rlhf_core.checkpoint.store import SaveFailed
from rlhf_core.config import ConfigError, parse_params, read_yaml, set_key
from rlhf_core.engines.ray.places import RoleLost
from rlhf_core.engines.ray.ranks import Rank, RankFailed, failure
from rlhf_core.stage.ray_job import network

ROOT = Path(__file__).parents[3]
WORK = """
import os, signal, time
import torch
import torch.distributed as dist

def work(kind, stop):
    rank, one = dist.get_rank(), torch.ones(1)
    dist.all_reduce(one)
    print(f"{kind}: rank {rank} of {dist.get_world_size()}")
    if rank == 1:
        if kind == "refuse":
            raise ValueError("data: expected rows, got none")
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
    while kind == "stop":
        asked = torch.tensor(float(stop()))
        dist.all_reduce(asked)
        if asked:
            return f"asked: {asked.item():g}"
        time.sleep(0.1)
    dist.all_reduce(one)
    return one.item()
"""
PROGRAM = """
import json, threading
from rlhf_core.engines.ray.places import RoleLost, join_cluster, leave_cluster
from rlhf_core.engines.ray.ranks import RankFailed, RankSettings, run_on_ranks
from rlhf_core.process import StepAbandoned, Stop

join_cluster(output=False)
found = {}
for kind in ("add", "refuse", "die", "hang", "stop", "stopped before"):
    stop = Stop()
    if kind == "stop":
        threading.Timer(15.0, stop.request).start()
    if kind == "stopped before":
        stop.request()
    settings = RankSettings(2, gpus=False, threads=1, visible=(), start_timeout=200.0, rank_timeout=10.0 if kind == "hang" else 200.0)
    try:
        found[kind] = ["returned", run_on_ranks("work:work", kind, settings, stop)]
    except (RankFailed, RoleLost, StepAbandoned) as error:
        found[kind] = [type(error).__name__, str(error)]
print(json.dumps(found))
leave_cluster()
"""
# In a process of its own: one that starts a head must not have imported Ray.
JOB = """
import sys, time
from types import SimpleNamespace
from rlhf_core.engines.ray.cluster import local_head, run_job

pulse = SimpleNamespace(read_bytes=lambda: str(time.monotonic()).encode())
how = {"name": "ranks", "environment": {"PYTHONPATH": sys.argv[2]}, "pulse": pulse, "on_output": lambda text: print(text, end="")}
with local_head(cpus=2, start_timeout=300.0) as address:
    command = f"exec {sys.executable} {sys.argv[1]}"
    sys.exit(run_job(address, command, start_timeout=300.0, silence_timeout=300.0, stop_requested=lambda: False, **how))
"""


class Group:
    """A group of which only the loss of ranks is asked for."""

    def dead(self, ranks: list[int], what: str) -> RoleLost:
        return RoleLost(f"rank {ranks}: expected {what} to finish, got a dead process", ranks)


def raised(cause: Exception) -> RayTaskError:
    lines = ("Traceback (most recent call last):", '  File "work.py", line 3, in work', repr(cause))
    return RayTaskError("run", "\n".join(lines), cause).as_instanceof_cause()


def test_a_rank_that_died_is_named_rather_than_those_whose_connection_broke():
    errors = {0: raised(RuntimeError("Connection closed by peer")), 2: ActorDiedError(), 3: raised(RuntimeError("Connection reset"))}
    lost = failure(Group(), errors)
    assert isinstance(lost, RoleLost) and lost.ranks == [2]


@pytest.mark.parametrize("refusal", [ValueError("sft step 3: expected a finite loss, got nan"), SaveFailed("the disk is full")])
def test_a_refusal_counts_before_its_consequences_on_other_ranks(refusal):
    failed = failure(Group(), {0: raised(RuntimeError("Connection closed by peer")), 1: raised(refusal), 2: ActorDiedError()})
    assert isinstance(failed, RankFailed) and type(failed.cause) is type(refusal) and str(failed.cause) == str(refusal)
    assert str(failed).startswith(f"training rank 1: expected its work to finish, got {type(refusal).__name__}: {refusal}")
    assert '\n  File "work.py", line 3, in work\n' in str(failed) and "\x1b" not in str(failed)


def test_an_error_of_communication_alone_names_the_first_rank():
    failed = failure(Group(), {3: raised(RuntimeError("timed out\nat line 3")), 1: raised(RuntimeError("closed"))})
    assert str(failed).startswith("training rank 1: expected its work to finish, got RuntimeError: closed\n")


def test_a_rank_is_asked_for_its_output_and_told_to_stop_while_it_works():
    rank = Rank(0, 1, 10.0)
    rank._output.write("step 1\n")
    print("step 2", file=rank._output)
    assert rank.look(stop=False) == "step 1\nstep 2\n" and not rank._stop.is_set()
    assert rank.look(stop=True) == "" and rank._stop.is_set()


@pytest.mark.long
def test_ranks_work_together_fail_and_stop_on_ray(tmp_path: Path):
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "driver.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-c", JOB, str(tmp_path / "driver.py"), environment["PYTHONPATH"]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *printed, last = done.stdout.splitlines()
    found = json.loads(last)
    assert found["add"] == ["returned", 4.0] and "add: rank 0 of 2" in printed and "add: rank 1 of 2" not in printed
    assert found["refuse"][0] == "RankFailed" and "rank 1: expected its work to finish, got ValueError: data" in found["refuse"][1]
    dead = r"training rank 1: expected its work to finish, got a dead process \(process \d+ on .*: gone\)"
    assert found["die"][0] == "RoleLost" and re.match(dead, found["die"][1])
    hangs = r"training rank 1: expected its work to finish, got no answer within cluster.rank_timeout=10 s \(rank 1: process .*: stopped\)"
    assert found["hang"][0] == "RoleLost" and re.match(hangs, found["hang"][1]), found["hang"]
    assert found["stop"] == ["returned", "asked: 1"] and found["stopped before"][0] == "StepAbandoned"


def test_both_libraries_of_collectives_get_the_network_interface():
    assert network("eth1") == {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1"}
    assert network(None) == {}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cluster.network_interface", "eth0; rm", "cluster.network_interface"),
        ("sft.ranks", 0, "sft.ranks"),
        ("sft.ranks", 100, r"sft.batch_size: expected at least ranks=100, got 64; raise it, so that each rank has an example"),
        ("dpo.ranks", 65, r"dpo.batch_size: expected at least ranks=65, got 64"),
        ("sft.pretrain.batch_size", 3, r"sft.pretrain.batch_size: expected at least ranks=4, got 3"),
    ],
)
def test_settings_of_ranks_are_refused_by_name(key: str, value: object, message: str):
    tree = read_yaml(CLERK_PARAMS)
    set_key(tree, "sft.ranks", 4)
    set_key(tree, "alignment.method", "dpo")
    set_key(tree, key, value)
    with pytest.raises(ConfigError, match=message):
        parse_params(tree)
