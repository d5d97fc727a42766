"""Teachers of rl.distillation on a trainer rank: frozen models whose distribution at the sampled tokens the policy learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from rlhf_core.config import DistillationConfig
from rlhf_core.engines.deepspeed.frozen import FrozenModel
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.divergence import Divergence, Projection, Target, TopTarget, likeliest
from rlhf_core.models.head import rows_at_a_time
from rlhf_core.types import TrainBatch


@dataclass(frozen=True)
class Teacher:
    """weight: share of all teachers' weights."""

    model: FrozenModel
    weight: float

    def target(self, batch: TokenBatch, logits: Projection) -> Target:
        """Return what the teacher computes for the selected tokens.

        Args:
            logits: of its head.
        """
        with torch.no_grad():
            return Target(self.model.module(batch, states_only=True), logits, self.weight)


class EarlyTeaching:
    """The teachers in the passes before the update.

    Args:
        teachers: in use; with top_k sharded ones' heads are gathered here, so that every rank makes this.
        vocabulary: ids that the policy has.
    """

    def __init__(self, teachers: Sequence[Teacher], top_k: int | None, *, vocabulary: int, temperature: float):
        self._teachers, self._top_k, self._vocabulary, self._temperature = teachers, top_k, vocabulary, temperature
        self._logits = [teacher.model.module.projection(teacher.model.whole) for teacher in teachers] if top_k else []

    @torch.no_grad()
    def outputs(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """Outputs for the selected tokens, by name: teacher_logprobs [N], the mean over the teachers by weight; or, with top_k,
        teacher_top_logprobs and teacher_top_ids [N, M, K].
        """
        if not self._top_k:
            how = {"temperature": self._temperature}
            return {"teacher_logprobs": sum(t.weight * t.model.module(batch, **how).logprobs.float() for t in self._teachers)}
        found = [self._likeliest(teacher, logits, batch) for teacher, logits in zip(self._teachers, self._logits, strict=True)]
        logprobs, ids = (torch.stack(of_each, 1) for of_each in zip(*found, strict=True))
        return {"teacher_top_logprobs": logprobs, "teacher_top_ids": ids}

    def _likeliest(self, teacher: Teacher, logits: Projection, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        states, size = teacher.model.module(batch, states_only=True), rows_at_a_time(self._vocabulary)
        pieces = [slice(first, first + size) for first in range(0, len(states), size)]
        return likeliest(states, logits, pieces, count=self._top_k, vocabulary=self._vocabulary, temperature=self._temperature)


def divergence_of_top(batch: TrainBatch, config: DistillationConfig) -> Divergence:
    """Return the divergence from the teachers' likeliest tokens at the trained tokens of a micro-batch."""
    mask, weights = batch.response_mask, config.early_weights
    logprobs, ids = batch.teacher_top_logprobs[mask], batch.teacher_top_ids[mask]
    targets = [TopTarget(logprobs[:, n], ids[:, n], weight) for n, weight in enumerate(weights)]
    return Divergence(config.loss, config.options, targets)


class Teaching:
    """The teachers in an update, in which they compute beside the policy.

    Args:
        teachers: in use; sharded ones' heads are gathered here, so that every rank makes this.
    """

    def __init__(self, teachers: Sequence[Teacher], config: DistillationConfig):
        self._config = config
        self._teachers = [(teacher, teacher.model.module.projection(teacher.model.whole)) for teacher in teachers]

    def divergence(self, batch: TokenBatch) -> Divergence:
        """Return the divergence from the teachers at the selected tokens of a micro-batch."""
        targets = [teacher.target(batch, logits) for teacher, logits in self._teachers]
        return Divergence(self._config.loss, self._config.options, targets)


@contextmanager
def in_use(models: Sequence[FrozenModel]) -> Iterator[None]:
    """All of these models with their weights on the device that computes."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.in_use())
        yield
