"""Checks before a run that the cluster and the storage of its stages can be used. Otherwise their first job would find out, hours later."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path

from flows.chain.stages import dvc_environment
from flows.chain.worktree import run_within
from rlhf_core.config import ConfigError, Params, shown
from rlhf_core.environment import keep_visible, of_stage
from rlhf_core.planning.preflight import runs_elsewhere
from rlhf_core.stage.reach import LATE

DEADLINE = 120.0  # seconds, of which the answers have up to 50

log = logging.getLogger("rlhf.flows")


def check_cluster(root: Path, params: Params, stages: Iterable[str]) -> None:
    """Check the cluster if one of the stages has a job on it, in the environment that the stage would see.

    Args:
        root: folder of the code. stages: stages that will run.
    Raises:
        ConfigError: address, token or storage can't be used. A late answer is only logged: the run may have a job there that keeps the
            cluster busy.
    """
    stage = next((stage for stage in stages if runs_elsewhere(stage, params)), None)
    if stage is None:
        return
    cluster, environment = params.cluster, dvc_environment(root)
    keep_visible(of_stage(params, stage, environment), named=params.environment, environment=environment)
    command = [sys.executable, "-m", "rlhf_core.stage.reach", *filter(None, (cluster.address, cluster.storage))]
    done = run_within(DEADLINE, command, root, environment)
    said = shown((done.stderr.strip().splitlines() or ["cluster: expected to be checked, got no output"])[-1], 2000)
    if done.returncode == LATE:
        log.warning("%s; the run goes on, and its first job waits longer", said)
        return
    if done.returncode:
        raise ConfigError(said)
    log.info("cluster: %s answers%s", cluster.address, "" if cluster.storage is None else f", and {cluster.storage} can be written")
