"""Scorers of RL: reward models on the trainer ranks, the others in an actor that may fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch

from rlhf_core.config import ScorerConfig
from rlhf_core.engines.ray.actors import ActorGroup, RoleLost
from rlhf_core.paths import JUDGE_ANSWERS
from rlhf_core.sampling.scoring import Scorers
from rlhf_core.scorers.llm_judge.answers import BudgetSpent
from rlhf_core.scorers.text import ScoreItem
from rlhf_core.trainers.rl.groups import TrainerGroup
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.trainers.rl.turns import GpuTimeSharing

log = logging.getLogger("rlhf")


class ActorScorers(Scorers):
    """Scorers in Ray actors, each call with a deadline.

    A text-scorer actor that dies or is late is replaced, and its call repeated once. If the second call fails too, or no replacement is
    left, these responses have no score.

    Raises:
        RoleLost: a trainer rank fails. The run ends.
        BudgetSpent: of a judge. The run ends, and another takes the answers from the disk.
    """

    def __init__(self, job: RlJob, ranks: TrainerGroup | None, replacements: Replacements, turns: GpuTimeSharing):
        super().__init__(job.rl.reward.scorers, {name: Path(folder) for name, folder in job.scorer_models.items()}, job.model)
        self._ranks, self._replacements, self._deadline = ranks, replacements, job.rl.deadlines.step
        self._turns = turns
        by_text = [config for config in self.configs if config.kind != "reward_model"]
        self._text_scorers: ActorGroup | None = None
        if by_text:
            self._text_scorers = ActorGroup(
                "scorer",
                "rlhf_core.scorers.text:TextScorers",
                1,
                cpus=0,
                threads=1,
                start_deadline=job.rl.deadlines.start,
                kwargs={
                    "configs": by_text,
                    "source_judges": job.source_judges,
                    "in_time": True,
                    "answers": Path(job.work).parents[1] / JUDGE_ANSWERS.name,  # job.work is a folder of a stage's in scratch
                },
            )
            self._text_scorers.wait_ready()

    @property
    def groups(self) -> list[ActorGroup]:
        """The actors that aren't the trainer's."""
        return [] if self._text_scorers is None else [self._text_scorers]

    def close(self) -> None:
        for group in self.groups:
            group.close()

    def submit_sequences(
        self, name: str, sequences: list[list[int] | None], ends: torch.Tensor | None = None
    ) -> Callable[[], torch.Tensor]:
        """Sequences are dealt out in turn, so that each rank gets its share of long and short ones."""
        self._turns.trainers()
        group = self._ranks
        size = group.trainer.data_parallel_size
        shards = [list(range(len(sequences)))[number::size] for number in range(size)]
        calls = [(name, [sequences[i] for i in shard], None if ends is None else ends[shard]) for shard in shards]
        pending = group.submit("score_by_reward_model", group.trainer.of_ranks(calls))
        order = torch.argsort(torch.tensor([i for shard in shards for i in shard]))

        def scores() -> torch.Tensor:
            found = group.wait(pending, deadline=self._deadline, what=f"score by {name}")
            return torch.cat(group.trainer.of_groups(found))[order]

        return scores

    def score_texts(self, config: ScorerConfig, items: list[ScoreItem]) -> tuple[list[float], dict[str, float]]:
        for can_retry in (True, False):
            try:
                return self._text_scorers.call_only("score_items", config.name, items, deadline=config.deadline)
            except RoleLost as lost:
                if isinstance(lost.cause, BudgetSpent):
                    raise lost.cause from lost
                self._text_scorers.replace([0])
                if can_retry and lost.ranks and self._replacements.allow(lost):
                    continue
                log.warning("scorer %s: expected scores of %d responses, got none (%s); they are unscored", config.name, len(items), lost)
                break
        return [math.nan] * len(items), {}
