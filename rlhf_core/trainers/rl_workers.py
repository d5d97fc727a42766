"""The RL loop's hands: rollout engines and trainer ranks as Ray actors, each call with a deadline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from rlhf_core.checkpoint import CheckpointStore
from rlhf_core.data.batching import batch_indices
from rlhf_core.engines.ray_actors import ActorGroup, join_cluster, leave_cluster
from rlhf_core.engines.vllm_engine import RolloutActor, SamplingSettings, request_seeds
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.scorers.reward_model import RewardModelInput
from rlhf_core.tracking import MetricsLog
from rlhf_core.trainers.credit import Moments, RewardNormalizer
from rlhf_core.trainers.rl_data import PromptStream, sequences_of
from rlhf_core.trainers.rl_job import RlJob
from rlhf_core.trainers.rl_rank import Minibatch, TrainerRank
from rlhf_core.types import Prompt, Rollout, ScoredRollout, TrainBatch

CALIBRATION_STEP = 2**31 - 1  # a step number of its own for the seeds of the calibration samples


class Workers:
    """Starts the actors, connects the trainers, and gives the loop one method for each of its steps.

    Raises:
        RoleLost: an actor can't be placed, doesn't start, dies or is late.
    """

    def __init__(self, job: RlJob):
        self._job = job
        self._checkpoints = CheckpointStore(Path(job.work) / "checkpoints")
        tokenizer = load_tokenizer(job.sft_model, trust_remote_code=job.model.trust_remote_code)
        reward_tokenizer = load_tokenizer(job.reward_model, trust_remote_code=job.model.trust_remote_code)
        self._eos_id = tokenizer.eos_token_id
        self._reward_input = RewardModelInput(tokenizer, reward_tokenizer, max_length=job.model.max_length)
        self._sampling = SamplingSettings(job.rl.rollout.max_new_tokens, job.rl.rollout.temperature)
        self._version = 0

    def __enter__(self) -> Workers:
        job, rl = self._job, self._job.rl
        has_gpu = join_cluster()
        start = rl.deadlines.start
        self._trainers = ActorGroup(
            "trainer",
            TrainerRank,
            rl.trainer.ranks,
            cpus=1,
            gpus=rl.trainer.gpus_per_rank if has_gpu else 0,
            threads=max(1, job.threads // rl.trainer.ranks),
            start_deadline=start,
            kwargs={"world_size": rl.trainer.ranks, "job": job},
        )
        self._rollouts = ActorGroup(
            "rollout",
            RolloutActor,
            rl.rollout.engines,
            cpus=1,
            gpus=rl.rollout.gpus_per_engine if has_gpu else 0,
            threads=max(1, job.threads // rl.rollout.engines),
            start_deadline=start,
            kwargs={
                "model_path": job.sft_model,
                "max_length": job.model.max_length,
                "dtype": job.model.dtype,
                "kv_cache_gib": rl.rollout.kv_cache_gib,
                "max_concurrent_sequences": rl.rollout.max_concurrent_sequences,
                "threads": max(1, job.threads // rl.rollout.engines),
                "seed": job.seed,
                "trust_remote_code": job.model.trust_remote_code,
                "gpu_memory_fraction": rl.rollout.gpu_memory_fraction,
            },
        )
        (address, *_) = self._trainers.call("address", deadline=start)
        self._trainers.call("connect", [address] * len(self._trainers), deadline=start)
        self._rollouts.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._trainers.close()
        self._rollouts.close()
        leave_cluster()

    # Rollouts

    def generate(self, prompts: list[Prompt], *, step: int) -> list[Rollout]:
        """`group_size` rollouts of each prompt, a prompt's next to each other; what is drawn follows from seed and step."""
        return self._generate(prompts, step=step, group_size=self._job.rl.group_size)

    def _generate(self, prompts: list[Prompt], *, step: int, group_size: int) -> list[Rollout]:
        seeds = request_seeds(self._job.seed, step, len(prompts))
        shards = _shards(len(prompts), len(self._rollouts))
        answers = self._rollouts.call(
            "generate",
            [([prompts[i].prompt_ids for i in shard], [seeds[i] for i in shard], self._sampling) for shard in shards],
            deadline=self._job.rl.deadlines.step,
            eos_id=self._eos_id,
            group_size=group_size,
        )
        by_prompt = {i: samples for shard, answer in zip(shards, answers, strict=True) for i, samples in zip(shard, answer, strict=True)}
        return [
            Rollout(prompt, s.response_ids, s.logprobs, s.finished, group_id=i, policy_version=self._version)
            for i, prompt in enumerate(prompts)
            for s in by_prompt[i]
        ]

    def score(self, rollouts: list[Rollout]) -> list[ScoredRollout]:
        """Raw scores by the reward model; NaN: it couldn't."""
        inputs = [
            self._reward_input.sequence(r.prompt.messages, r.prompt.prompt_ids, r.response_ids, finished=r.finished) for r in rollouts
        ]
        shards = _shards(len(inputs), len(self._trainers))
        answers = self._trainers.call("score", [([inputs[i] for i in shard],) for shard in shards], deadline=self._job.rl.deadlines.step)
        scores = torch.cat(answers)[_inverse(shards)].tolist()
        return [ScoredRollout(rollout, score) for rollout, score in zip(rollouts, scores, strict=True)]

    def forward(self, rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
        """What policy, reference and critic say of every response token, flat [N] in the order of the rollouts."""
        sequences, starts = sequences_of(rollouts)
        shards = _contiguous_shards(len(sequences), len(self._trainers))
        answers = self._trainers.call(
            "forward", [([sequences[i] for i in s], [starts[i] for i in s]) for s in shards], deadline=self._job.rl.deadlines.step
        )
        return {name: torch.cat([a[name] for a in answers]) for name in answers[0]}

    def calibration_scores(self, prompts: PromptStream) -> torch.Tensor | None:
        """Scores of the initial policy's samples, for the reward's normalisation."""
        config = self._job.rl.reward
        if config.normalization != "initial":
            return None
        rollouts = self._generate(prompts.batch(0, size=config.normalization_samples), step=CALIBRATION_STEP, group_size=1)
        return torch.tensor([s.score for s in self.score(rollouts)])

    # Training

    def update(self, batch: TrainBatch, *, step: int) -> dict[str, float]:
        """All epochs and minibatches of a step. Returns means over tokens and optimizer steps."""
        rl, ranks = self._job.rl, len(self._trainers)
        plans: list[list[Minibatch]] = [[] for _ in range(ranks)]
        per_epoch = len(batch) // rl.minibatch_size
        for k in range(per_epoch * rl.epochs):
            rows = batch_indices(k, batch_size=rl.minibatch_size, num_examples=len(batch), seed=_mixed(self._job.seed, step))
            mask = batch.response_mask[rows]
            tokens, sequences = int(mask.sum()), int(mask.any(1).sum())
            for rank in range(ranks):
                plans[rank].append(Minibatch(batch.select(rows[rank::ranks]), tokens, sequences))
        answers = self._trainers.call("update", [(plan,) for plan in plans], deadline=rl.deadlines.step)
        sums = {name: sum(a[name] for a in answers) for name in answers[0]}
        steps = sums["optimizer_steps"] / ranks
        metrics = {
            "policy_loss": sums["policy_loss"] / steps,
            "entropy": sums["entropy_sum"] / sums["tokens"],
            "clip_frac": sums["clip_frac_sum"] / sums["tokens"],
            "approx_kl": sums["approx_kl_sum"] / sums["tokens"],
            "grad_norm": sums["grad_norm"] / ranks / steps,
        }
        if "value_loss" in sums:
            metrics |= {"value_loss": sums["value_loss"] / steps, "critic_grad_norm": sums["critic_grad_norm"] / ranks / steps}
        return metrics

    def sync_weights(self, *, version: int) -> None:
        """Give the policy's weights to every rollout engine. That they arrived shows in the next step's log-probabilities."""
        deadline = self._job.rl.deadlines.step
        weights, *_ = self._trainers.submit("weights", [()] * len(self._trainers))
        versions = self._rollouts.call("load_weights", [(weights, version)] * len(self._rollouts), deadline=deadline)
        if versions != [version] * len(versions):
            raise RuntimeError(f"rollout engines: expected policy version {version} everywhere, got {versions}")
        self._version = version

    def export(self, folder: str) -> None:
        self._trainers.call("export", [(folder,)] * len(self._trainers), deadline=self._job.rl.deadlines.step)

    # State

    def checkpoint(self, step: int, normalizer: RewardNormalizer) -> None:
        """Everything that the loop needs to go on, in one folder: every rank's engines and generators, and the driver's state."""
        moments = normalizer.moments

        def write(folder: Path) -> None:
            self._trainers.call("save", [(str(folder),)] * len(self._trainers), deadline=self._job.rl.deadlines.step)
            state = {"policy_version": self._version, "normalizer": [moments.count, moments.mean, moments.squares]}
            (folder / "driver.json").write_text(json.dumps(state))

        self._checkpoints.save(step, write)

    def resume(self, normalizer: RewardNormalizer) -> int:
        """Load the newest whole checkpoint, weights into the rollout engines too. Returns the steps that are done."""
        found = self._checkpoints.latest()
        if found is None:
            return 0
        step, folder = found
        self._trainers.call("load", [(str(folder),)] * len(self._trainers), deadline=self._job.rl.deadlines.start)
        state = json.loads((folder / "driver.json").read_text())
        count, mean, squares = state["normalizer"]
        normalizer.moments = Moments(count, mean, squares)
        self.sync_weights(version=state["policy_version"])
        return step

    def open_curves(self, columns: tuple[str, ...], *, first_step: int) -> MetricsLog:
        job = self._job
        return MetricsLog(
            Path(job.work) / "curves.csv",
            columns,
            timings=Path(job.timings),
            tracking=job.tracking,
            run_name=job.run_name,
            first_step=first_step + 1,
        )


def _shards(count: int, parts: int) -> list[list[int]]:
    """Positions dealt out in turn, so that each part gets its share of long and short ones."""
    return [list(range(count))[k::parts] for k in range(parts)]


def _contiguous_shards(count: int, parts: int) -> list[list[int]]:
    return [list(map(int, part)) for part in np.array_split(np.arange(count), parts)]


def _inverse(shards: list[list[int]]) -> torch.Tensor:
    """Where each original position went when shards are laid end to end."""
    return torch.argsort(torch.tensor([i for shard in shards for i in shard]))


def _mixed(seed: int, step: int) -> int:
    """A seed for the order of minibatches within one step."""
    return int(np.random.SeedSequence([seed, step, 1]).generate_state(1)[0])
