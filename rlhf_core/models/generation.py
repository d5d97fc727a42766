"""Responses drawn from a model in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rlhf_core.algorithms.logprobs import left_logits
from rlhf_core.models.decoding import Decoder
from rlhf_core.sampling.requests import Sample, SamplingSettings

KEPT_PART = 0.8  # with no more than this part of the sequences still growing, the others are dropped from the batch


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    settings: SamplingSettings,
    *,
    stop_ids: Sequence[int],
    group_size: int,
    max_length: int,
    stops: Callable[[list[int], int], bool] | None,
    device: torch.device,
) -> list[list[Sample]]:
    """`group_size` responses to each prompt, in order, all at the same time.

    Args:
        seeds: of each prompt: they alone decide what is drawn, up to rounding, which depends on what is drawn beside it.
        stop_ids: tokens of which each ends a response. None of them is drawn before `settings.min_new_tokens`, as with vLLM.
        max_length: tokens of prompt and response together.
        stops: of a response's ids, whether a stop string ends in those after the first so many; None: there are no such strings.
    """
    room = min(settings.max_new_tokens, max_length - min(map(len, prompts)))
    limits = torch.tensor([max_length - len(p) for p in prompts]).clamp(max=room).repeat_interleave(group_size)
    uniforms = _uniforms(seeds, group_size, settings.max_new_tokens).to(device)
    count = len(limits)
    drawn_ids, drawn_logprobs = torch.zeros(count, room, dtype=torch.long), torch.zeros(count, room)
    lengths, finished = limits.clone(), torch.zeros(count, dtype=torch.bool)
    ends = torch.tensor(stop_ids)
    rows, growing = torch.arange(count), torch.ones(count, dtype=torch.bool)  # of the batch as it is now
    logits = decoder.begin(list(prompts), copies=group_size, room=room, max_length=max_length)
    for position in range(room):
        forbidden = stop_ids if position < settings.min_new_tokens else ()
        ids, logprobs = draw(logits, uniforms[rows.to(device), position], settings, forbidden=forbidden)
        drawn_ids[rows, position], drawn_logprobs[rows, position] = ids.cpu(), logprobs.cpu()
        ended = torch.isin(ids.cpu(), ends)
        if stops is not None and position >= settings.min_new_tokens:
            so_far, first = drawn_ids[rows, : position + 1].tolist(), settings.min_new_tokens
            ended |= torch.tensor([g and stops(ids_, first) for g, ids_ in zip(growing.tolist(), so_far, strict=True)])
        lengths[rows[growing & ended]] = position + 1
        finished[rows[growing & ended]] = True
        growing = growing & ~ended & (limits[rows] > position + 1)
        if not growing.any():
            break
        if int(growing.sum()) <= KEPT_PART * len(rows):
            chosen = growing.nonzero().squeeze(-1)
            decoder.keep(chosen.to(device))
            rows, growing, ids = rows[chosen], growing[chosen], ids[chosen.to(device)]
        logits = decoder.step(ids)
    decoder.end()
    return _samples(drawn_ids, drawn_logprobs, lengths, finished, group_size=group_size)


def draw(
    logits: torch.Tensor, uniforms: torch.Tensor, settings: SamplingSettings, *, forbidden: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row, by the inverse of the cumulative distribution, and its log-probability in what it was drawn from.

    Args:
        logits: [B, V].
        uniforms: [B] float64, in [0, 1).
        forbidden: ids that have no probability.
    Returns:
        [B] int64; [B] float32.
    """
    if forbidden:
        logits = logits.index_fill(-1, torch.tensor(tuple(forbidden), device=logits.device), -torch.inf)
    left = left_logits(logits, temperature=settings.temperature or 1.0, top_k=settings.top_k, top_p=settings.top_p)
    logprobs = left.log_softmax(-1)
    if settings.temperature == 0:
        ids = logprobs.argmax(-1, keepdim=True)
    else:
        cumulative = logprobs.exp().double().cumsum(-1)
        ids = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
        # Of logits that aren't finite: the log-probability is NaN then, and the trainer refuses that in words.
        ids = ids.clamp(max=logits.shape[-1] - 1)
    return ids.squeeze(-1), logprobs.gather(-1, ids).squeeze(-1)


def _uniforms(seeds: Sequence[int], group_size: int, tokens: int) -> torch.Tensor:
    """[prompts x group_size, tokens], of each prompt by its own seed."""
    return torch.from_numpy(np.concatenate([np.random.default_rng(seed).random((group_size, tokens)) for seed in seeds]))


def _samples(
    ids: torch.Tensor, logprobs: torch.Tensor, lengths: torch.Tensor, finished: torch.Tensor, *, group_size: int
) -> list[list[Sample]]:
    rows = zip(ids.tolist(), logprobs.tolist(), lengths.tolist(), finished.tolist(), strict=True)
    samples = [Sample(i[:n], p[:n], f) for i, p, n, f in rows]
    return [samples[k : k + group_size] for k in range(0, len(samples), group_size)]
