"""The data types of the RL loop. A batch changes its type when its meaning changes; no field is filled in later.

    Prompt -> Rollout -> RolloutBatch -> TrainBatch -> UpdateResult

Shapes: B rollouts, P tokens of the longest prompt, R of the longest response, G of the longest greedy response.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

# Where the old log-probabilities of the policy loss come from; `RlConfig.old_logprobs_source` decides it once per step.
OldLogprobs = Literal["recompute", "from_update", "from_engine"]
Components = dict[str, "torch.Tensor"]  # scorer's name -> [B] raw scores, NaN = not scored


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends before the assistant's answer.

    prompt_ids: the rendered conversation with the generation prompt.
    messages: list of {"role", "content"}.
    label: the expected answer of a verifiable task, or None.
    """

    id: str
    source: str
    messages: list[dict[str, str]]
    prompt_ids: list[int]
    label: str | None


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a response with one origin.

    logprobs: of each token, from the rollout engine, at the sampling temperature; any numbers where the tokens were not sampled.
    version: number of weight updates of the policy that sampled the tokens; None: they were put in, as a tool's output is.
    trained: the tokens are trained on; False where they were not sampled.
    """

    ids: list[int]
    logprobs: list[float]
    version: int | None
    trained: bool = True

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.logprobs) and not (self.trained and self.version is None)


@dataclass(frozen=True)
class Rollout:
    """One response: what the policy sampled, and what was put in between.

    spans: up to and including the end token, if one was sampled.
    finished: the model ended the response; False: it was truncated at the length limit.
    group_id: shared by the rollouts of one prompt within a step.
    """

    prompt: Prompt
    spans: list[Span]
    finished: bool
    group_id: int

    @property
    def response_ids(self) -> list[int]:
        return [token for span in self.spans for token in span.ids]

    @property
    def rollout_logprobs(self) -> list[float]:
        """Of each response token."""
        return [logprob for span in self.spans for logprob in span.logprobs]

    @property
    def num_tokens(self) -> int:
        """Of the response, with what was put in."""
        return sum(len(span.ids) for span in self.spans)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens: the length of the response for penalties and metrics."""
        return sum(len(span.ids) for span in self.spans if span.version is not None)


@dataclass(frozen=True)
class Baseline:
    """Greedy responses to the prompt of each row, whose rewards are the baseline of the row's own (ReMax).

    components: of the responses.    finished: [B] bool.    lengths: [B] int64, sampled tokens.
    response_mask: [B, G] bool, True = sampled by the policy and trained on.
    old_logprobs, ref_logprobs: [B, G], from trainer and reference; zeros where no KL is in the reward.
    """

    components: Components
    finished: torch.Tensor
    lengths: torch.Tensor
    response_mask: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor


@dataclass(frozen=True)
class RolloutBatch:
    """Scored rollouts as tensors, with the outputs of the forward passes before the update.

    prompt_ids: [B, P] int64, left-padded.            prompt_mask: [B, P] bool.
    response_ids: [B, R] int64, right-padded.         response_mask: [B, R] bool, True = sampled by the policy and trained on.
    rollout_logprobs: [B, R], from the rollout engine.
    old_logprobs_source: where old_logprobs come from.
    old_logprobs: [B, R], of the policy before the update; None with from_update.
    sampler_logprobs: [B, R], of the policy before the update, in the distribution that was sampled from: old_logprobs renormalised over the
        tokens that top-p and top-k leave. None with from_update.
    ref_logprobs: [B, R], from the reference; None where no reference is kept.
    values: [B, R], from the critic, before each token; zeros where there is no critic.
    baseline: greedy responses to each row's prompt; None unless the algorithm is remax.
    policy_versions: [B, R] int64, weight updates of the policy that sampled each token; -1 where none did.
    group_ids: [B] int64.    finished: [B] bool.    lengths: [B] int64, sampled tokens.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    response_ids: torch.Tensor
    response_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    old_logprobs_source: OldLogprobs
    old_logprobs: torch.Tensor | None
    sampler_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    values: torch.Tensor
    components: Components
    baseline: Baseline | None
    policy_versions: torch.Tensor
    group_ids: torch.Tensor
    finished: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class TrainBatch:
    """Inputs of the update. Shapes as in RolloutBatch.

    response_mask: [B, R] bool, True = trained on.
    old_logprobs: [B, R]; None: the update takes its own log-probabilities before the optimizer step (from_update).
    ref_logprobs: [B, R]; None where no reference is kept.
    advantages, returns: [B, R].
    importance_weights: [B, R], factor of each token's policy loss that corrects for the rollout engine's probabilities; 1 = uncorrected.
    """

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    response_ids: torch.Tensor
    response_mask: torch.Tensor
    old_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    old_values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    importance_weights: torch.Tensor

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {f.name: tensor for f in fields(self) if (tensor := getattr(self, f.name)) is not None}

    def select(self, rows: list[int]) -> TrainBatch:
        """Rows in the given order, without columns that are padding in all of them; one response column stays where none is trained on."""
        picked = {name: tensor[rows] for name, tensor in self._tensors().items()}
        used = picked["response_mask"].any(0).nonzero()
        width = int(used.max()) + 1 if len(used) else 1
        prompt_width = int(picked["prompt_mask"].sum(1).max())
        cut = {name: t[:, -prompt_width:] if name.startswith("prompt") else t[:, :width] for name, t in picked.items()}
        return replace(self, **cut)

    def to(self, device: torch.device) -> TrainBatch:
        return replace(self, **{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def __len__(self) -> int:
        return len(self.response_ids)


@dataclass(frozen=True)
class UpdateResult:
    """What an update returns.

    metrics: means over tokens and optimizer steps.
    old_logprobs: [B, R], of the policy before the update: the batch's, or with from_update those that the update computed; responses that
        were not trained on then have the engine's.
    """

    metrics: dict[str, float]
    old_logprobs: torch.Tensor
