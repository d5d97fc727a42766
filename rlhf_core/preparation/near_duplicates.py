"""Held-out prompts that training nearly has: the same words with other marks, behind a system message, or inside a longer text.

A held-out prompt, without its system message, is compared with each training conversation by normalised words.

- near: the words are those of the conversation up to one of its user's messages. Or the prompt has at least LONG words, and the
  conversation has all its numbers and the share CONTAINED of its shingles (runs of SHINGLE words): of all, and of those that at most COMMON
  training conversations have. So prompts with a common template aren't near for it alone, and a task with another number is another task.
- contained: a shorter prompt of which the conversation has all shingles. It may be another prompt's part: "Sort 12." in "Quick, sort 12."

The comparison is exact. A conversation with such a share has one of the prompt's rarest shingles, so only these are looked up: the prefix
filter of Chaudhuri et al. 2006, https://doi.org/10.1109/ICDE.2006.9
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from scipy.sparse import csr_array, vstack

from rlhf_core.data.hashing import SeenKeys, chunks, text_hash
from rlhf_core.data.schema import Message
from rlhf_core.preparation.normalised import normalised_text

LONG = 12  # words
SHINGLE = 3  # words
CONTAINED = 0.8
COMMON = 20  # training conversations; with a shingle in more of them nothing is recognised
MAX_PROMPTS = 20_000  # of a group that are compared: those with the lowest hashes
PAIRS_AT_ONCE = 2**16  # candidates whose shingles are in memory

# Scripts that put no space between words: there a word is one character.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")
_HAS_UNSPACED = re.compile(f"[{_UNSPACED}]")
_DIGIT = re.compile(r"\d")

_FACTORS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))  # odd, so that no bit of a hash is lost
_NUMBER = np.uint64(1)  # the lowest bit of a word's hash: whether it has a digit
_WORDS_REMEMBERED = 1_000_000

Named = tuple[str, Sequence[Message]]  # a row's name and its conversation


@dataclass(frozen=True)
class Compared:
    """A held-out prompt. near, contained: the name of a training row that has it, the lowest of several; None: there is none.

    name: the lowest one of its rows.
    """

    name: str
    near: str | None = None
    contained: str | None = None


def compare(heldout: Mapping[str, Iterable[Named]], training: Callable[[], Iterable[Named]]) -> dict[str, list[Compared]]:
    """Return, for each group of held-out rows, its distinct prompts, at most MAX_PROMPTS of them, in the order of their hashes.

    Time and memory grow with the words of the distinct training conversations: see docs/data.md.

    Args:
        training: gives all rows of training, from the first, each time it is called: a second time to name what was found.
    """
    groups = {group: _distinct(rows) for group, rows in heldout.items()}
    prompts = [prompt for of_group in groups.values() for prompt in of_group]
    if not prompts:
        return {group: [] for group in groups}
    shingles = _Shingles([prompt.words for prompt in prompts])
    trained = _Trained(shingles)
    for part in _distinct_conversations(training()):
        trained.add(part)
    near, contained = _matches(prompts, shingles, trained)
    names = _names(training(), {key for key in chain(near, contained) if key}) if any(near) or any(contained) else {}
    found = iter(
        Compared(prompt.name, names.get(of_near), None if of_near else names.get(of_contained))
        for prompt, of_near, of_contained in zip(prompts, near, contained, strict=True)
    )
    return {group: [next(found) for _ in of_group] for group, of_group in groups.items()}


@dataclass(frozen=True)
class _Prompt:
    """whole: hash of the normalised conversation. words: of the last message, or of all if those are few."""

    name: str
    whole: int
    words: list[str]


def _distinct(rows: Iterable[Named]) -> list[_Prompt]:
    """Return the MAX_PROMPTS distinct prompts of lowest hash, each with the lowest name of its rows."""
    kept: dict[int, tuple[str, list[str]]] = {}
    for name, messages in rows:
        texts = _normalised(messages)
        whole = text_hash("\n".join(texts))
        if any(texts) and (whole not in kept or name < kept[whole][0]):
            kept[whole] = (name, texts)
            if len(kept) > 2 * MAX_PROMPTS:
                kept = {key: kept[key] for key in sorted(kept)[:MAX_PROMPTS]}
    prompts = []
    for whole in sorted(kept)[:MAX_PROMPTS]:
        name, texts = kept[whole]
        last = _words(texts[-1])
        prompts.append(_Prompt(name, whole, last if len(last) >= LONG else _words(" ".join(texts))))
    return prompts


def _normalised(messages: Sequence[Message]) -> list[str]:
    """Return the normalised texts of the messages without a system message."""
    return [normalised_text(m["content"]) for m in messages if m["role"] != "system"]


def _words(text: str) -> list[str]:
    return _WORD.findall(text) if _HAS_UNSPACED.search(text) else text.split()


def _distinct_conversations(rows: Iterable[Named]) -> Iterator[list[tuple[int, Sequence[Message]]]]:
    """Yield the conversations that come for the first time, each with its key."""
    seen = SeenKeys()
    for part in chunks(rows):
        keys = [_key(messages) for _, messages in part]
        first = seen.count_and_add(np.array(keys, dtype=np.uint64)) == 0
        yield [(key, messages) for key, (_, messages), is_first in zip(keys, part, first, strict=True) if is_first]


def _key(messages: Sequence[Message]) -> int:
    """Return a conversation's key, which is never 0: that stands for no conversation."""
    return text_hash("\0".join(f"{m['role']}\t{m['content']}" for m in messages)) or 1


class _Vocabulary(dict[str, int]):
    """Word -> 64-bit hash, whose lowest bit says whether the word has a digit."""

    def __missing__(self, word: str) -> int:
        if len(self) > _WORDS_REMEMBERED:
            self.clear()
        self[word] = text_hash(word) & ~1 | bool(_DIGIT.search(word))
        return self[word]


class _Shingles:
    """Columns: the hashes of the prompts' shingles, and of the words in them that have digits. A prompt is a row.

    of_prompts, numbers [prompts, columns]: ones where a prompt has the shingle, or the word with digits.
    """

    def __init__(self, prompts: Sequence[Sequence[str]]):
        self._vocabulary = _Vocabulary()
        words, of = self._hashed(prompts)
        lengths = np.minimum(np.bincount(of, minlength=len(prompts)), SHINGLE)
        own = []
        for n in range(1, SHINGLE + 1):
            hashes, of_run = _runs(words, of, n)
            own.append((hashes[lengths[of_run] == n], of_run[lengths[of_run] == n]))
        has_digit = (words & _NUMBER).astype(bool)
        numbers = words[has_digit], of[has_digit]
        self._hashes = [np.unique(hashes) for hashes, _ in own]
        self._hashes[0] = np.union1d(self._hashes[0], numbers[0])
        self.count = sum(map(len, self._hashes))
        self.of_prompts, self.numbers = self._table(own, len(prompts)), self._table([numbers], len(prompts))

    def found_in(self, texts: Sequence[Sequence[str]]) -> csr_array:
        """Return a table [texts, columns] with ones where a text has a shingle or number."""
        words, of = self._hashed(texts)
        return self._table([_runs(words, of, n) for n in range(1, SHINGLE + 1)], len(texts))

    def _hashed(self, texts: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the hashes of the words of all texts, [words] uint64, and the positions of their texts."""
        counts, known = [len(text) for text in texts], self._vocabulary
        words = np.fromiter((known[word] for text in texts for word in text), dtype=np.uint64, count=sum(counts))
        return words, np.repeat(np.arange(len(texts)), counts)

    def _table(self, runs: Sequence[tuple[np.ndarray, np.ndarray]], height: int) -> csr_array:
        """Return a table [height, columns] with ones for (hashes, rows) of the runs of one word, of two, and so on; other hashes are left
        out.
        """
        cells, first = [np.zeros(0, dtype=np.int64)], 0
        for known, (hashes, rows) in zip(self._hashes, runs, strict=False):
            places = np.searchsorted(known, hashes)
            same = places < len(known)
            same[same] = known[places[same]] == hashes[same]
            cells.append(rows[same] * self.count + first + places[same])
            first += len(known)
        row, column = np.divmod(np.unique(np.concatenate(cells)), self.count)
        return _ones(column, np.bincount(row, minlength=height), self.count)


def _runs(words: np.ndarray, of: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the runs of so many words, and the positions of their texts."""
    end = len(words) - length + 1
    if end <= 0:
        return words[:0], of[:0]
    hashes = words[:end].copy()
    for i in range(1, length):
        hashes = hashes * _FACTORS[0] + words[i : end + i] * _FACTORS[1]  # modulo 2**64
    inside = of[:end] == of[length - 1 :]
    return hashes[inside], of[:end][inside]


def _ones(columns: np.ndarray, counts: np.ndarray, width: int) -> csr_array:
    """Return a table of ones, with the given number in each row."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    return csr_array((np.ones(len(columns), dtype=np.float32), columns.astype(np.int32), starts), shape=(len(counts), width))


class _Trained:
    """The distinct conversations of training: their shingles, and hashes of their beginnings, up to each message of the user."""

    def __init__(self, shingles: _Shingles):
        self._shingles = shingles
        self._parts = [shingles.found_in([])]
        self._keys, self._beginnings, self._of = array("Q"), array("Q"), array("q")

    def add(self, conversations: Sequence[tuple[int, Sequence[Message]]]) -> None:
        spoken = []
        for key, messages in conversations:
            texts = _normalised(messages)
            roles = [m["role"] for m in messages if m["role"] != "system"]
            for end, role in enumerate(roles, start=1):
                if role == "user" or end == len(roles):
                    self._beginnings.append(text_hash("\n".join(texts[:end])))
                    self._of.append(len(self._keys))
            self._keys.append(key)
            spoken.append(_words(" ".join(texts)))
        self._parts.append(self._shingles.found_in(spoken))

    @property
    def keys(self) -> np.ndarray:
        return np.array(self._keys, dtype=np.uint64)

    def table(self) -> csr_array:
        """Return which conversation has which shingle, [conversations, columns]."""
        return vstack(self._parts, format="csr")

    def with_beginning(self, wholes: np.ndarray) -> np.ndarray:
        """Return, for each hash, the lowest key of the conversations that begin so, [wholes] uint64; 0 without one."""
        found = np.zeros(len(wholes), dtype=np.uint64)
        beginnings, keys = np.array(self._beginnings, dtype=np.uint64), self.keys[np.array(self._of, dtype=np.int64)]
        order = np.lexsort((keys, beginnings))
        places = np.searchsorted(beginnings[order], wholes)
        same = places < len(order)
        same[same] = beginnings[order][places[same]] == wholes[same]
        found[same] = keys[order][places[same]]
        return found


def _matches(prompts: Sequence[_Prompt], shingles: _Shingles, trained: _Trained) -> tuple[list[int], list[int]]:
    """Return, for each prompt, the lowest keys of the conversations that nearly have it, and of those that contain it if it is short; 0:
    none.
    """
    conversations, keys = trained.table(), trained.keys
    near = trained.with_beginning(np.array([prompt.whole for prompt in prompts], dtype=np.uint64))
    contained = np.zeros_like(near)
    frequency = np.bincount(conversations.indices, minlength=shingles.count)
    every = shingles.of_prompts
    rare = every.multiply((frequency <= COMMON).astype(np.float32)[None, :]).tocsr()
    rare.eliminate_zeros()
    needed, needed_rare, numbers = every.sum(axis=1), rare.sum(axis=1), shingles.numbers.sum(axis=1)
    is_long = np.array([len(prompt.words) >= LONG for prompt in prompts])
    partly = is_long & (needed_rare > 0)  # others must be there as a whole
    looked_up = np.where(partly, needed_rare - np.ceil(CONTAINED * needed_rare) + 1, 1)
    needed[partly], needed_rare[partly] = np.ceil(CONTAINED * needed[partly]), np.ceil(CONTAINED * needed_rare[partly])
    for prompt, conversation in _candidates(_rarest(every, frequency, looked_up), conversations):
        theirs = conversations[conversation]
        wanted = ((every, needed), (rare, needed_rare), (shingles.numbers, numbers))
        passed = np.logical_and.reduce([ours[prompt].multiply(theirs).sum(axis=1) >= least[prompt] for ours, least in wanted])
        for i, key in zip(prompt[passed].tolist(), keys[conversation[passed]].tolist(), strict=True):
            of_kind = near if is_long[i] else contained
            of_kind[i] = min(int(of_kind[i]) or key, key)
    return near.tolist(), contained.tolist()


def _rarest(shingles: csr_array, frequency: np.ndarray, counts: np.ndarray) -> csr_array:
    """Return, for each prompt, the given number of its shingles that the fewest conversations have; [prompts, columns] of ones."""
    row = np.repeat(np.arange(shingles.shape[0]), np.diff(shingles.indptr))
    order = np.lexsort((shingles.indices, frequency[shingles.indices], row))
    kept = order[np.arange(len(row)) - shingles.indptr[row] < counts[row]]
    return _ones(shingles.indices[kept], np.bincount(row[kept], minlength=shingles.shape[0]), shingles.shape[1])


def _candidates(rarest: csr_array, conversations: csr_array) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs (prompts, conversations) that share one of these shingles, some at a time."""
    by_column = conversations.T.tocsr()
    sizes = np.cumsum(rarest @ np.diff(by_column.indptr).astype(float))
    start = 0
    while start < rarest.shape[0]:
        before = sizes[start - 1] if start else 0.0
        end = max(start + 1, int(np.searchsorted(sizes, before + PAIRS_AT_ONCE, side="right")))
        prompt, conversation = (rarest[start:end] @ by_column).nonzero()
        for first in range(0, len(prompt), PAIRS_AT_ONCE):
            part = slice(first, first + PAIRS_AT_ONCE)
            yield prompt[part] + start, conversation[part]
        start = end


def _names(rows: Iterable[Named], keys: set[int]) -> dict[int, str]:
    """Return, for each key, the lowest name of the rows with that conversation."""
    found: dict[int, str] = {}
    for name, messages in rows:
        if (key := _key(messages)) in keys and (key not in found or name < found[key]):
            found[key] = name
    return found
