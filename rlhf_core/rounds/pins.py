"""Rounds of iterative DPO as rounds/rounds.yaml pins them: the only reader and writer of that file.

A round's entry holds the hashes of all that the round begins with, so that it can be rebuilt, or refuses where something else is there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from rlhf_core.config import ConfigError, Section, fill_in, read_yaml
from rlhf_core.paths import ROUNDS_FILE, ROUNDS_PIPELINE
from rlhf_core.provenance.file_hashes import dvc_md5

_HEADER = """\
# What each round of iterative DPO began with, by DVC's hash; rounds/dvc.yaml makes the stages of a round from its entry.
# Flow iterative-dpo appends to it (docs/iterative_dpo.md); a series of rounds lives in its own worktree, runs/<series>.
"""


class Pin(Section):
    """A file or folder and its md5 as DVC counts it (dvc.lock)."""

    path: str
    md5: str


class PromptsPin(Section):
    """Which training prompts: their place in the order of rlhf_core.rounds.data, and `prompts_hash` of their ids."""

    first: int
    count: int
    sha256: str


class BudgetPin(Section):
    """What a round's comparison may spend of the series' error budget (rlhf_core/rounds/promotion.py).

    comparison: its number in the series, from 1; the round after one whose data was refused has the same. level: the largest p-value that
    accepts. spent: the levels of the comparisons before it that accepted nothing.
    """

    comparison: int
    level: float
    spent: float


class Round(Section):
    """What a round begins with.

    origin: what the first round started from. policy: what this one samples from, starts from and is compared with.
    reward_models: of each scorer of that kind, by its name.
    """

    origin: Pin
    policy: Pin
    reward_models: dict[str, Pin]
    gate: Pin
    prompts: PromptsPin
    budget: BudgetPin

    def check(self, number: int, root: Path = Path()) -> None:
        """What lies on the disk is what the round began with.

        Raises:
            ValueError: something is missing or has another content.
        """
        for pin in (self.origin, self.policy, self.gate, *self.reward_models.values()):
            path = root / pin.path
            found = dvc_md5(path) if path.exists() else "nothing"
            if found != pin.md5:
                raise ValueError(
                    f"{pin.path}: expected what round {number} began with, md5 {pin.md5}, got {found}; bring it back with `dvc checkout` "
                    "or `dvc repro`, or begin another series"
                )


def read_rounds(root: Path = Path()) -> dict[int, Round]:
    """All rounds by their number, from 1.

    Raises:
        ConfigError: the file isn't what it should be, or of a series that began before rounds had an error budget.
    """
    tree = read_yaml(root / ROUNDS_FILE).get("rounds")
    entries = tree.values() if isinstance(tree, dict) else ()
    if any(isinstance(entry, dict) and "prompts" in entry and "budget" not in entry for entry in entries):
        raise ConfigError(
            f"{ROUNDS_FILE}: expected the error budget of each round's comparison, got rounds that were judged without one; such a series "
            "can't go on: begin another with --series NAME, from its last policy with iterative.start=registry (docs/iterative_dpo.md)"
        )
    try:
        found = {int(number): Round.model_validate(entry) for number, entry in (tree or {}).items()}
    except (ValueError, AttributeError, ValidationError) as error:
        raise ConfigError(f"{ROUNDS_FILE}: expected an entry for each round, got: {error}; restore it with git") from error
    rounds = dict(sorted(found.items()))  # the file has them by name, 10 before 2
    if list(rounds) != list(range(1, len(rounds) + 1)):
        raise ConfigError(f"{ROUNDS_FILE}: expected rounds 1, 2, 3 and so on, got {list(rounds)}; restore it with git")
    return rounds


def read_round(number: int) -> Round:
    rounds = read_rounds()
    if number not in rounds:
        raise ConfigError(
            f"{ROUNDS_FILE}: expected an entry for round {number}, got {list(rounds) or 'none'}; the flow iterative-dpo adds it"
        )
    return rounds[number]


def write_rounds(rounds: dict[int, Round], root: Path = Path()) -> None:
    """The whole file, written aside and renamed."""
    path = root / ROUNDS_FILE
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(_HEADER)
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.dump({"rounds": {str(number): entry.model_dump() for number, entry in rounds.items()}}, file)
    aside.replace(path)


def read_round_stages(number: int, root: Path = Path()) -> dict[str, dict[str, Any]]:
    """The stages of one round by name (`sample_round@1`), with `${key}` and `${item...}` replaced as DVC's foreach does."""
    entry = read_yaml(root / ROUNDS_FILE)["rounds"][str(number)]
    text = fill_in((root / ROUNDS_PIPELINE).read_text(encoding="utf-8"), {"key": str(number), "item": entry, "rounds": "rounds"})
    return {f"{name}@{number}": stage["do"] for name, stage in YAML(typ="safe", pure=True).load(text)["stages"].items()}


def prompts_hash(ids: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()
