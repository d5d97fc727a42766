"""Log-likelihoods of continuations by a language model, and whether greedy decoding would write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlhf_core.algorithms.logprobs import token_logprobs
from rlhf_core.config import Params
from rlhf_core.engines.deepspeed.engine import device, most_over_ranks, release_memory
from rlhf_core.engines.deepspeed.frozen import FrozenModel
from rlhf_core.engines.deepspeed.ranks import in_shares, world_size
from rlhf_core.models.batch import TokenBatch, collate_tokens
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.progress import Bar
from rlhf_core.scorers.reward.model import MICROBATCH_TOKENS

if TYPE_CHECKING:
    from rlhf_core.harness.model import Pair

ROWS = 512  # tokens whose logits exist at a time


def score_pairs(folder: Path, pairs: list[Pair], *, pad_id: int, params: Params) -> list[tuple[float, bool]]:
    """Return the log-likelihood of each continuation in nats, and whether each of its tokens is the most likely one.

    Ranks share the pairs. The model is loaded for this call, and divided over ranks as `cluster.inference_ranks_per_model` says.
    """
    release_memory()
    collective = params.cluster.inference_ranks_per_model > 1
    model = load_language_model(folder, trust_remote_code=params.model.trust_remote_code, training_dtype=params.model.dtype)
    held = FrozenModel(PolicyModule(model), dtype=params.model.dtype, zero_stage=3 if collective else 0, offload=False)
    # Every rank makes as many passes where they are collectives.
    padding = -len(pairs) % world_size() if collective else 0
    items = [pairs[i % len(pairs)] for i in range(len(pairs) + padding)]
    try:
        return in_shares(items, lambda part: _own(held, part, pad_id=pad_id, collective=collective))[: len(pairs)]
    finally:
        held.close()


@torch.no_grad()
def _own(held: FrozenModel, pairs: list[Pair], *, pad_id: int, collective: bool) -> list[tuple[float, bool]]:
    sequences = [[*context, *continuation] for context, continuation in pairs]
    found: dict[int, tuple[float, bool]] = {}
    project = held.module.projection(held.whole)

    def forward(part: list[int]) -> None:
        batch = collate_tokens([sequences[i] for i in part], [len(pairs[i][0]) for i in part], pad_id=pad_id).to(device())
        logprobs, greedy = selected(held.module, project, batch)
        sizes = [len(pairs[i][1]) for i in part]
        for i, of_one, best in zip(part, logprobs.split(sizes), greedy.split(sizes), strict=True):
            found[i] = (float(of_one.double().sum()), bool(best.all()))
        bar.reach(len(found))

    parts = held.module.backend.microbatches(sequences, max_tokens=MICROBATCH_TOKENS)
    if collective:
        parts += [parts[-1]] * (most_over_ranks(len(parts)) - len(parts))
    with Bar("continuation", len(pairs)) as bar:
        held.module.backend.map(forward, parts)
    return [found[i] for i in range(len(pairs))]


def selected(module: PolicyModule, project: Callable[[torch.Tensor], torch.Tensor], batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability [N] of each selected token, and whether it is the most likely one [N] bool, on the CPU."""
    states, ids = module(batch, states_only=True), batch.predictions()[2]
    logprobs, greedy = [], []
    for rows, of_rows in zip(states.split(ROWS), ids.split(ROWS), strict=True):
        logits = project(rows)
        logprobs.append(token_logprobs(logits, of_rows, temperature=1.0))
        greedy.append(logits.argmax(-1) == of_rows)
    return torch.cat(logprobs).cpu(), torch.cat(greedy).cpu()
