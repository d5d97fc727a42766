"""The flow `iterative-dpo`: rounds of sampling, scoring, training and comparison. Each stage is a Prefect task that runs it by DVC."""

from __future__ import annotations

from pathlib import Path

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State, StateType

from flows.chain.console import tell, tell_end
from flows.chain.execute import end_state, outcome_of, show_file, show_gate, show_text
from flows.chain.flow import refused_or, run_with_retries
from flows.chain.overrides import Overrides
from flows.chain.pins import check_not_rolled_back
from flows.chain.prepare import PreparedRun
from flows.chain.settings import warn_of_settings
from flows.chain.stages import StageFailed
from flows.chain.worktree import commit_results
from flows.rounds.series import (
    check_promotion_split,
    check_reward_model,
    check_rounds,
    current_round,
    last_round_of_run,
    lay_out_start,
    prepared_series,
    publish,
    round_stages,
    verdict,
)
from flows.runs.record import ROUND_REFUSED, note, recording
from flows.runs.results import input_paths, result_paths
from flows.trackers.processes import tracked
from rlhf_core.config import with_recipes
from rlhf_core.paths import ROUNDS_FIGURE


@flow(name="iterative-dpo", persist_result=False)
def iterative_dpo(
    overrides: Overrides = {},  # noqa: B006 (Prefect's form)
    rounds: int = 1,
    series: str = "iterative-dpo",
    update: bool = False,
    recipes: list[str] = [],  # noqa: B006
) -> State | None:
    """Run rounds of iterative DPO in the worktree runs/<series>. A series that exists is continued.

    A round whose policy isn't better keeps the policy before it, from which the next round starts. Pairs that fail validation end the run.

    Args:
        overrides: dotted keys of params.yaml and their values; refused once the series has a round.
        rounds: number of rounds; an interrupted one counts.
        series: the name of the worktree.
        update: allow changed params in a series without a round.
        recipes: paths of recipes in the project's folder, each laid over those before it and over params.yaml; overrides win over all.
    """

    def of_deployment() -> State | None:
        root, given = Path.cwd(), with_recipes(recipes, overrides)
        check_rounds(rounds)
        with prepared_series(root, series, given, update=update) as ready:
            return run_prepared(ready, rounds)

    return refused_or(of_deployment)


def run_prepared(run: PreparedRun, rounds: int) -> State | None:
    """Run the chain before the rounds and then the rounds, record the outcome, and return a state if not all ended well."""
    get_run_logger().info("Workspace: %s", run.workspace)
    with tracked(run.workspace, run.params.tracking), recording(run.workspace):
        warn_of_settings(run.workspace, run.params, rounds=True)
        state = _chain(run) or _rounds(run, rounds)
        note(run.workspace, **outcome_of(state))
    if state is not None:
        tell_end(state.name, state.message)
    return state


def _chain(run: PreparedRun) -> State | None:
    """Run the stages of the chain that come before the rounds, and return a state if one failed."""
    workspace, params = run.workspace, run.params
    try:
        for stage in run.wanted:
            note(workspace, stage=stage)
            run_with_retries(stage, workspace, params.flow, skip=stage in run.skipped)
            show_gate(workspace, run.stages, stage)
            if stage == "prepare_data":  # before the expensive stages
                check_promotion_split(workspace, params)
    except StageFailed as failure:
        show_gate(workspace, run.stages, failure.stage)
        message = f"Results of run {workspace.name}, stopped at {failure.stage}"
        commit_results(workspace, message, result_paths(workspace), input_paths(workspace))
        return end_state(workspace, run.stages, failure)
    check_reward_model(workspace, params)
    if params.gate.override is None:
        check_not_rolled_back(run.root, workspace, params.iterative.scorers)
    return None


def _rounds(run: PreparedRun, rounds: int) -> State | None:
    """Run the rounds of this run, and return a state if one failed or its data was refused."""
    log, workspace, params = get_run_logger(), run.workspace, run.params
    start = lay_out_start(run.root, workspace, params)
    last = last_round_of_run(workspace, str(runtime.flow_run.id), rounds)
    while (number := current_round(workspace, params, start=start, last=last)) is not None:
        try:
            for stage in round_stages(number):
                note(workspace, stage=stage.rpartition(":")[2])  # without its pipeline's file
                run_with_retries(stage, workspace, params.flow)
        except StageFailed as failure:
            return end_state(workspace, run.stages, failure)
        _show(workspace, number)
        outcome = verdict(workspace, number)
        log.info("Round %d: %s: %s", number, "accepted" if outcome["accepted"] else "the policy before it is kept", outcome["reason"])
        if not outcome["trained"]:
            return State(type=StateType.FAILED, name=ROUND_REFUSED, message=f"round {number}: {outcome['reason']}")
    return None


def _show(workspace: Path, number: int) -> None:
    """Show the table and the figure of all rounds."""
    text = publish(workspace, number)
    tell(f"\n{text}")
    show_text(text, key="rounds", description=f"Rounds of {workspace.name}")
    if (workspace / ROUNDS_FIGURE).is_file():
        show_file(workspace / ROUNDS_FIGURE, key="rounds-figure")
