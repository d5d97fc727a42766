"""What goes into a conversion comes out of it: any conversation, in every format and shape."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhf_core.config import SourceConfig
from rlhf_core.data.control import is_blank
from rlhf_core.preparation.drops import Dropped
from rlhf_core.preparation.formats import convert
from rlhf_core.preparation.sources import load_source

ANY = st.text(st.characters(codec="utf-8"), max_size=12)
WORDS = st.sampled_from(
    ["", " ", "a", "First question", "\r\nCR\r\nLF\r\n", "lone\rCR", "äöü 漢字 🙂", "\u2028 \u00a0", "a, b; c\t|d", '"quoted"']
)
TEXT = st.one_of(WORDS, ANY, st.tuples(WORDS, ANY, WORDS).map("".join))
SAID = TEXT.filter(lambda text: text.strip())
USES = {"sft", "preference", "prompt"}


def plain(text: str) -> str:
    return re.sub("\r\n?", "\n", text)


def source(format: str, uses=("prompt",), **more) -> SourceConfig:
    given = {"name": "s", "kind": "file", "path": "x", "uses": list(uses), "weight": 1.0, "format": format}
    return SourceConfig.model_validate(given | more)


class Talk(NamedTuple):
    """A conversation, its next message in two ways, and what rows are to have of it."""

    messages: list[dict[str, str]]
    chosen: str
    rejected: str

    @property
    def plain(self) -> list[dict[str, str]]:
        return [{"role": m["role"], "content": plain(m["content"])} for m in self.messages]

    @property
    def users(self) -> list[str]:
        return [m["content"] for m in self.messages if m["role"] == "user"]


@st.composite
def talks(draw, *, system: bool | None = None, turns: int = 3, message=TEXT) -> Talk:
    """system: whether there is a system message; None: either."""
    first = [{"role": "system", "content": draw(message)}] if (draw(st.booleans()) if system is None else system) else []
    length = 2 * draw(st.integers(0, turns - 1)) + 1
    return Talk(
        [*first, *({"role": ("user", "assistant")[i % 2], "content": draw(message)} for i in range(length))], draw(message), draw(message)
    )


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def spelled(messages: list[dict[str, str]], spelling: str) -> list[dict[str, Any]]:
    """The same messages as other data sets write them."""
    if spelling == "sharegpt":
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        return [{"from": names[m["role"]], "value": m["content"]} for m in messages]
    if spelling == "parts":
        return [{"role": m["role"], "content": [{"type": "text", "text": m["content"], "image_url": None}]} for m in messages]
    names = {"system": "developer", "user": "User", "assistant": "assistant"} if spelling == "developer" else {}
    return [{"role": names.get(m["role"], m["role"]), "content": m["content"]} for m in messages]


SPELLINGS = st.sampled_from(["openai", "sharegpt", "parts", "developer"])


@given(talk=talks(), spelling=SPELLINGS, shape=st.sampled_from(["none", "first", "last", "list", "rest", "answers", "texts"]))
def test_a_pair_comes_out_as_it_went_in(talk, spelling, shape):
    """Whole conversations (without a prompt, with its first or last question, with its beginning, going on from it), answers, texts."""
    requested = {"first": talk.users[0], "last": talk.users[-1]}.get(shape, spelled(talk.messages, spelling))
    assume(not isinstance(requested, str) or requested.strip())
    assume(shape != "rest" or plain(talk.users[0]) not in map(plain, talk.users[1:]))  # it could be the whole conversation or what follows
    record: dict[str, Any] = {} if shape == "none" else {"prompt": requested}
    cut = 0
    if shape in ("list", "rest"):
        cut = 2 if talk.messages[0]["role"] == "system" else 1
        record["prompt"] = record["prompt"][:cut]
    elif shape in ("answers", "texts"):
        cut = len(talk.messages)
    turns = talk.messages if shape == "list" else talk.messages[cut:]
    for side in ("chosen", "rejected"):
        text = getattr(talk, side)
        record[side] = text if shape == "texts" else spelled([*turns, *answer(text)], spelling)
    [pair] = convert(record, source("preference"))["preference"]
    assert pair == {"messages": talk.plain, "chosen": plain(talk.chosen), "rejected": plain(talk.rejected)}


@given(
    talk=talks(system=False, message=SAID.filter(lambda t: not re.search("Human:|Assistant:", t))),
    ends=st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_a_transcript_comes_out_as_it_went_in(talk, ends):
    names = {"user": "Human", "assistant": "Assistant"}
    before = "".join(f"\n\n{names[m['role']]}: {m['content']}" for m in talk.messages)
    record = {side: f"{before}\n\nAssistant: {getattr(talk, side)}".replace("\n", ends) for side in ("chosen", "rejected")}
    [pair] = convert(record, source("hh"))["preference"]
    assert [m["role"] for m in pair["messages"]] == [m["role"] for m in talk.messages]
    assert [m["content"].split() for m in pair["messages"]] == [m["content"].split() for m in talk.messages]
    assert (pair["chosen"].split(), pair["rejected"].split()) == (talk.chosen.split(), talk.rejected.split())


@given(talk=talks(), spelling=SPELLINGS, apart=st.booleans())
def test_a_conversation_comes_out_as_it_went_in(talk, spelling, apart):
    """With its system message as its first one, or in a column."""
    first = talk.messages[0]
    apart = apart and first["role"] == "system" and bool(first["content"].strip())
    record = {"conversations": spelled([*talk.messages[apart:], *answer(talk.chosen)], spelling), "instructions": first["content"]}
    columns = {"messages": "conversations"} | ({"system": "instructions"} if apart else {})
    rows = convert(record, source("messages", columns=columns))
    assert rows["sft"] == [{"messages": talk.plain, "response": plain(talk.chosen)}]
    assert rows["prompt"] == [{"messages": talk.plain, "label": None}]


@given(talk=talks(message=SAID), more=TEXT)
def test_an_instruction_comes_out_with_system_history_and_input(talk, more):
    first = talk.messages[0]["content"] if talk.messages[0]["role"] == "system" else None
    *earlier, last = (m["content"] for m in talk.messages if m["role"] != "system")
    record = {"instruction": last, "input": more, "output": talk.chosen, "system": first}
    record["history"] = [list(pair) for pair in zip(earlier[::2], earlier[1::2], strict=True)]
    [row] = convert(record, source("instruction", columns={"system": "system", "history": "history"}))["sft"]
    requested = plain(last) if is_blank(more) else f"{plain(last)}\n\n{plain(more)}"
    assert row == {"messages": [*talk.plain[:-1], {"role": "user", "content": requested}], "response": plain(talk.chosen)}


@given(talk=talks(), spelling=SPELLINGS, whole=st.booleans(), good=st.booleans())
def test_feedback_without_pairs_comes_out_as_it_went_in(talk, spelling, whole, good):
    turns = talk.messages if whole else []
    record = {"prompt": spelled(talk.messages, spelling), "completion": spelled([*turns, *answer(talk.chosen)], spelling), "label": good}
    [row] = convert(record, source("unpaired"))["preference"]
    assert row["messages"] == talk.plain
    assert (row["chosen"], row["rejected"]) == ((plain(talk.chosen), None) if good else (None, plain(talk.chosen)))


@given(talk=talks(), more=st.lists(st.tuples(TEXT, st.booleans()), max_size=3), whole=st.booleans())
def test_graded_completions_come_out_as_they_went_in(talk, more, whole):
    graded = [(talk.chosen, True), (talk.rejected, False), *more]
    turns = talk.messages if whole else []
    completions = [{"completion": [*turns, *answer(text)], "good": good} for text, good in graded]
    rows = convert({"prompt": talk.messages, "completions": completions}, source("graded"))
    good, bad = ([plain(text) for text, mark in graded if mark is wanted] for wanted in (True, False))
    assert [(r["chosen"], r["rejected"]) for r in rows["preference"]] == [(g, b) for g in good for b in bad]
    assert all(row["messages"] == talk.plain for of_use in rows.values() for row in of_use)


@given(talk=talks(), others=st.lists(st.tuples(TEXT, st.integers(1, 3)), max_size=3), whole=st.booleans(), beside=st.booleans())
def test_ranked_completions_come_out_as_they_went_in(talk, others, whole, beside):
    ranked = [(talk.rejected, 2), (talk.chosen, 1), *others]
    turns = talk.messages if whole else []
    completions = [[*turns, *answer(text)] for text, _ in ranked]
    ranks = [rank for _, rank in ranked]
    inside = [{"completion": text, "rank": rank} for text, rank in zip(completions, ranks, strict=True)]
    rows = convert(
        {"prompt": talk.messages, **({"completions": completions, "rank": ranks} if beside else {"completions": inside})}, source("ranked")
    )
    best, worse = ([plain(text) for text, rank in ranked if (rank == 1) is wanted] for wanted in (True, False))
    assert [(r["chosen"], r["rejected"]) for r in rows["preference"]] == [(b, w) for b in best for w in worse]
    assert all(row["messages"] == talk.plain for of_use in rows.values() for row in of_use)


@given(
    talk=talks(),
    spelling=SPELLINGS,
    whole=st.booleans(),
    verdict=st.sampled_from([{"winner": "second"}, {"first_score": 1, "second_score": 2}]),
)
def test_a_comparison_comes_out_as_it_went_in(talk, spelling, whole, verdict):
    """With the prompt in its own column, or in both conversations."""
    turns = spelled(talk.messages, spelling)
    sides = {name: [*(turns if whole else []), *answer(text)] for name, text in (("first", talk.rejected), ("second", talk.chosen))}
    rows = convert(sides | verdict | ({} if whole else {"prompt": turns}), source("compared"))
    [pair] = rows["preference"]
    assert pair == {"messages": talk.plain, "chosen": plain(talk.chosen), "rejected": plain(talk.rejected)}


@given(talk=talks(system=False), more=TEXT)
def test_a_tree_comes_out_as_it_went_in(talk, more):
    """The conversation is one branch, whose last message has a better and a worse reply."""
    last = [{"role": "assistant", "text": text, "rank": rank} for text, rank in ((talk.rejected, 1), (talk.chosen, 0))]
    node = {"role": "prompter", "text": talk.messages[-1]["content"], "replies": last}
    for message in reversed(talk.messages[:-1]):
        node = {"role": message["role"], "text": message["content"], "replies": [node], "rank": 0, "other": more}
    rows = convert({"tree": node}, source("tree"))
    assert rows["preference"] == [{"messages": talk.plain, "chosen": plain(talk.chosen), "rejected": plain(talk.rejected)}]
    assert rows["sft"][-1] == {"messages": talk.plain, "response": plain(talk.chosen)}
    assert [row["messages"] for row in rows["prompt"]] == [talk.plain[:end] for end in range(1, len(talk.plain) + 1, 2)]


@given(talk=talks(), text=TEXT)
def test_prompts_and_texts_come_out_as_they_went_in(talk, text):
    assert convert({"prompt": talk.messages}, source("prompt"))["prompt"] == [{"messages": talk.plain, "label": None}]
    assert convert({"text": text}, source("text", uses=["pretrain"])) == {"pretrain": [{"text": plain(text)}]}


@given(
    rows=st.lists(st.tuples(SAID, TEXT, TEXT), min_size=1, max_size=4),
    names=st.lists(SAID.filter(lambda text: not set(text) & set(",;\t|")), min_size=3, max_size=3, unique_by=str.strip),
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    ends=st.sampled_from(["\n", "\r\n"]),
)
@settings(max_examples=60, deadline=None)
def test_a_table_comes_out_as_it_went_in(tmp_path_factory, rows, names, delimiter, ends):
    """Whatever its fields hold and its columns are called."""
    path = tmp_path_factory.getbasetemp() / "table.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter, lineterminator=ends, quoting=csv.QUOTE_ALL).writerows([names, *rows])
    columns = dict(zip(("prompt", "chosen", "rejected"), names, strict=True))
    how = {"columns": columns, "implicit_prompt": False}  # answers may begin with the prompt by chance
    loaded = load_source(source("preference", uses=["preference"], path=str(path), **how), seed=0)
    found = [(row["messages"][0]["content"], row["chosen"], row["rejected"]) for row in loaded.rows["preference"]]
    assert found == [tuple(map(plain, row)) for row in rows] and not loaded.dropped


ROLE = st.sampled_from(["system", "user", "assistant", "tool", "developer", "function", "human", "gpt", "robot"])
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "an argument"}'}}
PARTS = [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}]
PICTURE = {"type": "image_url", "text": "", "image_url": "https://host/picture"}
CONTENT = st.one_of(TEXT, st.none(), st.sampled_from([PARTS, [*PARTS, PICTURE], ["p"]]))
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": ROLE, "content": CONTENT}, optional={"tool_calls": st.sampled_from([None, [CALL], "x"])}),
    st.fixed_dictionaries({"from": ROLE, "value": TEXT}),
)
CONVERSATION = st.lists(MESSAGE, max_size=5)
VALUE = st.one_of(TEXT, st.none(), CONVERSATION, st.just(float("nan")), st.integers(0, 2))


@st.composite
def nested(draw) -> dict[str, Any]:
    """Two sides that mostly begin alike, with a prompt that may be somewhere in them."""
    talk = draw(talks())
    changed = draw(st.sampled_from([talk.messages, talk.messages, draw(talks()).messages, []]))
    sides = {"chosen": [*talk.messages, *answer(talk.chosen)], "rejected": [*changed, *answer(talk.rejected)]}
    pool = [m["content"] for m in talk.messages] + [talk.messages[:1], talk.messages[1:], talk.messages, None, "else"]
    return sides | draw(st.sampled_from([{}, {"prompt": draw(st.sampled_from(pool))}]))


@given(record=st.one_of(nested(), st.fixed_dictionaries({"chosen": VALUE, "rejected": VALUE}, optional={"prompt": VALUE})))
@settings(max_examples=100)
def test_no_text_of_a_pair_vanishes(record):
    """It is in the row, or the record is dropped for a reason."""
    all_or_nothing(record, source("preference", implicit_prompt=True), "preference")


@given(record=st.fixed_dictionaries({"prompt": VALUE, "completion": VALUE, "label": st.sampled_from([True, False, None, "yes"])}))
def test_no_text_of_feedback_vanishes(record):
    all_or_nothing(record, source("unpaired"), "preference")


@st.composite
def with_tools(draw) -> list[dict[str, Any]]:
    """A conversation with calls and answers of tools, in old and new spellings, of which a message may be something else."""
    call = draw(st.sampled_from([{"tool_calls": [CALL]}, {"tool_calls": [CALL, CALL]}, {"function_call": CALL["function"]}]))
    role = draw(st.sampled_from(["tool", "function"]))
    messages = [
        {"role": draw(st.sampled_from(["system", "developer"])), "content": draw(TEXT)},
        {"role": "user", "content": draw(CONTENT)},
        {"role": "assistant", "content": draw(st.sampled_from([None, "", "Wait."])), **call},
        {"role": role, "content": draw(TEXT), "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": draw(CONTENT), "reasoning_content": draw(st.sampled_from([None, "Hm."]))},
    ]
    messages += draw(st.sampled_from([[], [{"role": "user", "content": draw(TEXT)}, {"role": "assistant", "content": draw(TEXT)}]]))
    place = draw(st.integers(0, 2 * len(messages)))
    return [*messages[:place], draw(MESSAGE), *messages[place + 1 :]] if place < len(messages) else messages


@given(record=st.fixed_dictionaries({"messages": st.one_of(with_tools(), with_tools(), CONVERSATION)}, optional={"system": VALUE}))
@settings(max_examples=100)
def test_no_text_of_a_conversation_vanishes(record):
    all_or_nothing(record, source("messages", columns={"system": "system"} if "system" in record else {}), "sft")


def all_or_nothing(record: dict[str, Any], of: SourceConfig, use: str) -> None:
    try:
        [row] = convert(record, of)[use]
    except Dropped as reason:
        assert 0 < len(str(reason)) < 100
        return
    except ValueError as error:
        assert 0 < len(error.reason) < 100 and "expected" in str(error)
        return
    there = "\n".join(texts_in(row))
    blank_column = isinstance(record.get("system"), str) and is_blank(record["system"])  # such a column is no message
    for text in texts_in({key: value for key, value in record.items() if not (key == "system" and blank_column)}):
        assert plain(text) in there or (of.implicit_prompt and all(word in there for word in text.split()))


def texts_in(value: Any) -> Iterator[str]:
    """All texts but the names of roles; of `extra` and of arguments in JSON, those inside."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("role", "from", "type", "label"):
                in_json = key == "arguments" or (key == "extra" and inner is not None)
                yield from texts_in(json.loads(inner) if in_json and isinstance(inner, str) else inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)
    elif isinstance(value, str):
        yield value


@given(records=st.lists(st.one_of(nested(), nested(), st.just({"chosen": "no list", "rejected": 1})), min_size=1, max_size=8))
@settings(max_examples=60)
def test_every_record_of_a_file_is_a_row_or_counted(tmp_path_factory, records):
    path = tmp_path_factory.getbasetemp() / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    try:
        loaded = load_source(source("preference", uses=["preference"], path=str(path)), seed=0)
    except ValueError as error:
        assert f"{path}" in str(error)
        return
    rows, left = loaded.rows["preference"], loaded.dropped
    assert len(rows) + left.records == left.read == len(records)
    assert left.total() == left.records
    places = [row["origin"] for row in rows] + [example.where for examples in left.examples.values() for example in examples]
    assert len(set(places)) == len(places) and set(places) <= {f"{path} line {i + 1}" for i in range(len(records))}
