"""Turns a source's rows into token sequences, and counts what validate_data would object to, with the functions of trainers and stage."""

from __future__ import annotations

import itertools
import re
import sys
from array import array
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlhf_core.config import Params
from rlhf_core.data.control import VISIBLE
from rlhf_core.data.hashing import text_hash
from rlhf_core.data.pictures import pictures_of
from rlhf_core.models.response_ids import BACK, TORN
from rlhf_core.models.steps import turn_step_ends
from rlhf_core.models.tokenizer import encode_conversation, encode_prompt, encode_scored, encode_scored_turns
from rlhf_core.models.vision import vision_of
from rlhf_core.preparation.formats import STEP_SEPARATOR
from rlhf_core.scorers.text import final_number
from rlhf_core.trainers.supervised.demonstrations import Demonstration, encode_demonstrations, encode_texts

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from transformers import PreTrainedTokenizerBase


ROWS_AT_ONCE = 4096
MAX_PLACES = 5  # records of a kind that are named
MAX_NAMED = 100_000  # pairs among which a repeated one is named
FEW_WORDS = 4  # of an answer that a program can compare
_NOTATION = re.compile(r"\\[A-Za-z]|\$.*\$|\^|[0-9]\s*[/=*+]\s*[0-9a-z]|^[a-z]\s*=")  # of mathematics
JOINED = "whose response is tokenized apart: as one text, its first characters would be joined with the prompt's last ones"
COMPOSED = "whose characters the tokenizer composes (Unicode's NFC): they are trained, and will be written, in composed form"


def label_kind(label: str) -> str:
    """The kind of scorer that can compare a response with this expected answer: number, math or exact_match; `text` for a long answer."""
    if _NOTATION.search(label):
        return "math"
    if len(label.split()) <= 2 and final_number(label) is not None:
        return "number"
    return "exact_match" if len(label.split()) <= FEW_WORDS else "text"


@dataclass
class UseCounts:
    """Counts of one use's rows.

    found: kind of objection -> rows, but for rows that are too long. lengths: tokens of a row's longest sequence -> rows.
    responses: tokens of a response without its end -> responses. sequences, tokens: of all rows; a pair has two, and its prompt twice.
    labels: kind of an expected answer (`label_kind`) -> rows.
    chosen_is_longer: number of pairs whose chosen response has more tokens; a tie counts half.
    pairs, preferences: for each row with both, 64-bit hashes of its pair and of its preferred text.
    places: empty, duplicate -> the first MAX_PLACES records, a repeated pair with the record that has it first.
    """

    use: str
    rows: int = 0
    found: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    responses: Counter[int] = field(default_factory=Counter)
    sequences: int = 0
    tokens: float = 0.0
    labels: Counter[str] = field(default_factory=Counter)
    chosen_is_longer: float = 0.0
    pairs: array[int] = field(default_factory=lambda: array("Q"))
    preferences: array[int] = field(default_factory=lambda: array("Q"))
    places: dict[str, list[str]] = field(default_factory=dict)
    _first: dict[tuple[int, int], str] = field(default_factory=dict)  # hashes -> record, of the first MAX_NAMED pairs

    def add(self, rows: list[dict], tokenizer: PreTrainedTokenizerBase) -> None:
        """Count one row."""
        from rlhf_core.preparation.validation.measures import measure
        from rlhf_core.preparation.validation.texts import TEXT_COLUMNS

        frame = measure(self.use, [{"id": "", "source": "", "split": "", **row} for row in rows], tokenizer)
        self.rows += len(frame)
        self._add_lengths(frame)
        texts = [*TEXT_COLUMNS[self.use], *([] if self.use == "pretrain" else ["shortest_message"])]
        empty = [frame[text].notna() & ~frame[text].str.contains(VISIBLE, na=False) for text in texts]
        if empty:
            self._add_empty(sum(empty).gt(0), rows)
        if self.use != "pretrain":
            self._add_templates(frame)
        if self.use == "prompt":
            self.labels.update(label_kind(row["label"]) for row in rows if row.get("label") is not None)
        if self.use == "preference":
            self._add_pairs(frame, rows)

    def _add_empty(self, is_empty: pd.Series, rows: list[dict]) -> None:
        self.found["empty"] += int(is_empty.sum())
        for row in itertools.compress(rows, is_empty):
            self._add_place("empty", row["origin"])

    def _add_place(self, kind: str, place: str) -> None:
        if len(places := self.places.setdefault(kind, [])) < MAX_PLACES and place not in places:
            places.append(place)

    def _add_lengths(self, frame: pd.DataFrame) -> None:
        """Count the lengths of a pair. The shorter response follows the same prompt as the longer one, so its sequence is shorter by the
        difference.
        """
        from rlhf_core.preparation.validation.texts import TEXT_COLUMNS

        longest = frame["tokens"].dropna()
        self.lengths.update(map(int, longest))
        texts = [f"{text}_tokens" for text in TEXT_COLUMNS[self.use] if f"{text}_tokens" in frame]
        responses = frame.loc[longest.index, texts]
        self.responses.update(int(t) for text in texts for t in responses[text].dropna())
        shorter = responses.rsub(responses.max(axis=1), axis=0)
        number = responses.notna().sum(axis=1).clip(lower=1)
        self.sequences += int(number.sum())
        self.tokens += float((longest * number).sum() - shorter.sum().sum())

    def _add_templates(self, frame: pd.DataFrame) -> None:
        from rlhf_core.preparation.validation.texts import TEXT_COLUMNS
        from rlhf_core.preparation.values import ROLE_ORDER

        self.found["roles out of order"] += int((~frame["roles"].str.match(ROLE_ORDER).eq(True)).sum())
        self.found["refused by the template"] += int(frame["template_error"].notna().sum())
        self.found[JOINED] += int(frame["joined"].sum())
        self.found[COMPOSED] += int(frame["composed"].sum())
        self.found["templated"] += int(frame["control_token"].notna().sum())
        ended = [frame[f"{text}_end_token"].notna() for text in TEXT_COLUMNS[self.use]]
        self.found["end_token"] += int(sum(ended).gt(0).sum()) if ended else 0

    def _add_pairs(self, frame: pd.DataFrame, rows: list[dict]) -> None:
        both = frame["chosen"].notna() & frame["rejected"].notna()
        self.found["identical"] += int((both & (frame["chosen"].str.strip() == frame["rejected"].str.strip())).sum())
        self.chosen_is_longer += float(frame["chosen_is_longer"].sum())
        self.found["pairs"] += int(frame["chosen_is_longer"].notna().sum())
        for pair, preference, row in zip(frame["pair"], frame["preference"], rows, strict=True):
            if isinstance(pair, str) and isinstance(preference, str):
                self.pairs.append(text_hash(pair))
                self.preferences.append(text_hash(preference))
                self._note_repeat((self.pairs[-1], self.preferences[-1]), row["origin"])

    def _note_repeat(self, hashes: tuple[int, int], place: str) -> None:
        if hashes in self._first:
            self._add_place("duplicate", f"{place} (as {self._first[hashes]})")
        elif len(self._first) < MAX_NAMED:
            self._first[hashes] = place

    def objections(self, max_length: int) -> dict[str, int]:
        """Number of rows by kind of objection, without zeros; a row of more than max_length tokens is too long."""
        found = Counter({kind: n for kind, n in self.found.items() if kind != "pairs"} | {"too_long": self.longer_than(max_length)})
        if self.pairs:
            found["contradictory"], found["duplicate"] = self._repeated()
        return {kind: n for kind, n in found.items() if n}

    def dropped(self, kinds: Collection[str], max_length: int) -> int:
        """The largest number of rows that a source can drop with these kinds. A row of two kinds counts twice; of equal rows one stays."""
        objections = self.objections(max_length) | ({"duplicate": len(self.pairs) - len(self._distinct()[1])} if self.pairs else {})
        return min(self.rows, sum(objections.get(kind, 0) for kind in kinds))

    def _distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """Hashes [2, n] of the pair and the preferred text of each distinct row, and the number [n] of its rows."""
        import numpy as np

        rows = np.stack([np.frombuffer(self.pairs, dtype=np.uint64), np.frombuffer(self.preferences, dtype=np.uint64)])
        return np.unique(rows, axis=1, return_counts=True)

    def _repeated(self) -> tuple[int, int]:
        """Number of rows that another row contradicts, and of rows that another row repeats."""
        import numpy as np

        judged, times = self._distinct()
        _, pair, ways = np.unique(judged[0], return_inverse=True, return_counts=True)
        return int(times[ways[pair] > 1].sum()), int(times[times > 1].sum())

    def quantile(self, share: float) -> int:
        """Return the length in tokens that the share `share` of the rows doesn't exceed; 0 without rows."""
        return quantile(self.lengths, share)

    def longer_than(self, tokens: int) -> int:
        """Rows whose longest sequence has more tokens."""
        return sum(rows for length, rows in self.lengths.items() if length > tokens)

    def values(self, max_length: int) -> dict[str, Any]:
        lengths = {"median": self.quantile(0.5), "0.95": self.quantile(0.95), "longest": max(self.lengths, default=0)}
        shares = {"chosen_is_longer": self.chosen_is_longer, "pairs": self.found["pairs"]} if self.use == "preference" else {}
        return {"rows": self.rows, "tokens": lengths, **shares, "objections": self.objections(max_length)}


def quantile(lengths: Counter[int], share: float) -> int:
    """Return the length that the share `share` of them doesn't exceed; 0 for none."""
    left = share * lengths.total()
    for tokens, rows in sorted(lengths.items()):
        left -= rows
        if left <= 0:
            return tokens
    return 0


class Counting:
    """Counts rows by use, a few thousand at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._waiting: dict[str, list[dict]] = {}
        self._counts: dict[str, UseCounts] = {}

    def add(self, use: str, row: dict) -> None:
        waiting = self._waiting.setdefault(use, [])
        waiting.append(row)
        if len(waiting) >= ROWS_AT_ONCE:
            self._flush(use)

    def done(self) -> dict[str, UseCounts]:
        for use in list(self._waiting):
            self._flush(use)
        return self._counts

    def _flush(self, use: str) -> None:
        rows, self._waiting[use] = self._waiting[use], []
        if rows:
            self._counts.setdefault(use, UseCounts(use)).add(rows, self._tokenizer)


@dataclass(frozen=True)
class Sequence:
    """One input sequence of a model.

    name: the use and, for a pair, the side. ids [T]. trained [T]: whether the loss or the compared log-probability includes the token.
    remark: for people.
    pictures: width, height and number of tokens of each.
    """

    name: str
    ids: list[int]
    trained: list[bool]
    remark: str = ""
    pictures: tuple[tuple[int, int, int], ...] = ()


def sequences(use: str, row: dict, tokenizer: PreTrainedTokenizerBase, params: Params) -> list[Sequence]:
    """Return the sequences that trainers make of a row, also of one that is too long.

    Raises:
        Unrenderable: the chat template refuses the conversation.
    """
    found, vision = _sequences(use, row, tokenizer, params), vision_of(tokenizer)
    pictures = () if vision is None else pictures_of(row.get("messages", ()))
    sizes = tuple((picture.width, picture.height, vision.num_tokens([picture])) for picture in pictures)
    return [replace(sequence, pictures=sizes) for sequence in found]


def _sequences(use: str, row: dict, tokenizer: PreTrainedTokenizerBase, params: Params) -> list[Sequence]:
    if use == "pretrain":
        return [_of_demonstration("pretrain", d) for d in encode_texts([row], tokenizer, max_length=sys.maxsize)[0]]
    if use == "sft":
        masking = {"train_on": params.sft.train_on, "train_on_thoughts": params.sft.train_on_thoughts}
        return [_of_demonstration("sft", d) for d in encode_demonstrations([row], tokenizer, max_length=sys.maxsize, **masking)[0]]
    if use == "prompt":
        ids = encode_prompt(tokenizer, row["messages"])
        label = row.get("label")
        return [Sequence("prompt", ids, [False] * len(ids), "no label" if label is None else f"label {label!r}")]
    if use == "stepwise":
        return [_of_steps(row, tokenizer, params.reward.step_separator or STEP_SEPARATOR)]
    return list(_sides(row, tokenizer))


def _of_steps(row: dict, tokenizer: PreTrainedTokenizerBase, separator: str) -> Sequence:
    """Return the sequence of a process reward model, with the tokens at which it scores."""
    turns = encode_scored_turns(tokenizer, [(row["messages"], row["response"])])
    ends = turn_step_ends(turns, 0, tokenizer, separator)
    labels = " ".join(map(str, row["labels"]))
    return Sequence("stepwise", turns.ids(0), [i in ends for i in range(turns.length(0))], f"labels of its steps {labels}")


def _sides(row: dict, tokenizer: PreTrainedTokenizerBase) -> Iterator[Sequence]:
    paired = row["chosen"] is not None and row["rejected"] is not None
    for side in ("chosen", "rejected"):
        if row[side] is not None:
            ids, start = encode_conversation(tokenizer, row["messages"], row[side])
            name = f"preference, {side}" if paired else f"kto, {'desirable' if side == 'chosen' else 'undesirable'}"
            scored = encode_scored(tokenizer, row["messages"], row[side])
            reads = "the reward model reads {}, as the template writes the whole conversation".format
            other = reads(len(scored)) if len(scored) != len(ids) else reads("other tokens") if scored != ids else ""
            remark = other if paired else ""
            yield Sequence(name, ids, [False] * start + [True] * (len(ids) - start), remark)


def _of_demonstration(name: str, demonstration: Demonstration) -> Sequence:
    trained = [i >= demonstration.start for i in range(len(demonstration.ids))]
    for first, end in demonstration.skipped:
        trained[first:end] = [False] * (end - first)
    return Sequence(name, demonstration.ids, trained)


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[tuple[str, int, int]]:
    """(text, first token, end) of each part. A part is one token, or the tokens that make up one character."""

    def decode(first: int, end: int) -> str:
        return tokenizer.decode(ids[first:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    found, start = [], 0
    for end in range(1, len(ids) + 1):
        back = max(0, start - BACK)
        before, text = decode(back, start), decode(back, end)
        if (text.endswith(TORN) and end < len(ids) and end - start < BACK) or not text.startswith(before):
            continue
        found.append((text.removeprefix(before), start, end))
        start = end
    if start < len(ids):
        found.append((decode(start, len(ids)), start, len(ids)))
    return found
