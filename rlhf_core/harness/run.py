"""Runs tasks of lm-evaluation-harness on the SFT model and the policy, and compares them document by document."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlhf_core.config import Params
from rlhf_core.engines.deepspeed.ranks import in_shares, threads_of_rank, wait_for_all
from rlhf_core.engines.rollout.open import open_engine
from rlhf_core.engines.rollout.requests import SamplingSettings, request_seeds
from rlhf_core.harness.figures import compared
from rlhf_core.harness.model import HarnessModel, Pair
from rlhf_core.harness.score import score_pairs
from rlhf_core.harness.tasks import run_tasks
from rlhf_core.models.tokenizer import load_tokenizer, stop_ids
from rlhf_core.progress import drawing

MAX_CONCURRENT_SEQUENCES = 256

log = logging.getLogger("rlhf")


class SharedEngine:
    """A rollout engine that samples from several models in turn: opened by the first answers, closed before log-likelihoods."""

    def __init__(self, params: Params):
        self._params, self._engine, self._folder, self._loads = params, None, None, 0

    def generate(
        self, folder: Path, ends: tuple[int, ...], prompts: list[list[int]], settings: SamplingSettings, special: tuple[int, ...]
    ) -> list[list[int]]:
        """Return an answer's ids for each prompt by the model in a folder. Ranks share the prompts."""
        self._load(folder)
        ranks_per_model = self._params.cluster.inference_ranks_per_model
        requests = list(zip(prompts, request_seeds(self._params.seed, 0, len(prompts)), strict=True))

        def sampled(part: list[tuple[list[int], int]]) -> list[list[int]]:
            ids, seeds = map(list, zip(*part, strict=True))
            groups = self._engine.generate(ids, seeds, settings, stop_ids=(*ends, *special), group_size=1)
            return [group[0].response_ids for group in groups]

        with drawing("answer of the harness", len(requests)):
            return in_shares(requests, sampled, ranks_per_share=ranks_per_model)

    def _load(self, folder: Path) -> None:
        if self._engine is not None and folder != self._folder:
            self._loads += 1
            self._engine.load_folder(folder, self._loads)
        if self._engine is None:
            self._engine = self._open(folder)
        self._folder = folder

    def _open(self, folder: Path) -> Any:
        params, ranks_per_model = self._params, self._params.cluster.inference_ranks_per_model
        return open_engine(
            params.evaluation_backend,
            str(folder),
            ranks_per_model=ranks_per_model,
            apart=True,  # after the engine of the evaluation's answers
            max_length=params.harness_max_length,
            dtype=params.model.dtype,
            max_concurrent_sequences=MAX_CONCURRENT_SEQUENCES,
            threads=threads_of_rank(params.cluster.threads) * ranks_per_model,
            seed=params.seed,
            trust_remote_code=params.model.trust_remote_code,
            gpu_memory_fraction=params.evaluation.gpu_memory_fraction,
            reads_text=True,
        )

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            wait_for_all()  # an engine's GPUs are other ranks' too


def run_harness(params: Params, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return the figures of both models by task. Runs on each rank, and each has all results.

    Args:
        folders: "sft" and "policy" -> the model's folder.
    """
    config, engine = params.evaluation.harness, SharedEngine(params)
    results, truncated = {}, {}
    try:
        for name, folder in folders.items():
            model = _model(params, folder, engine)
            # The second model samples first, while the engine is open.
            results[name] = run_tasks(config, model, limit=config.limit, generation_first=bool(results))
            truncated[name] = model.truncated
    finally:
        engine.close()
    tasks = compared(results["sft"], results["policy"], truncated, confidence=params.evaluation.confidence)
    for name, task in tasks.items():
        if cut := {model: count for model, count in task["truncated"].items() if count}:
            log.warning("harness: %s: contexts longer than %d tokens lost their beginning: %s", name, params.harness_max_length, cut)
    settings = {"chat_template": config.chat_template, "limit": config.limit, "max_length": params.harness_max_length}
    return {"lm_eval": version("lm_eval"), **settings, "confidence": params.evaluation.confidence, "tasks": tasks}


def _model(params: Params, folder: Path, engine: SharedEngine) -> HarnessModel:
    tokenizer = load_tokenizer(str(folder), trust_remote_code=params.model.trust_remote_code)

    def score(pairs: list[Pair]) -> list[tuple[float, bool]]:
        engine.close()
        return score_pairs(folder, pairs, pad_id=tokenizer.pad_token_id, params=params)

    generate = partial(engine.generate, folder, stop_ids(tokenizer, folder))
    return HarnessModel(tokenizer, max_length=params.harness_max_length, score=score, generate=generate)
