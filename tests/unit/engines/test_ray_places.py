"""Ranks and engines on two Ray nodes with four logical GPUs each: each gets the GPU that the placement gives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# The actors host nothing: where Ray puts them is all that is looked at.
PROGRAM = """
import json, sys
import ray
from ray.cluster_utils import Cluster
from rlhf_core.config import RlConfig, read_yaml
from rlhf_core.engines.ray_actors import ActorGroup
from rlhf_core.engines.ray_places import Bundle, release, reserve_gpus
from rlhf_core.planning.placement import check_gpus, place
from pathlib import Path

size = {"num_gpus": 4, "num_cpus": 8, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False, "temp_dir": sys.argv[1]})
cluster.add_node(**size)
ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)


def job(**changes):
    tree = read_yaml(Path("params.yaml"))["rl"]
    tree["trainer"] |= changes.pop("trainer")
    tree["rollout"] |= changes.pop("rollout")
    return RlConfig.model_validate(tree | changes)


def start(role, gpus, share, reserved, placement):
    bundles = [Bundle(*reserved[gpu], placement.share(gpu, share)) for gpu in gpus]
    return ActorGroup(role, "types:SimpleNamespace", len(gpus), cpus=1, bundles=bundles, threads=1, start_deadline=60.0, kwargs={})


rl = job(
    placement="two_groups", samples_per_step=6, minibatch_size=6, trainer={"ranks": 3, "gpus_per_rank": 0.6},
    rollout={"engines": 2, "gpus_per_engine": 0.4},
)
placement = place(rl, 8)
reserved = reserve_gpus("rl", len(placement.actors), cpus=max(placement.actors), deadline=60.0)
groups = [start(f"trainer.{g.name}", gpus, placement.per_rank, reserved, placement) for g, gpus in zip(rl.role_groups, placement.ranks)]
groups.append(start("rollout", placement.engines, placement.per_engine, reserved, placement))
found = [group.gpus() for group in groups]
planned = {name: gpu for names, gpus in zip(found, [*placement.ranks, placement.engines]) for name, gpu in zip(names, gpus)}
found = {name: gpus for names in found for name, gpus in names.items()}
check_gpus(planned, found)
groups[-1].replace([1])  # a new process, in the bundle of the lost one
again = groups[-1].gpus()
on_cpus = ActorGroup("scorer", "types:SimpleNamespace", 1, cpus=1, threads=1, start_deadline=60.0, kwargs={})
have_gpus = [groups[-1].has_gpus, on_cpus.has_gpus]
refused = []
for count, cpus in ((9, 1), (8, 5)):
    try:
        reserve_gpus("rl", count, cpus=cpus, deadline=60.0)
    except ValueError as error:
        refused.append(str(error))
for group in [*groups, on_cpus]:
    group.close()
release(reserved)
print(json.dumps({"found": found, "planned": planned, "again": again, "refused": refused, "have_gpus": have_gpus}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict:
    home = tmp_path_factory.mktemp("home")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as sockets:  # whose names may have 107 characters
        command = [sys.executable, "-c", PROGRAM, sockets]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_rank_has_a_gpu_of_its_own_and_engines_are_beside_the_first(seen):
    found = {name: gpu for name, (gpu,) in seen["found"].items()}
    assert list(found) == [f"trainer.{group} rank {k}" for group in ("policy+reference", "critic+reward_models") for k in range(3)] + [
        "rollout rank 0",
        "rollout rank 1",
    ]
    ranks = [gpu for name, gpu in found.items() if name.startswith("trainer")]
    assert len(set(ranks)) == 6
    assert [found[f"rollout rank {k}"] for k in range(2)] == [found[f"trainer.policy+reference rank {k}"] for k in range(2)]
    nodes = [gpu.partition(" GPU")[0] for gpu in ranks]
    assert [len(set(nodes[:3])), len(set(nodes))] == [1, 2]  # a group stays on one node while it has room


def test_a_replaced_engine_gets_the_gpu_of_the_lost_one(seen):
    assert seen["again"] == {name: gpus for name, gpus in seen["found"].items() if name.startswith("rollout")}


def test_a_group_knows_whether_its_actors_have_gpus(seen):
    assert seen["have_gpus"] == [True, False]


def test_what_no_node_has_is_refused_at_once(seen):
    gpus, cpus = seen["refused"]
    assert "rl: expected nodes with 9 times a GPU and 1 CPUs, got " in gpus and gpus.count("with 4 GPUs and 8 CPUs") == 2
    assert "expected nodes with 8 times a GPU and 5 CPUs" in cpus
