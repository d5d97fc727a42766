"""Data of the RL loop: prompt and demonstration streams, and rollouts as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from rlhf_core.data.batching import batch_indices, stream_indices
from rlhf_core.data.pictures import pictures_of
from rlhf_core.data.schema import Split, read_rows
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.sampling.prompts import fitting_prompts
from rlhf_core.sampling.scoring import StepScores
from rlhf_core.trainers.rl.curriculum import Curriculum
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.taught import Taught
from rlhf_core.trainers.supervised.demonstrations import Demonstration, encode_demonstrations
from rlhf_core.types import Baseline, OldLogprobs, Prompt, RewardComponents, Rollout, RolloutBatch, Sequences


def read_prompts(job: RlJob, split: Split) -> list[Prompt]:
    """Return the prompts of a split that leave room for `rollout.max_new_tokens`, in file order.

    Raises:
        ValueError: no prompt does.
    """
    tokenizer = load_tokenizer(job.sft_model, **job.load_options)
    rows = read_rows(Path(job.prepared), "prompt", split)
    longest = job.model.max_length - job.rl.rollout.max_new_tokens
    template = job.rl.teacher_template if split == "train" else None
    return fitting_prompts(rows, tokenizer, longest=longest, what=f"prompts of the {split} split", teacher_template=template)


def evaluation_prompts(job: RlJob) -> list[Prompt]:
    """Prompts of the evaluations during training: of the validation split, in a seeded order, with rl.evaluation.sources so many of each.

    None without rl.evaluation.every.
    """
    evaluation = job.rl.evaluation
    if evaluation.every is None:
        return []
    prompts = read_prompts(job, "validation")
    order = stream_indices(0, len(prompts), num_examples=len(prompts), seed=job.seed)
    wanted = [[i for i in order if prompts[i].source == source] for source in evaluation.sources] or [order]
    return [prompts[i] for of_source in wanted for i in of_source[: evaluation.prompts]]


class PromptStream:
    """The training prompts in an endless order, which depends on seed and position only.

    Without weights each pass over all prompts is a new permutation. With weights each position samples its source by weight, and each
    source has its own passes. With difficulties each pass goes from the smallest to the largest, and equal ones are permuted. A curriculum
    passes over some prompts, whose positions then count too.

    Args:
        difficulties: by prompt's id.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        weights: dict[str, float],
        *,
        seed: int,
        curriculum: Curriculum | None = None,
        difficulties: Mapping[str, float] | None = None,
    ):
        self._seed, self._count, self.curriculum, self._difficulties = seed, len(prompts), curriculum, difficulties
        by_source: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            by_source.setdefault(prompt.source if weights else "", []).append(prompt)
        self._pools = [by_source[name] for name in sorted(by_source)]
        self._sources = SourceDraws([weights.get(name, 1.0) for name in sorted(by_source)], seed=seed) if weights else None

    def take(self, start: int, count: int) -> list[Prompt]:
        """Return the next `count` prompts from the position `start` on."""
        return self._draw(start, count)[0]

    def after(self, start: int, count: int) -> int:
        """Return the position behind the prompts that `take` returns."""
        return self._draw(start, count)[1]

    def _draw(self, start: int, count: int) -> tuple[list[Prompt], int]:
        """Prompts, each once if there are as many, and the position behind the last."""
        if self.curriculum is None:
            return self._at(start, count), start + count
        drawn: list[Prompt] = []
        ids: set[str] = set()
        position = start
        while len(drawn) < count:
            for prompt in self._at(position, count):
                if self.curriculum.draws(prompt, position) and (prompt.id not in ids or count > self._count):
                    drawn.append(prompt)
                    ids.add(prompt.id)
                position += 1
                if len(drawn) == count:
                    break
        return drawn, position

    def _at(self, start: int, count: int) -> list[Prompt]:
        """Return the prompts at `count` positions from `start` on."""
        if self._sources is None:
            (pool,) = self._pools
            return self._of_pool(pool, start, count)
        drawn = self._sources.draw(start, count)
        before = self._sources.counts(start)
        passing = [iter(self._of_pool(pool, before[i], int((drawn == i).sum()))) for i, pool in enumerate(self._pools)]
        return [next(passing[i]) for i in drawn]

    def _of_pool(self, pool: list[Prompt], start: int, count: int) -> list[Prompt]:
        size = len(pool)
        if not count:
            return []
        if self._difficulties is None:
            return [pool[i] for i in stream_indices(start, count, num_examples=size, seed=self._seed)]
        first, last = start // size, (start + count - 1) // size
        ordered = [prompt for number in range(first, last + 1) for prompt in self._pass(pool, number)]
        return ordered[start - first * size :][:count]

    def _pass(self, pool: list[Prompt], number: int) -> list[Prompt]:
        """Return all prompts of a pool, by difficulty."""
        permuted = [pool[i] for i in stream_indices(number * len(pool), len(pool), num_examples=len(pool), seed=self._seed)]
        return sorted(permuted, key=lambda prompt: self._difficulties[prompt.id])


class SourceDraws:
    """The source of each position: independent samples by weight, in blocks that are seeded by their number."""

    BLOCK = 4096

    def __init__(self, weights: Sequence[float], *, seed: int):
        self._probabilities = np.array(weights) / sum(weights)
        self._seed = seed
        self._blocks: list[np.ndarray] = []

    def draw(self, start: int, count: int) -> np.ndarray:
        """[count] numbers of sources."""
        self._extend(start + count)
        first = start // self.BLOCK
        return np.concatenate(self._blocks[first:])[start - first * self.BLOCK :][:count]

    def counts(self, end: int) -> list[int]:
        """How often each source occurs before position `end`."""
        self._extend(end)
        drawn = np.concatenate([*self._blocks, np.empty(0, dtype=np.int64)])[:end]
        return np.bincount(drawn, minlength=len(self._probabilities)).tolist()

    def _extend(self, end: int) -> None:
        while len(self._blocks) * self.BLOCK < end:
            generator = np.random.default_rng([self._seed, 2, len(self._blocks)])
            self._blocks.append(generator.choice(len(self._probabilities), size=self.BLOCK, p=self._probabilities))


class DemonstrationStream:
    """Batches of training demonstrations for rl.ptx, with the tokens that SFT trains on; empty batches if the coefficient is 0.

    Raises:
        ValueError: no demonstration fits model.max_length.
    """

    def __init__(self, job: RlJob):
        self._batch_size, self._seed = job.rl.ptx.batch_size, job.seed
        self._demonstrations: list[Demonstration] = []
        if job.rl.ptx.coef:
            tokenizer = load_tokenizer(job.sft_model, **job.load_options)
            rows = read_rows(Path(job.prepared), "sft", "train")
            kept, _ = encode_demonstrations(
                rows, tokenizer, max_length=job.model.max_length, train_on=job.train_on, train_on_thoughts=job.train_on_thoughts
            )
            if not kept:
                raise ValueError(
                    f"rl.ptx: expected demonstrations of at most model.max_length tokens, got none of {len(rows)}; set coef to 0"
                )
            self._demonstrations = kept

    def batch(self, number: int) -> list[Demonstration]:
        """Return the demonstrations of an optimizer step; `number` counts the steps of the whole run."""
        if not self._demonstrations:
            return []
        chosen = batch_indices(number, batch_size=self._batch_size, num_examples=len(self._demonstrations), seed=self._seed)
        return [self._demonstrations[i] for i in chosen]


def collate(
    rollouts: Sequence[Rollout],
    sequences: Sequences,
    components: RewardComponents,
    outputs: dict[str, torch.Tensor],
    baseline: Baseline | None,
    *,
    old_logprobs_source: OldLogprobs,
    steps: Mapping[str, StepScores] | None = None,
    taught: Taught | None = None,
) -> RolloutBatch:
    """Rollouts, their scores and the forward passes' outputs as tensors.

    Args:
        sequences: `pack(rollouts)`.
        outputs: flat [N] over the response tokens, in order: old_logprobs with `recompute`; sampler_logprobs with top-p or top-k;
            ref_logprobs with a reference; teacher_logprobs, or teacher_top_logprobs and teacher_top_ids, with teachers that compute
            before the update; values with a critic.
        baseline: of the greedy response to each row's prompt.
        steps: scores of process reward models, by scorer.
        taught: what teachers at an address answered. A response without an answer is masked.
    """
    if taught is not None:
        outputs = taught.beside(outputs)
    response_mask = _response_mask(rollouts)
    trained, versions = _origins(rollouts, response_mask)
    if taught is not None:
        trained &= torch.tensor(taught.known)[:, None]
    rollout_logprobs = _padded(torch.tensor([x for r in rollouts for x in r.rollout_logprobs]), response_mask)
    padded = {name: _padded(flat, response_mask) for name, flat in outputs.items()}
    old_logprobs = rollout_logprobs if old_logprobs_source == "from_engine" else padded.get("old_logprobs")
    return RolloutBatch(
        sequences=sequences,
        response_ids=torch.zeros(response_mask.shape, dtype=torch.long).masked_scatter(response_mask, sequences.response_ids()),
        response_mask=trained,
        rollout_logprobs=rollout_logprobs,
        old_logprobs_source=old_logprobs_source,
        old_logprobs=old_logprobs,
        sampler_logprobs=padded.get("sampler_logprobs", old_logprobs),
        ref_logprobs=padded.get("ref_logprobs"),
        values=padded.get("values", torch.zeros(response_mask.shape)),
        components=components,
        baseline=baseline,
        policy_versions=versions,
        turns=(turns := _turns(versions)),
        turn_rewards=_turn_rewards(rollouts, turns),
        step_rewards={name: _at_tokens(scores, response_mask.shape) for name, scores in (steps or {}).items()},
        group_ids=torch.tensor([r.group_id for r in rollouts]),
        finished=torch.tensor([r.finished for r in rollouts]),
        lengths=torch.tensor([r.num_sampled for r in rollouts]),
        teacher_logprobs=padded.get("teacher_logprobs"),
        teacher_top_logprobs=padded.get("teacher_top_logprobs"),
        teacher_top_ids=padded.get("teacher_top_ids"),
        teacher_sequences=pack_for_teachers(rollouts),
    )


def baseline_of(rollouts: Sequence[Rollout], components: RewardComponents, outputs: dict[str, torch.Tensor], *, copies: int) -> Baseline:
    """Greedy responses, one for each prompt, as the baseline of `copies` rows each.

    Args:
        outputs: as for `collate`; empty where no KL is in the reward.
    """
    mask = _response_mask(rollouts)
    logprobs = (_padded(outputs[name], mask) if outputs else torch.zeros(mask.shape) for name in ("old_logprobs", "ref_logprobs"))
    finished, lengths = torch.tensor([r.finished for r in rollouts]), torch.tensor([r.num_sampled for r in rollouts])
    trained, _ = _origins(rollouts, mask)
    tensors = (tensor.repeat_interleave(copies, dim=0) for tensor in (finished, lengths, trained, *logprobs))
    return Baseline({name: scores.repeat_interleave(copies) for name, scores in components.items()}, *tensors)


def _response_mask(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """[B, R] bool, the tokens that aren't padding."""
    lengths = torch.tensor([r.num_tokens for r in rollouts])
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _origins(rollouts: Sequence[Rollout], mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens are trained on, [B, R] bool, and the policy version that sampled each of them, [B, R] int64, -1 where none did.

    Args:
        mask: [B, R] bool, the tokens that aren't padding.
    """
    spans = [span for r in rollouts for span in r.spans]
    sizes = torch.tensor([len(span.ids) for span in spans])
    trained = torch.tensor([span.trained for span in spans]).repeat_interleave(sizes)
    versions = torch.tensor([-1 if span.version is None else span.version for span in spans]).repeat_interleave(sizes)
    return mask.masked_scatter(mask, trained), torch.full(mask.shape, -1).masked_scatter(mask, versions)


def _turns(versions: torch.Tensor) -> torch.Tensor:
    """[B, R] int64, number of each token's reply, -1 where none has it. Replies are apart: something was put in between."""
    sampled = versions >= 0
    begins = sampled & ~torch.nn.functional.pad(sampled, (1, 0))[:, :-1]
    return (begins.cumsum(1) - 1).where(sampled, -1)


def _turn_rewards(rollouts: Sequence[Rollout], turns: torch.Tensor) -> torch.Tensor:
    """[B, R], what each reply was given, at its last token."""
    found = torch.zeros(turns.shape)
    for row, rollout in enumerate(rollouts):
        for turn, reward in enumerate(rollout.dialogue.rewards if rollout.dialogue else ()):
            if reward:
                found[row, int((turns[row] == turn).nonzero().max())] = reward
    return found


def _at_tokens(scores: StepScores, shape: torch.Size) -> torch.Tensor:
    """[B, R], what each step adds to its response's score, at the token that ends it."""
    found = torch.zeros(shape)
    for row, (ends, rewards) in enumerate(zip(scores.ends, scores.rewards, strict=True)):
        found[row].index_add_(0, torch.tensor(ends, dtype=torch.long), torch.tensor(rewards))
    return found


def _padded(flat: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Flat values [N, ...] at the True positions of a mask [B, R], zeros elsewhere."""
    found = torch.zeros(*mask.shape, *flat.shape[1:], dtype=flat.dtype)
    found[mask] = flat
    return found


def pack(rollouts: Sequence[Rollout]) -> Sequences:
    """Prompt and response of each rollout."""
    ids = [[*r.prompt.prompt_ids, *r.response_ids] for r in rollouts]
    return Sequences.of(ids, [len(r.prompt.prompt_ids) for r in rollouts], [pictures_of(r.prompt.messages) for r in rollouts])


def pack_for_teachers(rollouts: Sequence[Rollout]) -> Sequences | None:
    """Return what teachers read and each response; None where they read what the policy does."""
    if any(r.prompt.teacher_ids is None for r in rollouts):
        return None
    ids = [[*r.prompt.teacher_ids, *r.response_ids] for r in rollouts]
    return Sequences.of(ids, [len(r.prompt.teacher_ids) for r in rollouts])
