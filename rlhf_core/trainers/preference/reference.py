"""Log-probabilities under the reference, the model that training started from: computed once before training, live, or not at all."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from rlhf_core.engines.deepspeed_engine import device
from rlhf_core.models.forward import PolicyModule
from rlhf_core.progress import Bar
from rlhf_core.trainers.preference.data import Continuation, PromptGroup, ResponseForward

log = logging.getLogger("rlhf")

# From a micro-batch to the log-probabilities [items] of its responses, summed over their tokens.
Reference = Callable[[list[PromptGroup]], torch.Tensor]


def no_reference(part: list[PromptGroup]) -> torch.Tensor:
    """For losses that don't look at it."""
    return torch.zeros(sum(len(group.items) for group in part), device=device())


def live_reference(module: nn.Module, forward: ResponseForward) -> Reference:
    """A forward pass of the frozen module for each micro-batch."""

    @torch.no_grad()
    def look(part: list[PromptGroup]) -> torch.Tensor:
        return forward.logprobs(module, part)

    return look


def precomputed_reference(
    make_module: Callable[[], PolicyModule], items: Iterable[Continuation], forward: ResponseForward, *, path: Path
) -> Reference:
    """All distinct items through the frozen module once, kept in `path`; a file that holds just these items is read instead.

    Args:
        make_module: called only if there is something to compute.
        path: in a folder that no other model's work shares: the file knows its items and not its model.
    """
    distinct = list(dict.fromkeys(items))
    table = dict(zip(distinct, _load(path, distinct, lambda: _compute(make_module(), distinct, forward)).tolist(), strict=True))

    def look(part: list[PromptGroup]) -> torch.Tensor:
        return torch.tensor([table[item] for group in part for item in group.items], device=device())

    return look


def _load(path: Path, items: list[Continuation], compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    digest = _digest(items)
    if path.exists():
        kept = torch.load(path, weights_only=True)
        if kept["items"] == digest:
            log.info("reference: going on with the log-probabilities of %d responses from an earlier start", len(items))
            return kept["logprobs"]
    logprobs = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    torch.save({"items": digest, "logprobs": logprobs}, aside)
    aside.replace(path)
    return logprobs


def _digest(items: list[Continuation]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()


@torch.no_grad()
def _compute(module: PolicyModule, items: list[Continuation], forward: ResponseForward) -> torch.Tensor:
    """Summed log-probabilities [items], on the CPU."""
    sums = torch.zeros(len(items))
    with Bar("response of the reference", len(items)) as bar:

        def forward_part(part: list[PromptGroup]) -> None:
            positions = [i for group in part for i in group.positions]
            sums[positions] = forward.logprobs(module, part).float().cpu()
            bar.step(len(positions))

        module.backend.map(forward_part, forward.microbatches(items))
    return sums
