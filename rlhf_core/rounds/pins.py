"""Reads and writes rounds/rounds.yaml, which pins the inputs of each round of iterative DPO.

An entry holds the hashes of the round's inputs. With them a round can be rebuilt, and stages refuse other inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from rlhf_core.config import ConfigError, Section, fill_in, read_yaml, read_yaml_text
from rlhf_core.files import replacing
from rlhf_core.paths import ROUNDS_FILE, ROUNDS_PIPELINE
from rlhf_core.provenance.file_hashes import dvc_md5

_HEADER = """\
# The inputs of each round of iterative DPO with DVC's hashes; rounds/dvc.yaml makes a round's stages from its entry.
# The flow iterative-dpo appends entries (docs/iterative_dpo.md). Each series of rounds has its own worktree, runs/<series>.
"""


class Pin(Section):
    """A file or folder and its md5 as dvc.lock has it."""

    path: str
    md5: str


class PromptsPin(Section):
    """The training prompts of a round: positions in the order of rlhf_core.rounds.data, and `prompts_hash` of the ids."""

    first: int
    count: int
    sha256: str


class BudgetPin(Section):
    """The part of the error budget that a round's comparison may spend (rlhf_core/rounds/promotion.py).

    comparison: number among all that improve the same model, from 1; a round whose data is refused makes no comparison. level: the largest
    p-value that accepts. spent: sum of the levels of earlier comparisons that accepted nothing.
    """

    comparison: int
    level: float
    spent: float


class Round(Section):
    """The inputs of a round.

    origin: model that the first round started from. policy: model that this round samples from, starts from and is compared with.
    reward_models: by the scorer's name.
    """

    origin: Pin
    policy: Pin
    reward_models: dict[str, Pin]
    gate: Pin
    prompts: PromptsPin
    budget: BudgetPin

    def check(self, number: int, root: Path = Path()) -> None:
        """Check that the files on disk match the pins.

        Raises:
            ValueError: a file is missing or has other content.
        """
        for pin in (self.origin, self.policy, self.gate, *self.reward_models.values()):
            path = root / pin.path
            found = dvc_md5(path) if path.exists() else "nothing"
            if found != pin.md5:
                raise ValueError(
                    f"{pin.path}: expected what round {number} began with, md5 {pin.md5}, got {found}; restore it with `dvc checkout` "
                    "or `dvc repro`, or begin another series"
                )


def read_rounds(root: Path = Path()) -> dict[int, Round]:
    """Return all rounds by number, from 1.

    Raises:
        ConfigError: the file is malformed, or its rounds have no error budget.
    """
    tree = read_yaml(root / ROUNDS_FILE).get("rounds")
    entries = tree.values() if isinstance(tree, dict) else ()
    if any(isinstance(entry, dict) and "prompts" in entry and "budget" not in entry for entry in entries):
        raise ConfigError(
            f"{ROUNDS_FILE}: expected the error budget of each round's comparison, got rounds that were judged without one; begin another "
            "series with --series NAME, from the last policy of this one with iterative.start=registry (docs/iterative_dpo.md)"
        )
    try:
        found = {int(number): Round.model_validate(entry) for number, entry in (tree or {}).items()}
    except (ValueError, AttributeError, ValidationError) as error:
        raise ConfigError(f"{ROUNDS_FILE}: expected an entry for each round, got: {error}; restore it with git") from error
    rounds = dict(sorted(found.items()))  # the file is sorted by text, 10 before 2
    if list(rounds) != list(range(1, len(rounds) + 1)):
        raise ConfigError(f"{ROUNDS_FILE}: expected rounds 1, 2, 3 and so on, got {list(rounds)}; restore it with git")
    return rounds


def read_round(number: int) -> Round:
    """Return the pinned inputs of one round."""
    rounds = read_rounds()
    if number not in rounds:
        raise ConfigError(
            f"{ROUNDS_FILE}: expected an entry for round {number}, got {list(rounds) or 'none'}; the flow iterative-dpo adds it"
        )
    return rounds[number]


def write_rounds(rounds: dict[int, Round], root: Path = Path()) -> None:
    """Replace the file atomically."""
    with replacing(root / ROUNDS_FILE) as aside, aside.open("w", encoding="utf-8") as file:
        file.write(_HEADER)
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.dump({"rounds": {str(number): entry.model_dump() for number, entry in rounds.items()}}, file)


def read_round_stages(number: int, root: Path = Path()) -> dict[str, dict[str, Any]]:
    """Return the stages of one round by name (`sample_round@1`), with `${key}` and `${item...}` filled in as by DVC's foreach."""
    entry = read_yaml(root / ROUNDS_FILE)["rounds"][str(number)]
    text = fill_in((root / ROUNDS_PIPELINE).read_text(encoding="utf-8"), {"key": str(number), "item": entry, "rounds": "rounds"})
    return {f"{name}@{number}": stage["do"] for name, stage in read_yaml_text(text, str(ROUNDS_PIPELINE))["stages"].items()}


def prompts_hash(ids: Sequence[str]) -> str:
    """Return the sha256 that identifies a round's prompt ids."""
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()
