"""Data written by the base model itself (rlhf_core.preparation.samples), with PyTorch's rollouts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlhf_core.config import ModelConfig, SamplesConfig
from rlhf_core.data.schema import Message
from rlhf_core.engines.rollout.pytorch_engine import PytorchEngine
from rlhf_core.engines.rollout.requests import Sample, SamplingSettings, request_seeds
from rlhf_core.models.tokenizer import encode_prompt, response_text, stop_ids
from rlhf_core.preparation.samples import Written

SEQUENCES = 512  # concurrent; more are no faster on a CPU
GPU_MEMORY = 0.5


class ModelWriter:
    """Samples texts and responses from the base model.

    The engine has one thread, so that the same parameters give the same bytes for any cluster.threads.

    Args:
        path: of the model's folder, or its Hugging Face name.
        tokenizer: of the model, with the template that renders prompts.
    """

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase, config: ModelConfig, *, seed: int):
        self._tokenizer, self._seed = tokenizer, seed
        # A base model may separate texts by another token than its end token, such as its begin token.
        self._stops = stop_ids(tokenizer, path)
        self._ends = frozenset([*tokenizer.all_special_ids, *self._stops])
        self._engine = PytorchEngine(
            path,
            max_length=config.max_length,
            dtype=config.dtype,
            kv_cache_gib=1,
            max_concurrent_sequences=SEQUENCES,
            threads=1,
            trust_remote_code=config.trust_remote_code,
            gpu_memory_fraction=GPU_MEMORY,
        )

    def extend(self, openings: list[str], config: SamplesConfig, *, source: str, draw: int) -> list[Written]:
        begin = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        ids = [[*begin, *self._tokenizer(text, add_special_tokens=False)["input_ids"]] for text in openings]
        groups = self._sample(ids, config.opening_tokens, config, each=1, seeds=self._seeds(source, draw, len(ids)))
        return [self._written(sample, before=before[len(begin) :]) for before, (sample,) in zip(ids, groups, strict=True)]

    def respond(self, conversations: list[list[Message]], config: SamplesConfig, *, source: str, draw: int) -> list[list[Written]]:
        ids = [encode_prompt(self._tokenizer, messages) for messages in conversations]
        groups = self._sample(
            ids, config.max_new_tokens, config, each=config.responses_per_prompt, seeds=self._seeds(source, draw, len(ids))
        )
        return [[self._written(sample, prompt=prompt) for sample in group] for prompt, group in zip(ids, groups, strict=True)]

    def _sample(self, ids: list[list[int]], tokens: int, config: SamplesConfig, *, each: int, seeds: list[int]) -> list[list[Sample]]:
        settings = SamplingSettings(tokens, config.temperature, top_p=config.top_p)
        return self._engine.generate(ids, seeds, settings, stop_ids=self._stops, group_size=each)

    def _seeds(self, source: str, draw: int, count: int) -> list[int]:
        of_source = hashlib.blake2b(f"{self._seed}:{source}".encode(), digest_size=8).digest()
        return request_seeds(int.from_bytes(of_source), draw, count)

    def _written(self, sample: Sample, *, before: Sequence[int] = (), prompt: Sequence[int] = ()) -> Written:
        """Return the text of a sample, with the ids `before` it, behind `prompt`."""
        end = next((i for i, token in enumerate(sample.response_ids) if token in self._ends), None)
        text = response_text(self._tokenizer, prompt, [*before, *sample.response_ids[:end]], special=True)
        return Written(text, ended=end is not None)
