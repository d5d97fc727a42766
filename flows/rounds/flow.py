"""The flow `iterative-dpo`: rounds of sampling, scoring, training and comparison. Each stage is a Prefect task that runs it by DVC."""

from __future__ import annotations

from pathlib import Path

from prefect import flow, get_run_logger, runtime
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.client.schemas.objects import State, StateType

from flows.chain.console import tell, tell_end
from flows.chain.flow import end_state, outcome_of, publish_gate, run_with_retries
from flows.chain.locks import only_flow
from flows.chain.overrides import Overrides
from flows.chain.pins import check_not_rolled_back
from flows.chain.reach import check_cluster
from flows.chain.settings import point_out
from flows.chain.stages import StageFailed, unchanged
from flows.chain.worktree import commit_results
from flows.rounds.series import (
    STAGES,
    chain_before_rounds,
    check_promotion_split,
    check_reward_model,
    current_round,
    last_round_of_run,
    lay_out_start,
    prepare_series,
    publish,
    round_stages,
    verdict,
)
from flows.runs.record import REFUSED, ROUND_REFUSED, note, recording
from flows.runs.results import input_paths, result_paths
from rlhf_core.config import ConfigError, Params, load_params, with_recipes
from rlhf_core.paths import ROUNDS_FIGURE


@flow(name="iterative-dpo", persist_result=False)
def iterative_dpo(
    overrides: Overrides = {},  # noqa: B006 (Prefect's form)
    rounds: int = 1,
    series: str = "iterative-dpo",
    update: bool = False,
    recipes: list[str] = [],  # noqa: B006
) -> State | None:
    """Rounds of iterative DPO in the worktree runs/<series>. A series that exists is continued.

    A round whose policy isn't better keeps the policy before it, from which the next round starts. Pairs that fail validation end the run.

    Args:
        overrides: dotted keys of params.yaml and their values; refused once the series has a round.
        rounds: number of rounds; an interrupted one counts.
        series: the name of the worktree.
        update: allow changed params in a series without a round.
        recipes: paths of recipes in the project's folder, each laid over those before it and over params.yaml; overrides win over all.
    """
    root, log = Path.cwd(), get_run_logger()
    try:
        if rounds < 1:
            raise ConfigError(f"rounds: expected at least 1, got {rounds}; correct it")
        overrides = with_recipes(recipes, overrides)
        with only_flow(root, series):
            workspace = prepare_series(root, series, overrides, update=update)
            checked = load_params(workspace / "params.yaml")
            log.info("Workspace: %s", workspace)
            with recording(workspace):
                point_out(workspace, checked, rounds=True)
                state = _chain(root, workspace, checked) or _rounds(root, workspace, checked, rounds)
                note(workspace, **outcome_of(state))
            if state is not None:
                tell_end(state.name, state.message)
            return state
    except ConfigError as error:
        log.error("%s", error)
        return State(type=StateType.FAILED, name=REFUSED, message=str(error))


def _chain(root: Path, workspace: Path, params: Params) -> State | None:
    """Run the stages of the chain that the rounds start from. Returns a state where one failed."""
    try:
        order = chain_before_rounds(workspace, params)
        skipped = unchanged(workspace, order)
        check_cluster(root, params, [*(stage for stage in order if stage not in skipped), *STAGES])
        for stage in order:
            run_with_retries(stage, workspace, params.flow, skip=stage in skipped)
            publish_gate(workspace, stage)
            if stage == "prepare_data":  # before the expensive stages
                check_promotion_split(workspace, params)
    except StageFailed as failure:
        publish_gate(workspace, failure.stage)
        message = f"Results of run {workspace.name}, stopped at {failure.stage}"
        commit_results(workspace, message, result_paths(workspace), input_paths(workspace))
        return end_state(workspace, failure)
    check_reward_model(workspace, params)
    if params.gate.override is None:
        check_not_rolled_back(root, workspace, params.iterative.scorers)
    return None


def _rounds(root: Path, workspace: Path, params: Params, rounds: int) -> State | None:
    """Run the rounds of this run. Returns a state where one failed or its data was refused."""
    log = get_run_logger()
    start = lay_out_start(root, workspace, params)
    last = last_round_of_run(workspace, str(runtime.flow_run.id), rounds)
    while (number := current_round(workspace, params, start=start, last=last)) is not None:
        try:
            for stage in round_stages(number):
                run_with_retries(stage, workspace, params.flow)
        except StageFailed as failure:
            return end_state(workspace, failure)
        _show(workspace, number)
        outcome = verdict(workspace, number)
        log.info("Round %d: %s: %s", number, "accepted" if outcome["accepted"] else "the policy before it is kept", outcome["reason"])
        if not outcome["trained"]:
            return State(type=StateType.FAILED, name=ROUND_REFUSED, message=f"round {number}: {outcome['reason']}")
    return None


def _show(workspace: Path, number: int) -> None:
    """Publish table and figure of all rounds as artifacts."""
    text = publish(workspace, number)
    tell(f"\n{text}")
    create_markdown_artifact(text, key="rounds", description=f"Rounds of {workspace.name}")
    if (workspace / ROUNDS_FIGURE).is_file():
        path = (workspace / ROUNDS_FIGURE).resolve()
        create_link_artifact(path.as_uri(), link_text=ROUNDS_FIGURE.name, key="rounds-figure", description=str(path))
