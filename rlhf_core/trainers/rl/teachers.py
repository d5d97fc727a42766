"""Teachers of rl.distillation on a trainer rank: frozen models whose distribution at the sampled tokens the policy learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from rlhf_core.config import DistillationConfig
from rlhf_core.engines.deepspeed.frozen import FrozenModel
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.divergence import Divergence, Projection, Target


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


@torch.no_grad()
def teacher_logprobs(teachers: Sequence[Teacher], batch: TokenBatch, *, temperature: float) -> torch.Tensor:
    """[N], log-probabilities of the selected tokens, their mean over the teachers by weight; every teacher is in use."""
    return sum(t.weight * t.model.module(batch, temperature=temperature).logprobs.float() for t in teachers)


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
