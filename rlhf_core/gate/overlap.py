"""Estimates how many pairs of a held-out split were in another one, from hashes of their texts."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_core.data.hashing import text_hash
from rlhf_core.preparation.normalised import normalised_text

KEPT = 4096  # hashes of a sketch
WORDS = 8  # of a pair's responses, below which equal ones are chance
_TYPE = np.dtype("<u8")


@dataclass(frozen=True)
class SplitKeys:
    """Identity of a split's pairs.

    sha256: of `split_hash`. prompts: [N] uint64, hashes of the pairs' prompts without system messages. responses: [M] uint64, hashes of
    both responses of the M pairs whose responses are long enough. The texts are normalised, so other white space, case or punctuation
    changes no hash, and other words in a prompt change only the prompt's.
    """

    sha256: str
    prompts: np.ndarray
    responses: np.ndarray

    @classmethod
    def of_rows(cls, rows: Sequence[dict[str, Any]]) -> SplitKeys:
        """Return the keys of a split from its rows.

        rows: with messages, chosen and rejected.
        """
        prompts = [text_hash(_prompt(row["messages"])) for row in rows]
        sides = (sorted(normalised_text(row[side]) for side in ("chosen", "rejected")) for row in rows)
        responses = [text_hash("\n".join(both)) for both in sides if sum(len(text.split()) for text in both) >= WORDS]
        return cls(split_hash(rows), np.array(prompts, dtype=_TYPE), np.array(responses, dtype=_TYPE))

    def share_in(self, prompts: np.ndarray, responses: np.ndarray) -> float:
        """Return the estimated share of these pairs whose prompt, or whose responses, are in another split; the larger of the two.

        Args:
            prompts, responses: sketches of the other split.
        """
        long = len(self.responses) / len(self.prompts)
        return max(_known(self.prompts, prompts), long * _known(self.responses, responses))


def split_hash(rows: Sequence[dict[str, Any]]) -> str:
    """sha256 of the texts of held-out pairs (messages, chosen, rejected), independent of their order."""
    texts = sorted(json.dumps([row[key] for key in ("messages", "chosen", "rejected")], sort_keys=True) for row in rows)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def write_sketch(hashes: np.ndarray) -> str:
    """Return the KEPT smallest distinct hashes as base64: a random sample of the texts, the same of any split that has them.

    Source: bottom-k sketches, Cohen and Kaplan 2007, https://doi.org/10.1145/1281100.1281133
    """
    return base64.b64encode(np.unique(hashes)[:KEPT].astype(_TYPE).tobytes()).decode()


def read_sketch(text: str) -> np.ndarray:
    """Return the hashes in a text of `write_sketch`.

    Raises:
        ValueError: `write_sketch` didn't make the text.
    """
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=_TYPE)


def _prompt(messages: Sequence[dict[str, Any]]) -> str:
    return "\n".join(f"{m['role']}\t{normalised_text(m['content'])}" for m in messages if m["role"] != "system")


def _known(hashes: np.ndarray, sketch: np.ndarray) -> float:
    """Return the share of hashes [n] that the sketched split contains, estimated from those in the sketch's range; 1 if none is in it."""
    if not len(hashes) or not len(sketch):
        return 0.0
    sampled = hashes if len(sketch) < KEPT else hashes[hashes <= sketch.max()]
    return float(np.isin(sampled, sketch).mean()) if len(sampled) else 1.0
