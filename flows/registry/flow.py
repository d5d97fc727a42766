"""The flow `promote`: promotes a version of the reward model or the policy after a person's approval with a reason."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from prefect import flow, get_run_logger, runtime
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State, StateType
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from pydantic import Field

from flows.chain.console import tell, tell_end
from flows.promote import decided, gate_of, identity, summary, uses_reward_model
from flows.registry import decisions
from flows.registry.evidence import check_version
from flows.registry.reviews import read_reviews, refusals
from flows.registry.state import Registry, read_for_decision
from flows.registry.tags import Event, Version
from rlhf_core.commands import printable
from rlhf_core.config import ConfigError, RegistryConfig, load_params, parse_json
from rlhf_core.files import replace_text
from rlhf_core.report.texts import markdown_block, markdown_text

NOT_APPROVED, ANOTHER_MODEL = "NotApproved", "AnotherModel"  # states of a run that promoted nothing


class Approval(RunInput):
    """The form that a person fills in. No field has a default, which Prefect would use without input."""

    approve: bool = Field(description="Whether this version is to be used from now on.")
    by: str = Field(min_length=1, description="Who decides; kept as stated, for nothing proves it.")
    reason: str = Field(min_length=1, description="Why; kept with the decision.")


@flow(name="promote", persist_result=False)
def promote(
    artifact: Literal["reward-model", "policy"] = "reward-model",
    version: str | None = None,
    by: str | None = None,
    reason: str | None = None,
    override: str | None = None,
) -> State | None:
    """Promote a version of a model in the registry.

    Args:
        version: the version, such as v2.0.0; without it the newest one when the run starts.
        by: stated decider; reason: why. Used only if promotion.require_approval is off; otherwise a form asks for them.
        override: reason for promoting a version that its gate or a review rejected, or that was rolled back.
    """
    root, log = Path.cwd(), get_run_logger()
    try:
        config = load_params(root / "params.yaml", complete=False).promotion
        found = read_for_decision(root, artifact)
        chosen = version_to_approve(_note(root), found, version, resumed=runtime.flow_run.run_count > 1)
        check_version(root, chosen)
        refusal = refusals(root, found, chosen)
        if refusal and override is None:
            raise ConfigError(f"{artifact} {chosen.version}: {refusal}; to promote it anyway, give the reason in `override`")
        details = printable(summary(found, chosen)) + (f"\nOverride: {override}" if refusal else "")
        given = None if config.require_approval else _given(root, by, reason)
        decision = given or _reviewed(root, found, chosen, refusal) or _ask(chosen, details, config)
        if not decision.approve:
            log.info("%s %s: not approved", artifact, chosen.version)
            message = f"{artifact} {chosen.version}: stated by {decision.by}: {decision.reason}"
            tell_end(NOT_APPROVED, message)
            return State(type=StateType.FAILED, name=NOT_APPROVED, message=message)
        given = {"by": decision.by, "reason": decision.reason, "override": override}
        event = decisions.promote(root, artifact, chosen.version, approved=chosen.model, **given)
        _show(artifact, event)
    except ConfigError as error:
        log.error("%s", error)
        name = ANOTHER_MODEL if isinstance(error, decisions.AnotherModel) else "Refused"
        return State(type=StateType.FAILED, name=name, message=str(error))
    return None


def _note(root: Path) -> Path:
    return root / "scratch" / "promote" / str(runtime.flow_run.id)


def version_to_approve(note: Path, found: Registry, version: str | None, *, resumed: bool) -> Version:
    """Return the version that a run promotes. A resumed run uses the version of its first start, even if newer ones were registered.

    Args:
        note: file that records the version at the first start. version: None: the newest.
        resumed: whether the run was started before.
    Raises:
        decisions.AnotherModel: the version's model has changed.
        ConfigError: there is no such version, or a resumed run's note is missing.
    """
    if not note.exists():
        if resumed:
            raise ConfigError(f"promote: expected the file {note.name} from the run's first start, got none; start another run")
        chosen = found.get(version or found.newest_version() or "latest")
        replace_text(note, json.dumps({"version": chosen.version, "model": chosen.model}))
        return chosen
    noted = parse_json(note.read_text(encoding="utf-8"), f"note {note.name}")
    chosen = found.get(noted["version"])
    decisions.check_approved(chosen, noted["model"])
    return chosen


def question(chosen: Version) -> str:
    """Return the question with the model's hash, commit and verdict, since a version's name can be given to another model."""
    gate = "its gate" if chosen.artifact == "reward-model" else f"the {gate_of(chosen.artifact)}"
    verdict = f"{gate}: {chosen.verdict}" if uses_reward_model(chosen) else "its training used no reward model"
    return f"May {chosen.artifact} {chosen.version} be used from now on? It is {chosen.identity}, of commit {chosen.commit}; {verdict}."


def _ask(chosen: Version, details: str, config: RegistryConfig) -> Approval:
    """Suspend the run until a person answers.

    When the person resumes it, the run starts again and gets the answer here.

    The server stores the answer under a key of the model, so an answer about another model isn't used.
    """
    text_of_question = question(chosen)
    key = hashlib.sha256(json.dumps([chosen.artifact, chosen.version, chosen.model]).encode()).hexdigest()[:32]
    text = f"# {markdown_text(text_of_question)}\n\n{markdown_block(details)}"
    create_markdown_artifact(text, key=f"promote-{chosen.artifact}", description=text_of_question)
    form = Approval.with_initial_data(description=text_of_question)
    return suspend_flow_run(wait_for_input=form, timeout=config.approval_timeout, key=key)


def _reviewed(root: Path, found: Registry, chosen: Version, refusal: str | None) -> Approval | None:
    """Return the last review as the answer if it approves the version, so that nobody is asked again.

    refusal: why the version needs an override, which a person sees and answers whatever the review says; None: it needs none.
    """
    last = read_reviews(root, found).last(chosen.version)
    if refusal is not None or last is None or last.answer != "approve":
        return None
    return Approval(approve=True, by=last.who.removeprefix("stated by "), reason=last.reason)


def _given(root: Path, by: str | None, reason: str | None) -> Approval:
    if not reason:
        raise ConfigError("reason: expected why this version is promoted, got none; it is kept with the decision")
    return Approval(approve=True, by=by or identity(root), reason=reason)


def _show(artifact: str, event: Event) -> None:
    text = printable(decided(artifact, event))
    tell(text)
    lines = [markdown_text(line) for line in text.splitlines()]
    create_markdown_artifact("\n\n".join(lines), key=f"promoted-{artifact}", description=lines[0])
