"""Runs RL steps in one process, without Ray between rollout engine and trainer, for growth.py."""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from pathlib import Path

from tools.bench.ours_online import describe
from tools.bench.peers import make_inputs
from tools.bench.variety import of_texts

STEPS, WARMUP = 6, 2


def rl_step(prompts: int) -> tuple[float, float, int]:
    """Median CPU seconds of an RLOO step of the benchmark's small model, peak resident set in GB, and number of responses."""
    import torch

    from rlhf_core.engines.rollout.pytorch_engine import PytorchEngine
    from rlhf_core.models.tokenizer import load_tokenizer, stop_ids
    from rlhf_core.sampling.rewards import RewardNormalizer
    from rlhf_core.trainers.rl.credit import compute_advantages
    from rlhf_core.trainers.rl.data import DemonstrationStream, PromptStream, collate, pack, read_prompts
    from rlhf_core.trainers.rl.minibatch import plan_update
    from rlhf_core.trainers.rl.rank import TrainerRank
    from rlhf_core.trainers.rl.rollouts import sampling_settings
    from rlhf_core.types import Rollout, Span

    with tempfile.TemporaryDirectory() as folder:
        work = make_inputs(Path(folder), ["small"]).work("rloo", "small", steps=STEPS, batch_size=4 * prompts)
        job = describe(work.params, work.read_rows(), Path(folder) / "job", model=work.model, name=work.method, threads=1)
        rl, tokenizer = job.rl, load_tokenizer(job.sft_model, trust_remote_code=False)
        engine = PytorchEngine(
            job.sft_model, max_length=job.model.max_length, dtype=job.model.dtype, kv_cache_gib=rl.rollout.kv_cache_gib,
            max_concurrent_sequences=rl.rollout.max_concurrent_sequences, threads=1, trust_remote_code=False,
            gpu_memory_fraction=rl.rollout.gpu_memory_fraction,
        )  # fmt: skip
        rank = TrainerRank(0, 1, job)
        rank.connect(rank.address())
        stream, demonstrations = PromptStream(read_prompts(job, "train"), rl.prompt_weights, seed=job.seed), DemonstrationStream(job)
        seconds = []
        for step in range(STEPS):
            began = time.process_time()
            taken = stream.take(step * prompts, prompts)
            options = {"stop_ids": stop_ids(tokenizer, job.sft_model), "group_size": rl.group_size}
            groups = engine.generate([p.prompt_ids for p in taken], list(range(prompts)), sampling_settings(rl), **options)
            rollouts = [
                Rollout(prompt, [Span(s.response_ids, s.logprobs, s.version)], s.finished, group_id=i)
                for i, (prompt, group) in enumerate(zip(taken, groups, strict=True))
                for s in group
            ]
            scores = of_texts(tokenizer.batch_decode([r.response_ids for r in rollouts]))
            sequences, components = pack(rollouts), {"variety": torch.tensor(scores)}
            batch = collate(rollouts, sequences, components, rank.forward(sequences), None, old_logprobs_source="recompute")
            train_batch, _ = compute_advantages(batch, rl, RewardNormalizer(rl.reward), kl_coef=rl.kl.coef)
            (plan,) = plan_update(train_batch, demonstrations, rl, seed=job.seed, step=step)
            rank.update(plan, kl_coef=rl.kl.coef, train_policy=True)
            engine.load_weights(rank.weights(), step + 1)
            seconds.append(time.process_time() - began)
    return statistics.median(seconds[WARMUP:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 4 * prompts
