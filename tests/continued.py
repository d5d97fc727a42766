"""Responses that an engine samples in parts, with other weights for each part."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_core.engines.rollout.requests import SamplingSettings, request_seeds
from rlhf_core.models.weights import checkpoint_names
from rlhf_core.trainers.rl.ahead import begun, extended, request
from rlhf_core.types import Prompt, Rollout


def drawn_in_parts(
    engine: Any,
    models: list[PreTrainedModel],
    prompts: list[list[int]],
    settings: SamplingSettings,
    *,
    stop_ids: tuple[int, ...],
    least: int,
) -> list[Rollout]:
    """A response to each prompt: with each model's weights in turn at least so many tokens, with the last ones to its end. The version of a
    span is the number of its model.
    """
    rollouts = begun([Prompt(str(i), "made", [], ids, None) for i, ids in enumerate(prompts)], 1)
    seeds = request_seeds(3, 0, len(prompts))
    for version, model in enumerate(models):
        engine.load_weights(checkpoint_names(model, model.state_dict()), version)
        places = [i for i, r in enumerate(rollouts) if not r.finished and r.num_sampled < settings.max_new_tokens]
        requests = [request(rollouts[i], seeds[i], settings.max_new_tokens - rollouts[i].num_sampled) for i in places]
        is_last = version == len(models) - 1
        samples = engine.advance(requests, settings, len(requests) if is_last else 0, stop_ids=stop_ids, least=least)
        for i, sample in zip(places, samples, strict=True):
            rollouts[i] = extended(rollouts[i], sample)
    return rollouts


@torch.no_grad()
def span_differences(models: list[PreTrainedModel], rollouts: list[Rollout], *, first: int = 0) -> list[float]:
    """Of each span: its log-probabilities' largest difference from those of its model.

    Args:
        first: so many tokens of each response don't count.
    """
    found = []
    for rollout in rollouts:
        ids, start = torch.tensor([[*rollout.prompt.prompt_ids, *rollout.response_ids]]), 0
        for span in rollout.spans:
            logits = models[span.version](input_ids=ids, use_cache=False).logits[0, len(rollout.prompt.prompt_ids) - 1 : -1]
            logprobs = logits.float().log_softmax(-1).gather(-1, torch.tensor(rollout.response_ids)[:, None]).squeeze(-1)
            apart = (logprobs[start : start + len(span.ids)] - torch.tensor(span.logprobs)).abs()[max(0, first - start) :]
            found.append(float(apart.max()) if len(apart) else 0.0)
            start += len(span.ids)
    return found
