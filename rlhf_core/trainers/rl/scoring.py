"""Every response's score by every scorer: reward models on the trainer ranks, the rest in an actor that may fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rlhf_core.config import ScorerConfig
from rlhf_core.engines.ray_actors import ActorGroup, RoleLost
from rlhf_core.models.tokenizer import load_tokenizer, stop_ids
from rlhf_core.scorers.members import combine_members
from rlhf_core.scorers.reasons import Reasons
from rlhf_core.scorers.reward_input import RewardModelInput, without_stop
from rlhf_core.scorers.text import ScoreItem, score_item
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.types import Rollout, ScoredRollout

DISAGREEMENT = "disagreement"  # of an ensemble: the members' standard deviation, in units of the raw score

log = logging.getLogger("rlhf")


@dataclass
class ScorerMetrics:
    """What scorers measured beside their scores, over all their calls of a step: <scorer>.<name>, weighted by the responses of a call."""

    _sums: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, scorer: str, metrics: dict[str, float], *, count: int) -> None:
        for name, value in metrics.items():
            key = f"{scorer}.{name}"
            self._sums[key] = self._sums.get(key, 0.0) + count * value
            self._counts[key] = self._counts.get(key, 0) + count

    def means(self) -> dict[str, float]:
        return {name: self._sums[name] / self._counts[name] for name in sorted(self._sums)}


class Scoring:
    """Raises RoleLost where a trainer fails: that ends the run.

    Text scorers whose process dies or is late get a new one, which is asked again, at most once a call; one that fails then too, or says
    no, only has no scores for these responses.
    """

    def __init__(self, job: RlJob, trainers: ActorGroup, replacements: Replacements):
        self._job, self._trainers, self._replacements = job, trainers, replacements
        trust = job.model.trust_remote_code
        self._tokenizer = load_tokenizer(job.sft_model, trust_remote_code=trust)
        self._stops = stop_ids(self._tokenizer, job.sft_model)
        self._inputs = {
            name: RewardModelInput(
                self._tokenizer,
                load_tokenizer(folder, trust_remote_code=trust, template_date=job.model.template_date, scores=True),
                max_length=job.model.max_length,
                stops=self._stops,
                report=Reasons(name),
            )
            for name, folder in job.scorer_models.items()
        }
        self._text_configs = [s for s in job.rl.reward.scorers if s.kind != "reward_model"]
        self._text = self._start_text_scorers() if self._text_configs else None

    def close(self) -> None:
        if self._text is not None:
            self._text.close()

    def score(
        self, rollouts: Sequence[Rollout], metrics: ScorerMetrics | None = None, *, meanwhile: Callable[[], None] = lambda: None
    ) -> list[ScoredRollout]:
        """Raw scores by every scorer, in their order; NaN: it couldn't. What else they measure is added to `metrics`.

        Args:
            meanwhile: called once the reward models are at work; the trainer ranks do what it asks of them after that.
        """
        shards = [list(range(len(rollouts)))[rank :: len(self._trainers)] for rank in range(len(self._trainers))]
        running = {name: self._submit(name, rollouts, shards) for name in self._inputs}
        meanwhile()
        items = self._items(rollouts) if self._text_configs else []
        found = {config.name: self._by_text(config, items, metrics) for config in self._text_configs}
        order = torch.argsort(torch.tensor([i for shard in shards for i in shard]))
        for name, references in running.items():
            answers = self._trainers.wait(references, deadline=self._job.rl.deadlines.step, what=f"score by {name}")
            found[name] = self._combined(name, torch.cat(answers)[order], metrics)
        names = [s.name for s in self._job.rl.reward.scorers]
        return [ScoredRollout(rollout, {name: found[name][i] for name in names}) for i, rollout in enumerate(rollouts)]

    def _combined(self, name: str, scores: torch.Tensor, metrics: ScorerMetrics | None) -> list[float]:
        """A reward model's scores from its members' [N, members]; how far they disagree is measured."""
        (config,) = (s for s in self._job.rl.reward.scorers if s.name == name)
        combined, std = combine_members(scores, std_coef=config.std_coef)
        known = std[std.isfinite()]
        if metrics is not None and config.members > 1 and len(known):
            metrics.add(name, {DISAGREEMENT: float(known.mean())}, count=len(known))
        return combined.tolist()

    def _submit(self, name: str, rollouts: Sequence[Rollout], shards: list[list[int]]) -> list:
        """Dealt out in turn, so that each rank gets its share of long and short ones."""
        inputs = self._inputs[name].sequences((r.prompt, r.response_ids, r.finished) for r in rollouts)
        return self._trainers.submit("score", [(name, [inputs[i] for i in shard]) for shard in shards])

    def _items(self, rollouts: Sequence[Rollout]) -> list[ScoreItem]:
        said = [without_stop(r.response_ids, self._stops, finished=r.finished) for r in rollouts]
        texts = self._tokenizer.batch_decode(said, skip_special_tokens=True)
        return [
            score_item(r.prompt, text, finished=r.finished, response_length=len(r.response_ids))
            for r, text in zip(rollouts, texts, strict=True)
        ]

    def _by_text(self, config: ScorerConfig, items: list[ScoreItem], metrics: ScorerMetrics | None) -> list[float]:
        for again in (True, False):
            try:
                scores, measured = self._text.attempt("score", config.name, items, deadline=config.timeout)
            except RoleLost as lost:
                self._text.replace([0])
                if again and lost.ranks and self._replacements.allow(lost):
                    continue
                log.warning("scorer %s: expected scores of %d responses, got none (%s); they are unscored", config.name, len(items), lost)
                return [math.nan] * len(items)
            break
        if metrics is not None:
            metrics.add(config.name, measured, count=len(items))
        return scores

    def _start_text_scorers(self) -> ActorGroup:
        job = self._job
        group = ActorGroup(
            "scorer",
            "rlhf_core.scorers.text:TextScorers",
            1,
            cpus=0,
            gpus=0,
            threads=1,
            start_deadline=job.rl.deadlines.start,
            kwargs={"configs": self._text_configs, "source_judges": job.source_judges},
        )
        group.wait_ready()
        return group
