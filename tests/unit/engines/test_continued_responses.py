"""Responses that PyTorch's engine samples in parts, and where a part ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from continued import drawn_in_parts, span_differences
from transformers import PreTrainedModel

from rlhf_core.engines.rollout.pytorch_engine import PytorchEngine
from rlhf_core.engines.rollout.requests import Request, Sample, SamplingSettings, segment_seed
from rlhf_core.engines.vllm.parameters import at_stop
from rlhf_core.models.build import load_language_model
from rlhf_core.types import Rollout
from tests.unit.engines.test_pytorch_engine import EOS, MODELS, PROMPTS, engine, llama

NEW = 24
PLAIN = SamplingSettings(NEW, 1.0)


def versions(folder: Path, count: int = 3) -> list[PreTrainedModel]:
    """The model and others whose weights are far from its."""
    models = [load_language_model(folder) for _ in range(count)]
    for seed, model in enumerate(models[1:]):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return models


def drawn(folder: Path, settings: SamplingSettings = PLAIN, *, count: int = 3, least: int = 7, **changes) -> tuple[list, list[Rollout]]:
    models = versions(folder, count)
    how = {"stop_ids": (EOS,), "least": least}
    return models, drawn_in_parts(engine(folder, **changes), models, PROMPTS, settings, **how)


@pytest.mark.parametrize("name", MODELS)
def test_every_part_has_the_log_probabilities_of_its_weights(tmp_path, name):
    models, rollouts = drawn(MODELS[name](tmp_path))
    assert sum(len(r.spans) == 3 for r in rollouts) >= 4
    assert all([len(span.ids) for span in r.spans[:-1]] == [7] * (len(r.spans) - 1) for r in rollouts)
    assert all(r.finished == (r.response_ids[-1] == EOS) and (r.finished or r.num_sampled == NEW) for r in rollouts)
    assert max(span_differences(models, rollouts)) < 1e-4
    assert max(span_differences(models[1:] + models[:1], rollouts)) > 0.05  # the comparison can tell


def test_before_the_fewest_tokens_of_all_parts_together_no_response_ends(tmp_path):
    models, rollouts = drawn(llama(tmp_path), replace(PLAIN, min_new_tokens=10))
    assert EOS not in {t for r in rollouts for t in r.response_ids[:10]} and any(r.finished for r in rollouts)
    assert max(span_differences(models, rollouts, first=10)) < 1e-4 < 1e-3 < max(span_differences(models, rollouts))


def test_parts_have_other_random_numbers(tmp_path):
    """Of one policy: with the same numbers in each part, and little that a token depends on, responses would repeat themselves."""
    made = engine(llama(tmp_path))
    for parameter in made._model.model.parameters():
        parameter.data.zero_()  # every token is as likely as any other
    made.renew(0)
    first = made.advance([Request([5], [], segment_seed(9, 0), 40)], PLAIN, 0, stop_ids=(EOS,), least=8)[0].response_ids
    again = made.advance([Request([5], first, segment_seed(9, 8), 40)], PLAIN, 0, stop_ids=(EOS,), least=8)[0].response_ids
    assert len(first) == len(again) == 8 and sum(a == b for a, b in zip(first, again, strict=True)) <= 1
    repeated = made.advance([Request([5], first, segment_seed(9, 0), 40)], PLAIN, 0, stop_ids=(EOS,), least=8)[0].response_ids
    assert repeated == first


def lengths(made: PytorchEngine, *, due: int, least: int, limits: list[int] | None = None) -> list[int]:
    limits = limits or [NEW] * len(PROMPTS)
    requests = [Request(ids, [], 100 + i, limit) for i, (ids, limit) in enumerate(zip(PROMPTS, limits, strict=True))]
    samples = made.advance(requests, PLAIN, due, stop_ids=(EOS,), least=least)
    assert all(s.finished == (s.response_ids[-1:] == [EOS]) for s in samples)
    return [len(s.response_ids) for s in samples]


def test_sampling_stops_when_what_is_due_has_ended_and_enough_is_sampled(tmp_path):
    made = engine(llama(tmp_path))
    whole = lengths(made, due=len(PROMPTS), least=0)
    assert len(set(whole)) > 3 and max(whole) == NEW
    due = next(n for n in range(1, len(PROMPTS)) if 2 < max(whole[:n]) < NEW)
    until = max(whole[:due])
    for least in (0, until - 1, until + 3):
        assert lengths(made, due=due, least=least) == [min(length, max(until, least)) for length in whole]
    assert lengths(made, due=0, least=5) == [min(length, 5) for length in whole]
    assert lengths(made, due=0, least=0) == [0] * len(PROMPTS)
    assert made.advance([], PLAIN, 0, stop_ids=(EOS,), least=4) == []


def test_each_request_has_a_limit_of_its_own(tmp_path):
    made = engine(llama(tmp_path))
    whole, limits = lengths(made, due=len(PROMPTS), least=0), [1 + i for i in range(len(PROMPTS))]
    assert lengths(made, due=len(PROMPTS), least=0, limits=limits) == list(map(min, whole, limits))


@pytest.mark.parametrize("room", [1, 3, 5])
def test_what_has_no_room_in_a_batch_waits_behind_what_is_due(tmp_path, room):
    folder = llama(tmp_path)
    whole, made = lengths(engine(folder), due=len(PROMPTS), least=0), engine(folder, max_concurrent_sequences=room)
    assert lengths(made, due=len(PROMPTS), least=0) == whole
    found = lengths(made, due=4, least=0)
    assert found[:4] == whole[:4] and found.count(0) >= len(PROMPTS) - 4 - room


@pytest.mark.parametrize("fewest", [0, 14])
def test_a_stop_string_across_two_parts_ends_a_response(tmp_path, fewest):
    """Of PyTorch's engine, which sees all of it; and of vLLM's, which sees new text only, what it has sampled is cut there."""
    made = engine(llama(tmp_path), reads_text=True)
    decode, settings = made._tokenizer.decode, replace(PLAIN, min_new_tokens=fewest)

    def sampled(request: Request, settings: SamplingSettings) -> Sample:
        return made.advance([request], settings, 1, stop_ids=(EOS,), least=0)[0]

    before = sampled(Request(PROMPTS[0], [], 4, 12), replace(PLAIN, min_new_tokens=12)).response_ids
    request = next(r for seed in range(99) if decode(sampled(r := Request(PROMPTS[0], before, seed, 12), settings).response_ids[0]).strip())
    free = sampled(request, settings)
    stop = decode([*before, free.response_ids[0]])[len(decode(before)) - 1 :]
    assert len(stop) > 1 and len(before) == 12
    stopping = replace(settings, stop=(stop,))
    ended = sampled(request, stopping)
    assert ended == at_stop(request, free, stopping, made._tokenizer)
    if fewest:  # it ends before it may
        assert ended == free
    else:
        assert ended == replace(free, response_ids=free.response_ids[:1], logprobs=free.logprobs[:1], finished=True) != free
