"""A series of rounds of iterative DPO in its worktree: the next round, its inputs, and the results so far. Needs no Prefect.

rounds/dvc.yaml has the stages of a round.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.chain.locks import only_flow
from flows.chain.pins import promoted_version, start_from_registry
from flows.chain.prepare import PreparedRun, prepare_workspace, read_run, refusal_recorded
from flows.chain.reach import check_cluster
from flows.chain.stages import read_stages
from flows.chain.updates import check_run, check_update
from flows.chain.user_files import check_user_files
from flows.chain.worktree import commit, commit_results, prepare_worktree, undone_on_failure, worktree_path
from flows.runs.results import input_paths, result_paths
from rlhf_core.config import UNTRACKED_SECTIONS, ConfigError, Params, load_params, read_yaml
from rlhf_core.data.schema import read_rows
from rlhf_core.paths import (
    GATE_METRICS,
    PREPARED,
    REWARD_MODEL,
    ROUNDS_FIGURE,
    ROUNDS_FILE,
    ROUNDS_PIPELINE,
    ROUNDS_TABLE,
    SOURCES,
    round_folder,
)
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.provenance.inputs import changes_since, read_inputs
from rlhf_core.report.rounds import draw, table
from rlhf_core.rounds.data import check_promotion_rows, prompts_of_round
from rlhf_core.rounds.pins import BudgetPin, Pin, PromptsPin, Round, prompts_hash, read_rounds, write_rounds
from rlhf_core.rounds.spending import begin_comparison, improved, outcome_of, record_rounds

STAGES = ("sample_round", "validate_round", "train_round", "evaluate_round")

log = logging.getLogger("rlhf.flows")


def check_rounds(rounds: int) -> None:
    """Check the number of rounds of a run. Raises ConfigError if it is below 1."""
    if rounds < 1:
        raise ConfigError(f"rounds: expected at least 1, got {rounds}; correct it")


@contextmanager
def prepared_series(root: Path, series: str, overrides: dict[str, Any], *, update: bool = False) -> Iterator[PreparedRun]:
    """Prepare a series and hold its lock in the block. Arguments and errors are those of `prepare_series` and `only_flow`."""
    check_run(root, series, overrides, rounds=True)  # before anything is written, such as the lock
    with only_flow(root, series):
        yield prepare_series(root, series, overrides, update=update)


def prepare_series(root: Path, series: str, overrides: dict[str, Any], *, update: bool = False) -> PreparedRun:
    """Prepare a series in its worktree, which is made if it doesn't exist. The run's stages are those that come before the first round.

    The caller holds the lock of the series.

    Raises:
        ConfigError: params, data or models differ from those of the earlier rounds, an override is refused, a scorer's file is missing, or
            the cluster can't be used.
    """
    with undone_on_failure(root, series):
        workspace = _series_workspace(root, series, overrides, update=update)
        with refusal_recorded(workspace):
            params = load_params(workspace / "params.yaml")
            run = read_run(root, workspace, until=last_before_rounds(params))
            check_cluster(root, run.params, [*(stage for stage in run.wanted if stage not in run.skipped), *STAGES])
    return run


def _series_workspace(root: Path, series: str, overrides: dict[str, Any], *, update: bool) -> Path:
    path = worktree_path(root, series)
    if not (path.exists() and read_rounds(path)):
        return prepare_workspace(root, series, overrides, update=update, rounds=True)
    own, (_, wanted) = load_params(path / "params.yaml"), check_run(root, series, overrides, rounds=True)
    check_user_files(root, series, wanted, rounds=True)
    before, after = (params.model_dump(exclude=set(UNTRACKED_SECTIONS)) for params in (own, wanted))
    changed = [section for section in before if before[section] != after[section]]
    other = _other_inputs(path, wanted)
    if (changed or other) and unmade(path):
        check_update(root, series, own, wanted, overrides, update=update)
        forget_unmade(path)
        return prepare_workspace(root, series, overrides, update=update, rounds=True)
    if other:
        raise ConfigError(
            f"series {series}: expected the data and models that its rounds were made with, got others; restore them, or begin "
            "another series with --series NAME\n" + "\n".join(other)
        )
    if changed:
        raise ConfigError(
            f"series {series}: expected the params that its rounds were made with, got others in {', '.join(changed)}; begin another "
            "series with --series NAME"
        )
    check_update(root, series, own, wanted, overrides, update=update)
    return prepare_worktree(root, series, overrides)


def _other_inputs(workspace: Path, params: Params) -> list[str]:
    """Return a line for each file from outside the project that has changed since the chain and the rounds read it."""
    inputs, order = read_inputs(params, workspace), [*read_stages(workspace)]
    later = set(order[order.index(last_before_rounds(params)) + 1 :])
    locks = (workspace / "dvc.lock", workspace / ROUNDS_PIPELINE.with_suffix(".lock"))
    return [line for lock in locks for line in changes_since(lock, inputs, workspace, ignored=later)]


def unmade(workspace: Path) -> bool:
    """Return whether there is one round and it has written nothing, for example because its first stage refused an input."""
    made = (file for file in (workspace / round_folder(1)).rglob("*") if file.is_file() and file.name != ".gitignore")
    return list(read_rounds(workspace)) == [1] and not any(made)


def forget_unmade(workspace: Path) -> None:
    """Remove the entry of the first round if the round has written nothing.

    Nothing was sampled or compared, so the series may begin with other params, and none of its error budget is spent.
    """
    if not unmade(workspace):
        return
    (entry,) = read_rounds(workspace).values()
    record_rounds(workspace.name, improved(load_params(workspace / "params.yaml")), [(1, entry.budget, "none")], workspace)
    write_rounds({}, workspace)
    if (refusal := commit(workspace, "Take back the beginning of round 1", [str(ROUNDS_FILE)])) is not None:
        log.warning("Round 1: the removal of its entry is not committed; %s", refusal)


def last_before_rounds(params: Params) -> str:
    """Return the last stage of dvc.yaml that comes before the first round."""
    return "train_policy" if params.iterative.start == "policy" else "gate_reward"


def check_reward_model(workspace: Path, params: Params) -> None:
    """Refuse the chain's own reward model as a scorer of rounds if it didn't pass its gate.

    Raises:
        ConfigError: a scorer uses the model, and the gate neither passed nor has an override.
    """
    gate = _read(workspace / GATE_METRICS)
    usable = gate and (gate["passed"] or gate["override"])
    if any(scorer.is_own_reward_model for scorer in params.iterative.scorers) and not usable:
        message = gate["message"] if gate else f"{GATE_METRICS} is missing"
        raise ConfigError(
            f"iterative.scorers: expected a reward model that passed its gate, got one that didn't ({message}); make it pass, or use "
            "scorers without a reward model (docs/scorers.md)"
        )


def last_round_of_run(workspace: Path, run: str, rounds: int) -> int:
    """Return the number of the last round that a run of the flow works on. A retry of the run gets the same number.

    Args:
        run: Prefect's id of the run. rounds: number of rounds of the run, an unfinished one included.
    """
    note = workspace / "scratch" / "iterative_dpo" / run
    if not note.exists():
        finished = sum(is_finished(workspace, number) for number in read_rounds(workspace))
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(str(finished + rounds))
    return int(note.read_text())


def lay_out_start(root: Path, workspace: Path, params: Params) -> Path:
    """Return the folder of the model that the first round starts from.

    A version of the registry is fetched: the one that was promoted when the series began.

    Raises:
        ConfigError: no policy is promoted, or its files can't be fetched.
    """
    if params.iterative.start != "registry":
        return Path("models") / params.iterative.start
    rounds = read_rounds(workspace)
    return start_from_registry(root, workspace, promoted_version(rounds[1].origin.path) if rounds else None)


def current_round(workspace: Path, params: Params, *, start: Path, last: int) -> int | None:
    """Return the number of the round to work on: the newest if it isn't finished, else a new one, whose entry is written and committed.

    Args:
        start: folder of the model that the first round starts from.
    Returns:
        The number, or None if round `last` is done.
    """
    rounds = read_rounds(workspace)
    number = len(rounds)
    if number and not is_finished(workspace, number):
        return number
    if number >= last:
        return None
    rounds[number + 1] = new_round(workspace, rounds, params, start)
    write_rounds(rounds, workspace)
    refusal = commit(workspace, f"Begin round {number + 1} from {rounds[number + 1].policy.path}", [str(ROUNDS_FILE)])
    if refusal is not None:
        log.warning("Round %d: its entry is not committed; %s", number + 1, refusal)
    return number + 1


def new_round(workspace: Path, rounds: dict[int, Round], params: Params, start: Path) -> Round:
    """Return the entry of the round after `rounds`, with hashes of the files in the workspace."""

    def pin(path: Path | str) -> Pin:
        return Pin(path=str(path), md5=dvc_md5(workspace / path))

    config, number = params.iterative, len(rounds) + 1
    accepted = [n for n in rounds if (verdict(workspace, n) or {}).get("accepted")]
    check_promotion_split(workspace, params)
    ids = [row["id"] for row in read_rows(workspace / PREPARED, "prompt", "train")]
    prompts = prompts_of_round(ids, number, config.sampling.prompts, seed=params.seed)
    return Round(
        origin=rounds[1].origin if rounds else pin(start),
        policy=pin(round_folder(accepted[-1]) / "policy" if accepted else start),
        reward_models={s.name: pin(s.path or REWARD_MODEL) for s in config.scorers if s.kind == "reward_model"},
        gate=pin(GATE_METRICS),
        prompts=PromptsPin(first=(number - 1) * len(prompts), count=len(prompts), sha256=prompts_hash(prompts)),
        budget=_budget_of_next(workspace, rounds, params),
    )


def check_promotion_split(workspace: Path, params: Params) -> None:
    """Check that policies can be compared on the promotion split, as `check_promotion_rows` requires.

    Raises:
        ConfigError: there are too few prompts, or a judge is missing.
    """
    sources = _read(workspace / SOURCES) or {}
    judged = {name for name, source in sources.items() if source["judge"]}
    try:
        check_promotion_rows(read_rows(workspace / PREPARED, "prompt", "promotion"), params.iterative.promotion, judged=judged)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _budget_of_next(workspace: Path, rounds: dict[int, Round], params: Params) -> BudgetPin:
    """Return the budget of the comparison after `rounds`, and after those of other series that improve the same model.

    Raises:
        ConfigError: a round's pinned budget or its verdict has changed since it was recorded, or nothing of the error budget is left.
    """
    record_comparisons(workspace, rounds, params)
    improves, config, number = improved(params), params.iterative.promotion, len(rounds) + 1
    budget, before = begin_comparison(workspace.name, number, improves, config, workspace)
    if before.series:
        log.info(
            "Round %d: comparison %d of all that improve %s, at level %.2g; other series (%s) have spent %.2g of the error budget %g",
            *(number, budget.comparison, improves, budget.level, ", ".join(before.series), before.spent, config.error_budget),
        )
    return budget


def record_comparisons(workspace: Path, rounds: dict[int, Round], params: Params) -> None:
    """Append to the ledger of comparisons those of this series that it lacks, as `record_rounds` does."""
    made = [(number, entry.budget, outcome_of(verdict(workspace, number))) for number, entry in rounds.items()]
    record_rounds(workspace.name, improved(params), made, workspace)


def is_finished(workspace: Path, number: int) -> bool:
    """Return whether the round has its verdict and DVC has recorded it."""
    lock = workspace / ROUNDS_PIPELINE.with_suffix(".lock")
    recorded = lock.exists() and f"{STAGES[-1]}@{number}" in (read_yaml(lock).get("stages") or {})
    return recorded and verdict(workspace, number) is not None


def verdict(workspace: Path, number: int) -> dict[str, Any] | None:
    """Return metrics/evaluate.json of a round, or None before there is one."""
    return _read(workspace / round_folder(number) / "metrics" / "evaluate.json")


def round_stages(number: int) -> list[str]:
    """Return the targets of `dvc repro` for a round's stages, in order."""
    return [f"{ROUNDS_PIPELINE}:{stage}@{number}" for stage in STAGES]


def results(workspace: Path) -> list[dict[str, Any]]:
    """Return the verdict of each finished round, with the figures of its samples under `samples`."""
    found = []
    for number in read_rounds(workspace):
        metrics = verdict(workspace, number)
        if metrics is not None:
            samples = _read(workspace / round_folder(number) / "metrics" / "sample.json")
            found.append({**metrics, "samples": samples})
    return found


def publish(workspace: Path, number: int) -> str:
    """Write figure and table of all rounds, record this round's verdict, commit its results, and return the table."""
    record_comparisons(workspace, read_rounds(workspace), load_params(workspace / "params.yaml"))
    rows = results(workspace)
    text = table(rows)
    (workspace / ROUNDS_TABLE).write_text(f"# Rounds of {workspace.name}\n\n{text}", encoding="utf-8")
    try:
        draw(rows, workspace / ROUNDS_FIGURE)
    except ModuleNotFoundError as error:
        log.warning("%s: expected matplotlib for the figure, got none (%s); install the extra `compare`", ROUNDS_FIGURE, error)
    commit_results(workspace, f"Results of round {number}", result_paths(workspace), input_paths(workspace))
    return text


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, json.JSONDecodeError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None
