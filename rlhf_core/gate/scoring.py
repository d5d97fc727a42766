"""A reward model loaded from its folder: its scores of pairs, of pairs from elsewhere, and against a promoted model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import ExternalPairsConfig, IncumbentConfig
from rlhf_core.config.gate import SUBSET
from rlhf_core.data.hashing import conversation_text
from rlhf_core.data.places import locate
from rlhf_core.data.schema import Message
from rlhf_core.data.sources import load_source
from rlhf_core.engines.ranks import in_shares, on_first
from rlhf_core.gate.heldout import Heldout
from rlhf_core.gate.pairs import compare, pair_points
from rlhf_core.models.forward import ScalarModule
from rlhf_core.models.template import DEFAULT_DATE
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.provenance.dvc_cache import checkout
from rlhf_core.provenance.file_hashes import FileHashes
from rlhf_core.scorers.reasons import Reasons
from rlhf_core.scorers.reward_input import fitting_ids
from rlhf_core.scorers.reward_model import MICROBATCH_TOKENS, load_members, score_by_members
from rlhf_core.statistics.clusters import cluster_codes, share_interval

REPORTED = ("accuracy", "low", "high", "ties", "n")

Text = tuple[Sequence[Message], str]  # a conversation and a response to it


def _unreported(reason: str, *, count: int) -> None:
    """A report for refusals that a probe provokes."""


@dataclass(frozen=True)
class LoadedModel:
    """Every member of a reward model with its tokenizer. Scores are the members' mean."""

    members: list[ScalarModule]
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    device: torch.device
    report: Reasons = field(default_factory=lambda: Reasons("gate"))
    _known: dict[tuple[int, ...], float] = field(default_factory=dict, init=False, repr=False)  # scores by token ids

    @classmethod
    def load(cls, folder: Path, *, max_length: int, trust_remote_code: bool, template_date: str = DEFAULT_DATE) -> LoadedModel:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        members = load_members(folder, device=device, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code, template_date=template_date, scores=True)
        return cls(members, tokenizer, max_length, device)

    def encode(self, messages: Sequence[Message], response: str, *, max_length: int | None = None) -> list[int] | None:
        """Token ids; None if longer than the limit or refused by the template."""
        own = max_length is None  # another limit is a probe's, which provokes refusals
        limit = self.max_length if own else max_length
        return fitting_ids(self.tokenizer, [(messages, response)], max_length=limit, report=self.report if own else _unreported)[0]

    def score(self, sequences: Sequence[list[int] | None], *, microbatch_tokens: int = MICROBATCH_TOKENS) -> np.ndarray:
        """Scores [len(sequences)]; NaN where a sequence is None."""
        return score_by_members(
            self.members,
            list(sequences),
            pad_id=self.tokenizer.pad_token_id,
            microbatch_tokens=microbatch_tokens,
            device=self.device,
        ).double().mean(1).numpy()  # fmt: skip

    def score_texts(self, texts: Sequence[Text], *, reported: bool = True) -> np.ndarray:
        """Scores [len(texts)]; each distinct text is scored once, in all calls. Ranks share the texts; each calls this with all of them.

        Args:
            reported: False: texts without ids are not reported.
        """
        limit = None if reported else self.max_length
        return self.score_once([self.encode(messages, response, max_length=limit) for messages, response in texts])

    def score_pairs(self, rows: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
        """Scores [len(rows)] of `chosen` and of `rejected`, together, since both have the same prompt."""
        texts = [(row["messages"], row[side]) for side in ("chosen", "rejected") for row in rows]
        chosen, rejected = self.score_texts(texts).reshape(2, -1)
        return chosen, rejected

    def score_once(self, sequences: Sequence[list[int] | None]) -> np.ndarray:
        """Scores [len(sequences)] in large batches, remembered for later calls; NaN where a sequence is None. Ranks as in `score_texts`."""
        keys = [None if ids is None else tuple(ids) for ids in sequences]
        new = [list(ids) for ids in dict.fromkeys(keys) if ids is not None and ids not in self._known]
        scores = in_shares(new, lambda own: self.score(own).tolist())
        self._known.update(zip(map(tuple, new), scores, strict=True))
        return np.array([np.nan if ids is None else self._known[ids] for ids in keys])


def score_external(config: ExternalPairsConfig, model: LoadedModel, *, confidence: float) -> dict[str, Any]:
    """An entry of `external` in gate.json. Records without a pair, and pairs too long for the model, are counted and left out.

    Raises:
        ValueError, FileNotFoundError: the file is missing, or doesn't have the configured columns.
    """
    loaded = load_source(config.source(), seed=0)
    rows = loaded.rows["preference"]
    chosen, rejected = model.score_pairs(rows)
    known = np.isfinite(chosen) & np.isfinite(rejected)
    points = pair_points(chosen[known], rejected[known])
    prompts = np.array([conversation_text(row["messages"]) for row in rows])[known]
    subsets = np.array([row.get("slices", {}).get(SUBSET, "") for row in rows])[known]
    overall = _accuracy(points, prompts, confidence)
    by_subset = [
        {
            "subset": str(name),
            **{k: v for k, v in _accuracy(points[subsets == name], prompts[subsets == name], confidence).items() if k in REPORTED},
        }
        for name in sorted(set(subsets.tolist()))
    ]
    return {
        "name": config.name,
        "path": config.path,
        "sha256": FileHashes(Path()).of(locate(config.path)).sha256,
        **overall,
        "not_scored": int((~known).sum()),
        "left_out": dict(sorted(loaded.dropped.items())),
        "threshold": config.min_accuracy,
        "subsets": by_subset if config.subset is not None else [],
    }


def _accuracy(points: np.ndarray, prompts: np.ndarray, confidence: float) -> dict[str, Any]:
    if not len(points):
        return {"accuracy": None, "low": 0.0, "high": 1.0, "ties": 0, "n": 0, "prompts": 0}
    interval = share_interval(points, cluster_codes(prompts), confidence)
    accuracy = {"accuracy": float(points.mean()), "low": interval.low, "high": interval.high}
    return {**accuracy, "ties": int((points == 0.5).sum()), "n": len(points), "prompts": interval.clusters}


def compare_to_promoted(
    test: Heldout, role: str, promoted: IncumbentConfig, *, confidence: float, scratch: Path, how: dict[str, Any]
) -> dict[str, Any]:
    """The candidate against a promoted model, on the pairs that the promoted model can score.

    Raises:
        ValueError: DVC's cache lacks the promoted model with this md5 and sha256, or the model can score no pair.
    """
    folder = scratch / role
    subject = f"gate.{role} {promoted.version}"
    on_first(lambda: checkout(promoted.md5, folder, root=Path(), sha256=promoted.sha256), subject=subject)
    other = LoadedModel.load(folder, **how)
    chosen, rejected = other.score_pairs(test.rows)
    known = np.isfinite(chosen) & np.isfinite(rejected)
    if not known.any():
        raise ValueError(f"{subject}: expected a model that can score these pairs, got a score for none")
    pairs = test.pairs.select(known)
    compared = compare(pairs.points, pair_points(chosen[known], rejected[known]), pairs.clusters, confidence)
    return {"version": promoted.version, "md5": promoted.md5, "not_scored": int((~known).sum()), **compared}
