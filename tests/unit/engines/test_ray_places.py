"""Ranks and engines on two Ray nodes with four logical GPUs each: each gets the GPUs that the placement gives it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.config import RlConfig, read_yaml
from rlhf_core.engines.ray.places import check_cpus

ROOT = Path(__file__).parents[3]
SIZES = (1, 2, 4)
# Two ranks of each group that fits, and two engines where there is room. Whole GPUs, but for the last: ranks and engines share them.
JOBS = {
    f"{name}, {size}": {"placement": name, "tensor_parallel_size": size}
    for name, size in product(("together", "two_groups", "apart"), SIZES)
}
JOBS |= {"shared": {"placement": "two_groups", "tensor_parallel_size": 1, "ranks": 3, "gpus_per_rank": 0.6, "gpus_per_engine": 0.4}}
JOBS |= {"shared, 2": {"placement": "together", "tensor_parallel_size": 2, "ranks": 6, "gpus_per_rank": 0.6, "gpus_per_engine": 0.4}}
# Where Ray puts processes is all that is looked at. Actors, which host nothing, are started where GPUs are shared; elsewhere a task in each
# one's place does, since its bundle's GPUs are its own.
PROGRAM = """
import json, logging, sys, time
import ray
from pathlib import Path
from types import SimpleNamespace
from ray.cluster_utils import Cluster
from rlhf_core.config import RlConfig
from rlhf_core.engines.ray import places
from rlhf_core.engines.ray.actors import ActorGroup
from rlhf_core.engines.ray.places import RoleLost
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rlhf_core.engines.ray.gpus import ReservedGpus, node_gpus, reserve_gpus
from rlhf_core.engines.ray.processes import by_node
from rlhf_core.planning.placement import place
from rlhf_core.trainers.rl.groups import TrainerGroups
from rlhf_core.trainers.rl.recovery import Replacements, RolloutRecovery
from tools.clerk import clerk_tree

DEADLINE = 200.0

size = {"num_gpus": 4, "num_cpus": 8, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False, "temp_dir": sys.argv[1]})
cluster.add_node(**size)
ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
BASE = clerk_tree()["rl"]


def job(placement, tensor_parallel_size, ranks=None, engines=None, gpus_per_rank="auto", gpus_per_engine="auto"):
    ranks = ranks or (1 if placement == "apart" else 2)
    trainer = BASE["trainer"] | {"ranks": ranks, "gpus_per_rank": gpus_per_rank}
    engines = engines or (1 if tensor_parallel_size == 4 else 2)
    rollout = {"engines": engines, "gpus_per_engine": gpus_per_engine, "tensor_parallel_size": tensor_parallel_size}
    sizes = {"samples_per_step": ranks, "minibatch_size": ranks}
    return RlConfig.model_validate(BASE | sizes | {"placement": placement, "trainer": trainer, "rollout": BASE["rollout"] | rollout})


def where():
    context = ray.get_runtime_context()
    return [f"{context.get_node_id()} GPU {gpu}" for gpu in context.get_accelerator_ids()["GPU"]]


def look(role, bundles):
    places = [PlacementGroupSchedulingStrategy(b.group, placement_group_bundle_index=b.index) for b in bundles]
    tasks = [ray.remote(where).options(num_cpus=1, num_gpus=b.gpus, scheduling_strategy=p).remote() for b, p in zip(bundles, places)]
    return {f"{role} rank {k}": gpus for k, gpus in enumerate(ray.get(tasks, timeout=DEADLINE))}


def start(role, bundles):
    return ActorGroup(role, "types:SimpleNamespace", len(bundles), cpus=1, bundles=bundles, threads=1, start_deadline=DEADLINE, kwargs={})


def gpus_of(group):
    return {name: [f"{place.node} GPU {gpu}" for gpu in place.gpus] for name, place in group.places().items()}


def land(rl, is_shared):
    placement = place(rl, 8, node_gpus())
    reserved = ReservedGpus(placement, deadline=DEADLINE)
    names = [f"trainer.{group.name}" for group in rl.role_groups]
    seen, groups = {}, []
    if is_shared:
        engines = start("rollout", reserved.of_engines())
        ranks = [start(name, reserved.of_ranks(k)) for k, name in enumerate(names)]
        groups = [*ranks, engines]
        reserved.check([group.places() for group in ranks], engines.places())
        reserved.check([group.places() for group in ranks], {})  # a recorded run that is trained again has no engines
        seen = {"found": {name: gpus for group in groups for name, gpus in gpus_of(group).items()}, "has_gpus": engines.has_gpus}
        seen["lines"] = by_node({name: place for group in groups for name, place in group.places().items()})
        engines.replace([1])  # a new process, in the bundle of the lost one
        seen["again"] = gpus_of(engines)
        engines.end(deadline=DEADLINE)
        (seen["ended"],) = engines._look([0])
    else:
        found = [look(name, reserved.of_ranks(k)) for k, name in enumerate(names)] + [look("rollout", reserved.of_engines())]
        seen = {"found": {name: gpus for names in found for name, gpus in names.items()}}
    for group in groups:
        group.close()
    reserved.release()
    return seen


seen = {name: land(job(**changes), name.startswith("shared")) for name, changes in json.loads(sys.argv[2]).items()}
refused = []
for sizes, cpus in (([1] * 9, 1), ([1] * 8, 5), ([3, 3, 1, 1], 1), ([3, 3, 2], 1)):
    try:
        reserve_gpus("rl", sizes, cpus=cpus, deadline=DEADLINE)
        refused.append(None)
    except ValueError as error:
        refused.append(str(error))
nothing = {"cpus": 0, "threads": 1, "start_deadline": DEADLINE, "kwargs": {}}
alone = ActorGroup("scorer", "types:SimpleNamespace", 1, **nothing)
groups = TrainerGroups(job("two_groups", 1), [ActorGroup(f"trainer.{k}", "types:SimpleNamespace", 2, **nothing) for k in range(2)])
groups.all[1].actors.wait_ready()
ray.kill(groups.all[1].actors.actors[1])
lost = {"ranks": sorted(groups.find_lost())}
try:
    groups.check()
except RoleLost as error:
    lost["message"] = str(error)


slow = ActorGroup("scorer", "types:SimpleNamespace", 3, **nothing | {"kwargs": {"nap": time.sleep}})
slow.wait_ready()
late = []
for end in (lambda: slow.call("nap", [(30,), (0,), (0,)], deadline=2.0), lambda: None, lambda: ray.kill(slow.actors[1])):
    try:
        end()
        slow.check(3.0)
    except RoleLost as error:
        late.append((str(error), list(error.ranks)))
slow.close()


def gone():
    raise RoleLost("trainer rank 0: dead")


places.LOOK_SECONDS, waits = 1, []
for meanwhile in (lambda: waits.append("looked"), gone):
    try:
        places.reserve("rollout", [{"CPU": 100.0}] * 2, deadline=3.0, meanwhile=meanwhile)
    except RoleLost as error:
        waits.append(str(error))

sleepers = nothing | {"kwargs": {"nap": time.sleep}}
engines, trainer = (ActorGroup(role, "types:SimpleNamespace", 2, **sleepers) for role in ("rollout", "trainer"))
unused = dict.fromkeys(("sync_check", "transfer", "renew", "check_trainers"))
recovery = RolloutRecovery(
    SimpleNamespace(rl=job("together", 1)), engines, replacements=Replacements(1), turns=SimpleNamespace(), **unused
)
died, updates = [], trainer.submit("nap", [(40,)] * 2)
logging.getLogger("rlhf").addHandler(SimpleNamespace(level=0, handle=lambda record: died.append((time.monotonic(), record.getMessage()))))
engines.wait_ready()
busy = engines.submit_one(1, "nap", 40)
kills = []


def watch():
    recovery.look()
    if len(died) == len(kills) < 2:  # the one at rest, then the one at work
        ray.kill(engines.actors[len(kills)])
        kills.append(time.monotonic())
        recovery._replacements.limit = 2 - len(kills)


trainer.meanwhile = watch
try:
    trainer.wait(updates, deadline=DEADLINE, what="update")
except RoleLost as error:
    died.append((time.monotonic(), str(error)))
died = [(seconds - killed, message) for (seconds, message), killed in zip(died, kills)]
print(json.dumps({"died": died, "jobs": seen, "refused": refused, "has_gpus": alone.has_gpus, "lost": lost, "late": late, "waits": waits}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict:
    home = tmp_path_factory.mktemp("home")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as sockets:  # whose names may have 107 characters
        (Path(sockets) / "ray").mkdir()  # for Ray's note of the newest cluster, which other programs must not read
        environment["RAY_TMPDIR"] = sockets
        command = [sys.executable, "-c", PROGRAM, sockets, json.dumps(JOBS)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def node(gpu: str) -> str:
    return gpu.partition(" GPU")[0]


def of(found: dict, role: str) -> list[list[str]]:
    return [gpus for name, gpus in found.items() if name.startswith(role)]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in JOBS if not name.startswith("shared")])
def test_each_rank_and_engine_has_whole_gpus_of_its_own(seen, name):
    found, size = seen["jobs"][name]["found"], JOBS[name]["tensor_parallel_size"]
    ranks, engines = of(found, "trainer"), of(found, "rollout")
    assert [len(ranks), len(engines)] == [2 if "together" in name else 4, 1 if size == 4 else 2]
    assert {len(gpus) for gpus in ranks} == {1} and {len(gpus) for gpus in engines} == {size}
    every = [gpu for gpus in (*ranks, *engines) for gpu in gpus]
    assert len(set(every)) == len(every)
    assert all(len({node(gpu) for gpu in gpus}) == 1 for gpus in engines)


@pytest.mark.long
def test_engines_share_the_gpus_of_the_first_ranks(seen):
    found = {name: gpu for name, (gpu,) in seen["jobs"]["shared"]["found"].items()}
    ranks = [gpu for name, gpu in found.items() if name.startswith("trainer")]
    assert len(ranks) == len(set(ranks)) == 6 and seen["jobs"]["shared"]["has_gpus"] and not seen["has_gpus"]
    assert [found[f"rollout rank {k}"] for k in range(2)] == [found[f"trainer.policy+reference rank {k}"] for k in range(2)]
    assert [len(set(map(node, ranks[:3]))), len(set(map(node, ranks)))] == [1, 2]  # a group stays on one node while it has room


@pytest.mark.long
def test_engines_on_several_gpus_share_them_with_one_rank_each(seen):
    found = seen["jobs"]["shared, 2"]["found"]
    ranks, engines = [gpu for (gpu,) in of(found, "trainer")], of(found, "rollout")
    assert len(ranks) == len(set(ranks)) == 6 and [len(gpus) for gpus in engines] == [2, 2]
    assert all(set(gpus) <= set(ranks) and len(set(map(node, gpus))) == 1 for gpus in engines)
    assert not set(engines[0]) & set(engines[1]) and seen["jobs"]["shared, 2"]["has_gpus"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["shared", "shared, 2"])
def test_a_replaced_engine_gets_the_gpus_of_the_lost_one(seen, name):
    job = seen["jobs"][name]
    assert job["again"] == {name: gpus for name, gpus in job["found"].items() if name.startswith("rollout")}


@pytest.mark.long
def test_a_group_that_is_ended_has_no_process_any_more(seen):
    assert seen["jobs"]["shared"]["ended"].endswith((": gone", ": zombie"))


@pytest.mark.long
def test_a_rank_that_died_without_a_call_is_found(seen):
    assert seen["lost"]["ranks"] == [3]  # the second of the second group
    assert re.match(r"trainer.1 rank 1: expected its work to finish, got a dead process \(process \d+ on ", seen["lost"]["message"])


@pytest.mark.long
def test_an_engine_that_dies_during_an_update_is_named_in_seconds_and_ends_it_if_it_may_not_be_replaced(seen):
    (after, told), (later, raised) = seen["died"]
    assert max(after, later) < 5.0
    assert re.match(r"rollout rank 0: expected its work to finish, got a dead process .*; to be replaced once it is called$", told)
    assert re.match(r"rollout rank 1: expected its work to finish, got a dead process \(process \d+ on ", raised)


@pytest.mark.long
def test_a_late_rank_is_not_called_dead(seen):
    (at_once, of_call), (found, of_check), (dead, of_dead) = seen["late"]
    assert of_call == of_check == [0] and of_dead == [1]
    assert at_once.replace("expected nap", "expected its work") == found
    assert re.match(
        r"scorer rank 0: expected its work to finish, got no answer within 2 s \(rank 0: process \d+ on .*: (sleeping|idle)\);", found
    )
    assert dead.startswith("scorer rank 1: expected its work to finish, got a dead process (process ")


@pytest.mark.long
def test_who_waits_for_room_looks_at_what_happens_meanwhile(seen):
    *looked, full, ended = seen["waits"]
    assert 1 <= len(looked) <= 3 and ended == "trainer rank 0: dead"
    assert re.match(
        r"rollout: expected room for 2 x \(100 CPU\) within 3 s, got none \(2 nodes: \d+ CPU, \d+ free, 8 GPU, [0-9.]+ free\); add", full
    )


@pytest.mark.long
def test_what_no_node_has_is_refused_at_once(seen):
    gpus, cpus, fits, together = seen["refused"]
    assert "rl: expected nodes with 9 times 1 GPU and 1 CPU, got " in gpus and gpus.count("with 4 GPUs and 8 CPUs") == 2
    assert "expected nodes with 8 times 1 GPU and 5 CPUs" in cpus
    assert fits is None
    assert "expected nodes with 1 times 2 GPUs and 2 CPUs and 2 times 3 GPUs and 3 CPUs, got" in together


@pytest.mark.long
def test_each_node_has_a_line_with_its_processes(seen):
    lines, found = seen["jobs"]["shared"]["lines"], seen["jobs"]["shared"]["found"]
    assert len(lines) == 2 and all(re.match(r"[0-9.]+ \(node [0-9a-f]{8}\): trainer", line) for line in lines)
    for name, (gpu,) in found.items():
        place, _, number = gpu.partition(" GPU ")
        (line,) = [line for line in lines if f"(node {place[:8]})" in line]
        assert re.search(rf"{re.escape(name)} \(pid \d+, GPU {number}\)", line)


def rl(**changes) -> RlConfig:
    base = read_yaml(CLERK_PARAMS)["rl"]
    return RlConfig.model_validate(
        base | {"trainer": base["trainer"] | {"ranks": 4}, "placement": "together", "rollout": base["rollout"] | changes}
    )


@pytest.mark.parametrize(("size", "nodes"), [(1, [7]), (1, [3, 4]), (2, [10]), (2, [5, 5]), (2, [2, 2, 2, 1, 1, 1, 1])])
def test_each_process_of_an_engine_and_each_rank_has_a_cpu(size, nodes):
    check_cpus(rl(engines=3, tensor_parallel_size=size), nodes)


@pytest.mark.parametrize(
    ("size", "nodes", "message"),
    [
        (1, [6], r"expected 7 CPUs of the Ray cluster, 1 for each of 4 trainer ranks and 1 for .*, got 6; lower rl\.rollout\.engines"),
        (2, [8], r"expected 10 CPUs .* 2 \(of one node\) for each of 3 rollout engines, got 8; lower rl\.rollout\.tensor_parallel_size"),
        (2, [1] * 12, r"expected 10 CPUs .*for each of 3 rollout engines, got 1 and 1 and"),
    ],
)
def test_too_few_cpus_are_refused_with_what_to_lower(size, nodes, message):
    with pytest.raises(ValueError, match=message):
        check_cpus(rl(engines=3, tensor_parallel_size=size), nodes)
