"""What flows through the RL loop. A batch changes its type when its meaning changes; nothing is filled in later.

    Prompt -> Rollout -> ScoredRollout -> RolloutBatch -> TrainBatch -> metrics

B = rollouts, P = longest prompt, R = longest response, T = longest prompt and response together.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for the assistant's answer.

    prompt_ids: its template with the generation prompt.
    messages: list of {"role", "content"}.
    label: the expected answer of a verifiable task, or None.
    """

    id: str
    source: str
    messages: list[dict[str, str]]
    prompt_ids: list[int]
    label: str | None


@dataclass(frozen=True)
class Rollout:
    """One sampled response.

    response_ids: up to and including the end token, if it came.
    rollout_logprobs: of each response token, as the sampling engine computed them, at the sampling temperature.
    finished: the model ended the response itself; False: it was cut off by length.
    group_id: rollouts of one prompt share it within a step.
    policy_version: number of weight updates the sampling engine had received.
    """

    prompt: Prompt
    response_ids: list[int]
    rollout_logprobs: list[float]
    finished: bool
    group_id: int
    policy_version: int


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout and the raw score of its response by each scorer, by name; NaN: that one could not score it."""

    rollout: Rollout
    components: dict[str, float]


@dataclass(frozen=True)
class Baseline:
    """Greedy responses to each row's prompt, whose rewards are what the row's own is compared with (ReMax).

    components: scorer's name -> [B] raw scores, NaN = not scored.    finished: [B] bool.
    response_mask: [B, G] bool, G = the longest of them.
    old_logprobs, ref_logprobs: [B, G], from trainer and reference; zeros where no KL is in the reward.
    """

    components: dict[str, torch.Tensor]
    finished: torch.Tensor
    response_mask: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor


@dataclass(frozen=True)
class RolloutBatch:
    """Scored rollouts as tensors, with what the frozen and the current models say of them.

    prompt_ids: [B, P] int64, left-padded.            prompt_mask: [B, P] bool.
    response_ids: [B, R] int64, right-padded.         response_mask: [B, R] bool, True = sampled and trained on.
    rollout_logprobs: [B, R], from the sampling engine.
    old_logprobs: [B, R], from the trainer before the update; until an update on policy has computed them, the engine's.
    sampler_logprobs: [B, R], from the trainer before the update, of the distribution that was sampled from: old_logprobs within the
        tokens that top-p and top-k leave.
    ref_logprobs: [B, R], from the reference; equal to old_logprobs where no reference is used.
    values: [B, R], the critic's before each token; zeros where there is no critic.
    components: scorer's name -> [B] raw scores, NaN = not scored.
    baseline: of the greedy response to each row's prompt; None where the algorithm asks for none.
    group_ids: [B] int64.    finished: [B] bool.    policy_versions: [B] int64.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    response_ids: torch.Tensor
    response_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    values: torch.Tensor
    components: dict[str, torch.Tensor]
    baseline: Baseline | None
    group_ids: torch.Tensor
    finished: torch.Tensor
    policy_versions: torch.Tensor


@dataclass(frozen=True)
class TrainBatch:
    """What the update needs: the rollouts and their credit. Shapes as in RolloutBatch.

    advantages, returns: [B, R].
    importance_weights: [B, R], of each token's policy loss, for samples of a policy that isn't quite the trainer's; 1 where uncorrected.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    response_ids: torch.Tensor
    response_mask: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    old_values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    importance_weights: torch.Tensor

    def select(self, rows: list[int]) -> TrainBatch:
        """Some rows, in the given order; columns that are padding in all of them go, but for one where no response counts."""
        picked = {f.name: getattr(self, f.name)[rows] for f in fields(self)}
        used = picked["response_mask"].any(0).nonzero()
        width = int(used.max()) + 1 if len(used) else 1
        prompt_width = int(picked["prompt_mask"].sum(1).max())
        for name, value in picked.items():
            picked[name] = value[:, -prompt_width:] if name.startswith("prompt") else value[:, :width]
        return replace(self, **picked)

    def to(self, device: torch.device) -> TrainBatch:
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def __len__(self) -> int:
        return len(self.response_ids)
