"""Pairs for people to label, and their labels as a source of preferences: export and import.

An export is a folder with
    pairs.jsonl          one pair a line: id, prompt, a, b, choice (to be filled in: a, b or tie) and annotator
    label_studio.json    the same pairs as tasks of Label Studio
    label_studio.xml     Label Studio's interface for these pairs
    key.json             which side is which, and the reward model's scores: hidden from annotators
Sides are in a seeded random order, so that nothing reveals which response a model preferred.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config import shown
from rlhf_core.data.schema import Message
from rlhf_core.statistics.clusters import cluster_codes, share_interval
from rlhf_core.statistics.intervals import accuracy_with_ties

PAIRS, TASKS, INTERFACE, KEY = "pairs.jsonl", "label_studio.json", "label_studio.xml", "key.json"
CHOICES = ("a", "b", "tie")
UNNAMED = "unnamed"  # annotator of a line that names none
_INTERFACE = """\
<View>
  <Header value="Which answer is better?"/>
  <Text name="prompt" value="$prompt"/>
  <Header value="a"/>
  <Text name="a" value="$a"/>
  <Header value="b"/>
  <Text name="b" value="$b"/>
  <Choices name="choice" toName="prompt" choice="single" required="true">
    <Choice value="a"/>
    <Choice value="b"/>
    <Choice value="tie"/>
  </Choices>
</View>
"""


@dataclass(frozen=True)
class LabelPair:
    """A pair to be labelled. chosen, rejected: by the scores; a score of None is unknown."""

    id: str
    messages: list[Message]
    chosen: str
    rejected: str
    chosen_score: float | None
    rejected_score: float | None


@dataclass(frozen=True)
class Label:
    """One annotator's choice for one pair; None: not labelled."""

    pair: str
    annotator: str
    choice: str | None


@dataclass(frozen=True)
class Labels:
    """The result of an import.

    rows: decided pairs, for a source of format preference.
    provenance: counts, annotators, agreement among them and with the reward model.
    """

    rows: list[dict[str, Any]]
    provenance: dict[str, Any]


def export_pairs(pairs: Sequence[LabelPair], folder: Path, *, count: int | None, seed: int, origin: str) -> int:
    """Write an export of at most `count` of the pairs (None: all). Returns how many.

    Args:
        origin: the source of the pairs, for the provenance.
    Raises:
        ValueError: there are no pairs, two have one id, or the folder holds an export already.
    """
    if not pairs:
        raise ValueError(f"{origin}: expected pairs to label, got none; choose another round or file")
    if len({pair.id for pair in pairs}) < len(pairs):
        raise ValueError(f"{origin}: expected different ids, got one twice; remove repeated pairs")
    if (folder / KEY).exists():
        raise ValueError(f"{folder}: expected a folder without an export, got one; choose another folder: its labels need its key")
    random = np.random.default_rng(seed)
    picked = [pairs[i] for i in random.permutation(len(pairs))[:count]]
    swapped = random.integers(2, size=len(picked)).astype(bool).tolist()
    shown = [_shown(pair, swap) for pair, swap in zip(picked, swapped, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({**item, "choice": None, "annotator": None}, ensure_ascii=False) + "\n" for item in shown]
    (folder / PAIRS).write_text("".join(lines), encoding="utf-8")
    (folder / TASKS).write_text(json.dumps([{"data": item} for item in shown], indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / INTERFACE).write_text(_INTERFACE, encoding="utf-8")
    sides = [{"a": "rejected" if swap else "chosen", **asdict(pair)} for pair, swap in zip(picked, swapped, strict=True)]
    key = {"origin": origin, "seed": seed, "pairs": sides, "sha256": sha256(folder / PAIRS)}
    (folder / KEY).write_text(json.dumps(key, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return len(picked)


def _shown(pair: LabelPair, swap: bool) -> dict[str, str]:
    a, b = (pair.rejected, pair.chosen) if swap else (pair.chosen, pair.rejected)
    return {"id": pair.id, "prompt": _as_text(pair.messages), "a": a, "b": b}


def _as_text(messages: Sequence[Message]) -> str:
    """Return a single message's text, or several messages with their roles."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{m['role']}: {m['content']}" for m in messages)


def read_labels(path: Path, key: dict[str, Any]) -> list[Label]:
    """Return the labels in pairs.jsonl or in Label Studio's JSON export, checked against the key.

    Raises:
        ValueError: another format, a pair that wasn't exported, changed texts, an unknown choice, or two labels of one annotator for one
            pair.
    """
    exported = {side["id"]: _shown(_pair(side), side["a"] == "rejected") for side in key["pairs"]}
    text = _read_text(path)
    labels = []
    for where, item, annotator, choice in _studio(path, text) if text.lstrip().startswith("[") else _lines(path, text):
        if not isinstance(item, dict):
            raise ValueError(f"{where}: expected an object with id, a, b and choice, got {type(item).__name__}; correct it")
        wanted = exported.get(item["id"]) if isinstance(item.get("id"), str) else None
        if wanted is None:
            got = f"id {shown(repr(item.get('id')))}"
            raise ValueError(f"{where}: expected a pair of this export, got {got}; import the file with its own export")
        if changed := [name for name in wanted if item.get(name) != wanted[name]]:
            raise ValueError(f"{where}: expected the texts that were exported, got others in {', '.join(changed)}; label without editing")
        if choice is not None and choice not in CHOICES:
            raise ValueError(f"{where}: expected a choice of {', '.join(CHOICES)}, got {shown(repr(choice))}; correct it")
        if not annotator.isprintable():
            raise ValueError(f"{where}: expected an annotator's name, got {shown(repr(annotator))}; correct it")
        labels.append(Label(item["id"], annotator, choice))
    twice = [label for label, n in Counter((label.pair, label.annotator) for label in labels).items() if n > 1]
    if twice:
        pair, annotator = twice[0]
        got = f"more of {shown(annotator)} for {pair}"
        raise ValueError(f"{path}: expected one label of each annotator for a pair, got {got}; keep one")
    return labels


def read_key(path: Path) -> dict[str, Any]:
    """Return the key that `export_pairs` wrote.

    Raises:
        ValueError: the file is not a key, or damaged. OSError: it can't be read.
    """
    text = _read_text(path)
    try:
        key = json.loads(text)
        for side in key["pairs"]:
            if not isinstance(side["id"], str) or side["a"] not in ("chosen", "rejected"):
                raise TypeError("a pair without its id or sides")
            _shown(_pair(side), False)
        _ = key["origin"], key["sha256"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        got = f"{type(error).__name__}: {shown(str(error))}"
        raise ValueError(f"{path}: expected the key of an export, got {got}; restore it, or export again") from error
    return key


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        got = f"byte {error.object[error.start]:#04x} at byte {error.start}"
        raise ValueError(f"{path}: expected UTF-8, got {got}; convert it to UTF-8") from error


def _pair(side: dict[str, Any]) -> LabelPair:
    return LabelPair(**{name: value for name, value in side.items() if name != "a"})


FoundLabel = tuple[str, dict[str, Any], str, str | None]  # place, pair as shown, annotator, choice


def _lines(path: Path, text: str) -> Iterable[FoundLabel]:
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would also split at a U+2028 inside a text
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: expected a line of JSON, got: {shown(str(error))}; correct it") from error
        if not isinstance(item, dict):
            raise ValueError(f"{where}: expected an object with id, a, b and choice, got {type(item).__name__}; correct it")
        yield where, item, _name(item.get("annotator")), item.get("choice")


def _studio(path: Path, text: str) -> Iterable[FoundLabel]:
    """Yield every annotation of every task; a skipped one, and a task without annotations, is a label without a choice."""
    try:
        tasks = json.loads(text)
        for number, task in enumerate(tasks):
            where = f"{path}: task {shown(str(task.get('id', number)))}"
            annotations = task["annotations"]
            if not annotations:
                yield where, task["data"], UNNAMED, None
            for annotation in annotations:
                choices = [r["value"]["choices"] for r in annotation["result"] if r.get("from_name") == "choice"]
                choice = None if annotation.get("was_cancelled") or not choices else ",".join(choices[0])
                yield where, task["data"], _annotator(annotation), choice
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {shown(str(error))}"
        raise ValueError(f"{path}: expected Label Studio's JSON export, got {got}; export it as JSON") from error


def _annotator(annotation: dict[str, Any]) -> str:
    by = annotation.get("completed_by")
    return _name(by.get("email") or by.get("id") if isinstance(by, dict) else by)


def _name(value: Any) -> str:
    """Return an annotator's name, from a text or a number.

    Raises:
        TypeError: the value is something else.
    """
    if value is not None and not isinstance(value, str | int | float):
        raise TypeError(f"an annotator of type {type(value).__name__}")
    return str(value or UNNAMED)


def decide(labels: Sequence[Label], key: dict[str, Any], *, confidence: float) -> Labels:
    """Return the majority's choice for each pair; ties, by choice or by equal votes, are dropped and counted.

    Raises:
        ValueError: no pair is decided.
    """
    votes: dict[str, dict[str, str]] = defaultdict(dict)
    for label in labels:
        if label.choice is not None:
            votes[label.pair][label.annotator] = label.choice
    sides = {side["id"]: side for side in key["pairs"]}
    decided = {pair: winner for pair, given in votes.items() if (winner := _majority(given.values())) != "tie"}
    if not decided:
        raise ValueError(f"labels: expected at least one pair with a choice, got none of {len(sides)}; label some first")
    rows = []
    for pair, winner in decided.items():
        side = sides[pair]
        agrees = (side["a"] == "chosen") == (winner == "a")
        chosen, rejected = ("chosen", "rejected") if agrees else ("rejected", "chosen")
        rows.append(
            {"id": pair, "prompt": side["messages"], "chosen": side[chosen], "rejected": side[rejected], "votes": dict(votes[pair])}
        )
    provenance = {
        "pairs_exported": len(sides),
        "pairs_labelled": len(votes),
        "pairs_decided": len(decided),
        "ties_dropped": len(votes) - len(decided),
        "annotators": dict(sorted(Counter(label.annotator for label in labels if label.choice is not None).items())),
        "agreement_among_annotators": agreement(votes.values(), confidence),
        "agreement_with_scores": _agreement_with_scores(rows, sides, confidence),
    }
    return Labels(rows, provenance)


def _majority(choices: Iterable[str]) -> str:
    """Return the choice with the most votes; tie if several have the most."""
    first, *others = Counter(choices).most_common()
    return "tie" if others and others[0][1] == first[1] else first[0]


def agreement(votes: Iterable[dict[str, str]], confidence: float) -> dict[str, Any]:
    """Return the share of equal choices among all pairs of annotators, over all pairs of responses.

    Five annotators of one pair of responses give ten correlated comparisons, so the confidence interval is clustered by pair of responses.
    """
    same, items = [], []
    for item, given in enumerate(votes):
        of_item = [one == other for one, other in combinations(given.values(), 2)]
        same += of_item
        items += [item] * len(of_item)
    return _share(same, items, confidence)


def _agreement_with_scores(rows: list[dict[str, Any]], sides: dict[str, Any], confidence: float) -> dict[str, Any]:
    """Return the share of decided pairs with known scores whose chosen response has the higher score; ties count half.

    The confidence interval is clustered by prompt: pairs of one prompt share responses.
    """
    points, prompts = [], []
    for row in rows:
        side = sides[row["id"]]
        if side["chosen_score"] is not None and side["rejected_score"] is not None:
            first, second = side["chosen_score"], side["rejected_score"]
            chosen, rejected = (first, second) if row["chosen"] == side["chosen"] else (second, first)
            points.append(accuracy_with_ties([chosen], [rejected]).value)
            prompts.append(json.dumps(side["messages"], sort_keys=True))
    return _share(points, prompts, confidence)


def _share(points: Sequence[float], clusters: Sequence[Any], confidence: float) -> dict[str, Any]:
    """Return the mean of points between 0 and 1 with its clustered confidence interval; n: number of points. Without points the interval is
    (0, 1).
    """
    if not points:
        return {"value": None, "low": 0.0, "high": 1.0, "n": 0}
    found = np.asarray(points, dtype=float)
    interval = share_interval(found, cluster_codes(np.asarray(clusters)), confidence)
    return {"value": float(found.mean()), "low": interval.low, "high": interval.high, "n": len(found), "clusters": interval.clusters}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
