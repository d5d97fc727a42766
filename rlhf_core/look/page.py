"""Shows what was found in the data as text for a terminal, pipe or file, or as JSON. Untrusted texts are printed escaped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from rlhf_core.config import Params, number_of, shown
from rlhf_core.config.data import DropKind
from rlhf_core.look import repeats
from rlhf_core.look.guess import columns_line
from rlhf_core.look.look import Guess, Inspection, TriedReading
from rlhf_core.look.proposed import as_json as proposal_json
from rlhf_core.look.proposed import costs, notes
from rlhf_core.look.recipe import LIMITS, dropped_share, exceeds_limit, yaml_lines
from rlhf_core.look.rows import Sequence, pieces
from rlhf_core.models.vision import vision_of
from rlhf_core.preparation.drops import DropCounts

if TYPE_CHECKING:
    from rlhf_core.look.propose import Proposal

OPEN, CLOSE = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"
COLOUR, PLAIN = "\x1b[1;32m", "\x1b[0m"
MAX_CHARACTERS = 3000  # of one sequence, at each end
MAX_SEQUENCES = 8  # of one record
MAX_PIECES = 40  # listed tokens around the first trained one
LEFT_OUT = "left out of training"


def describe_guess(guess: Guess, path: str, *, counts_all: bool = False) -> Iterator[str]:
    """Describes the sample and its readings.

    counts_all: the counts cover all records, not the sample only.
    """
    count = f"all {len(guess.records)}" if guess.whole else f"the first {len(guess.records)}"
    more = " for the guess, and all for the counts" if counts_all and not guess.whole else ""
    yield f"{shown(path)}: {count} {'record' if len(guess.records) == 1 else 'records'} read{more}"
    yield f"columns: {shown(', '.join(p for p in guess.columns if '.' not in p), 400)}"
    if guess.records and guess.records[0].note:
        yield f"assumed: {guess.records[0].note}"
    if guess.aside:
        names = shown(", ".join(guess.aside), 400)
        yield f"not read, since their names are of other splits: {names} (--split test reads those named so, --split all every file)"
    if guess.known:
        yield f"these are the columns of {guess.known}"
    if len(guess.fitting) == 1 and not guess.unreadable:
        yield from _reading("guess", guess.fitting[0])
        return
    if guess.unreadable:
        yield f"unsure: {guess.unreadable}"
    if guess.fitting:
        yield _choice(guess)
        for number, tried in enumerate(guess.fitting, start=1):
            yield from _reading(f"reading {number}", tried)
        return
    yield "no format fits; docs/tables/formats.md has each format with a record"
    for tried in guess.others[:6]:
        yield f"  {tried.reading.format}{_mapping(tried.reading.columns)}: {shown(tried.refused or '', 500)}"
    for format_ in dict.fromkeys(tried.reading.format for tried in guess.others if guess.chosen):
        yield f"name its columns as yours: {shown(columns_line(format_, guess.columns), 400)}"


def _choice(guess: Guess) -> str:
    if guess.unreadable and all(tried.reading.format == "prompt" for tried in guess.fitting):
        return "otherwise only the prompts are used; if you want that, choose it with --format prompt:"
    if guess.unreadable:
        return "without these every response would be learned, good or bad; if you want that, choose it with --format:"
    return f"unsure: {len(guess.fitting)} readings fit; choose with --format or --columns"


def _reading(title: str, tried: TriedReading) -> Iterator[str]:
    reading = tried.reading
    yield f"{title}: format {reading.format}{_mapping(reading.columns)}, for {', '.join(reading.uses)}"
    yield f"  because {'; '.join(shown(w, 300) for w in reading.why)}"
    yield from (f"  unsure: {line}" for line in reading.unsure)
    if reading.unread:
        yield f"  columns not read: {', '.join(reading.unread)} (`slices` may name them)"


def _mapping(columns: Mapping[str, Any]) -> str:
    theirs = {ours: ", ".join(value) if isinstance(value, list) else value for ours, value in columns.items()}
    named = "; ".join(f"{ours} from {shown(value, 120)}" for ours, value in theirs.items())
    return f" ({named})" if named else ""


def describe_inspection(found: Inspection, params: Params, *, colour: bool, every_token: bool) -> Iterator[str]:
    """Shows records as they are trained on, then the counts."""
    if params.model.path is None:
        yield (
            "No model is given: the tokens are those of a new tokenizer, trained on these texts alone; template and mask are the chain's. "
            "With --model the recipe is a whole one."
        )
    mark = "bold green" if colour else f"{OPEN}{CLOSE}"
    yield f"\nAs they are trained on ({mark}: in the loss, or compared; \N{MIDDLE DOT} between tokens):"
    for where, sequences in found.samples:
        yield f"\n{shown(where)}"
        yield from _record(sequences, found, params, colour=colour, every_token=every_token)
    yield ""
    yield from _counts(found, params)


def _record(sequences: list[Sequence | str], found: Inspection, params: Params, *, colour: bool, every_token: bool) -> Iterator[str]:
    """Shows a record's sequences; a prompt that several of them share is shown once."""
    shown_before: list[tuple[list[int], str]] = []
    for sequence in sequences[:MAX_SEQUENCES]:
        if isinstance(sequence, str):
            yield f"  {shown(sequence, 400)}"
            continue
        yield _title(sequence, found, params)
        start = sequence.trained.index(True) if any(sequence.trained) else len(sequence.ids)
        head = sequence.ids[:start]
        same = next((name for ids, name in shown_before if ids[: len(head)] == head), None) if start > 1 else None
        shown_before.append((sequence.ids, sequence.name))
        parts = [
            (_safe(text), sequence.trained[first], first, end)
            for text, first, end in _in_parts(sequence, found)
            if same is None or first >= start
        ]
        lines = _marked([(text, trained) for text, trained, _, _ in parts], colour).split("\n")
        lines[0] = (f"[prompt as in {same}] " if same else "") + lines[0]
        yield from (f"    | {line}".rstrip() for line in lines)
        yield from _tokens(sequence, parts) if every_token else [f"    tokens {_excerpt(parts)}"] if parts else []
    if len(sequences) > MAX_SEQUENCES:
        yield f"  and {len(sequences) - MAX_SEQUENCES} more of this record"


def _in_parts(sequence: Sequence, found: Inspection) -> list[tuple[str, int, int]]:
    """Return `pieces` of a sequence; the equal tokens of a picture are one part, with the text of one."""
    vision, parts = vision_of(found.tokenizer), []
    for text, first, end in pieces(found.tokenizer, sequence.ids):
        if vision is not None and parts and text == parts[-1][0] == vision.filler:
            parts[-1] = (text, parts[-1][1], end)
        else:
            parts.append((text, first, end))
    return parts


def _title(sequence: Sequence, found: Inspection, params: Params) -> str:
    trained, length = sum(sequence.trained), len(sequence.ids)
    line = f"  {sequence.name}: {length} tokens, {f'{trained} trained' if trained else 'continued by the policy'}"
    line += f"; {shown(sequence.remark, 300)}" if sequence.remark else ""
    line += "".join(f"; picture of {width} x {height} pixels, {tokens} tokens" for width, height, tokens in sequence.pictures)
    if length <= params.model.max_length:
        return line
    use = {"kto": "preference"}.get(sequence.name.split(",")[0], sequence.name.split(",")[0])
    counts = found.counts[use]
    too_long = counts.longer_than(params.model.max_length)
    stops = too_long > params.validation.max_too_long_fraction * counts.rows
    fate = f"validate_data stops at {too_long} such rows" if stops else LEFT_OUT
    return f"{line}; TOO LONG, model.max_length is {params.model.max_length}: {fate}"


def _tokens(sequence: Sequence, parts: list[tuple[str, bool, int, int]]) -> Iterator[str]:
    for text, is_trained, first, end in parts:
        ids = " ".join(map(str, sequence.ids[first:end]))
        yield f"    {first:>5} {ids:>8} {'trained' if is_trained else '       '} {_one_line(text)}"


def _safe(text: str) -> str:
    """Return the text without terminal control characters, changes of text direction and this page's own marks; line breaks stay."""
    lines = text.replace(OPEN, "\\u27e6").replace(CLOSE, "\\u27e7").split("\n")
    return "\n".join(shown(line, 10 * len(line)) for line in lines)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")


def _marked(parts: list[tuple[str, bool]], colour: bool) -> str:
    """Return the text with its trained spans marked; the middle of a very long text is left out."""
    begin, end = (COLOUR, PLAIN) if colour else (OPEN, CLOSE)
    written, inside, length, cut = [], False, sum(len(text) for text, _ in parts), False
    at = 0
    for text, trained in parts:
        at += len(text)
        if MAX_CHARACTERS < at <= length - MAX_CHARACTERS:
            written.append("" if cut else f" [... {length - 2 * MAX_CHARACTERS} characters ...] ")
            cut = True
            continue
        if trained != inside:
            written.append(begin if trained else end)
            inside = trained
        if colour and inside:
            text = text.replace("\n", f"{end}\n{begin}")
        written.append(text)
    return "".join(written) + (end if inside else "")


def _excerpt(parts: list[tuple[str, bool, int, int]]) -> str:
    """Return the tokens around the first trained one."""
    first = next((i for i, part in enumerate(parts) if part[1]), len(parts))
    low = max(0, min(first, len(parts)) - MAX_PIECES // 2)
    some = parts[low : low + MAX_PIECES]
    before = "... " if low else ""
    after = " ..." if low + MAX_PIECES < len(parts) else ""
    return before + "\N{MIDDLE DOT}".join(_one_line(text) for text, *_ in some) + after


def _counts(found: Inspection, params: Params) -> Iterator[str]:
    dropped = found.dropped
    left_out = f"{dropped.records} left out{_too_many(found, params)}{':' * bool(dropped.records)}"
    yield f"{number_of(dropped.read, 'record')} read, {left_out}"
    yield from _reasons(dropped, [reason for reason, _ in dropped.most_common() if reason in dropped.of_records])
    if others := [reason for reason, _ in dropped.most_common() if reason not in dropped.of_records]:
        yield "of the records that are kept:"
        yield from _reasons(dropped, others)
    for use, counts in found.counts.items():
        values = counts.values(params.model.max_length)
        lengths = values["tokens"]
        yield (
            f"{use}: {number_of(values['rows'], 'row')}; tokens: median {lengths['median']}, 95% at most {lengths['0.95']}, "
            f"longest {lengths['longest']} (model.max_length {params.model.max_length})"
        )
        if values.get("pairs"):
            yield _length_bias(values, params.validation.max_length_bias)
        new = params.rl.rollout.max_new_tokens
        if (
            params.alignment.method == "rl" and use == "prompt" and (crowded := counts.longer_than(params.model.max_length - new + 1))
        ):  # a prompt's count includes one token of an answer
            yield f"  {crowded} leave no room for rl.rollout.max_new_tokens, {new}: RL leaves them out"
        for kind, count in values["objections"].items():
            yield f"  {objection(kind, count, values['rows'], params)}"
            yield from (f"    {shown(place, 400)}" for place in counts.places.get(kind, []))
    yield from (shown(line, 600) for line in repeats.lines(found.repeats, params))


def _reasons(dropped: DropCounts, reasons: list[str]) -> Iterator[str]:
    for reason in reasons:
        yield f"  {dropped[reason]} {shown(reason)}"
        yield from (f"    {shown(where)}: {text}" for where, text in dropped.examples.get(reason, []))


def _length_bias(values: Mapping[str, Any], limit: float) -> str:
    longer = values["chosen_is_longer"] / values["pairs"]
    line = f"  the chosen response is the longer one in {longer:.0%} of {values['pairs']} pairs, ties as half"
    line += f"; validation.max_length_bias, {limit:g}, allows {0.5 - limit:.0%} to {0.5 + limit:.0%}"
    return f"{line}: validate_data stops, since training would learn length" if abs(longer - 0.5) > limit else line


def _too_many(found: Inspection, params: Params) -> str:
    """Return a note if prepare_data would stop because too much of a use is left out."""
    (share, _), limit = dropped_share(found, [], list(found.counts), params.model.max_length), params.validation.max_dropped_fraction
    return f" ({share:.1%}; validation.max_dropped_fraction is {limit:g}: prepare_data stops)" if share > limit else ""


def objection(kind: str, count: int, rows: int, params: Params) -> str:
    """Return a line about rows of a kind: share, limit, and whether validate_data would stop."""
    limit = LIMITS.get(kind)
    share = count / rows
    line = f"{count} {kind.replace('_', ' ')} ({share:.1%})"
    if limit is None:
        return line
    allowed = getattr(params.validation, limit)
    if not exceeds_limit(kind, count, rows, params):
        return f"{line}; validation.{limit} is {allowed:g}{f': {LEFT_OUT}' if kind == 'too_long' else ''}"
    longer = "; raise model.max_length" if kind == "too_long" else ""
    longer = "; with strip_end_tokens: true the source takes them off" if kind == "end_token" else longer
    advice = f", unless the source has drop: [{kind}]" if kind in get_args(DropKind) else ""
    return f"{line}; validation.{limit} is {allowed:g}: validate_data stops{advice}{longer}"


@dataclass(frozen=True)
class InspectedReading:
    """A reading that was inspected.

    params: with the proposal laid over them, or as they are. recipe: YAML. proposal: None without a model.
    """

    looked: Inspection
    params: Params
    recipe: str
    proposal: Proposal | None = None


def describe_proposal(reading: InspectedReading) -> Iterator[str]:
    """Shows the reasons, the recipe, and the time and memory that it will take."""
    if reading.proposal is not None:
        yield ""
        yield from notes(reading.proposal)
    yield f"\n# a recipe for --params\n{reading.recipe}"
    if reading.proposal is not None:
        yield from costs(reading.proposal)


def as_json(guess: Guess, found: list[InspectedReading]) -> dict[str, Any]:
    """Return the same content as JSON values, with unescaped texts and complete token ids and masks."""
    return {
        "records": len(guess.records),
        "whole": guess.whole,
        "aside": list(guess.aside),
        "known": guess.known,
        "assumed": guess.records[0].note if guess.records else "",
        "decided": len(guess.fitting) == 1 and guess.unreadable is None,
        "unsure": guess.unreadable,
        "readings": [
            {
                "format": tried.reading.format,
                "columns": tried.reading.columns,
                "uses": list(tried.reading.uses),
                "why": list(tried.reading.why),
                "unsure": list(tried.reading.unsure),
                "unread": list(tried.reading.unread),
                **_json_of_reading(tried, next((one for one in found if one.looked.tried is tried), None)),
            }
            for tried in guess.fitting
        ],
        "refused": [{"format": t.reading.format, "columns": t.reading.columns, "reason": t.refused} for t in guess.others if t.refused],
    }


def _json_of_reading(tried: TriedReading, found: InspectedReading | None) -> dict[str, Any]:
    if found is None:
        return {"yaml": yaml_lines(tried.source)}
    proposal = {} if found.proposal is None else {"proposal": proposal_json(found.proposal)}
    max_length = found.params.model.max_length
    return {"yaml": found.recipe, "max_length": max_length, **_json_of(found.looked, max_length), **proposal}


def _json_of(found: Inspection, max_length: int) -> dict[str, Any]:
    return {
        "read": found.dropped.read,
        "left_out": found.dropped.records,
        "dropped": dict(found.dropped),
        "counts": {use: counts.values(max_length) for use, counts in found.counts.items()},
        "repeats": {
            split: {"prompts": len(prompts), **{kind: sum(getattr(p, kind) is not None for p in prompts) for kind in repeats.LIMITS}}
            for split, prompts in found.repeats.items()
        },
        "samples": [
            {"where": where, "sequences": [s if isinstance(s, str) else vars(s) for s in sequences]} for where, sequences in found.samples
        ],
    }
