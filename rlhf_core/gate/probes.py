"""Invariance probes of a reward model: the same text must have the same score in any batch, padding and position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.probe import can_share_prefixes
from rlhf_core.scorers.reward.loaded import LoadedModel, Text
from rlhf_core.scorers.reward.model import MICROBATCH_TOKENS
from rlhf_core.statistics.clusters import cluster_codes, mean_interval

# Changes of a response's format that keep its content.
FORMATS: dict[str, Callable[[str], str]] = {
    "trailing newline": lambda text: text + "\n",
    "leading space": lambda text: " " + text,
    "doubled spaces": lambda text: text.replace(" ", "  "),
    "bold": lambda text: f"**{text}**",
    "list item": lambda text: f"- {text}",
}

SCORED_AGAIN = 32  # texts: a model that computes with others or with padding shows it on any
AT_THE_LIMIT = 4  # texts that are padded to the longest at once, at least

Probes = dict[str, dict[str, float | int | None]]


def invariance(model: LoadedModel, texts: Sequence[Text], stored: np.ndarray) -> Probes:
    """Largest difference between two scores of one text, by probe. All probes but `stored_scores` take SCORED_AGAIN of the texts, evenly
    spread.

    A score alone in its batch differs from the one
    - padding_side: left-padded, with the mask and positions that this needs; value None where the model's attention takes no mask, and of
      a model that sees,
    - batch_size: in large batches with all texts,
    - truncation: padded to the model's max_length; infinite if a limit of the text's length truncates it, or a limit of one token less
      gives a score instead of none;
    and scores in large batches from one another
    - identical_responses: twice in one batch with other texts,
    - stored_scores: as train_reward wrote it.

    Args:
        stored: [len(texts)], the scores in data/reward_heldout.parquet.
    """
    all_sequences = [model.encode(*text) for text in texts]
    together = model.score_once(all_sequences)
    again = np.unique(np.linspace(0, len(texts) - 1, min(SCORED_AGAIN, len(texts))).astype(int))
    sequences = [all_sequences[i] for i in again]
    alone = model.score(sequences, microbatch_tokens=1)
    found = {
        "padding_side": _left_padded(model, sequences),
        "batch_size": together[again],
        "truncation": _padded_to_the_limit(model, [texts[i] for i in again], sequences),
    }
    differences = {name: None if scores is None else scores - alone for name, scores in found.items()}
    twice = model.score([*sequences, *sequences])
    differences["identical_responses"] = twice[: len(again)] - twice[len(again) :]
    differences["stored_scores"] = stored - together
    return {name: _largest(values) for name, values in differences.items()}


def _largest(differences: np.ndarray | None) -> dict[str, float | int | None]:
    known = differences is not None
    return {"value": float(np.abs(differences).max()) if known else None, "low": None, "high": None, "n": len(differences) if known else 0}


def _padded_to_the_limit(model: LoadedModel, texts: Sequence[Text], sequences: Sequence[list[int]]) -> np.ndarray:
    """Scores [len(texts)] of texts padded to the model's limit, with batches of the usual number of tokens, since the limit may be long."""
    filler = [model.tokenizer.pad_token_id] * model.max_length
    scores: list[float] = []
    at_once = max(AT_THE_LIMIT, MICROBATCH_TOKENS // model.max_length - 1)
    for start in range(0, len(texts), at_once):
        batch = [*sequences[start : start + at_once], filler]
        scores += model.score(batch, microbatch_tokens=len(batch) * model.max_length)[:-1].tolist()
    kept = [model.encode(*text, max_length=len(ids)) == ids for text, ids in zip(texts, sequences, strict=True)]
    refused = [model.encode(*text, max_length=len(ids) - 1) is None for text, ids in zip(texts, sequences, strict=True)]
    return np.where(np.array(kept) & np.array(refused), scores, np.inf)


@torch.no_grad()
def _left_padded(model: LoadedModel, sequences: Sequence[list[int]]) -> np.ndarray | None:
    if model.sight is not None:  # positions may depend on pictures
        return None
    if not all(m.score_head.per_token and can_share_prefixes(m.model, max_length=model.max_length) for m in model.members):
        return None
    width = max(map(len, sequences))
    batch = left_padded(sequences, pad_id=model.tokenizer.pad_token_id, width=width).to(model.device)
    return torch.stack([member(batch).cpu().double() for member in model.members], 1).mean(1).numpy()


def left_padded(sequences: Sequence[list[int]], *, pad_id: int, width: int) -> TokenBatch:
    """Token ids [B, width] with the padding first and the last token of each row selected.

    Padding sees itself, because attention must see something.
    """
    lengths = torch.tensor([len(ids) for ids in sequences])
    input_ids = torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in sequences])
    real = torch.arange(width) >= width - lengths[:, None]
    position_ids = (torch.arange(width) - (width - lengths[:, None])).clamp(min=0)
    visible = torch.ones(width, width, dtype=torch.bool).tril() & real[:, None, :]
    visible |= torch.eye(width, dtype=torch.bool)
    selected = torch.zeros_like(real)
    selected[:, -1] = True
    return TokenBatch(input_ids, selected, position_ids, visible[:, None])


def format_shifts(model: LoadedModel, texts: Sequence[Text], prompts: np.ndarray, *, scale: float, confidence: float) -> Probes:
    """Mean change of a score when the response is only formatted differently, in units of `scale`; above 0 if the format is rewarded.

    Texts that the format doesn't change or makes too long are left out.

    Args:
        prompts: [len(texts)], names equal for texts of one prompt. scale: standard deviation of the scores.
    """
    changed = {name: [(messages, change(response)) for messages, response in texts] for name, change in FORMATS.items()}
    together = [*texts, *(text for of_format in changed.values() for text in of_format)]  # so that prompts are computed once where they can
    before, *after = model.score_texts(together, reported=False).reshape(-1, len(texts))
    found: Probes = {}
    for name, scores in zip(changed, after, strict=True):
        differs = np.array([a[1] != b[1] for a, b in zip(texts, changed[name], strict=True)])
        shifts = np.where(differs, scores - before, np.nan) / scale
        known = np.isfinite(shifts)
        value, low, high = None, None, None
        if known.any():
            low, high = mean_interval(shifts[known], cluster_codes(prompts[known]), confidence)
            value = float(shifts[known].mean())
        found[name] = {"value": value, "low": low, "high": high, "n": int(known.sum())}
    return found
