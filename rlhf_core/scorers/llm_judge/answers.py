"""A judge's answers on disk, by the content of the question: none is asked for twice in a run, and the budget holds over restarts."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config import ScorerConfig, number_of


@dataclass(frozen=True)
class JudgeAnswer:
    """What a judge answered.

    text: of its message; None: it refused. ended: its finish_reason. input_tokens, output_tokens: by the service's `usage`. model: that the
    service says it is.
    """

    text: str | None
    ended: str
    input_tokens: int
    output_tokens: int
    model: str


class BudgetSpent(ValueError):
    """A judge's budget is used up. Its answers are kept, so that nothing is asked again after the budget is raised."""


def question_key(request: dict[str, Any], url: str) -> str:
    """Return a hash of all that an answer depends on."""
    return hashlib.sha256(json.dumps([url, request], sort_keys=True).encode()).hexdigest()[:32]


class JudgeAnswers:
    """The file of one scorer's answers, a line of JSON each, which several processes may append to.

    Args:
        folder: of the files, `rlhf_core.paths.JUDGE_ANSWERS` of a run.
    """

    def __init__(self, config: ScorerConfig, folder: Path):
        of = hashlib.sha256(json.dumps([config.url, config.model]).encode()).hexdigest()[:8]
        self.path = folder / f"{config.name}-{of}.jsonl"
        self._config, self._known, self._read_to = config, {}, 0
        self.input_tokens = self.output_tokens = 0  # of all answers, lost repetitions among them

    def refresh(self) -> None:
        """Read what this or another process has appended. A last line that is incomplete is left for later, a broken one is left out."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read_to)
                content = file.read()
        except FileNotFoundError:
            return
        lines = content[: content.rfind(b"\n") + 1]
        self._read_to += len(lines)
        for line in filter(None, lines.split(b"\n")):
            try:
                tree = json.loads(line)
                self._take(tree.pop("key"), JudgeAnswer(**tree))
            except (ValueError, TypeError, KeyError, AttributeError):  # written by a process that was killed
                continue

    def _take(self, key: str, answer: JudgeAnswer) -> None:
        self._known.setdefault(key, answer)
        self.input_tokens += answer.input_tokens
        self.output_tokens += answer.output_tokens

    def find(self, key: str) -> JudgeAnswer | None:
        return self._known.get(key)

    def keep(self, key: str, answer: JudgeAnswer) -> JudgeAnswer:
        """Append an answer. Returns that which is known from then on: the first one to this question."""
        line = f"\n{json.dumps({'key': key, **asdict(answer)})}\n".encode()  # a killed process may have left a line without its end
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if os.write(file, line) < len(line):
                raise OSError(f"{self.path}: expected room for an answer, got a full disk")
        finally:
            os.close(file)
        self.refresh()
        return self._known[key]

    @property
    def cost(self) -> float:
        return self.cost_of(self.input_tokens, self.output_tokens)

    def cost_of(self, input_tokens: int, output_tokens: int) -> float:
        """In the currency of the scorer's prices; 0 without them."""
        prices = self._config.prices
        return 0.0 if prices is None else (prices.input * input_tokens + prices.output * output_tokens) / 1e6

    def check_budget(self) -> None:
        """Raises: BudgetSpent."""
        config, tokens = self._config, self.input_tokens + self.output_tokens
        for key, limit, spent in (("budget_tokens", config.budget_tokens, tokens), ("budget_cost", config.budget_cost, self.cost)):
            if limit is not None and spent >= limit:
                raise BudgetSpent(
                    f"scorer {config.name}: expected to judge within {key}={limit:g}, got {self.spent()} so far; raise it and run again, "
                    f"which takes these answers from {self.path}, or use fewer samples"
                )

    def spent(self) -> str:
        cost = "" if self._config.prices is None else f", {self.cost:.4g} by its prices"
        return f"{number_of(self.input_tokens + self.output_tokens, 'token')} ({self.output_tokens:,} of answers){cost}"
