"""Pairs out for labelling and labels back in: through our JSON lines, and through Label Studio's tasks and export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows import labels as command
from rlhf_core.config import SourceConfig
from rlhf_core.data.schema import write_rows
from rlhf_core.preparation.labels import INTERFACE, KEY, PAIRS, TASKS, Label, LabelPair, decide, export_pairs, read_labels
from rlhf_core.preparation.sources import load_source


def pair(number: int, *, scores: tuple[float | None, float | None] = (1.0, 0.0)) -> LabelPair:
    messages = [{"role": "user", "content": f"Sort {number}."}]
    return LabelPair(f"id{number}", messages, f"good {number}", f"bad {number}", *scores)


@pytest.fixture
def export(tmp_path) -> Path:
    """Of twelve pairs, whose first response the scores prefer."""
    assert export_pairs([pair(n) for n in range(12)], tmp_path / "export", count=None, seed=3, origin="a test") == 12
    return tmp_path / "export"


def read(path: Path):
    return json.loads(path.read_text())


def lines(export: Path) -> list[dict]:
    return [json.loads(line) for line in (export / PAIRS).read_text().splitlines()]


def labelled(export: Path, choose, annotator: str | None = None) -> Path:
    """The exported lines with the choices filled in; choose: from a line to a choice."""
    path = export / f"labelled-{annotator}.jsonl"
    rows = [{**line, "choice": choose(line), "annotator": annotator} for line in lines(export)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def good_side(line: dict) -> str:
    return "a" if line["a"].startswith("good") else "b"


def test_an_export_hides_which_side_the_scores_prefer(export):
    shown = lines(export)
    assert {line["id"] for line in shown} == {f"id{n}" for n in range(12)}
    assert {good_side(line) for line in shown} == {"a", "b"}
    for path in (PAIRS, TASKS):
        text = (export / path).read_text()
        assert "score" not in text and "chosen" not in text and "rejected" not in text
    assert [line["id"] for line in shown] == [task["data"]["id"] for task in read(export / TASKS)]
    for name in ("prompt", "a", "b"):
        assert f'value="${name}"' in (export / INTERFACE).read_text()


def test_the_seed_decides_which_pairs_and_sides(tmp_path):
    def exported(folder: str, seed: int) -> list[dict]:
        assert export_pairs([pair(n) for n in range(12)], tmp_path / folder, count=5, seed=seed, origin="a test") == 5
        return lines(tmp_path / folder)

    assert exported("one", 1) == exported("again", 1) != exported("two", 2)


def test_an_export_is_not_written_over_another(export):
    with pytest.raises(ValueError, match="expected a folder without an export"):
        export_pairs([pair(1)], export, count=None, seed=0, origin="a test")


def test_lines_come_back_as_they_were_labelled(export):
    file = labelled(export, lambda line: "tie" if line["id"] == "id0" else None if line["id"] == "id1" else good_side(line), "ann")
    found = decide(read_labels(file, read(export / KEY)), read(export / KEY), confidence=0.95)
    assert {row["id"] for row in found.rows} == {f"id{n}" for n in range(2, 12)}
    assert all(row["chosen"].startswith("good") and row["rejected"].startswith("bad") for row in found.rows)
    counts = {key: found.provenance[key] for key in ("pairs_exported", "pairs_labelled", "pairs_decided", "ties_dropped")}
    assert counts == {"pairs_exported": 12, "pairs_labelled": 11, "pairs_decided": 10, "ties_dropped": 1}
    # Wilson, 10 of 10 at 95%, z^2 = 3.8415: low = 10 / (10 + 3.8415) = 0.7225
    agreement = found.provenance["agreement_with_scores"]
    assert (agreement["value"], agreement["high"], agreement["n"]) == (1.0, 1.0, 10)
    assert agreement["low"] == pytest.approx(0.7225, abs=1e-4)


def studio_export(export: Path, annotations) -> Path:
    """Label Studio's JSON export of the tasks; annotations: from a task's data to [(annotator, choice)], choice None: skipped."""
    tasks = []
    for number, task in enumerate(read(export / TASKS)):
        made = []
        for annotator, choice in annotations(task["data"]):
            value = {"from_name": "choice", "to_name": "prompt", "type": "choices", "value": {"choices": [choice]}}
            made.append({"completed_by": annotator, "was_cancelled": choice is None, "result": [] if choice is None else [value]})
        tasks.append({"id": number, "annotations": made, **task})
    path = export / "studio.json"
    path.write_text(json.dumps(tasks))
    return path


def test_label_studios_export_with_several_annotators(export):
    """id0: two of three say b where a is good; id1: one each way; id2: one skipped; the rest: both say the good one."""

    def annotations(data: dict):
        good, bad = good_side(data), "ab"["ba".index(good_side(data))]
        given = {"id0": [bad, bad, good], "id1": [good, bad], "id2": [good, None]}.get(data["id"], [good, good])
        return [({"id": 7 + i, "email": f"{i}@example.org"}, choice) for i, choice in enumerate(given)]

    key = read(export / KEY)
    found = decide(read_labels(studio_export(export, annotations), key), key, confidence=0.95)
    by_id = {row["id"]: row for row in found.rows}
    assert by_id["id0"]["chosen"] == "bad 0" and "id1" not in by_id and by_id["id2"]["votes"] == {"0@example.org": good_of(export, "id2")}
    assert found.provenance["ties_dropped"] == 1
    assert found.provenance["annotators"] == {"0@example.org": 12, "1@example.org": 11, "2@example.org": 1}
    # Two annotators of one pair of responses: id0 has 3 such twos, of which 1 agrees; id1 has 1 and it doesn't; nine others agree.
    assert found.provenance["agreement_among_annotators"]["n"] == 13
    assert found.provenance["agreement_among_annotators"]["value"] == pytest.approx(10 / 13)
    assert found.provenance["agreement_among_annotators"]["clusters"] == 11
    assert found.provenance["agreement_with_scores"]["value"] == pytest.approx(10 / 11)  # 11 decided, all but id0


def good_of(export: Path, pair_id: str) -> str:
    return good_side(next(line for line in lines(export) if line["id"] == pair_id))


def test_equal_votes_of_three_are_a_tie_and_unknown_scores_take_no_part(tmp_path):
    pairs = [pair(0, scores=(None, None)), pair(1, scores=(0.5, 0.5))]
    export_pairs(pairs, tmp_path, count=None, seed=0, origin="a test")
    key = read(tmp_path / KEY)
    split = [Label("id1", annotator, choice) for annotator, choice in (("x", "a"), ("y", "b"), ("z", "tie"))]
    found = decide([Label("id0", "x", "a"), *split], key, confidence=0.95)
    assert [row["id"] for row in found.rows] == ["id0"] and found.provenance["agreement_with_scores"]["n"] == 0
    found = decide([Label("id1", "x", "a")], key, confidence=0.95)
    assert found.provenance["agreement_with_scores"]["value"] == 0.5  # equal scores agree by half


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "id99"}, "expected a pair of this export, got id 'id99'"),
        ({"a": "better"}, "got others in a; label without editing"),
        ({"prompt": "Sort!"}, "got others in prompt"),
        ({"choice": "c"}, "expected a choice of a, b, tie, got 'c'"),
    ],
)
def test_what_does_not_fit_the_export_is_refused_by_line(export, change, message):
    rows = [{**line, "choice": "a"} for line in lines(export)]
    rows[2] |= change
    path = export / "labelled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message) as refused:
        read_labels(path, read(export / KEY))
    assert f"{path}:3:" in str(refused.value)


def test_files_that_are_no_labels_are_refused(export):
    key = read(export / KEY)
    path = export / "labelled.jsonl"
    for text, message in (("{", ":1: expected a line of JSON"), ("3\n", ":1: expected an object"), ('[{"id": 1}]', "Label Studio's JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_labels(path, key)
    path.write_text(2 * (export / PAIRS).read_text())
    with pytest.raises(ValueError, match="expected one label of each annotator for a pair"):
        read_labels(path, key)
    with pytest.raises(ValueError, match="expected at least one pair with a choice"):
        decide(read_labels(export / PAIRS, key), key, confidence=0.95)


def round_data(folder: Path, scores: list[tuple[float, float]]) -> None:
    """A round's data as sample_round writes it: each pair's responses among its prompt's samples."""
    import pandas as pd

    rows, samples = [], []
    for number, (chosen, rejected) in enumerate(scores):
        one = pair(number)
        row = {"id": one.id, "source": "clerk", "split": "train", "messages": one.messages, "chosen": one.chosen, "rejected": one.rejected}
        rows.append(row)
        samples += [{"score": rejected, "used_as": "rejected"}, {"score": 0.1, "used_as": ""}, {"score": chosen, "used_as": "chosen"}]
    write_rows(folder, "preference", rows)
    pd.DataFrame(samples).to_parquet(folder / "samples.parquet")


def test_the_command_takes_a_rounds_pairs_and_makes_a_source_of_their_labels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    round_data(tmp_path / "rounds/2/data", [(2.0, -1.0), (1.5, 0.5), (0.9, 0.2)])
    assert command.main(["export", "--round", "2", "--out", "mine"]) == 0
    assert {(s["chosen_score"], s["rejected_score"]) for s in read(tmp_path / "mine" / KEY)["pairs"]} == {
        (2.0, -1.0),
        (1.5, 0.5),
        (0.9, 0.2),
    }
    file = labelled(tmp_path / "mine", good_side, "ann")
    assert command.main(["import", str(file)]) == 0
    reported = capsys.readouterr().out
    assert "3 pairs exported, 3 labelled, 3 decided" in reported and "path: data/labels/mine.jsonl" in reported

    entry = SourceConfig(name="mine", kind="file", uses=["preference"], weight=1.0, path="data/labels/mine.jsonl", format="preference")
    rows = load_source(entry, seed=0).rows["preference"]
    assert sorted((r["chosen"], r["rejected"]) for r in rows) == [(f"good {n}", f"bad {n}") for n in range(3)]
    provenance = read(tmp_path / "data/labels/mine.json")
    assert provenance["origin"] == "round 2 of iterative-dpo" and provenance["annotators"] == {"ann": 3}
    assert provenance["export_sha256"] == read(tmp_path / "mine" / KEY)["sha256"]

    assert command.main(["import", str(file)]) == 2 and "expected a new name, got labels of that name" in capsys.readouterr().err
    assert command.main(["import", str(file), "--name", "a b"]) == 2
    assert command.main(["export", "--round", "9", "--out", "other"]) == 2


def test_a_text_with_a_line_separator_inside_is_still_one_line(tmp_path):
    """json leaves U+2028 as it is; it ends a line for str.splitlines, and not for JSON lines."""
    odd = LabelPair("odd", [{"role": "user", "content": "one\u2028two"}], "good\x85", "bad", 1.0, 0.0)
    export_pairs([odd], tmp_path, count=None, seed=0, origin="a test")
    assert read_labels(tmp_path / PAIRS, read(tmp_path / KEY)) == [Label("odd", "unnamed", None)]


def test_annotators_of_one_pair_agree_together(tmp_path):
    """Five annotators of 20 pairs: on half of them all agree, on the other half 3 against 2. 10 of 10 and 4 of 10 of their twos agree.

    (140 of 200 treated as independent trials would be 0.633 to 0.759.)
    """
    export_pairs([pair(i) for i in range(20)], tmp_path, count=None, seed=0, origin="a test")
    labels = [Label(f"id{i}", str(who), "b" if i % 2 and who < 2 else "a") for i in range(20) for who in range(5)]
    found = decide(labels, read(tmp_path / KEY), confidence=0.95).provenance["agreement_among_annotators"]
    assert (found["value"], found["n"], found["clusters"]) == (0.7, 200, 20)
    # Over 20 pairs: 0.7 +- t(19) * 0.3 / sqrt(19) = 0.7 +- 0.144, Wilson's form of it
    assert found["high"] - found["low"] == pytest.approx(2 * 0.144, abs=0.02)
