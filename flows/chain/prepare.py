"""Prepares a run, once, by whoever starts it: the command line, a deployment's flow or a series of rounds.

Params, files and cluster are checked, the worktree is made, the registry's state and the baselines are pinned, and DVC says what is up to
date. The flow runs the result's stages and reads none of it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.chain.locks import only_flow
from flows.chain.pins import NAMED, check_promoted, check_scorers, pin_registry
from flows.chain.reach import check_cluster
from flows.chain.stages import Stages, check_chosen, read_stages, stages_until, unchanged
from flows.chain.updates import check_run, check_update
from flows.chain.user_files import check_user_files
from flows.chain.worktree import commit, prepare_worktree, undone_on_failure, worktree_path
from flows.runs.record import REFUSED, note
from flows.trackers.processes import check_installed
from rlhf_core.config import ConfigError, Params, parse_params, read_yaml


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready for its first stage. The starter holds its lock (`only_flow`) until it ends.

    root: the checkout from which it was started. workspace: the folder of the run, which is `root` or a worktree of it.
    tree: content of the workspace's params.yaml. params: the same content, typed.
    stages: stages of dvc.yaml in topological order. up_to_date: the leading stages that DVC need not run.
    force: a stage that runs even if it is up to date. until: the last stage of this run; None: the chain's last.
    """

    root: Path
    workspace: Path
    tree: dict[str, Any]
    params: Params
    stages: Stages
    up_to_date: tuple[str, ...]
    force: str | None = None
    until: str | None = None

    @property
    def wanted(self) -> list[str]:
        """Stages of this run, in order."""
        return stages_until([*self.stages], self.until)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Stages that are up to date and come before the forced one."""
        return tuple(itertools.takewhile(lambda stage: stage != self.force, self.up_to_date))

    @property
    def has_work(self) -> bool:
        """Whether one of the stages of this run isn't up to date, or is forced."""
        return not set(self.wanted) <= set(self.skipped)


@contextmanager
def prepared(
    root: Path, name: str | None, overrides: dict[str, Any], *, update: bool = False, force: str | None = None, until: str | None = None
) -> Iterator[PreparedRun]:
    """Prepare a run and hold its lock in the block. Arguments and errors are those of `prepare` and `only_flow`."""
    check_run(root, name, overrides)  # before anything is written, such as the lock
    with only_flow(root, name):
        yield prepare(root, name, overrides, update=update, force=force, until=until)


def prepare(
    root: Path, name: str | None, overrides: dict[str, Any], *, update: bool = False, force: str | None = None, until: str | None = None
) -> PreparedRun:
    """Prepare a run of the chain. The caller holds its lock.

    Args:
        root: the checkout. name: the run's name; None: it works in `root`.
        update: as for check_update.
        force, until: as for `PreparedRun`.
    Raises:
        ConfigError: as prepare_workspace; there is no such stage; the baselines can't be read; or the cluster can't be used. A new worktree
            is removed again; the record of a run that exists tells why it was refused.
    """
    if force is not None or until is not None:  # checked before anything is written
        existing = name is not None and worktree_path(root, name).exists()
        check_chosen([*read_stages(worktree_path(root, name) if existing else root)], force=force, until=until)
    with undone_on_failure(root, name):
        workspace = prepare_workspace(root, name, overrides, update=update)
        with refusal_recorded(workspace):
            run = read_run(root, workspace, force=force, until=until)
            if run.has_work:
                from flows.chain.baselines import BASELINES, pin_baselines  # imports pandas

                if pin_baselines(root, workspace, up_to_date=len(run.up_to_date) == len(run.stages)):
                    others = itertools.takewhile(lambda stage: str(BASELINES) not in (run.stages[stage].get("deps") or []), run.up_to_date)
                    run = replace(run, up_to_date=tuple(others))
            check_cluster(root, run.params, [stage for stage in run.wanted if stage not in run.skipped])
    return run


def read_run(root: Path, workspace: Path, *, force: str | None = None, until: str | None = None) -> PreparedRun:
    """Read the params and stages of a workspace, and ask DVC what is up to date.

    Raises:
        ConfigError: a file is invalid, there is no such stage, or a tracker's package isn't installed.
    """
    tree = read_yaml(workspace / "params.yaml")
    params = parse_params(tree, subject=str(workspace / "params.yaml"))
    check_installed(params.tracking)
    stages = read_stages(workspace, tree)
    order = [*stages]
    check_chosen(order, force=force, until=until)  # a new worktree has the stages of the last commit
    last = None if until == order[-1] else until
    return PreparedRun(root, workspace, tree, params, stages, tuple(unchanged(workspace, order)), force, last)


@contextmanager
def refusal_recorded(workspace: Path) -> Iterator[None]:
    """Record a refusal that the block raises as the run's outcome."""
    try:
        yield
    except ConfigError as error:
        note(workspace, outcome=REFUSED, stage=None, message=str(error), until=None)
        raise


def prepare_workspace(
    root: Path, name: str | None, overrides: dict[str, Any], *, update: bool = False, free: Iterable[str] = (), rounds: bool = False
) -> Path:
    """Make or reuse the folder of a run (the current one, or a named run's worktree), pin the registry's state in its params, and return
    it.

    Args:
        update, free: as for check_update.
        rounds: whether it is for a series of rounds of iterative DPO.
    Raises:
        ConfigError: as check_update and prepare_worktree; a file named in params is missing; a scorer's reward model was rolled back; or
            the promoted reward model is of another kind.
    """
    before, after = check_run(root, name, overrides, rounds=rounds)
    if name is not None and before is not None:
        check_update(root, name, before, after, overrides, update=update, free=free)
    check_user_files(root, name, after, rounds=rounds)
    unpinned = {} if before is None or before.reward.path == after.reward.path else {NAMED: None}
    with undone_on_failure(root, name):
        workspace = root if name is None else prepare_worktree(root, name, unpinned | overrides)
        if pin_registry(root, workspace, chosen=overrides, fresh=before is None) and name is not None:
            refusal = commit(workspace, f"Run {name}: pin the registry's state", ["params.yaml"])
            if refusal is not None:
                raise ConfigError(f"run {name}: {refusal}; correct what the hook names")
        check_scorers(root, workspace)
        check_promoted(root, workspace)
    return workspace
