"""Scores of responses by every scorer.

RL, evaluation, rejection sampling and rounds of iterative DPO all score here. They differ in where scorers run: `LocalScorers` runs them in
this process, `rlhf_core.trainers.rl.actor_scorers` in Ray actors.

    scorers = LocalScorers(section.scorers, reward_model=Path("models/reward"), source_judges=..., model=params.model)
    groups = ResponseScorer(scorers, tokenizer, stops=stop_ids(tokenizer, folder)).score_groups(prompts, samples)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithms.step_rewards import aggregate_of, step_rewards
from rlhf_core.config import ModelConfig, ScorerConfig
from rlhf_core.data.tokens import beside_pictures, content_of
from rlhf_core.engines.deepspeed.engine import device
from rlhf_core.engines.deepspeed.ranks import in_shares
from rlhf_core.engines.rollout.requests import Sample
from rlhf_core.models.batch import padded_ends
from rlhf_core.models.folder import step_separator
from rlhf_core.models.tokenizer import load_tokenizer, response_text
from rlhf_core.models.vision import sight
from rlhf_core.paths import PREPARED
from rlhf_core.progress import Reasons
from rlhf_core.sampling.responses import Response, ScoredResponse, last_reply, sampled_response
from rlhf_core.sampling.rewards import weighted_score
from rlhf_core.scorers.needs import model_folders
from rlhf_core.scorers.reward.input import RewardModelInput, without_stop
from rlhf_core.scorers.reward.members import combine_members
from rlhf_core.scorers.reward.model import MICROBATCH_TOKENS, load_members, score_by_members
from rlhf_core.scorers.text import ScoreItem, TextScorers, score_item
from rlhf_core.types import Prompt, RewardComponents, Rollout

DISAGREEMENT = "disagreement"  # of an ensemble: the standard deviation over its members, in units of the raw score


@dataclass
class ScorerMetrics:
    """Means of what scorers measured beside their scores, as <scorer>.<name>, weighted by the number of responses in each call."""

    _sums: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, scorer: str, metrics: dict[str, float], *, count: int) -> None:
        for name, value in metrics.items():
            key = f"{scorer}.{name}"
            self._sums[key] = self._sums.get(key, 0.0) + count * value
            self._counts[key] = self._counts.get(key, 0) + count

    def means(self) -> dict[str, float]:
        return {name: self._sums[name] / self._counts[name] for name in sorted(self._sums)}


class Scorers:
    """The scorers of a stage, and the tokenizers of their reward models. A subclass says where the scorers run.

    Args:
        folders: scorer's name -> folder of its reward model.
        model: of the policy; its max_length bounds a reward model's input.
    """

    def __init__(self, configs: list[ScorerConfig], folders: dict[str, Path], model: ModelConfig):
        self.configs = configs
        self.max_length = model.max_length
        options = {"trust_remote_code": model.trust_remote_code, "template_date": model.template_date, "vision": model.vision}
        self.tokenizers = {name: load_tokenizer(str(folder), scores=True, **options) for name, folder in folders.items()}
        self.separators = {name: step_separator(folder) for name, folder in folders.items()}
        self.reports = {name: Reasons(name) for name in folders}

    def submit_sequences(
        self, name: str, sequences: list[list[int] | None], ends: torch.Tensor | None = None
    ) -> Callable[[], torch.Tensor]:
        """Start a reward model's forward passes. The result waits for them: raw scores [N, members], NaN where a sequence is None.

        Args:
            ends: of steps, as for `score_sequences`: the scores are theirs, [N, members, S].
        """
        raise NotImplementedError

    def score_texts(self, config: ScorerConfig, items: list[ScoreItem]) -> tuple[list[float], dict[str, float]]:
        """One score per item (NaN = not scored) by a scorer that reads text, and its further metrics."""
        raise NotImplementedError


class LocalScorers(Scorers):
    """Scorers in this process. Reward models compute in `model.dtype`, as in RL, on the GPU where there is one.

    Args:
        reward_model: folder of the chain's own, for scorers of kind reward_model without a path.
        source_judges: data source -> its judge.
    Raises:
        ValueError: a scorer's function or reward model can't be loaded.
    """

    def __init__(self, configs: list[ScorerConfig], *, reward_model: Path, source_judges: dict[str, str], model: ModelConfig):
        folders = model_folders(configs, reward_model)
        self._text_scorers = TextScorers(0, configs, source_judges)
        self._members = {
            config.name: load_members(
                folders[config.name],
                device=device(),
                dtype=getattr(torch, model.dtype),
                training_dtype=model.dtype,
                trust_remote_code=model.trust_remote_code,
                count=config.members,
                label=config.label,
            )
            for config in configs
            if config.name in folders
        }
        super().__init__(configs, folders, model)
        self._sights = {name: sight(tokenizer, PREPARED) for name, tokenizer in self.tokenizers.items()}

    def submit_sequences(
        self, name: str, sequences: list[list[int] | None], ends: torch.Tensor | None = None
    ) -> Callable[[], torch.Tensor]:
        options = {"pad_id": self.tokenizers[name].pad_token_id, "sight": self._sights[name]}
        of_steps = [()] * len(sequences) if ends is None else [tuple(row) for row in ends.tolist()]
        place: dict[Any, int] = {}  # of each distinct sequence, which is scored once
        contents = [None if ids is None else content_of(ids) for ids in sequences]
        places = [place.setdefault(key, len(place)) for key in zip(contents, of_steps, strict=True)]
        distinct = [None if content is None else beside_pictures(list(content[0]), content[1]) for content, _ in place]
        own_ends = None if ends is None else torch.tensor([own for _, own in place]).reshape(len(place), ends.shape[1])
        scores = score_by_members(
            self._members[name], distinct, microbatch_tokens=MICROBATCH_TOKENS, device=device(), ends=own_ends, **options
        )
        return lambda: scores[places]

    def score_texts(self, config: ScorerConfig, items: list[ScoreItem]) -> tuple[list[float], dict[str, float]]:
        return self._text_scorers.score_items(config.name, items)


@dataclass(frozen=True)
class PendingScores:
    """Responses whose reward models are at work; `ResponseScorer.collect` waits for the scores.

    steps: of each process reward model, the tokens of each response that end a step; None where it has no score.
    """

    responses: Sequence[Response]
    by_model: dict[str, Callable[[], torch.Tensor]]
    steps: dict[str, list[list[int] | None]]


@dataclass(frozen=True)
class StepScores:
    """What a process reward model says of each response.

    probabilities: that each step is right, less an ensemble's penalty.    ends: its tokens in the response.
    rewards: what each step adds to the response's score, at the same tokens.
    """

    probabilities: list[list[float]]
    ends: list[list[int]]
    rewards: list[list[float]]

    def select(self, rows: Sequence[int]) -> StepScores:
        return StepScores(*([of[row] for row in rows] for of in (self.probabilities, self.ends, self.rewards)))

    @classmethod
    def joined(cls, parts: Sequence[StepScores]) -> StepScores:
        return cls(*([row for part in parts for row in getattr(part, name)] for name in ("probabilities", "ends", "rewards")))


class ResponseScorer:
    """Raw scores of one policy's responses by every scorer.

    Args:
        tokenizer: of the policy, with the template that rendered the prompts.
        stops: `stop_ids` of the policy; they are no part of a response's text.
    """

    def __init__(self, scorers: Scorers, tokenizer: PreTrainedTokenizerBase, *, stops: Collection[int] = ()):
        self._scorers, self._tokenizer, self._stops = scorers, tokenizer, stops
        self._inputs = {
            name: RewardModelInput(
                tokenizer, own, max_length=scorers.max_length, stops=stops, report=scorers.reports[name], separator=scorers.separators[name]
            )
            for name, own in scorers.tokenizers.items()
        }

    def submit(self, responses: Sequence[Response]) -> PendingScores:
        """Start the reward models' forward passes."""
        triples = [(r.prompt, r.response_ids, r.finished) for r in map(last_reply, responses)]
        by_model, steps = {}, {}
        for name, inputs in self._inputs.items():
            if inputs.separator is None:
                by_model[name] = self._scorers.submit_sequences(name, inputs.sequences(triples))
                continue
            found = inputs.step_sequences(triples)
            ends = padded_ends([None if s is None else s.ends for s in found])
            by_model[name] = self._scorers.submit_sequences(name, [None if s is None else s.ids for s in found], ends)
            steps[name] = [None if s is None else s.own for s in found]
        return PendingScores(responses, by_model, steps)

    def collect(
        self,
        pending: PendingScores,
        metrics: ScorerMetrics | None = None,
        *,
        texts: list[str] | None = None,
        steps: dict[str, StepScores] | None = None,
        others: Sequence[str] | None = None,
    ) -> RewardComponents:
        """Run the scorers that read text, then wait for the reward models. The scores of text have 64 bits.

        Args:
            metrics: collects further metrics of scorers, and the disagreement of ensembles.
            steps: gets what process reward models say of steps, by the scorer's name.
            texts: `self.texts(responses)`, if the caller has it.
            others: the other model's responses, which scorers of mode head_to_head compare with.
        """
        metrics, steps = ScorerMetrics() if metrics is None else metrics, {} if steps is None else steps
        by_text = [config for config in self._scorers.configs if config.name not in self._inputs]
        items = self._items(pending.responses, by_text, texts, others) if by_text else []
        found = {config.name: self._text_scores(config, items, metrics) for config in by_text}
        for config in (c for c in self._scorers.configs if c.name in pending.by_model):
            found[config.name] = _model_scores(pending, config, metrics, steps)
        failed = torch.tensor([r.dialogue is not None and r.dialogue.failed for r in pending.responses])
        return {config.name: found[config.name].masked_fill(failed, torch.nan) for config in self._scorers.configs}

    def _items(
        self, responses: Sequence[Response], configs: list[ScorerConfig], texts: list[str] | None, others: Sequence[str] | None
    ) -> list[ScoreItem]:
        """Return what scorers of text read; see `collect`."""
        texts = self.texts(responses) if texts is None else texts
        rendered = self._rendered(responses) if any(config.reads_rendered for config in configs) else [None] * len(texts)
        return [
            score_item(
                last_reply(r).prompt,
                text,
                finished=r.finished,
                response_length=r.num_sampled,
                rendered=both,
                dialogue=r.dialogue,
                other=other,
            )
            for r, text, both, other in zip(responses, texts, rendered, others or [None] * len(texts), strict=True)
        ]

    def _text_scores(self, config: ScorerConfig, items: list[ScoreItem], metrics: ScorerMetrics) -> torch.Tensor:
        scores, measured = self._scorers.score_texts(config, items)
        metrics.add(config.name, measured, count=len(items))
        return torch.tensor(scores, dtype=torch.float64)

    def texts(self, responses: Sequence[Response]) -> list[str]:
        """Return the text of each response; of several turns, that of the last reply."""
        replies = [last_reply(r) for r in responses]
        token_ids = [without_stop(r.response_ids, self._stops, finished=r.finished) for r in replies]
        return [response_text(self._tokenizer, r.prompt.prompt_ids, ids) for r, ids in zip(replies, token_ids, strict=True)]

    def _rendered(self, responses: Sequence[Response]) -> list[tuple[str, str]]:
        """Return each prompt's text, and that of the prompt with its response, special tokens included."""
        prompts = [r.prompt.prompt_ids for r in responses]
        whole = [[*r.prompt.prompt_ids, *r.response_ids] for r in responses]
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return list(zip(*(self._tokenizer.batch_decode(ids, **options) for ids in (prompts, whole)), strict=True))

    def score_groups(
        self, prompts: list[Prompt], samples: list[list[Sample | Rollout]], others: list[list[str]] | None = None
    ) -> list[list[ScoredResponse]]:
        """Return every prompt's responses with their scores, in order. Ranks share the prompts, and each calls this with all of them.

        Args:
            samples: of each prompt; a rollout has the prompt as it was sampled from.
            others: for each sample the other model's response; see `collect`.
        """
        own = list(zip(prompts, samples, others or [None] * len(prompts), strict=True))
        return in_shares(own, lambda rows: self._score_own(*map(list, zip(*rows, strict=True))))

    def _score_own(
        self, prompts: list[Prompt], samples: list[list[Sample | Rollout]], others: list[list[str] | None]
    ) -> list[list[ScoredResponse]]:
        responses = [sampled_response(p, s) for p, group in zip(prompts, samples, strict=True) for s in group]
        texts = self.texts(responses)
        steps: dict[str, StepScores] = {}
        beside = None if None in others else [text for group in others for text in group]
        components = self.collect(self.submit(responses), texts=texts, steps=steps, others=beside)
        configs = self._scorers.configs
        weighted = any(config.weight for config in configs)
        scores = weighted_score(components, configs).tolist() if weighted else [math.nan] * len(responses)
        components = {name: values.tolist() for name, values in components.items()}
        scored = (
            ScoredResponse(
                **vars(response),
                text=text,
                score=score,
                components={name: v[i] for name, v in components.items()},
                steps={name: found.probabilities[i] for name, found in steps.items()},
            )
            for i, (response, text, score) in enumerate(zip(responses, texts, scores, strict=True))
        )
        return [[next(scored) for _ in group] for group in samples]


def _model_scores(pending: PendingScores, config: ScorerConfig, metrics: ScorerMetrics, steps: dict[str, StepScores]) -> torch.Tensor:
    """Wait for a reward model's scores [B]; metrics and steps as for `ResponseScorer.collect`."""
    combined, std = combine_members(pending.by_model[config.name](), std_coef=config.std_coef)
    if config.name in pending.steps:
        probabilities = combined.sigmoid()
        combined = aggregate_of(probabilities, config.aggregate)
        steps[config.name] = _step_scores(pending, config, probabilities)
    known = std[std.isfinite()]
    if config.members > 1 and len(known):
        metrics.add(config.name, {DISAGREEMENT: float(known.mean())}, count=len(known))
    return combined


def _step_scores(pending: PendingScores, config: ScorerConfig, probabilities: torch.Tensor) -> StepScores:
    """Scores and rewards of steps from their probabilities [N, S]."""
    dialogues = [0 if r.dialogue is None else r.dialogue.start for r in pending.responses]
    ends = [[start + end for end in own or ()] for start, own in zip(dialogues, pending.steps[config.name], strict=True)]
    counts = [len(own) for own in ends]

    def rows(values: torch.Tensor) -> list[list[float]]:
        return [row[:n] for row, n in zip(values.tolist(), counts, strict=True)]

    return StepScores(rows(probabilities), ends, rows(step_rewards(probabilities, config.aggregate)))
