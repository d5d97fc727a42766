"""Answers of several models to the same prompts, greedy and sampled, with scores and judgements, and how far the models diverge.

models = {"sft": EvaluatedModel(folder, tokenizer, prompts), "policy": EvaluatedModel(...)}
samples = sample_answers(models, config, ...)
answers = score_answers(models, samples, LocalScorers(...), source_judges)
logprobs = response_logprobs(load_policy(folder, model), answers["greedy"]["policy"], ...)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.agents.environment import Environment
from rlhf_core.config import EvaluationConfig, ModelConfig, Params, RolloutBackend
from rlhf_core.data.hashing import conversation_text, distinct_prompts
from rlhf_core.data.pictures import pictures_of
from rlhf_core.engines.deepspeed.engine import device, most_over_ranks, release_memory
from rlhf_core.engines.deepspeed.frozen import FrozenModel
from rlhf_core.engines.deepspeed.ranks import in_shares, threads_of_rank, wait_for_all, world_size
from rlhf_core.engines.rollout.open import open_engine
from rlhf_core.engines.rollout.requests import Sample, SamplingSettings
from rlhf_core.evaluation.figures import Answer, judged
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.tokenizer import encode_prompt, stop_ids
from rlhf_core.models.vision import Sight, undrawn_ids, with_sight
from rlhf_core.models.weights import frozen
from rlhf_core.paths import PREPARED
from rlhf_core.progress import Bar, drawing
from rlhf_core.sampling.prompts import choose_prompts
from rlhf_core.sampling.responses import sampled_response
from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer
from rlhf_core.scorers.reward.model import MICROBATCH_TOKENS
from rlhf_core.types import Prompt, Rollout

MODES = ("greedy", "sampled")
Samples = dict[str, dict[str, list[list[Sample | Rollout]]]]  # mode -> model's name -> a list of one sample or episode per prompt
Answers = dict[str, dict[str, list[Answer]]]  # mode -> model's name -> one answer per prompt


@dataclass(frozen=True)
class EvaluatedModel:
    """A policy and the prompts as its tokenizer renders them."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end a response of this model."""
        return stop_ids(self.tokenizer, self.folder)


def heldout_prompts(
    rows: list[dict], tokenizers: dict[str, PreTrainedTokenizerBase], *, longest: int, count: int, seed: int, gate_texts: Collection[str]
) -> dict[str, list[Prompt]]:
    """`count` distinct prompts in a seeded order, the same for every model, rendered by each model's template.

    Args:
        tokenizers: model's name -> its tokenizer. Every rendering has at most `longest` tokens.
        gate_texts: canonical texts of the gate's conversations, which are taken last; see `prefer_unseen`.
    Raises:
        ValueError: no prompt is short enough.
    """
    distinct = distinct_prompts(rows)
    fitting = [r for r in distinct if all(len(encode_prompt(t, r["messages"])) <= longest for t in tokenizers.values())]
    if not fitting:
        raise ValueError(
            f"evaluation: expected held-out prompts of at most {longest} tokens, got none of {len(distinct)}; raise model.max_length"
        )
    ordered = {name: choose_prompts(fitting, t, longest=longest, count=None, seed=seed) for name, t in tokenizers.items()}
    return {name: prefer_unseen(prompts, count, gate_texts) for name, prompts in ordered.items()}


def prefer_unseen(prompts: list[Prompt], count: int, gate_texts: Collection[str]) -> list[Prompt]:
    """`count` prompts in which each source keeps its share; within a source, prompts that the gate has come last."""
    left = Counter(prompt.source for prompt in prompts[:count])
    chosen = []
    for prompt in sorted(prompts, key=lambda p: conversation_text(p.messages) in gate_texts):  # stable
        if left[prompt.source]:
            left[prompt.source] -= 1
            chosen.append(prompt)
    return chosen


def sample_answers(
    models: dict[str, EvaluatedModel],
    config: EvaluationConfig,
    *,
    backend: RolloutBackend,
    model: ModelConfig,
    max_concurrent_sequences: int,
    threads: int,
    seed: int,
    seeds: Sequence[int],
    stop: tuple[str, ...] = (),
    environments: Mapping[str, Environment] | None = None,
    ranks_per_model: int = 1,
) -> Samples:
    """Return one response for each prompt, model and mode. Ranks share the prompts.

    One engine of each rank serves all models; the weights are swapped, and the engine is closed at the end.

    Args:
        seed: of the engine. seeds: of the prompts, in order, the same for every model and mode.
        stop: strings that end a response, in addition to the models' end tokens.
        environments: model's name -> its environment, whose episodes are sampled in place of single responses.
        ranks_per_model: ranks that have an engine together.
    """
    engine = open_engine(
        backend,
        str(next(iter(models.values())).folder),
        ranks_per_model=ranks_per_model,
        max_length=model.max_length,
        dtype=model.dtype,
        max_concurrent_sequences=max_concurrent_sequences,
        threads=threads_of_rank(threads) * ranks_per_model,
        seed=seed,
        trust_remote_code=model.trust_remote_code,
        gpu_memory_fraction=config.gpu_memory_fraction,
        reads_text=bool(stop),
        prepared=None if model.vision is None else str(PREPARED),
    )
    samples: Samples = {mode: {} for mode in MODES}
    try:
        # An episode has a number of replies that nobody knows before.
        what, total = ("reply", None) if environments else ("answer", len(models) * len(MODES) * len(seeds))
        with drawing(what, total) as bar:
            for version, (name, evaluated) in enumerate(models.items()):
                if version:
                    engine.load_folder(evaluated.folder, version)
                requests = list(zip(evaluated.prompts, seeds, strict=True))
                for mode in MODES:
                    settings = SamplingSettings(config.max_new_tokens, 0.0 if mode == "greedy" else config.temperature, stop=stop)
                    generate = partial(_generate, engine, settings=settings, stop_ids=evaluated.stops)
                    if environments:
                        generate = partial(_play, environments[name], settings=settings, generate=generate)
                    samples[mode][name] = in_shares(requests, generate, ranks_per_share=ranks_per_model)
                    if total:  # with the answers of other ranks
                        bar.reach(len(seeds) * sum(map(len, samples.values())))
    finally:
        for environment in (environments or {}).values():
            environment.close()
        engine.close()
    wait_for_all()  # an engine's GPUs are other ranks' too
    return samples


def open_environments(params: Params, models: dict[str, EvaluatedModel]) -> dict[str, Environment]:
    """Return the environment of each model; empty without rl.environment.

    Raises:
        ValueError: it can't be used.
    """
    if params.rl.environment is None:
        return {}
    options = {
        "max_length": params.model.max_length,
        "deadline": params.rl.deadlines.step,
        "takes_scores": any(s.kind == "environment" for s in [*params.evaluation_scorers[1], *params.rl.reward.scorers]),
    }
    return {name: Environment(params.rl.environment, model.tokenizer, stops=model.stops, **options) for name, model in models.items()}


def _generate(
    engine: Any, requests: list[tuple[Prompt, int]], *, settings: SamplingSettings, stop_ids: tuple[int, ...]
) -> list[list[Sample]]:
    """Return one sample for each prompt and seed."""
    ids, seeds = [prompt.prompt_ids for prompt, _ in requests], [seed for _, seed in requests]
    pictures = [pictures_of(prompt.messages) for prompt, _ in requests]
    return engine.generate(ids, seeds, settings, stop_ids=stop_ids, group_size=1, pictures=pictures)


def _play(
    environment: Environment, requests: list[tuple[Prompt, int]], *, settings: SamplingSettings, generate: Any
) -> list[list[Rollout]]:
    """Return one episode for each prompt and seed."""

    def sample(ids: list[list[int]], seeds: list[int], settings: SamplingSettings) -> list[Sample]:
        prompts = [Prompt("", "", [], of_one, None) for of_one in ids]
        return [group[0] for group in generate(list(zip(prompts, seeds, strict=True)), settings=settings)]

    return [[r] for r in environment.play([p for p, _ in requests], [seed for _, seed in requests], settings, sample)]


def score_answers(models: dict[str, EvaluatedModel], samples: Samples, scorers: LocalScorers, source_judges: dict[str, str]) -> Answers:
    """Return the samples with their scores and, where the prompt's source has a judge, its judgement."""
    with Bar("scored answer", sum(len(groups) for by_model in samples.values() for groups in by_model.values())) as bar:
        by_name = {name: ResponseScorer(scorers, model.tokenizer, stops=model.stops) for name, model in models.items()}
        together = {  # by prompt, since a reward model may compute the prompt once
            name: [list(chain(*of_prompt)) for of_prompt in zip(*(samples[mode][name] for mode in samples), strict=True)] for name in models
        }
        others = _others(models, by_name, together) if any(s.mode == "head_to_head" for s in scorers.configs) else {}

        def answers(name: str) -> dict[str, list[Answer]]:
            """Return a model's answers, scored and judged, by mode."""
            groups = by_name[name].score_groups(models[name].prompts, together[name], others.get(name))
            scored = [[judged(response, source_judges) for response in group] for group in groups]
            bar.step(len(samples) * len(scored))
            return dict(zip(samples, map(list, zip(*scored, strict=True)), strict=True))

        by_model = {name: answers(name) for name in models}
        return {mode: {name: by_model[name][mode] for name in models} for mode in samples}


def _others(
    models: dict[str, EvaluatedModel], scorers: dict[str, ResponseScorer], samples: dict[str, list[list[Any]]]
) -> dict[str, list[list[str]]]:
    """For each of two models the texts of the other one's samples, by prompt."""
    texts = {
        name: [
            scorers[name].texts([sampled_response(prompt, s) for s in group]) for prompt, group in zip(model.prompts, groups, strict=True)
        ]
        for (name, model), groups in zip(models.items(), samples.values(), strict=True)
    }
    return dict(zip(texts, reversed(texts.values()), strict=True))


def with_prompts_of(answers: list[Answer], others: list[Answer]) -> list[Answer]:
    """Return the same responses after the prompts as the model of `others` renders them. Both lists are in the prompts' order."""
    return [replace(answer, prompt=other.prompt) for answer, other in zip(answers, others, strict=True)]


def load_policy(folder: str | Path, model: ModelConfig, *, ranks_per_model: int = 1) -> PolicyModule:
    """Return a frozen policy in model.dtype, on the GPU where there is one. Models that were loaded before should have no references left.

    Args:
        ranks_per_model: above 1 the weights are divided over all ranks, and every forward pass is a collective.
    """
    release_memory()
    load_options = {"trust_remote_code": model.trust_remote_code, "training_dtype": model.dtype, "vision": model.vision}
    language_model = load_language_model(folder, **load_options)
    if ranks_per_model > 1:
        return FrozenModel(PolicyModule(language_model), dtype=model.dtype, zero_stage=3, offload=False).module
    return frozen(PolicyModule(language_model), device=device(), dtype=getattr(torch, model.dtype))


def response_logprobs(
    module: PolicyModule,
    answers: list[Answer],
    *,
    pad_id: int,
    temperature: float,
    microbatch_tokens: int = MICROBATCH_TOKENS,
    ranks_per_model: int = 1,
    sight: Sight | None = None,
) -> torch.Tensor:
    """Return the summed log-probability [len(answers)] of each response's sampled tokens given its prompt's ids. Ranks share the answers.

    Args:
        ranks_per_model: as for `load_policy`; above 1 ranks with fewer answers repeat some.
        sight: of a model that sees, which never draws the tokens of pictures.
    """
    settings = {"pad_id": pad_id, "temperature": temperature, "microbatch_tokens": microbatch_tokens, "collective": ranks_per_model > 1}
    settings |= {"sight": sight}
    count = len(answers) if ranks_per_model == 1 else -(-len(answers) // world_size()) * world_size()
    items = [answers[i % len(answers)] for i in range(count)]
    return torch.tensor(in_shares(items, lambda part: _own_logprobs(module, part, **settings).tolist())[: len(answers)])


@torch.no_grad()
def _own_logprobs(
    module: PolicyModule,
    answers: list[Answer],
    *,
    pad_id: int,
    temperature: float,
    microbatch_tokens: int,
    collective: bool,
    sight: Sight | None,
) -> torch.Tensor:
    options = {"temperature": temperature} | ({} if sight is None else {"forbidden": undrawn_ids(module.model.config)})
    sequences = [[*a.prompt.prompt_ids, *a.response_ids] for a in answers]
    sums = torch.full((len(answers),), torch.nan)

    def forward(part: list[int]) -> None:
        batch = collate_tokens([sequences[i] for i in part], [len(answers[i].prompt.prompt_ids) for i in part], pad_id=pad_id)
        batch = with_sight(batch, sight, [p for i in part for p in pictures_of(answers[i].prompt.messages)])
        flat = module(batch.to(module.model.device), **options).logprobs
        for i, logprobs in zip(part, flat.cpu().split([len(answers[i].response_ids) for i in part]), strict=True):
            sums[i] = logprobs.sum() if (d := answers[i].dialogue) is None else logprobs[torch.tensor(d.sampled)].sum()
        bar.reach(int((~sums.isnan()).sum()))  # ranks repeat parts

    parts = module.backend.microbatches(sequences, max_tokens=microbatch_tokens)
    if collective:
        parts += [parts[-1]] * (most_over_ranks(len(parts)) - len(parts))
    with Bar("answer for the KL", len(answers)) as bar:
        module.backend.map(forward, parts)
    return sums
