"""Labelled steps: what their formats give, and what is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from measured_rows import write_measures
from tiny_models import tiny_params, tiny_tokenizer

from rlhf_core.config import ConfigError, SourceConfig
from rlhf_core.data.schema import open_tables, write_rows
from rlhf_core.preparation.drops import Dropped, Misfit
from rlhf_core.preparation.formats import convert
from rlhf_core.preparation.notation import notation_of
from rlhf_core.preparation.validation.tables import read_measured
from rlhf_core.preparation.validation.validate import validate

TAG = "\N{CYRILLIC SMALL LETTER KA}\N{CYRILLIC SMALL LETTER I}"


def source(form: str, **more) -> SourceConfig:
    given = {"name": "s", "kind": "file", "path": "x", "uses": ["stepwise", "prompt"], "weight": 1.0, "format": form}
    return SourceConfig.model_validate(given | more)


def steps_of(record: dict, form: str = "stepwise", **more) -> list[tuple[str, list[int]]]:
    of = source(form)
    return [(row["response"], row["labels"]) for row in convert(record, of, notation_of([record], of), **more)["stepwise"]]


class TestStepwise:
    def test_steps_lose_the_white_space_at_their_edges_and_are_joined(self):
        record = {"prompt": "q", "completions": [" a\n", "b c"], "labels": [True, False]}
        assert steps_of(record) == [("a\n\nb c", [1, -1])]
        assert steps_of(record, separator="\n") == [("a\nb c", [1, -1])]

    def test_zero_is_neutral_beside_minus_one_and_else_wrong(self):
        assert steps_of({"prompt": "q", "completions": ["a", "b", "c"], "labels": [1, 0, -1]}) == [("a\n\nb\n\nc", [1, 0, -1])]
        assert steps_of({"prompt": "q", "completions": ["a", "b"], "labels": [1, 0]}) == [("a\n\nb", [1, -1])]

    @pytest.mark.parametrize(
        ("record", "reason"),
        [
            ({"completions": ["a", "b"], "labels": [True]}, "there isn't one label for each step"),
            ({"completions": ["a\n\nb"], "labels": [True]}, "a step has the separator '\\\\n\\\\n' inside it"),
            ({"completions": ["a", " \n"], "labels": [True, True]}, "a step is empty"),
            ({"completions": [], "labels": []}, "a response without steps"),
        ],
    )
    def test_what_has_no_steps_with_labels_is_dropped(self, record, reason):
        with pytest.raises(Dropped, match=reason):
            steps_of({"prompt": "q"} | record)

    @pytest.mark.parametrize("record", [{"completions": "a", "labels": [True]}, {"completions": ["a"], "labels": [2]}])
    def test_what_is_no_such_list_does_not_fit(self, record):
        with pytest.raises(Misfit):
            steps_of({"prompt": "q"} | record)


RECORD = {
    "question": {"problem": "q"},
    "label": {
        "steps": [
            {"completions": [{"text": "a", "rating": 1}, {"text": "b", "rating": -1}], "chosen_completion": 0},
            {"completions": [{"text": "c", "rating": -1}], "human_completion": {"text": "d"}, "chosen_completion": None},
            {"completions": [{"text": "e", "rating": 0}, {"text": "f", "rating": None}], "chosen_completion": 0},
        ]
    },
}


class TestPrm800k:
    def test_each_alternative_ends_a_response_and_the_path_that_went_on_another(self):
        assert steps_of(RECORD, "prm800k") == [("b", [-1]), ("a\n\nc", [1, -1]), ("a\n\nd\n\ne", [1, 1, 0])]

    def test_ends_before_a_chosen_completion_without_a_rating(self):
        steps = [*RECORD["label"]["steps"], {"completions": [{"text": "g", "rating": None}], "chosen_completion": 0}]
        assert steps_of(RECORD | {"label": {"steps": steps}}, "prm800k")[-1] == ("a\n\nd\n\ne", [1, 1, 0])

    @pytest.mark.parametrize(
        "step",
        [
            {"completions": [{"text": "a", "rating": 1}], "chosen_completion": 1},
            {"completions": [{"text": "a", "rating": 1}], "chosen_completion": -1},
            {"completions": [{"text": "a", "rating": 1}], "chosen_completion": "0"},
            {"completions": ["a"], "chosen_completion": 0},
            {"completions": {"text": "a", "rating": 1}, "chosen_completion": None},
            {"completions": [{"text": "a", "rating": 1}], "human_completion": "own", "chosen_completion": None},
        ],
    )
    def test_a_step_without_the_chosen_completion_does_not_fit(self, step):
        with pytest.raises(Misfit, match="expected steps with lists of completions"):
            steps_of(RECORD | {"label": {"steps": [step]}}, "prm800k")

    def test_a_problem_without_ratings_is_dropped(self):
        with pytest.raises(Dropped, match="a solution without rated steps"):
            steps_of(RECORD | {"label": {"steps": [{"completions": None, "chosen_completion": None}]}}, "prm800k")


class TestMathShepherd:
    def record(self, *signs: str, text: str = f"2 + 2? Step 1: 2 and 2 {TAG}\nStep 2: The answer is: 5 {TAG}") -> dict:
        marked = text
        for sign in signs:
            marked = marked.replace(TAG, sign, 1)
        return {"input": text, "label": marked}

    def test_signs_in_the_places_of_tags_are_labels(self):
        assert steps_of(self.record("+", "-"), "math_shepherd") == [("Step 1: 2 and 2\n\nStep 2: The answer is: 5", [1, -1])]
        [prompt] = convert(self.record("+", "-"), source("math_shepherd"))["prompt"]
        assert prompt["messages"] == [{"role": "user", "content": "2 + 2?"}]

    def test_a_plus_in_a_step_is_no_label(self):
        found = steps_of(self.record("-", text=f"q Step 1: 1 + 1 - 0 {TAG}"), "math_shepherd")
        assert found == [("Step 1: 1 + 1 - 0", [-1])]

    @pytest.mark.parametrize("signs", [("+",), ("+", "?")])
    def test_a_tag_without_its_sign_is_dropped(self, signs):
        with pytest.raises(Dropped, match="input and label differ in more than the tags"):
            steps_of(self.record(*signs), "math_shepherd")

    def test_a_text_behind_the_last_tag_has_no_label_and_is_dropped(self):
        record = self.record("+", text=f"2 + 2? Step 1: 2 and 2 {TAG}\nStep 2: The answer is: 5")
        with pytest.raises(Dropped, match="there isn't one label for each step"):
            steps_of(record, "math_shepherd")

    def test_a_text_without_tags_does_not_fit(self):
        with pytest.raises(Misfit, match="expected steps that end in"):
            steps_of({"input": "q", "label": "q"}, "math_shepherd")


ROWS = [
    {"id": f"s{i}", "source": "made", "split": split, "messages": [{"role": "user", "content": f"Sort {i}1."}]}
    | {"response": "Certainly\n\n1.", "labels": [1, -1 if i % 3 else 1]}
    for i, split in enumerate(("train", "train", "train", "test", "validation") * 50)
]


def failures(folder: Path, rows: list[dict]) -> dict[str, str]:
    write_rows(folder / "prepared", "stepwise", rows)
    write_measures(folder / "prepared", folder / "measured", tiny_tokenizer())
    tables = open_tables(folder / "prepared")
    needed = [("stepwise", "train"), ("stepwise", "test")]
    measured = lambda use: read_measured(folder / "measured", use, tables[use])  # noqa: E731
    repeats = tiny_params().validation.model_copy(update={"max_near_duplicate_fraction": 1.0, "max_contained_fraction": 1.0})
    found = validate(tables, measured, repeats, max_length=64, needed=needed, pairs=False)
    return {f.name: f.message() for f in found if not f.passed}


class TestValidation:
    def test_sound_steps_pass(self, tmp_path):
        assert failures(tmp_path, ROWS) == {}

    def test_a_step_without_a_label_is_refused(self, tmp_path):
        broken = [{**ROWS[0], "labels": [1]}, *ROWS[1:]]
        assert "there is one label for each step" in failures(tmp_path, broken)["labels_of_steps"]

    def test_another_label_is_refused(self, tmp_path):
        assert "1 (right), 0 (neutral) and -1 (wrong)" in failures(tmp_path, [{**ROWS[0], "labels": [1, 2]}, *ROWS[1:]])["label_values"]

    def test_labels_that_are_all_the_same_are_refused(self, tmp_path):
        found = failures(tmp_path, [{**row, "labels": [1, 0]} for row in ROWS])
        assert list(found) == ["wrong_steps"] and "add responses with wrong steps" in found["wrong_steps"]

    def test_too_few_responses_are_refused(self, tmp_path):
        assert list(failures(tmp_path, ROWS[:100])) == ["min_pairs"]


SOURCE = {"name": "steps", "kind": "file", "path": "x.jsonl", "format": "stepwise", "uses": ["stepwise", "prompt"]}


class TestConfig:
    def of(self, **changes) -> str:
        with pytest.raises(ConfigError) as refused:
            tiny_params(**changes)
        return str(refused.value)

    def test_steps_without_a_separator_are_refused(self):
        found = self.of(data__sources=[SOURCE])
        assert "reward.step_separator: expected the text between steps with sources of use stepwise" in found

    def test_a_separator_without_steps_is_refused(self):
        assert "expected null without a source of use stepwise" in self.of(reward__step_separator="\n")

    def test_a_critic_of_single_steps_is_refused(self):
        how = {"data__sources": [SOURCE], "reward__step_separator": "\n", "rl__algorithm": "ppo"}
        assert "expected reward_model_trunk or sft with a process reward model" in self.of(**how, rl__ppo__critic_init="reward_model")
        assert tiny_params(**how, rl__ppo__critic_init="reward_model_trunk").reward.rows_use == "stepwise"

    def test_steps_of_a_scorer_of_whole_responses_are_refused(self):
        scorers = [{"name": "reward_model", "kind": "reward_model", "steps": "sum"}]
        assert "expected no steps of reward_model without reward.step_separator" in self.of(rl__reward__scorers=scorers)

    @pytest.mark.parametrize("key", ["min_slice_accuracy", "min_shorter_accuracy", "max_format_shift"])
    def test_requirements_of_pairs_are_refused(self, key):
        found = self.of(data__sources=[SOURCE], reward__step_separator="\n", **{f"gate__{key}": 0.5})
        assert f"gate.{key}: expected null with a process reward model" in found
