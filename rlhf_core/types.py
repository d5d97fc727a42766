"""The data types of the RL loop. A batch changes its type when its meaning changes; no field is filled in later.

    Prompt -> Rollout -> RolloutBatch -> TrainBatch -> UpdateResult

Shapes: B rollouts, R tokens of the longest response, G of the longest greedy response. Tokens of prompt and response are unpadded
(`Sequences`); what there is of each response token is padded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

# Where the old log-probabilities of the policy loss come from; `RlConfig.old_logprobs_source` decides it once per step.
OldLogprobs = Literal["recompute", "from_update", "from_engine"]
RewardComponents = dict[str, "torch.Tensor"]  # scorer's name -> [B] raw scores, NaN = not scored


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends before the assistant's answer.

    prompt_ids: the rendered conversation with the generation prompt.
    messages: list of {"role", "content"}.
    label: the expected answer of a verifiable task, or None.
    teacher_ids: what teachers read in place of prompt_ids (rl.distillation.teacher_template); None: the same.
    """

    id: str
    source: str
    messages: list[dict[str, str]]
    prompt_ids: list[int]
    label: str | None
    teacher_ids: list[int] | None = None


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
class Dialogue:
    """What a response of several turns has besides its tokens (rlhf_core/agents).

    messages: the conversation before the last reply.    opening: how many of them came before the first.
    sampled: of each response token, whether the model sampled it.
    start: number of response tokens before the last reply.
    score: what the environment gave; None: nothing.    rewards: the parts of it that `chat.reward` gave after each reply.
    failed: the environment ended with an error, so that no scorer scores the response.
    turns, calls, failed_calls: numbers of replies, of tool results, and of those that are errors.
    """

    messages: list[dict[str, str]]
    opening: int
    sampled: list[bool]
    start: int
    score: float | None
    rewards: list[float]
    failed: bool
    turns: int
    calls: int
    failed_calls: int


@dataclass(frozen=True)
class Rollout:
    """One response: what the policy sampled, and what was put in between.

    spans: up to and including the end token, if one was sampled.
    finished: the model ended the response; False: it was truncated at the length limit.
    group_id: shared by the rollouts of one prompt within a step.
    dialogue: None: the response is a single reply.
    """

    prompt: Prompt
    spans: list[Span]
    finished: bool
    group_id: int
    dialogue: Dialogue | None = None

    @classmethod
    def of_tree(cls, tree: dict[str, Any]) -> Rollout:
        """Return the rollout of what JSON makes of its fields and theirs."""
        dialogue = tree["dialogue"] and Dialogue(**tree["dialogue"])
        return cls(**tree | {"prompt": Prompt(**tree["prompt"]), "spans": [Span(**s) for s in tree["spans"]], "dialogue": dialogue})

    @property
    def response_ids(self) -> list[int]:
        return [token for span in self.spans for token in span.ids]

    @property
    def ids(self) -> list[int]:
        """Token ids of prompt and response."""
        return [*self.prompt.prompt_ids, *self.response_ids]

    @property
    def rollout_logprobs(self) -> list[float]:
        """The engine's log-probability of each response token."""
        return [logprob for span in self.spans for logprob in span.logprobs]

    @property
    def num_tokens(self) -> int:
        """Number of the response's tokens, with those that were put in."""
        return sum(len(span.ids) for span in self.spans)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens: the length of the response for penalties and metrics."""
        return sum(len(span.ids) for span in self.spans if span.version is not None)


@dataclass(frozen=True)
class Sequences:
    """Prompts with their responses, end to end, without padding.

    ids: [N] int32, sequence after sequence.
    starts: [B] int64, tokens of each prompt.    lengths: [B] int64, tokens of each prompt and its response.
    pictures: of each prompt, `rlhf_core.data.pictures.Picture`; None: none has any.
    """

    ids: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    pictures: list[tuple[Any, ...]] | None = None

    @classmethod
    def of(cls, sequences: list[list[int]], starts: list[int], pictures: list[tuple[Any, ...]] | None = None) -> Sequences:
        import torch

        flat = torch.tensor([token for ids in sequences for token in ids], dtype=torch.int32)
        return cls(flat, torch.tensor(starts), torch.tensor([len(ids) for ids in sequences]), pictures)

    def __len__(self) -> int:
        return len(self.lengths)

    def lists(self) -> list[list[int]]:
        return [ids.tolist() for ids in self._pieces()]

    def response_ids(self) -> torch.Tensor:
        """[M] int64, response after response."""
        import torch

        return torch.cat([ids[start:] for ids, start in zip(self._pieces(), self.starts.tolist(), strict=True)]).long()

    def select(self, rows: list[int]) -> Sequences:
        """Sequences in the given order."""
        import torch

        pieces, pictures = self._pieces(), None if self.pictures is None else [self.pictures[row] for row in rows]
        return Sequences(torch.cat([self.ids[:0], *(pieces[row] for row in rows)]), self.starts[rows], self.lengths[rows], pictures)

    def pictures_of(self, rows: list[int]) -> list[Any]:
        """The pictures of these sequences, in order."""
        return [picture for row in rows for picture in (self.pictures or {row: ()})[row]]

    def until(self, ends: torch.Tensor) -> Sequences:
        """Return each with so many tokens of its response, [B]."""
        import torch

        lengths = self.starts + ends
        return replace(self, ids=torch.cat([ids[:n] for ids, n in zip(self._pieces(), lengths.tolist(), strict=True)]), lengths=lengths)

    def _pieces(self) -> tuple[torch.Tensor, ...]:
        return self.ids.split(self.lengths.tolist())


@dataclass(frozen=True)
class Baseline:
    """Greedy responses to the prompt of each row, whose rewards are the baseline of the row's own (ReMax).

    components: of the responses.    finished: [B] bool.    lengths: [B] int64, sampled tokens.
    response_mask: [B, G] bool, True = sampled by the policy and trained on.
    old_logprobs, ref_logprobs: [B, G], from trainer and reference; zeros where no KL is in the reward.
    """

    components: RewardComponents
    finished: torch.Tensor
    lengths: torch.Tensor
    response_mask: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor


@dataclass(frozen=True)
class RolloutBatch:
    """Scored rollouts as tensors, with the outputs of the forward passes before the update.

    sequences: prompts with their responses.
    response_ids: [B, R] int64, right-padded by 0.    response_mask: [B, R] bool, True = sampled by the policy and trained on.
    rollout_logprobs: [B, R], from the rollout engine.
    old_logprobs_source: where old_logprobs come from.
    old_logprobs: [B, R], of the policy before the update; None with from_update.
    sampler_logprobs: [B, R], of the policy before the update, in the distribution that was sampled from: old_logprobs renormalised over the
        tokens that top-p and top-k leave. None with from_update.
    ref_logprobs: [B, R], from the reference; None where no reference is kept.
    values: [B, R], from the critic, before each token; zeros where there is no critic.
    baseline: greedy responses to each row's prompt; None unless the algorithm is remax.
    policy_versions: [B, R] int64, weight updates of the policy that sampled each token; -1 where none did.
    turns: [B, R] int64, number of the reply that has the token, from 0 on; -1 where none has.
    turn_rewards: [B, R], what `chat.reward` gave after a reply, at its last token.
    step_rewards: of each process reward model, [B, R], what a step adds to the response's raw score, at its last token.
    group_ids: [B] int64.    finished: [B] bool.    lengths: [B] int64, sampled tokens.
    teacher_logprobs: [B, R], mean over the teachers by their weights; None unless the loss is of sampled tokens alone.
    teacher_top_logprobs, teacher_top_ids: [B, R, M, K], of each of M teachers' K likeliest tokens; None without rl.distillation.top_k.
    teacher_sequences: what teachers read that compute in the update: other prompts with the same responses; None: what the policy reads.
    """

    sequences: Sequences
    response_ids: torch.Tensor
    response_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    old_logprobs_source: OldLogprobs
    old_logprobs: torch.Tensor | None
    sampler_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    values: torch.Tensor
    components: RewardComponents
    baseline: Baseline | None
    policy_versions: torch.Tensor
    turns: torch.Tensor
    turn_rewards: torch.Tensor
    group_ids: torch.Tensor
    finished: torch.Tensor
    lengths: torch.Tensor
    teacher_logprobs: torch.Tensor | None = None
    teacher_top_logprobs: torch.Tensor | None = None
    teacher_top_ids: torch.Tensor | None = None
    teacher_sequences: Sequences | None = None
    step_rewards: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainBatch:
    """Inputs of the update. Shapes as in RolloutBatch.

    sequences: prompts with their responses.
    response_mask: [B, R] bool, True = trained on.
    old_logprobs: [B, R]; None: the update takes its own log-probabilities before the optimizer step (from_update).
    ref_logprobs: [B, R]; None where no reference is kept.
    advantages, returns: [B, R].
    importance_weights: [B, R], factor of each token's policy loss that corrects for the rollout engine's probabilities; 1 = uncorrected.
    teacher_logprobs, teacher_top_logprobs, teacher_top_ids, teacher_sequences: as of RolloutBatch.
    """

    sequences: Sequences
    response_mask: torch.Tensor
    old_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    old_values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    importance_weights: torch.Tensor
    teacher_logprobs: torch.Tensor | None = None
    teacher_top_logprobs: torch.Tensor | None = None
    teacher_top_ids: torch.Tensor | None = None
    teacher_sequences: Sequences | None = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        of_ids = ("sequences", "teacher_sequences")
        return {f.name: tensor for f in fields(self) if f.name not in of_ids and (tensor := getattr(self, f.name)) is not None}

    @property
    def ends(self) -> torch.Tensor:
        """[B] tokens of each response up to the last that is trained on; 0 where none is."""
        return (self.response_mask.flip(1).cumsum(1) > 0).sum(1)

    def select(self, rows: list[int]) -> TrainBatch:
        """Rows in the given order. Each sequence ends with its last trained token, and has at least one token of its response; columns are
        as many as the longest needs.
        """
        picked = replace(self, **{name: tensor[rows] for name, tensor in self._tensors().items()})
        ends = picked.ends.clamp(min=1)
        cut = {name: tensor[:, : int(ends.max())] for name, tensor in picked._tensors().items()}
        taught = None if self.teacher_sequences is None else self.teacher_sequences.select(rows).until(ends)
        return replace(picked, sequences=self.sequences.select(rows).until(ends), teacher_sequences=taught, **cut)

    def to(self, device: torch.device) -> TrainBatch:
        """Return the tensors on a device; sequences stay where they are."""
        return replace(self, **{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def __len__(self) -> int:
        return len(self.response_mask)


@dataclass(frozen=True)
class UpdateResult:
    """What an update returns.

    metrics: means over tokens and optimizer steps.
    old_logprobs: [B, R], of the policy before the update: the batch's, or with from_update those that the update computed; responses that
        were not trained on then have the engine's.
    """

    metrics: dict[str, float]
    old_logprobs: torch.Tensor
