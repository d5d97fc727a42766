"""What the look at data shows is what is trained on, and the YAML it prints is a source that gives just that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_rows import measured

from rlhf_core.config import parse_params, parse_yaml, read_yaml
from rlhf_core.data.schema import SCHEMAS, read_rows
from rlhf_core.look import page
from rlhf_core.look.__main__ import main
from rlhf_core.look.look import Inspection, guess, inspect_reading, place_of, sample_of
from rlhf_core.look.rows import pieces
from rlhf_core.models.tokenizer import encode_prompt, encode_scored, new_tokenizer
from rlhf_core.preparation.sources import load_source, mix
from rlhf_core.trainers.preference.train import begin_examples, begin_pairs
from rlhf_core.trainers.supervised.demonstrations import collate_demonstrations, encode_demonstrations
from tests.chat_templates import templated
from tests.tiny_models import DEFAULTS, tiny_params, tiny_tokenizer

ROOT = Path(__file__).parents[3]
TURNS = [
    {"role": "user", "content": "Please sort 7142."},
    {"role": "assistant", "content": "<think>\nFour digits.\n</think>\n\nSorted: 1247."},
    {"role": "user", "content": "And 309?"},
]
PAIRS = [
    {"prompt": TURNS, "chosen": "<think>\nThree.\n</think>\n\n039 <|end|> é 日本", "rejected": "903"},
    {"prompt": "Largest of 309?", "chosen": "9", "rejected": "3 \U0001f600"},
]
MARKS = [
    {"prompt": "2 + 2?", "completion": "4", "label": True},
    {"prompt": "2 + 3?", "completion": "4", "label": False},
]


def looked(folder: Path, records: list[dict], tokenizer, params, **choice) -> Inspection:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    place = place_of(str(path), {})
    sample, whole = sample_of(place, 2000)
    found = guess(place, sample, whole=whole, format_=choice.get("format_"), columns=choice.get("columns", {}))
    (tried,) = found.fitting
    return inspect_reading(tried, sample, params, tokenizer, show=100)


def shown_of(found: Inspection, name: str) -> list[tuple[list[int], list[bool]]]:
    return [(s.ids, s.trained) for _, sequences in found.samples for s in sequences if s.name == name]


@pytest.mark.parametrize("template", ["built-in", "chatml", "thinks", "trimmed"])
@pytest.mark.parametrize(("train_on", "thoughts"), [("last_turn", True), ("all_turns", True), ("all_turns", False)])
def test_tokens_and_masks_of_pairs_are_those_of_the_trainers(template, train_on, thoughts, tmp_path):
    tokenizer = tiny_tokenizer() if template == "built-in" else templated(template)
    params = tiny_params(sft__train_on=train_on, sft__train_on_thoughts=thoughts)
    found = looked(tmp_path, PAIRS, tokenizer, params)
    rows = load_source(found.tried.source, seed=0).rows
    examples, _ = encode_demonstrations(rows["sft"], tokenizer, max_length=10**6, train_on=train_on, train_on_thoughts=thoughts)
    batch = collate_demonstrations(examples, pad_id=tokenizer.pad_token_id)
    assert shown_of(found, "sft") == [
        (e.ids, selected[: len(e.ids)].tolist()) for e, selected in zip(examples, batch.selected, strict=True)
    ]
    pairs, _ = begin_pairs(rows["preference"], tokenizer, max_length=10**6)()
    for side in ("chosen", "rejected"):
        sides = [getattr(pair, side) for pair in pairs]
        expected = [([*s.prompt_ids, *s.response_ids], [False] * len(s.prompt_ids) + [True] * len(s.response_ids)) for s in sides]
        assert shown_of(found, f"preference, {side}") == expected
    assert [ids for ids, _ in shown_of(found, "prompt")] == [encode_prompt(tokenizer, row["messages"]) for row in rows["prompt"]]


def test_tokens_and_masks_of_marked_responses_are_those_of_kto(tmp_path):
    tokenizer = templated("chatml")
    found = looked(tmp_path, MARKS, tokenizer, tiny_params())
    examples, _ = begin_examples(load_source(found.tried.source, seed=0).rows["preference"], tokenizer, max_length=10**6)()
    for example in examples:
        name = "kto, desirable" if example.desirable else "kto, undesirable"
        prompt, response, _ = example.continuation
        assert shown_of(found, name) == [([*prompt, *response], [False] * len(prompt) + [True] * len(response))]


def test_without_a_model_the_tokenizer_is_the_one_that_prepare_data_would_train(tmp_path):
    params = tiny_params(data__promotion_fraction=0.0)
    found = looked(tmp_path, [{"prompt": f"Sort {i}.", "chosen": f"Sorted: {i}", "rejected": "no"} for i in range(40)], None, params)
    data = params.data.model_copy(update={"sources": [found.tried.source]})
    mixed = mix(data, tmp_path / "prepared", scratch=tmp_path / "scratch", seed=0)
    rows = (row for use in mixed.uses for row in read_rows(tmp_path / "prepared", use))
    assert new_tokenizer(rows, vocab_size=params.model.architecture.vocab_size).get_vocab() == found.tokenizer.get_vocab()


def test_a_reward_model_that_reads_something_else_is_mentioned(tmp_path):
    """Behind the end of a ChatML turn stands a line break, which nothing samples and a reward model reads."""
    for tokenizer, mentioned in ((templated("chatml"), True), (tiny_tokenizer(), False)):
        found = looked(tmp_path, PAIRS[1:], tokenizer, tiny_params())
        (chosen,) = [s for _, sequences in found.samples for s in sequences if s.name == "preference, chosen"]
        (row,) = load_source(found.tried.source, seed=0).rows["preference"]
        scored = len(encode_scored(tokenizer, row["messages"], row["chosen"]))
        assert (f"reads {scored}," in chosen.remark, scored != len(chosen.ids)) == (mentioned, mentioned)


def test_prompts_without_room_for_a_response_are_those_that_rl_leaves_out(tmp_path):
    tokenizer, records = tiny_tokenizer(), [{"prompt": "4 " * n} for n in range(1, 40)]
    params = tiny_params(rl__rollout__max_new_tokens=30)
    found = looked(tmp_path, records, tokenizer, params, format_="prompt")
    lengths = [len(ids) for ids, _ in shown_of(found, "prompt")]
    crowded = sum(length > params.model.max_length - 30 for length in lengths)
    assert 0 < crowded < len(lengths)
    assert f"  {crowded} leave no room for" in "\n".join(page.describe_inspection(found, params, colour=False, every_token=False))


TOKENIZERS = {name: templated(name) for name in ("chatml", "thinks")}


@given(st.text(alphabet="ab é日\U0001f600\n\t<|>", max_size=30), st.sampled_from(sorted(TOKENIZERS)))
def test_pieces_are_the_whole_text_in_order(text, template):
    tokenizer = TOKENIZERS[template]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = pieces(tokenizer, ids)
    assert "".join(piece for piece, _, _ in found) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert [i for _, first, end in found for i in range(first, end)] == list(range(len(ids)))


def test_the_marks_hold_the_trained_text_and_nothing_else(tmp_path):
    tokenizer = tiny_tokenizer()
    found = looked(tmp_path, [{"prompt": "Please sort 41.", "chosen": "14", "rejected": "41"}], tokenizer, tiny_params())
    text = "\n".join(page.describe_inspection(found, tiny_params(), colour=False, every_token=False))
    assert "| <|user|>Please sort 41.<|end|><|assistant|>⟦14<|end|>⟧" in text
    assert "| [prompt as in sft] ⟦41<|end|>⟧" in text


HOSTILE = "a\x1b[2J\x07\u202edesrever\u2066 ⟦not trained⟧"


def test_texts_of_the_data_give_a_terminal_no_orders(tmp_path):
    found = looked(tmp_path, [{"prompt": HOSTILE, "chosen": HOSTILE, "rejected": "b", f"x{HOSTILE}": 1}], tiny_tokenizer(), tiny_params())
    described = page.describe_inspection(found, tiny_params(), colour=False, every_token=True)
    lines = "\n".join([*described, *found.tried.reading.unsure]).split("\n")
    assert not [line for line in lines if any(ord(c) < 32 or c in "\x7f\u202e\u2066" for c in line)]
    (marked,) = [line for line in lines if "not trained" in line and "⟦" in line and "<|user|>" in line]
    assert marked.count("⟦") == 1 and "\\u27e6not trained" in marked and "\\u202edesrever" in marked


def test_colour_is_only_for_a_terminal(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(MARKS[0]) + "\n")
    assert main([str(path), "--params", str(DEFAULTS)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    found = looked(tmp_path, MARKS, tiny_tokenizer(), tiny_params())
    assert page.COLOUR in "\n".join(page.describe_inspection(found, tiny_params(), colour=True, every_token=False))


@pytest.mark.parametrize(
    ("name", "records", "choice"),
    [
        ("pairs of é \U0001f600.jsonl", PAIRS, []),
        ("marks.jsonl", MARKS, []),
        ("on.jsonl", [{"question": "2 + 2?", "answer": "4 it is\n#### 4"}], []),
        ("short.jsonl", [{"question": "2 + 2?", "answer": "4"}], ["--format", "prompt"]),
        ("implicit.jsonl", [{"chosen": "The sky is blue.", "rejected": "The sky is green."}], []),
        ("1.2.jsonl", [{"q: [x]": "2 + 2?", "chosen": "4", "rejected": "5"}], ["--format", "preference", "--columns", "prompt=q: [x]"]),
    ],
)
def test_the_yaml_is_a_source_of_the_params_that_gives_the_rows_that_were_shown(name, records, choice, tmp_path, capsys):
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    assert main([str(path), "--yaml-only", *choice]) == 0
    printed = parse_yaml(capsys.readouterr().out, "printed")
    tree = read_yaml(DEFAULTS)
    tree["data"]["sources"] = printed["data"]["sources"]
    (source,) = parse_params(tree).data.sources
    rows = load_source(source, seed=0).rows
    assert all(rows[use] for use in source.uses)
    main([str(path), "--json", "--params", str(DEFAULTS), *choice])
    (reading,) = json.loads(capsys.readouterr().out)["readings"]
    assert {use: counts["rows"] for use, counts in reading["counts"].items()} == {use: len(of_use) for use, of_use in rows.items()}
    assert reading["yaml"] == page.yaml_lines(source)


def test_two_readings_are_both_shown_with_their_yaml_and_end_with_2(tmp_path, capsys):
    path = tmp_path / "qa.jsonl"
    path.write_text(json.dumps({"question": "What is 2 + 2?", "answer": "4"}) + "\n")
    assert main([str(path), "--params", str(DEFAULTS)]) == 2
    out = capsys.readouterr().out
    assert "2 readings fit; choose with --format" in out
    assert "format: instruction" in out and "format: prompt" in out
    assert main([str(path), "--yaml-only"]) == 2
    assert capsys.readouterr().out == ""  # nothing that a script would take for YAML


def test_a_misspelt_column_is_named_with_those_of_the_data(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"query": "2 + 2?", "nice": "It is 4.", "nasty": "4, of course."}) + "\n")
    options = ["--format", "preference", "--columns", "prompt=query", "rejected=nasty"]
    assert main([str(path), "--yaml-only", *options, "chosen=nicer"]) == 2
    expected = "--columns chosen=nicer: expected a column of the data, got none named nicer; the columns are: query, nice, nasty"
    assert expected in capsys.readouterr().err
    assert main([str(path), "--yaml-only", *options, "chosen=nice"]) == 0


def test_two_texts_beside_a_prompt_may_be_a_pair(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"query": f"{i} + 1?", "nice": f"It is {i + 1}.", "nasty": f"Ugh, {i + 1}.", "topic": "sum", "by": "Ann Lee"} for i in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(path), "--yaml-only"]) == 2
    found = capsys.readouterr()
    assert found.out == "" and "--format preference --columns prompt=query chosen=nice rejected=nasty," in found.err
    assert "otherwise only the prompts are used; if you want that, choose it with --format prompt:" in found.err
    assert main([str(path), "--yaml-only", "--format", "prompt", "--columns", "prompt=query"]) == 0
    path.write_text("".join(json.dumps({key: row[key] for key in ("query", "nice", "topic", "by")}) + "\n" for row in rows))
    assert main([str(path), "--yaml-only"]) == 0


def test_what_cannot_be_read_ends_with_2_and_says_where(tmp_path, capsys):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "a", "chosen": \n')
    assert main([str(path)]) == 2
    assert f"{path} line 1: expected JSON" in capsys.readouterr().err
    path.write_text('{"prompt": "a\tb"}\n')
    assert main([str(path)]) == 2
    assert "Invalid control character in column 14; correct it" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing.jsonl")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("data check: ") and "got nothing there" in err


@pytest.mark.parametrize(
    ("options", "message"), [(["--encoding", "no\x1bsuch"], "expected a name such as utf-8"), (["--delimiter", ";;"], "delimiter: ")]
)
def test_options_that_mean_nothing_are_refused(options, message, tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text("prompt,chosen,rejected\na,b,c\n")
    assert main([str(path), *options]) == 2
    err = capsys.readouterr().err
    assert message in err and "\x1b" not in err and err.count("\n") == 1


def test_only_the_first_records_are_read_unless_all_are_wanted(tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"prompt": f"Sort {i}.", "chosen": f"{i}", "rejected": "no"}) + "\n" for i in range(50))
        file.write("{broken\n")
    assert main([str(path), "--params", str(DEFAULTS), "--records", "50"]) == 0
    out = capsys.readouterr().out
    assert "the first 50 records read" in out and "50 records read, 0 left out" in out
    assert main([str(path), "--params", str(DEFAULTS), "--records", "50", "--all"]) == 2  # now the last line is read
    assert f"{path} line 51" in capsys.readouterr().err


def test_what_is_left_out_is_counted_with_its_reason_and_first_record(tmp_path, capsys):
    path = tmp_path / "gaps.jsonl"
    records = [*PAIRS, {"prompt": None, "chosen": "x", "rejected": "y"}, {"prompt": "p", "chosen": 3, "rejected": "y"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main([str(path), "--params", str(DEFAULTS)]) == 0
    out = capsys.readouterr().out
    assert "4 records read, 2 left out (50.0%; validation.max_dropped_fraction is 0.1: prepare_data stops)" in out
    assert "1 prompt is null" in out and f"{path} line 3" in out


@pytest.mark.parametrize(("options", "absent"), [(["--yaml-only"], {"torch", "transformers", "pandas"}), ([], {"torch"})])
def test_what_is_not_needed_is_not_loaded(options, absent, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(PAIRS[1]) + "\n")
    program = (
        "import sys; from rlhf_core.look.__main__ import main; code = main(sys.argv[1:]); "
        f"print(code, sorted({absent!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path), *options], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_every_use_that_a_reading_has_is_a_use_of_the_schema(tmp_path):
    found = looked(tmp_path, [{"text": "Once upon a time."}], tiny_tokenizer(), tiny_params())
    (sequence,) = found.samples[0][1]
    assert set(found.counts) <= set(SCHEMAS) and sequence.trained == [False] + [True] * (len(sequence.ids) - 1)


def test_objections_are_those_of_validate_data(tmp_path):
    """The same rows, validated: every expectation that counts rows finds as many."""
    from rlhf_core.data.schema import open_rows
    from rlhf_core.preparation.validation.validate import validate

    records = [
        *PAIRS,
        *({"prompt": f"Sort {i}.", "chosen": "yes", "rejected": "no"} for i in range(3)),
        {"prompt": "Sort 1.", "chosen": "no", "rejected": "yes"},
        {"prompt": "Sort 2.", "chosen": "yes", "rejected": "no"},
        {"prompt": "same", "chosen": "a", "rejected": "a"},
        {"prompt": "empty", "chosen": "", "rejected": "a"},
        {"prompt": "long", "chosen": "1 " * 200, "rejected": "a"},
    ]
    params, tokenizer = tiny_params(), tiny_tokenizer()
    found = looked(tmp_path, records, tokenizer, params)
    data = params.data.model_copy(update={"sources": [found.tried.source]})
    mixed = mix(data, tmp_path / "prepared", scratch=tmp_path / "scratch", seed=0)
    tables = {use: open_rows(tmp_path / "prepared" / f"{use}.parquet") for use in mixed.uses}
    findings = validate(tables, measured(tables, tokenizer), params.validation, max_length=params.model.max_length)
    unexpected = {(f.use, f.name): f.unexpected for f in findings}
    objections = {use: counts.objections(params.model.max_length) for use, counts in found.counts.items()}
    names = {"identical": "identical_pairs", "contradictory": "contradictory_pairs", "duplicate": "duplicate_pairs", "too_long": "too_long"}
    assert {kind: objections["preference"][kind] for kind in names} == {
        kind: unexpected["preference", name] for kind, name in names.items()
    }
    assert objections["preference"]["contradictory"] == 2 and objections["preference"]["duplicate"] == 2
    names = {"empty": "empty.response", "too_long": "too_long", "templated": "templated"}  # <|end|> in the middle of an answer
    assert objections["sft"] == {kind: unexpected["sft", name] for kind, name in names.items()}
    # The places of PAIRS come first; a repeated pair is named with the one that it repeats, and of each kind five at most.
    path, first = tmp_path / "data.jsonl", len(PAIRS) + 1
    text = "\n".join(page.describe_inspection(found, params, colour=False, every_token=False))
    assert f"\n    {path} line {first + 6}\n" in text
    assert f"\n    {path} line {first + 4} (as {path} line {first + 2})\n" in text


def test_at_most_five_records_of_a_kind_are_named(tmp_path):
    records = [*PAIRS, *({"prompt": f"Sort {i}.", "chosen": "", "rejected": "a"} for i in range(8))]
    found = looked(tmp_path, records, tiny_tokenizer(), tiny_params())
    assert len(found.counts["preference"].places["empty"]) == 5 and found.counts["preference"].objections(200)["empty"] == 8


def test_params_may_be_a_recipe_or_a_whole_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(PAIRS[1]) + "\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {max_length: 777}\n")
    whole = tmp_path / "whole.yaml"
    whole.write_text(DEFAULTS.read_text(encoding="utf-8").replace("max_length: 96", "max_length: 78", 1))
    for options, length in ((["--params", str(recipe)], 777), (["--params", str(whole)], 78), (["--max-length", "79"], 79), ([], 1024)):
        assert main([str(path), *options]) == 0
        assert f"(model.max_length {length})" in capsys.readouterr().out
    recipe.write_text("model: {max_lenght: 77}\n")
    assert main([str(path), "--params", str(recipe)]) == 2
    err = capsys.readouterr().err
    assert "model.max_lenght" in err and "more of the kind" not in err
    monkeypatch.chdir(tmp_path)  # outside the project a whole file is enough
    assert main([str(path), "--params", str(whole)]) == 0


def test_length_bias_is_printed_with_limit_and_effect(tmp_path):
    """4 of 5 chosen responses are longer, one ties: (4 + 0.5) / 5 = 0.9, 0.4 from one half."""
    pairs = [
        *({"prompt": f"Sort {i}.", "chosen": "1 2 3 4", "rejected": "1"} for i in range(4)),
        {"prompt": "2?", "chosen": "4", "rejected": "5"},
    ]
    found = looked(tmp_path, pairs, tiny_tokenizer(), tiny_params())
    for limit, allowed, verdict in ((0.25, "25% to 75%", True), (0.45, "5% to 95%", False)):
        text = "\n".join(page.describe_inspection(found, tiny_params(validation__max_length_bias=limit), colour=False, every_token=False))
        assert f"the longer one in 90% of 5 pairs, ties as half; validation.max_length_bias, {limit:g}, allows {allowed}" in text
        assert (f"{allowed}: validate_data stops" in text) == verdict


def test_repeated_rows_are_counted_apart_from_dropped_records(tmp_path):
    found = looked(
        tmp_path, [PAIRS[1], {**PAIRS[1], "chosen": "7"}, {"prompt": None, "chosen": "1", "rejected": "2"}], tiny_tokenizer(), tiny_params()
    )
    lines = list(page.describe_inspection(found, tiny_params(), colour=False, every_token=False))
    start = next(i for i, line in enumerate(lines) if line.startswith("3 records read, 1 left out"))
    end = lines.index("of the records that are kept:")
    left_out = [line for line in lines[start + 1 : end] if not line.startswith("    ")]
    assert left_out == ["  1 prompt is null"] and lines[end + 1] == "  1 prompt rows that repeat a conversation"


def test_a_record_that_is_too_long_says_what_the_counts_say(tmp_path):
    records = [{"prompt": "long", "chosen": "1 " * 200, "rejected": "a"}, PAIRS[1]]
    found = looked(tmp_path, records, tiny_tokenizer(), tiny_params())
    for limit, fate in ((0.05, "validate_data stops"), (0.5, "left out of training")):
        params = tiny_params(validation__max_too_long_fraction=limit)
        text = "\n".join(page.describe_inspection(found, params, colour=False, every_token=False))
        (record, *_) = [line for line in text.split("\n") if "TOO LONG" in line]
        (count, *_) = [line for line in text.split("\n") if "1 too long" in line]
        assert fate in record and fate in count
