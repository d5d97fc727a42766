"""The ledger of looks: which models were judged on a held-out split, in which order, and the significance level of each look.

If models are judged on the same pairs until one passes, one passes by chance. The ledger counts the models that were judged on a split, or
on one that shares at least SHARED of its pairs, and the level decreases with their number.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from rlhf_core.config import ConfigError, GateConfig, Section
from rlhf_core.gate.overlap import SplitKeys, read_sketch, write_sketch
from rlhf_core.ledger import Ledger, git, now

SHARED = 0.1  # of a split's pairs, from which on the looks at another split count for it


def look_level(confidence: float, number: int) -> float:
    """Return the one-sided level of a split's look `number`, from 1.

    alpha = (1 - confidence) / 2,  level_1 = alpha,  level_k = alpha / (k (k - 1)) for k > 1
    The levels of all later looks sum to alpha, since 1 / (k (k - 1)) = 1 / (k - 1) - 1 / k. So the chance that any of any number of
    models below the threshold passes, on splits that all share pairs, is at most 2 alpha, whatever the dependence of their results.
    Source: alpha-spending, Tian and Ramdas 2021, https://arxiv.org/abs/1910.04900
    """
    alpha = (1 - confidence) / 2
    return alpha if number == 1 else alpha / (number * (number - 1))


def at_look(config: GateConfig, number: int) -> GateConfig:
    """Return the gate's settings with the two-sided confidence that corresponds to a look's one-sided level."""
    return config if number == 1 else config.model_copy(update={"confidence": 1 - 2 * look_level(config.confidence, number)})


class _Line(Section):
    """A line of the ledger.

    kind: look, a model begins to be judged on a split; or result, its outcome.

    split: of `split_hash`. model: md5 of its folder, as in dvc.lock. run: branch, or folder without git. at: ISO 8601.
    confidence: of the intervals that decided.
    """

    kind: Literal["look", "result"]
    split: str = Field(pattern=r"^[0-9a-f]{64}$")
    model: str = Field(pattern=r"^[0-9a-f]{32}\.dir$")
    run: str
    at: str
    passed: bool | None = None
    accuracy: float | None = None
    confidence: float | None = None


class _Split(Section):
    """Sketches of a split's texts.

    line: number of lines in the ledger of looks at that time, so that earlier looks keep their numbers. prompts, responses: results of
    `write_sketch`.
    """

    split: str = Field(pattern=r"^[0-9a-f]{64}$")
    line: int = Field(ge=0)
    prompts: str = Field(min_length=1)
    responses: str

    @field_validator("prompts", "responses")
    @classmethod
    def _sketch(cls, text: str) -> str:
        read_sketch(text)
        return text


@dataclass(frozen=True)
class Look:
    """A look at a split.

    number: from 1, in the order in which models were judged on the split or on one that shares its pairs. earlier: the looks before it, as
    in gate.json.
    """

    number: int
    split: str
    model: str
    earlier: list[dict[str, Any]]


LEDGER = Ledger("rlhf-gate-looks.jsonl", "the gate", _Line)
SPLITS = Ledger("rlhf-gate-splits.jsonl", "the gate", _Split)  # a file of its own: older versions refuse other lines among the looks


def take_look(keys: SplitKeys, model: str, root: Path = Path()) -> Look:
    """Return the look of a model at a split. A new look is added to the ledger; a repeated one keeps its number.

    Looks at another split count if at least SHARED of this one's pairs were in it. Lines of older versions have no sketches of their
    splits: they count for exactly the same pairs.

    Call this before any measurement, so that an interrupted run counts as a look. Earlier looks are returned as known when this look began,
    so that a repeated stage gets the same answer whatever runs in parallel.

    Raises:
        ConfigError: the ledger can't be read or written.
    """
    split = keys.sha256
    with LEDGER.opened(root) as file, SPLITS.opened(root) as sketches:
        lines, known = LEDGER.read(file), {line.split: line for line in SPLITS.read(sketches)}
        at = next((i for i, line in enumerate(lines) if (line.kind, line.split, line.model) == ("look", split, model)), len(lines))
        if at == len(lines):
            if split not in known:
                texts = {"prompts": write_sketch(keys.prompts), "responses": write_sketch(keys.responses)}
                SPLITS.append(sketches, _Split(split=split, line=at, **texts))
            LEDGER.append(file, _Line(kind="look", split=split, model=model, run=run_name(root), at=now()))
    before = lines[:at]
    of_others = [line for line in known.values() if line.line <= at]
    shares = {line.split: keys.share_in(read_sketch(line.prompts), read_sketch(line.responses)) for line in of_others}
    shares = {name: share for name, share in shares.items() if share >= SHARED} | {split: 1.0}
    looks, results = [line for line in before if line.kind == "look" and line.split in shares], _first_results(before)
    earlier = [
        {**_shown(k, line, results.get((line.split, line.model))), "shared": round(shares[line.split], 3)}
        for k, line in enumerate(looks, start=1)
    ]
    return Look(len(earlier) + 1, split, model, earlier)


def write_result(split: str, model: str, *, passed: bool, accuracy: float | None, confidence: float, root: Path = Path()) -> None:
    """Append the result of a look, unless it is the last one of that look.

    Raises:
        ConfigError: the ledger can't be read or written.
    """
    found = {"passed": passed, "accuracy": None if accuracy is None else round(accuracy, 6), "confidence": confidence}
    line = _Line(kind="result", split=split, model=model, run=run_name(root), at=now(), **found)
    with LEDGER.opened(root) as file:
        of_look = [x for x in LEDGER.read(file) if (x.kind, x.split, x.model) == ("result", split, model)]
        if not of_look or of_look[-1].model_dump(include=set(found)) != found:
            LEDGER.append(file, line)


def check_ledger(gate: dict[str, Any], root: Path = Path()) -> None:
    """Compare gate.json with the ledger's lines about its look: the model, the number of looks before it, the verdict and the accuracy.

    Raises:
        ConfigError: they differ, or the ledger has no such look.
    """
    look, again = gate["look"], "rerun it where its model is registered, `dvc repro --single-item --force gate_reward`"
    with LEDGER.opened(root) as file:
        lines = [line for line in LEDGER.read(file) if line.split == look["split"]]
    at = next((i for i, line in enumerate(lines) if (line.kind, line.model) == ("look", look["model"])), None)
    results = [line for line in lines if (line.kind, line.model) == ("result", look["model"])]
    if at is None or not results:
        raise ConfigError(
            f"gate.json: expected the look of its model, md5 {look['model']}, in this repository's {LEDGER.name}, got none; the gate ran "
            f"elsewhere: {again}"
        )
    earlier = sum(line.kind == "look" for line in lines[:at])
    if look["number"] <= earlier or len(look["earlier"]) != look["number"] - 1:
        raise ConfigError(
            f"gate.json: expected look {earlier + 1} at its pairs or a later one by {LEDGER.name}, got {look['number']}; {again}"
        )
    accuracy = None if gate["accuracy"] is None else round(gate["accuracy"], 6)
    if (gate["passed"], accuracy) not in [(line.passed, line.accuracy) for line in results]:
        known = results[-1]
        raise ConfigError(
            f"gate.json: expected what {LEDGER.name} says of its model, passed {known.passed} with accuracy {known.accuracy}, got passed "
            f"{gate['passed']} with accuracy {accuracy}; {again}"
        )


def run_name(root: Path) -> str:
    """Return the name of the checked-out branch, or of the folder if there is none."""
    done = git(root, "symbolic-ref", "--short", "--quiet", "HEAD")
    name = root.resolve().name if done is None or done.returncode else done.stdout.strip()
    return os.fsencode(name).decode(errors="replace")  # JSON is UTF-8


def _first_results(lines: list[_Line]) -> dict[tuple[str, str | None], _Line]:
    """The first result of each look. Later results, with other thresholds, are left out so that earlier looks in gate.json don't change."""
    return {(line.split, line.model): line for line in reversed(lines) if line.kind == "result"}


def _shown(number: int, line: _Line, result: _Line | None) -> dict[str, Any]:
    known = {key: getattr(result, key, None) for key in ("passed", "accuracy", "confidence")}
    return {"number": number, "model": line.model, "run": line.run, **known}
