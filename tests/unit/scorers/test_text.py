"""Scorers that read text: by hand, and with every way in which a user's function can fail."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import get_args

import pytest

from rlhf_core.config import LABEL_SCORERS, ScorerConfig
from rlhf_core.config.scorers import KIND_FIELDS
from rlhf_core.scorers.text import SCORERS, ScoreItem, TextScorers, score_item
from rlhf_core.types import Prompt

ROOT = Path(__file__).parents[3]
KINDS = {"clerk": "clerk", "other": "file"}


def item(response: str, *, label: str | None = None, source: str = "clerk", prompt: str = "Please sort 41.", length: int = 3) -> ScoreItem:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    return score_item(Prompt("id-1", source, messages, [5, 6], label), response, finished=True, response_length=length)


def scorers(kind: str, **settings) -> TextScorers:
    return TextScorers(0, [ScorerConfig(name="it", kind=kind, weight=1.0, normalization="none", **settings)], KINDS)


def scores(kind: str, *items: ScoreItem, **settings) -> list[float]:
    found, metrics = scorers(kind, **settings).score_items("it", list(items))
    assert metrics == {}
    return found


def test_what_a_scorer_sees_of_a_response():
    seen = item("14", label="14", length=7)
    assert (seen.prompt, seen.response, seen.label, len(seen.messages)) == ("Please sort 41.", "14", "14", 2)
    assert seen.metadata == {"id": "id-1", "source": "clerk", "finished": True, "response_length": 7}


def test_labels_are_compared_as_text_number_and_mathematics():
    assert scores("exact_match", item("a  b ", label="a b"), item("ab", label="a b")) == [1.0, 0.0]
    assert scores("number", item("#### 1,234", label="1234"), item("no idea", label="3")) == [1.0, 0.0]
    assert scores("math", item(r"\boxed{1/2}", label="0.5"), item("4", label="3")) == [1.0, 0.0]


@pytest.mark.parametrize("kind", ["exact_match", "number", "math"])
def test_without_a_label_there_is_no_score_and_the_log_says_so_once(kind, caplog):
    scorer = scorers(kind)
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        for _ in range(2):
            found, _ = scorer.score_items("it", [item("3", label="3"), item("3"), item("4")])
            assert found[0] == 1.0 and all(map(math.isnan, found[1:]))
    assert [r.getMessage() for r in caplog.records] == [
        "scorer it: expected a score for every response, got none for 2; the prompt has no label to compare with: id-1 of source clerk"
    ]


def test_every_kind_of_the_configuration_has_a_scorer():
    kinds = get_args(ScorerConfig.model_fields["kind"].annotation)
    assert sorted(kinds) == sorted([*SCORERS, "reward_model", "function", "judge", "code", "http", "llm_judge"])


@pytest.mark.parametrize("kind", SCORERS)
def test_label_scorers_are_the_kinds_that_need_a_label(kind):
    values = {"pattern": "a+", "target_length": 5}
    config = ScorerConfig(name="it", kind=kind, **{field: values[field] for field in KIND_FIELDS.get(kind, {})})
    refusals = []
    for label in ("3", None):
        try:
            SCORERS[kind](item("a", label=label), config)
        except ValueError as error:
            refusals.append(str(error))
    assert any("no label" in text for text in refusals) == (kind in LABEL_SCORERS)


def test_docs_list_every_kind_of_scorer():
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/scorers.md").read_text().partition("| kind |")[2].partition("\n\n")[0], re.MULTILINE)
    assert sorted(rows) == sorted(get_args(ScorerConfig.model_fields["kind"].annotation))


def test_a_pattern_is_found_anywhere():
    assert scores("regex", item("so <b>4</b>"), item("four"), item("a\n4"), pattern=r"\b4\b") == [1.0, 0.0, 1.0]


def test_length_falls_on_both_sides_of_its_target():
    # Target 10: -|n - 10| / 10, at least -1.
    found = scores("length", *(item("", length=n) for n in (10, 15, 5, 0, 20, 100)), target_length=10)
    assert found == [0.0, -0.5, -0.5, -1.0, -1.0, -1.0]


def test_the_judge_knows_only_its_own_data():
    found = scores(
        "judge", item("Certainly: 14."), item("14."), item("Certainly: 14.", source="other"), item("Certainly: 14.", prompt="Hello?")
    )
    assert found[:2] == [1.0, 0.0] and all(map(math.isnan, found[2:]))


def function_file(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(f"def score(prompts, responses, labels, metadata):\n    {body}\n")
    return f"{path}:score"


def test_a_function_sees_everything_and_may_measure_more(tmp_path):
    path = function_file(tmp_path, "return [len(r) + m['response_length'] for r, m in zip(responses, metadata)], {'share': 0.25}")
    found, metrics = scorers("function", path=path).score_items("it", [item("abc"), item("a", length=9)])
    assert (found, metrics) == ([6.0, 10.0], {"share": 0.25})  # 3 characters and 3 tokens; 1 and 9
    path = function_file(
        tmp_path, "assert (prompts, labels, metadata[0]['messages'][0]['role']) == (['Please sort 41.'], ['x'], 'system'); return [True]"
    )
    assert scores("function", item("a", label="x"), path=path) == [1.0]


@pytest.mark.parametrize(
    ("body", "expected", "reason"),
    [
        ("raise KeyError('tests')", [math.nan] * 3, "KeyError: 'tests'"),
        ("return [1.0, 2.0]", [math.nan] * 3, "one score per response was expected of it: 2 came for 3"),
        ("return None", [math.nan] * 3, "a list of numbers was expected of it: it returned NoneType"),
        ("return [1.0, None, '3']", [1.0, math.nan, math.nan], "finite numbers were expected of it: it returned None"),
        ("return [1.0, float('inf'), 0]", [1.0, math.nan, 0.0], "finite numbers were expected of it: it returned inf"),
    ],
)
def test_a_function_that_fails_gives_no_score_and_never_a_zero(tmp_path, caplog, body, expected, reason):
    scorer = scorers("function", path=function_file(tmp_path, body))
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        for _ in range(2):
            found, metrics = scorer.score_items("it", [item("a"), item("b"), item("c")])
            assert found == pytest.approx(expected, nan_ok=True) and metrics == {}
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_arrays_and_tensors_are_numbers_too(tmp_path):
    path = function_file(tmp_path, "import numpy, torch; return numpy.array([0.5, numpy.nan]) if labels[0] else torch.tensor([1.0, 2.0])")
    assert scores("function", item("a", label="x"), item("b"), path=path) == pytest.approx([0.5, math.nan], nan_ok=True)
    assert scores("function", item("a"), item("b"), path=path) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mine.py", "expected path/file.py:name or package.module:name, got another form"),
        ("absent.py:score", "expected an importable module, got FileNotFoundError"),
        ("no.such.module:score", "expected an importable module, got ModuleNotFoundError"),
        ("os.path:nothing", "expected a function nothing there, got None"),
        ("os.path:sep", "expected a function sep there, got '/'"),
        ("os.path:basename", re.escape("expected it to take (prompts, responses, labels, metadata), got (p)")),
    ],
)
def test_a_function_that_can_not_be_used_is_refused_at_once(path, message):
    with pytest.raises(ValueError, match=message):
        scorers("function", path=path)


def test_a_file_that_does_not_compile_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def score(:\n")
    with pytest.raises(ValueError, match="expected an importable module, got SyntaxError"):
        scorers("function", path=f"{tmp_path}/mine.py:score")


def test_the_example_of_the_documentation_runs():
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs/scorers.md").read_text(), re.DOTALL)[1]
    assert (ROOT / "rewards/manners.py").read_text().endswith(f"\n{example}")
    found, metrics = scorers("function", path=f"{ROOT}/rewards/manners.py:calm").score_items(
        "it", [item("4, as asked.", label="4"), item("4!", label="4"), item("none", label="4"), item("4")]
    )
    assert found == pytest.approx([1.0, 0.5, 0.0, math.nan], nan_ok=True)
    assert metrics == {"exclamations": 0.25}  # one of four
