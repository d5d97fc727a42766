"""A vLLM engine and the trainer's own modules on the same tiny model, for each kind of head: python rollout_probe.py <folder>

Prints its results as one line of JSON for test_rollouts.py. Each engine has its own process, because it can't be shut down within one. The
processes are forked, because importing vLLM takes longest.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.engines.rollout.requests import Sample, SamplingSettings, request_seeds
from rlhf_core.engines.transfer.weights import replace_weights
from rlhf_core.engines.vllm.engine import VllmEngine
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.weights import read_state_dict
from rlhf_core.process import configure_process
from rlhf_core.trainers.rl.data import collate, pack
from rlhf_core.trainers.rl.mismatch import LogprobMismatch, check_logprobs
from rlhf_core.types import Prompt, Rollout, Span
from tests.continued import drawn_in_parts, span_differences
from tools.clerk import clerk_params

ROOT = Path(__file__).parents[2]

EOS, VOCABULARY, LONGEST, NEW = 1, 101, 48, 12
HEADS = {"own_head": False, "tied_head": True}
PROMPTS = [[5, 9, 33, 60], [7] * 11, [90, 3], [12, 13, 14, 15, 16, 17, 18], *([40 + i, 8, 22 + i] for i in range(12))]
SEEDS = request_seeds(3, 0, len(PROMPTS))


def model(seed: int, *, tied: bool) -> LlamaForCausalLM:
    """A random model with logits of standard deviation 1.5, so that wrong weights show and the end token occurs."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=LONGEST, tie_word_embeddings=tied, eos_token_id=EOS, pad_token_id=0, initializer_range=0.2, dtype="float32",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def trainer_logprobs(policy: LlamaForCausalLM, groups: list[list[Sample]], *, temperature: float) -> torch.Tensor:
    """Log-probabilities of all sampled tokens, flat."""
    pairs = [(prompt, sample) for prompt, group in zip(PROMPTS, groups, strict=True) for sample in group]
    batch = collate_tokens([[*p, *s.response_ids] for p, s in pairs], [len(p) for p, _ in pairs], pad_id=0)
    return PolicyModule(policy)(batch, temperature=temperature).logprobs


@torch.no_grad()
def filtered_difference(policy: LlamaForCausalLM, groups: list[list[Sample]], settings: SamplingSettings) -> float:
    """Largest difference of a sampled token under top-k and top-p; infinite if the trainer excludes the token."""
    pairs = [(prompt, sample) for prompt, group in zip(PROMPTS, groups, strict=True) for sample in group]
    batch = collate_tokens([[*p, *s.response_ids] for p, s in pairs], [len(p) for p, _ in pairs], pad_id=0)
    output = PolicyModule(policy)(batch, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    sampled = torch.tensor([x for group in groups for s in group for x in s.logprobs])
    return float((output.sampler_logprobs - sampled).abs().max())


def early_and_late(policy: LlamaForCausalLM, groups: list[list[Sample]], *, first: int) -> tuple[float, float]:
    """Largest difference over the first tokens of each response, and over the rest."""
    flat = trainer_logprobs(policy, groups, temperature=1.0).split([len(s.response_ids) for group in groups for s in group])
    samples = [s for group in groups for s in group]
    differences = [(theirs - torch.tensor(s.logprobs)).abs() for theirs, s in zip(flat, samples, strict=True)]
    return max(float(d[:first].max()) for d in differences), max(float(d[first:].max()) for d in differences if len(d) > first)


def difference(policy: LlamaForCausalLM, groups: list[list[Sample]], *, temperature: float) -> float:
    """Largest difference between vLLM's and the trainer's log-probability of a sampled token, in nats."""
    sampled = torch.tensor([x for group in groups for s in group for x in s.logprobs])
    return float((trainer_logprobs(policy, groups, temperature=temperature) - sampled).abs().max())


def check(policy: LlamaForCausalLM, groups: list[list[Sample]]) -> str:
    """Result of the RL loop's own check when the trainer has `policy`, with the project's limits."""
    rollouts = [
        Rollout(Prompt(str(i), "made", [], prompt, None), [Span(s.response_ids, s.logprobs, s.version)], s.finished, group_id=i)
        for i, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True))
        for s in group
    ]
    outputs = {"old_logprobs": trainer_logprobs(policy, groups, temperature=1.0)}
    batch = collate(rollouts, pack(rollouts), {}, outputs, None, old_logprobs_source="recompute")
    try:
        check_logprobs(batch, batch.sampler_logprobs, clerk_params().rl, step=3, dtype="float32")
    except LogprobMismatch as error:
        return str(error)
    return "passed"


def main() -> None:
    configure_process()
    from vllm import LLM  # noqa: F401  # its modules, before there are two of us

    heads = {name: HEADS[name] for name in sys.argv[2:]}
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        seen = pool.starmap(look, [(Path(sys.argv[1]) / name, tied) for name, tied in heads.items()], chunksize=1)
    print(json.dumps(dict(zip(heads, seen, strict=True))))


def look(folder: Path, tied: bool) -> dict:
    first, second = model(0, tied=tied), model(1, tied=tied)
    first.save_pretrained(folder)
    engine = VllmEngine(
        str(folder), max_length=LONGEST, dtype="float32", kv_cache_gib=1, max_concurrent_sequences=32, threads=1, seed=0,
        trust_remote_code=False, gpu_memory_fraction=0.3,
    )  # fmt: skip

    def sample(temperature: float = 1.0, group_size: int = 2, rows: slice = slice(None)) -> list[list[Sample]]:
        settings = SamplingSettings(NEW, temperature)
        return engine.generate(PROMPTS[rows], SEEDS[rows], settings, stop_ids=(EOS,), group_size=group_size)

    plain = SamplingSettings(NEW, 1.0)
    hot, cool, greedy = sample(), sample(0.7), sample(0.0, 1)
    seen = {
        "at_1": difference(first, hot, temperature=1.0),
        "at_0.7": difference(first, cool, temperature=0.7),
        "at_1_taken_for_0.7": difference(first, hot, temperature=0.7),
        "again": ids(sample()) == ids(hot),
        "alone": [ids(sample(rows=slice(i, i + 1))) == ids(hot[i : i + 1]) for i in range(len(PROMPTS))],
        "in_parts": in_parts(engine) == hot,
        "of_nothing": engine.generate([], [], plain, stop_ids=(EOS,), group_size=2),
        "siblings_differ": sum(a.response_ids != b.response_ids for a, b in hot),
        "greedy_is_argmax": all(is_argmax(first, p, group[0]) for p, group in zip(PROMPTS, greedy, strict=True)),
        "samples": [[s.response_ids, s.finished, len(s.logprobs)] for group in hot for s in group],
        "check_in_sync": check(first, hot),
        "check_stale": check(second, hot),
    }
    filters = {"top_p": {"top_p": 0.7}, "top_k": {"top_k": 5}, "both_cool": {"top_p": 0.8, "top_k": 9, "temperature": 0.7}}
    for name, changes in filters.items():
        filtered = replace(plain, **changes)
        drawn = engine.generate(PROMPTS, SEEDS, filtered, stop_ids=(EOS,), group_size=2)
        seen[name] = [filtered_difference(first, drawn, filtered), difference(first, drawn, temperature=filtered.temperature)]
    late = engine.generate(PROMPTS, SEEDS, replace(plain, min_new_tokens=6), stop_ids=(EOS,), group_size=2)
    seen["min_lengths"] = [len(s.response_ids) for group in late for s in group]
    seen["before_and_after_min"] = early_and_late(first, late, first=6)
    seen["other_end"] = other = hot[0][0].response_ids[2]
    seen["two_ends"], late = (
        [(s.response_ids, s.finished) for group in engine.generate(PROMPTS, SEEDS, how, stop_ids=(EOS, other), group_size=2) for s in group]
        for how in (plain, replace(plain, min_new_tokens=6))
    )
    seen["late_ends"] = [response_ids[:6] for response_ids, _ in late]
    seen["version"] = [engine.version, engine.load_weights(second.state_dict(), 7), engine.version]
    changed = sample()
    seen |= {"synced": difference(second, changed, temperature=1.0), "old_after_sync": difference(first, changed, temperature=1.0)}
    seen["unknown_weights"] = [replaces(engine, weights) for weights in not_this_models(second.state_dict())]
    seen["unknown_changed_nothing"] = sample() == changed
    reload_as_vllm_does(engine, first.state_dict(), 8)
    seen["reloaded"] = ids(sample()) == ids(hot)
    seen["replaced"] = replaces(engine, second.state_dict())
    seen["replaced_as_reloaded"] = [sample() == changed, reload_as_vllm_does(engine, second.state_dict(), 9), sample() == changed]
    engine.load_weights(read_state_dict(folder), 10)  # from a file, in which a tied head has no entry
    seen["back"] = ids(sample()) == ids(hot)
    seen |= over_versions(engine, [first, second, first])
    seen["compiled_graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return seen


def over_versions(engine: VllmEngine, models: list[LlamaForCausalLM]) -> dict:
    """Responses of which each part has other weights. More than the engine samples at a time wait."""
    how = {"settings": SamplingSettings(24, 1.0), "stop_ids": (EOS,), "least": 7}
    parts = drawn_in_parts(engine, models, PROMPTS * 3, **how)
    return {
        "parts": [[[span.version, len(span.ids)] for span in r.spans] for r in parts],
        "parts_finished": [r.finished for r in parts],
        "parts_differ": max(span_differences(models, parts)),
        "parts_taken_for_others": max(span_differences([*models[1:], models[1]], parts)),
        "parts_again": drawn_in_parts(engine, models, PROMPTS * 3, **how) == parts,
    }


def in_parts(engine: VllmEngine) -> list[list[Sample]]:
    """Two responses to each prompt, of which the engine gets new ones whenever three are left."""
    found, how = {}, {"stop_ids": (EOS,), "group_size": 2}
    for start in range(0, len(PROMPTS), 5):
        numbers = list(range(len(PROMPTS)))[start : start + 5]
        prompts, seeds = [PROMPTS[n] for n in numbers], [SEEDS[n] for n in numbers]
        finished = engine.serve(numbers, prompts, seeds, SamplingSettings(NEW, 1.0), **how, leave=3)
        assert len(found) + len(finished) >= min(start + 5, len(PROMPTS)) - 3
        found |= finished
    found |= engine.serve([], [], [], SamplingSettings(NEW, 1.0), **how, leave=0)
    return [found[n] for n in range(len(PROMPTS))]


def replaces(engine: VllmEngine, state_dict: dict[str, torch.Tensor]) -> bool:
    (done,) = engine._llm.apply_model(partial(replace_weights, state_dict=state_dict))
    return done


def not_this_models(state_dict: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Weights with one missing, one too many, and one transposed."""
    name = "model.layers.1.mlp.down_proj.weight"
    less = {n: t for n, t in state_dict.items() if n != name}
    return [less, state_dict | {"model.layers.1.mlp.down_proj.bias": torch.zeros(3)}, less | {name: state_dict[name].T}]


def reload_as_vllm_does(engine: VllmEngine, state_dict: dict[str, torch.Tensor], version: int) -> int:
    with mock.patch("rlhf_core.engines.vllm.engine.replace_weights", return_value=False):
        return engine.load_weights(state_dict, version)


def ids(groups: list[list[Sample]]) -> list[list[list[int]]]:
    return [[s.response_ids for s in group] for group in groups]


@torch.no_grad()
def is_argmax(policy: LlamaForCausalLM, prompt: list[int], sample: Sample) -> bool:
    logits = policy(torch.tensor([[*prompt, *sample.response_ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(1).tolist() == sample.response_ids


if __name__ == "__main__":
    main()
