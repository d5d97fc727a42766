"""Sampling settings as vLLM's parameters, and its outputs as samples."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_core.engines.rollout.requests import Request, Sample, SamplingSettings, stop_finder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import CompletionOutput, SamplingParams


def sampling_parameters(settings: SamplingSettings, seed: int, *, stop_ids: tuple[int, ...], **changes: Any) -> SamplingParams:
    """Return the parameters of one request, which asks for the log-probability of each token."""
    from vllm import SamplingParams

    arguments = dict(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k or 0,
        max_tokens=settings.max_new_tokens,
        min_tokens=settings.min_new_tokens,
        stop_token_ids=list(stop_ids),
        stop=list(settings.stop) or None,
        include_stop_str_in_output=True,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(settings.stop),
        skip_clone=True,  # each belongs to one request, so vLLM's deep copies aren't needed
    )
    return SamplingParams(**arguments | changes)


def continued_parameters(request: Request, settings: SamplingSettings, *, stop_ids: tuple[int, ...], **changes: Any) -> SamplingParams:
    """Return the parameters for continuing a response behind the tokens that it has."""
    fewest = max(0, settings.min_new_tokens - len(request.given))
    return sampling_parameters(settings, request.seed, stop_ids=stop_ids, max_tokens=request.limit, min_tokens=fewest, **changes)


def sample_of(output: CompletionOutput | None, version: int) -> Sample:
    """Return a sample from vLLM's output; None: the request hasn't begun."""
    if output is None:
        return Sample([], [], False, version)
    return Sample(list(output.token_ids), list(output.logprobs.logprobs), output.finish_reason == "stop", version)


def at_stop(request: Request, sample: Sample, settings: SamplingSettings, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Return the sample up to the end of a stop string that began in the tokens before: vLLM looks for stop strings in the new text
    only.
    """
    stops, longest = stop_finder(tokenizer, settings.stop), max(map(len, settings.stop))
    for end in range(1, len(sample.response_ids) + 1 if request.given else 1):
        ids = sample.response_ids[:end]
        if stops([*request.given, *ids], settings.min_new_tokens):
            return replace(sample, response_ids=ids, logprobs=sample.logprobs[:end], finished=True)
        if len(tokenizer.decode(ids, skip_special_tokens=True)) >= longest:
            break
    return sample
