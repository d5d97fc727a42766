"""The flow `promote`: a version of the reward model or the policy is promoted once a person has said yes, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from prefect import flow, get_run_logger, runtime
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State, StateType
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from pydantic import Field

from flows import registry
from flows.promote import decided, identity, summary
from flows.registry import Event, Version, read_registry
from rlhf_core.config import ConfigError, RegistryConfig, load_params
from rlhf_core.report.texts import markdown_block, markdown_text

NOT_APPROVED = "NotApproved"


class Approval(RunInput):
    """What the run asks a person for. No field has a default: Prefect would take it unasked."""

    approve: bool = Field(description="Whether this version is to be used from now on.")
    by: str = Field(min_length=1, description="Who decides.")
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
        version: such as v2.0.0; without it the newest when the run starts.
        by: who decides; reason: why. Only where promotion.require_approval is off: otherwise the run asks a person for them.
        override: why a model is promoted that its gate rejected or that was rolled back.
    """
    root, log = Path.cwd(), get_run_logger()
    try:
        config = load_params(root / "params.yaml").promotion
        chosen = _chosen(root, artifact, version)
        found = read_registry(root, artifact)
        refusal = registry.why_not(found, chosen)
        if refusal and override is None:
            raise ConfigError(f"{artifact} {chosen.version}: {refusal}; to promote it all the same, give the reason in `override`")
        decision = _ask(chosen, summary(found, chosen), config) if config.require_approval else _given(root, by, reason)
        if not decision.approve:
            log.info("%s %s: not approved", artifact, chosen.version)
            return State(type=StateType.FAILED, name=NOT_APPROVED, message=f"{artifact} {chosen.version}: {decision.by}: {decision.reason}")
        event = registry.promote(root, artifact, chosen.version, by=decision.by, reason=decision.reason, override=override)
        _show(artifact, event)
    except ConfigError as error:
        log.error("%s", error)
        return State(type=StateType.FAILED, name="Refused", message=str(error))
    return None


def _chosen(root: Path, artifact: str, version: str | None) -> Version:
    """The version that this run is about: the same after it was suspended, whatever was registered in the meantime."""
    note = root / "scratch" / "promote" / str(runtime.flow_run.id)
    found = read_registry(root, artifact)
    if not note.exists():
        name = found.get(version or next(reversed(found.versions), "latest")).version
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(name, encoding="utf-8")
    return found.get(note.read_text(encoding="utf-8"))


def _ask(chosen: Version, told: str, config: RegistryConfig) -> Approval:
    """Suspends the run; when a person resumes it, it starts again and gets the answer here."""
    question = f"May {chosen.artifact} {chosen.version} be used from now on?"
    create_markdown_artifact(
        f"# {markdown_text(question)}\n\n{markdown_block(told)}", key=f"promote-{chosen.artifact}", description=question
    )
    return suspend_flow_run(wait_for_input=Approval.with_initial_data(description=question), timeout=config.approval_timeout)


def _given(root: Path, by: str | None, reason: str | None) -> Approval:
    if not reason:
        raise ConfigError("reason: expected why this version is promoted, got none; it is kept with the decision")
    return Approval(approve=True, by=by or identity(root), reason=reason)


def _show(artifact: str, event: Event) -> None:
    text = decided(artifact, event)
    print(text, flush=True)
    lines = [markdown_text(line) for line in text.splitlines()]
    create_markdown_artifact("\n\n".join(lines), key=f"promoted-{artifact}", description=lines[0])
