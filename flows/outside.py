"""Puts models that other trainers made through the chain's gate and evaluation: rlhf gate and rlhf evaluate.

The chain runs with these models in place of its own, so that its checks, report, lineage and registry hold for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import Parameter

from flows.chain.worktree import slug
from flows.full_pipeline import start
from rlhf_core.commands import NONE_GIVEN, REFUSED, FileOrName, Overrides
from rlhf_core.config import ConfigError, read_yaml_text
from rlhf_core.config.data import DataFormat
from rlhf_core.data.places import locate, model_snapshot
from rlhf_core.models.folder import step_separator

HELD_OUT = {"data.validation_fraction": 0.1, "data.test_fraction": 0.8, "data.promotion_fraction": 0.0}  # nothing learns from the rest
LOOK_SECONDS = 600.0  # for a data set that is fetched
Format = Annotated[str | None, Parameter(help=f"Instead of the guess: {', '.join(get_args(DataFormat))}.")]


@Parameter(name="*")
@dataclass(frozen=True)
class Run:
    """Where the results go, and further params.

    Args:
        name: work in the worktree runs/RUN; by default named after the model.
        update: change the params of a run that exists, which is refused otherwise.
    """

    name: Annotated[str | None, Parameter("--run")] = None
    update: bool = False
    given: Overrides = NONE_GIVEN


NEW_RUN = Run()


def gate(*, reward_model: FileOrName, pairs: FileOrName, reference: FileOrName, format_: Format = None, run: Run = NEW_RUN) -> int:
    """Judge a reward model on pairs, or a process reward model on labelled steps, that it wasn't trained on.

    Args:
        reward_model: folder or Hugging Face name of a model with a score head.
        pairs: preferences, or labelled steps; a file, a folder or a Hugging Face name.
        reference: the model whose answers it is to score: its template renders the conversations.
    """
    settings = {"reward.enabled": True, "reward.path": reward_model, "alignment.method": "dpo", "rl.rollout.backend": "pytorch"}  # unused
    return _start("gate", reward_model, reference, pairs, format_, settings, run, until="gate_reward")


def evaluate(
    *,
    policy: FileOrName,
    reference: FileOrName,
    data: FileOrName,
    reward_model: FileOrName | None = None,
    format_: Format = None,
    run: Run = NEW_RUN,
) -> int:
    """Compare a policy with the model that it was trained from, on held-out prompts, after the gate of the reward model that compares them.

    Args:
        policy: folder or Hugging Face name of the trained model or of its LoRA adapters.
        reference: the model from which it was trained.
        data: prompts, or with --reward-model pairs, or labelled steps; a file, a folder or a Hugging Face name.
        reward_model: by which answers are compared; without it --set evaluation.scorers.
    """
    judged = {"reward.enabled": reward_model is not None, "reward.path": reward_model}
    settings = {**judged, "alignment.method": "external", "external.path": policy}
    return _start("evaluate", policy, reference, data, format_, settings, run)


def _start(
    command: str,
    model: str,
    reference: str,
    data: str,
    format_: str | None,
    settings: Mapping[str, Any],
    run: Run,
    until: str | None = None,
) -> int:
    """Run the chain with these models and this data; --set of the user wins."""
    try:
        own = assignments(reference, data, format_, settings)
    except ValueError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return REFUSED
    given = Overrides((*own, *run.given.assignments), run.given.recipes)
    return start(given=given, name=run.name or slug(f"{command}-{Path(model).name}"), update=run.update, until=until)


def assignments(reference: str, data: str, format_: str | None, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the overrides of params.yaml, as --set has them: no SFT, and data that is nearly all held out.

    Raises:
        ValueError: the data can't be read, or has no pairs, or labelled steps, where the settings ask for a reward model of them.
    """
    separator = separator_of(settings["reward.path"]) if settings["reward.enabled"] else None
    judged = ["preference" if separator is None else "stepwise"] if settings["reward.enabled"] else []
    source = source_of(data, format_, [*judged, "prompt"])
    settings = {**settings, "reward.step_separator": separator}
    if separator is not None and settings["alignment.method"] == "dpo":  # which would need pairs
        settings |= {"alignment.method": "external", "external.path": reference}
    values = {"model.path": reference, "sft.enabled": False, **HELD_OUT, "data.sources": [source], **settings}
    return tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())


def separator_of(reward_model: str) -> str | None:
    """Return the text between steps that a process reward model's config.json names; None for others, and for one that isn't here yet.

    Raises:
        ValueError: its config.json can't be read.
    """
    folder = locate(reward_model)
    folder = folder if folder.is_dir() else model_snapshot(reward_model, None)
    return None if folder is None else step_separator(folder)


def source_of(data: str, format_: str | None, uses: list[str]) -> dict[str, Any]:
    """Return the entry of data.sources for a file, a folder or a data set, as `rlhf data check` reads it.

    Rows that have an empty text are left out.

    Raises:
        ConfigError: no format fits, or several do, or the format lacks what is needed.
    """
    reading = ["--format", format_] if format_ is not None else []
    command = [sys.executable, "-m", "rlhf_core.look", data, "--yaml-only", *reading]  # a process of its own, since flows import no torch
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{data}: expected its format within {LOOK_SECONDS:g} s, got none; give a local file, or --format") from None
    if done.returncode != 0:
        raise ConfigError(f"{data}: expected data of one format; `rlhf data check` says:\n{done.stderr.strip()}")
    (source,) = read_yaml_text(done.stdout, data)["data"]["sources"]
    if "preference" in uses and ("preference" not in source["uses"] or source["format"] == "unpaired"):
        raise ConfigError(f"{data}: expected pairs of a better and a worse answer, got {source['format']}; give preferences")
    if "stepwise" in uses and "stepwise" not in source["uses"]:
        raise ConfigError(f"{data}: expected labelled steps for a process reward model, got {source['format']}; give steps")
    return source | {"uses": uses, "drop": ["empty"]}
