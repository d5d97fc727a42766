"""Prompts in, tensors out: what the RL loop does with data."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_core.data.batching import batch_indices
from rlhf_core.data.schema import read_rows
from rlhf_core.models.tokenizer import encode_prompt, load_tokenizer
from rlhf_core.trainers.rl_job import RlJob
from rlhf_core.types import Prompt, Rollout, RolloutBatch, ScoredRollout


class PromptStream:
    """The training prompts, in an order that follows from the seed and the step alone.

    Prompts that leave no room for `rollout.max_new_tokens` are dropped.

    Raises:
        ValueError: none is left.
    """

    def __init__(self, job: RlJob):
        tokenizer = load_tokenizer(job.sft_model, trust_remote_code=job.model.trust_remote_code)
        self.pad_id, self.eos_id = tokenizer.pad_token_id, tokenizer.eos_token_id
        self._seed, self._batch_size = job.seed, job.rl.rollout_batch_size
        rows = read_rows(Path(job.prepared), "prompt", "train")
        prompts = [Prompt(r["id"], r["source"], r["messages"], encode_prompt(tokenizer, r["messages"]), r["label"]) for r in rows]
        longest = job.model.max_length - job.rl.rollout.max_new_tokens
        self._prompts = [p for p in prompts if len(p.prompt_ids) <= longest]
        if not self._prompts:
            raise ValueError(f"prompts: expected some of at most {longest} tokens, got none of {len(rows)}; raise model.max_length")

    def batch(self, step: int, *, size: int | None = None) -> list[Prompt]:
        """The prompts of one step; `size` overrides rollout_batch_size."""
        chosen = batch_indices(step, batch_size=size or self._batch_size, num_examples=len(self._prompts), seed=self._seed)
        return [self._prompts[i] for i in chosen]


def collate(scored: list[ScoredRollout], outputs: dict[str, torch.Tensor], pad_id: int) -> RolloutBatch:
    """Rollouts, their scores and what the models said of them, as tensors.

    Args:
        outputs: flat [N] over the response tokens in order; `ref_logprobs` and `values` may be absent.
    """
    rollouts = [s.rollout for s in scored]
    responses = [torch.tensor(r.response_ids) for r in rollouts]
    response_ids = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(r) for r in responses])
    response_mask = torch.arange(response_ids.shape[1]) < lengths[:, None]
    prompt_ids, prompt_mask = _left_padded([r.prompt.prompt_ids for r in rollouts], pad_id)

    def padded(flat: torch.Tensor) -> torch.Tensor:
        return torch.zeros(response_mask.shape).masked_scatter(response_mask, flat)

    old_logprobs = padded(outputs["old_logprobs"])
    return RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=response_ids,
        response_mask=response_mask,
        rollout_logprobs=padded(torch.tensor([x for r in rollouts for x in r.rollout_logprobs])),
        old_logprobs=old_logprobs,
        ref_logprobs=padded(outputs["ref_logprobs"]) if "ref_logprobs" in outputs else old_logprobs,
        values=padded(outputs["values"]) if "values" in outputs else torch.zeros(response_mask.shape),
        scores=torch.tensor([s.score for s in scored]),
        group_ids=torch.tensor([r.group_id for r in rollouts]),
        finished=torch.tensor([r.finished for r in rollouts]),
        policy_versions=torch.tensor([r.policy_version for r in rollouts]),
    )


def _left_padded(sequences: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, sequences))
    ids = torch.full((len(sequences), width), pad_id)
    mask = torch.zeros((len(sequences), width), dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        mask[row, width - len(sequence) :] = True
    return ids, mask


def rollout_batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Raw scores over what could be scored (finite ones); KL to the reference per sequence, in nats (k1 on the sampled tokens)."""
    known = batch.scores.isfinite()
    scored = batch.scores[known]
    kl = ((batch.old_logprobs - batch.ref_logprobs) * batch.response_mask).sum(1)
    return {
        "score_mean": float(scored.mean()),
        "score_std": float(scored.std(correction=0)),
        "kl_mean": float(kl.mean()),
        "response_length": float(batch.response_mask.sum(1).float().mean()),
        "cut_off_fraction": float((~batch.finished).float().mean()),
        "unscored_fraction": float((~known).float().mean()),
    }


def sequences_of(rollouts: list[Rollout]) -> tuple[list[list[int]], list[int]]:
    """Prompt and response of each rollout as one sequence, and where the response starts."""
    return [[*r.prompt.prompt_ids, *r.response_ids] for r in rollouts], [len(r.prompt.prompt_ids) for r in rollouts]
