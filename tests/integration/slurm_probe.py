"""A flow for recipes/cluster/slurm.sh: python -m slurm_probe <file> --set cluster.address=<address> ...

Runs a job on the cluster that does a task on each node, notes what it saw in the file, and then waits for SIGTERM. As the job:
python -m slurm_probe <file>.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_core.engines.ray.cluster import run_job


def job(seen: Path) -> None:
    ray.init(address="auto", log_to_driver=False)
    here = ray.remote(num_cpus=0)(lambda: ray.get_runtime_context().get_node_id())
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    found = ray.get([here.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote() for node in nodes])
    hub = [os.environ[name] for name in ("HF_HOME", "HF_HUB_OFFLINE")]
    seen.write_text(json.dumps({"nodes": nodes, "ran_on": found, "grace": os.environ["RAY_JOB_STOP_WAIT_TIME_S"], "hub": hub}))


def flow(seen: Path, options: list[str]) -> int:
    given = dict(option.split("=", 1) for option in options if "=" in option)
    job_file = seen.with_suffix(".job")
    code = run_job(
        given["cluster.address"],
        shlex.join([sys.executable, "-m", "slurm_probe", str(job_file)]),
        name="probe",
        environment={"PYTHONPATH": os.environ["PYTHONPATH"]},
        start_timeout=60,
        silence_timeout=60,
        pulse=job_file,
        on_output=lambda text: print(text, end=""),
        stop_requested=lambda: False,
    )
    if code:
        return code
    told = {name: name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")}
    aside = seen.with_suffix(".tmp")
    aside.write_text(json.dumps({**json.loads(job_file.read_text()), "given": given, "told": told}))
    aside.rename(seen)
    signal.sigwait({signal.SIGTERM})
    return 143


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    file, *rest = sys.argv[1:]
    sys.exit(flow(Path(file), rest) if rest else job(Path(file)))
