"""Drawing responses by an engine that each rank of a stage opens for itself: for rejection sampling and rounds of iterative DPO.

In RL the engines are Ray actors (rlhf_core.trainers.rl.rollouts); evaluation loads several models into one engine, one after the other
(rlhf_core.evaluation.answers).
"""

from __future__ import annotations

from collections.abc import Callable

from rlhf_core.config import ModelConfig, SamplingConfig
from rlhf_core.engines.deepspeed.ranks import in_shares, threads_of_rank, wait_for_all, world_size
from rlhf_core.engines.rollout.open import open_engine
from rlhf_core.engines.rollout.requests import Sample, SamplingSettings, request_seeds
from rlhf_core.models.tokenizer import load_tokenizer, stop_ids
from rlhf_core.progress import drawing
from rlhf_core.types import Prompt

REQUEST_RESPONSES = 4096  # in one request to an engine; the stage can be stopped between requests


def sample_responses(
    model_path: str,
    prompts: list[Prompt],
    config: SamplingConfig,
    *,
    model: ModelConfig,
    threads: int,
    seed: int,
    draw: int = 0,
    check_stop: Callable[[], None],
    ranks_per_model: int = 1,
) -> list[list[Sample]]:
    """Sample `config.samples_per_prompt` responses to each prompt, in the prompts' order. Ranks share the prompts.

    The engine is closed afterwards.

    Args:
        model_path: Hugging Face folder with its tokenizer; `stop_ids` end a response.
        config: `config.prompts` isn't read: the caller has chosen the prompts.
        threads: CPU threads of all ranks' engines.
        seed, draw: with a prompt's position, they determine its responses. Rounds of one series differ in `draw`.
        check_stop: called between requests; it raises on every rank once a stop was requested.
        ranks_per_model: ranks that have an engine together.
    """
    ends = stop_ids(load_tokenizer(model_path, trust_remote_code=model.trust_remote_code), model_path)
    settings = SamplingSettings(config.max_new_tokens, config.temperature, top_p=config.top_p)
    seeds = request_seeds(seed, draw, len(prompts))
    per_request = max(1, REQUEST_RESPONSES // config.samples_per_prompt) * world_size()
    engine = open_engine(
        config.backend,
        model_path,
        max_length=model.max_length,
        dtype=model.dtype,
        max_concurrent_sequences=config.max_concurrent_sequences,
        ranks_per_model=ranks_per_model,
        threads=threads_of_rank(threads) * ranks_per_model,
        seed=seed,
        trust_remote_code=model.trust_remote_code,
        gpu_memory_fraction=config.gpu_memory_fraction,
    )
    samples: list[list[Sample]] = []

    def draw_own(own: list[int]) -> list[list[Sample]]:
        ids, own_seeds = [prompts[i].prompt_ids for i in own], [seeds[i] for i in own]
        return engine.generate(ids, own_seeds, settings, stop_ids=ends, group_size=config.samples_per_prompt)

    try:
        with drawing("response", len(prompts) * config.samples_per_prompt) as bar:
            for start in range(0, len(prompts), per_request):
                check_stop()
                samples += in_shares(range(start, min(start + per_request, len(prompts))), draw_own, ranks_per_share=ranks_per_model)
                bar.reach(len(samples) * config.samples_per_prompt)
    finally:
        engine.close()
    wait_for_all()  # an engine's GPUs are other ranks' too
    return samples
