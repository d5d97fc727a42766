"""The scorer `code`: which program of a response is run, what passes a test, and what has no score."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from hostile_programs import command_line, workers

from rlhf_core.config import ScorerConfig
from rlhf_core.scorers.code.cases import Opaque, check_tests, decoded, read_cases
from rlhf_core.scorers.code.driver import encoded
from rlhf_core.scorers.code.scorer import program_of
from rlhf_core.scorers.text import ScoreItem, TextScorers

SQUARE = "def square(x):\n    return x * x\n"
SQUARES = "assert square(3) == 9\nassert square(-2) == 4"
SECRET = "needle-4815"
HIDDEN = f"assert guess(7) == {SECRET!r}"
DOUBLES = json.dumps({"inputs": ["3\n", "10\n"], "outputs": ["6\n", "20\n"]})


def item(response: str, label: str | None) -> ScoreItem:
    return ScoreItem("p", [], response, label, {"id": "1", "source": "s"})


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def scorers(*, in_time: bool = False, **options) -> TextScorers:
    return TextScorers(0, [ScorerConfig(name="tests", kind="code", **options)], {}, in_time=in_time)


@pytest.fixture(scope="module")
def by_share() -> TextScorers:
    return scorers(seconds=1.0)


@pytest.fixture(scope="module")
def all_or_nothing() -> TextScorers:
    return scorers(seconds=1.0, reward="all")


def score(of: TextScorers, program: str, label: str | None) -> float:
    return of.score_items("tests", [item(fenced(program), label)])[0][0]


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nthen\n~~~py\nb\n~~~\n", "b\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        ("```python\na\n```\n```python\ncut", "a\n"),
        ("def f(): pass", None),
        ("```python\ncut", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_closed_block(response, program):
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("program", "label", "expected"),
    [
        (SQUARE, SQUARES, 1.0),
        (SQUARE, json.dumps(SQUARES.split("\n")), 1.0),
        ("def square(x):\n    return 9\n", SQUARES, 0.5),
        ("def cube(x):\n    return x\n", SQUARES, 0.0),
        ("def square(x) return", SQUARES, 0.0),
        ("def square(x):\n    if x == 3: return 9\n    while True: pass\n", SQUARES, 0.5),  # what it passed before its time counts
        (SQUARE + "print('3', '[\"square(3)\", 1]')\nif __name__ == '__main__': 1 / 0", SQUARES, 1.0),
        ("import math\ndef root(x): return math.sqrt(x)", "import math\nassert math.isclose(root(2), 1.41421, rel_tol=1e-5)", 1.0),
        ("def root(x): return x ** 0.5", "assert abs(root(2) - 1.41421) < 1e-4\nassert 1 < root(2) <= 1.5 and not root(0)", 1.0),
        ("def some(): return (2, 1, 2)", "assert set(some()) == {1, 2}\nassert sorted(some()) == [1, 2, 2]\nassert len(some()) == 3", 1.0),
        ("def some(): return (2, 1)", "assert some() == [2, 1]", 0.0),  # as in Python
        ("def sum(a, b): return 6", "assert sum(10, 15) == 6", 1.0),  # a name that Python has too
        ("import re\ndef find(): return re.match('a', 'a')", "assert find()\nassert find() is not None\nassert find() == 1", 2 / 3),
        ("class Stack:\n    def top(self): return {'a': [1, None]}", "assert Stack().top()['a'] == [1, None]", 1.0),
        ("def big(): return 10 ** 12 + 7", "assert big() == 10**12 + 7 and big() % 10 == 14 // 2", 1.0),
        ("def zeros(n): return [0] * n", "assert zeros(3) == [0] * 3\nassert zeros(2) * 2 == 4 * [0]", 1.0),
        ("print(int(input()) * 2)", DOUBLES, 1.0),
        ("print(6)", DOUBLES, 0.5),
        ("print(int(input()) * 2)\nraise SystemExit(1)", DOUBLES, 0.0),
        ("n = int(input())\nprint(' ', n + n, '\\n\\n')", DOUBLES, 1.0),
        ("n = int(input())\nwhile n == 3: pass\nprint(n * 2)", DOUBLES, 0.0),  # the rest isn't run after one that takes too long
        ("print(*[input() for _ in range(2)])", json.dumps({"inputs": [["a", "b"]], "outputs": [["a b"]]}), 1.0),
    ],
)
def test_the_share_of_tests_passed(by_share, program, label, expected):
    assert score(by_share, program, label) == pytest.approx(expected)


def test_all_or_nothing(all_or_nothing):
    programs = [SQUARE, "def square(x):\n    return 9\n"]
    assert [score(all_or_nothing, program, SQUARES) for program in programs] == [1.0, 0.0]
    assert [score(all_or_nothing, program, DOUBLES) for program in ("print(int(input()) * 2)", "print(6)")] == [1.0, 0.0]


TEXT = r"""
### leaves early
import os
os._exit(0)
### exits
raise SystemExit(0)
### leaves when called
import os
def guess(x):
    os._exit(0)
### leaves at its end
import atexit, os
atexit.register(lambda: os._exit(0))
def guess(x):
    raise SystemExit(0)
### equals everything
class Any(str):
    def __eq__(self, other):
        return True
    __hash__ = None
def guess(x):
    return Any("1")
### redefines
import builtins, json
builtins.AssertionError, builtins.eval, json.dumps = None, lambda *_: True, lambda *_, **__: "true"
def guess(x):
    return 1
### forges answers
import os
def guess(x):
    for n in range(1, 64):
        try:
            os.write(n, b'true\n["guess(7) == 1", true]\n["guess(7)"]\n{}\n["guess(7)", {"set": [[]]}]\n')
        except OSError:
            pass
    return 1
print(guess(7))
### looks for it
import gc, os, re, sys
def guess(x):
    seen, frame = [str(os.environ), str(sys.argv)], sys._getframe()
    while frame:
        seen += [str(frame.f_locals), str(frame.f_globals)]
        frame = frame.f_back
    for folder, _, names in os.walk("/tmp"):
        seen += [open(os.path.join(folder, name), errors="replace").read() for name in names]
    seen += [str(o) for o in gc.get_objects() if isinstance(o, list | tuple | dict)]
    seen += [os.pread(n, 1 << 20, 0).decode(errors="replace") for n in range(3) if os.path.sameopenfile(n, n) and n != 1]
    return re.search("need" + r"le-\d+", "".join(seen)).group()
print(guess(7))
"""
CHEATS = {name: program for name, _, program in (part.partition("\n") for part in TEXT.split("\n### ")[1:])}


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.parametrize("label", [HIDDEN, json.dumps({"inputs": ["7"], "outputs": [SECRET]})], ids=["assert", "output"])
def test_what_a_program_does_instead_of_solving_earns_nothing(by_share, name, label):
    assert score(by_share, CHEATS[name], label) == 0.0


def test_the_search_for_it_finds_what_the_sandbox_gets(by_share):
    """Otherwise the test above would prove nothing of it."""
    shown = [f"assert guess({SECRET!r}) == {SECRET!r}", json.dumps({"inputs": [SECRET], "outputs": [SECRET]})]
    assert [score(by_share, CHEATS["looks for it"], label) for label in shown] == [1.0, 1.0]


def test_expected_values_are_not_among_what_the_sandbox_gets():
    arithmetic = "assert f(0) - 3 == -3 * 2 + 1\nassert math.isclose(g(2) - 23.42, 4.8)"
    cases = read_cases(f"import math\n{arithmetic}\nassert sorted(f([2, 1])) == [481, 516]\nassert h(1) in {{15, 16}}")
    assert cases.expressions() == ["f(0)", "g(2)", "f([2, 1])", "h(1)"]


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (None, "the prompt has no label"),
        ("4", "can't be read"),
        ("def check(f):\n    pass", "only assert statements and imports"),
        ("assert True", "calls the program"),
        ("import math", "no assert statement"),
        ("assert f(1) == 'x' * 10**9", "can be computed"),
        ("assert f(1) == len(3)", "can be computed"),
        ("[1, 2]", "expected tests as"),
        ('{"inputs": ["1"], "outputs": []}', "as many inputs as outputs"),
        ('{"inputs": [1], "outputs": [2]}', "as text"),
        ('{"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}', "fn_name"),
        ("assert f(" + "(" * 500, "expected tests as"),
    ],
)
def test_a_label_without_tests_has_no_score_and_says_why(by_share, label, reason, caplog):
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        fresh = scorers()
        assert math.isnan(score(fresh, SQUARE, label))
    assert reason in caplog.text


def test_responses_keep_their_order_and_equal_ones_are_run_once(by_share):
    """A program that counts its runs can't: each begins in an empty folder. Time tells: 40 equal sleeps of 0.2 s take less than 8 s."""
    slow = "import time\ntime.sleep(0.2)\n" + SQUARE
    items = [item(fenced(slow), SQUARES)] * 40 + [item("none", SQUARES), item(fenced("def square(x): return 9"), SQUARES)]
    start = time.monotonic()
    scores, metrics = by_share.score_items("tests", items)
    assert time.monotonic() - start < 4
    assert scores == [1.0] * 40 + [0.0, 0.5]
    assert metrics == {"no_program": 1 / 42, "timed_out": 0.0}
    assert by_share.score_items("tests", []) == ([], {})


def test_what_is_not_run_by_the_deadline_has_no_score(caplog):
    """2 s: some of 200 programs of 0.1 s are done, and the others are unscored rather than 0."""
    many = [item(fenced(f"import time\ntime.sleep(0.1)\n{SQUARE}# {n}"), SQUARES) for n in range(200)]
    limited = scorers(in_time=True, timeout=2.0)
    start = time.monotonic()
    scores, _ = limited.score_items("tests", many)
    assert time.monotonic() - start < 2.0 + 1.0
    assert {s for s in scores if not math.isnan(s)} == {1.0}
    assert 0 < sum(map(math.isnan, scores)) < 200
    assert "timeout, 2 s" in caplog.text


def runs_program(worker: int) -> bool:
    with contextlib.suppress(psutil.Error):  # it has ended meanwhile
        return any("driver.py" in command_line(process.pid) for process in psutil.Process(worker).children(recursive=True))
    return False


def test_a_sandbox_that_dies_gives_no_score_rather_than_0(caplog):
    """The workers of this scorer are killed while they run a program; it goes on with others."""
    own = scorers(seconds=3.0)
    sleeper = "import time\ntime.sleep(6)\n" + SQUARE
    before = workers()

    def kill() -> None:
        until = time.monotonic() + 60
        while not (found := [pid for pid in workers() - before if runs_program(pid)]) and time.monotonic() < until:
            time.sleep(0.02)
        for pid in found:
            os.kill(pid, 9)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    assert math.isnan(score(own, sleeper, SQUARES))
    killer.join()
    assert "the sandbox's process ended" in caplog.text
    assert score(own, SQUARE, SQUARES) == 1.0


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)


@given(VALUES | st.sets(st.integers()) | st.frozensets(st.text()))
def test_a_value_comes_back_as_it_was(value):
    found = decoded(json.loads(json.dumps(encoded(value))))
    assert found == value and (type(found) is type(value) or isinstance(value, frozenset))


def test_what_is_no_data_is_only_true_or_false():
    found = [decoded(json.loads(json.dumps(encoded(value)))) for value in (object(), b"", range(3))]
    assert [bool(f) for f in found] == [True, False, True] and all(isinstance(f, Opaque) for f in found)


def test_prompts_without_any_tests_are_refused_and_some_are_counted(caplog):
    with pytest.raises(ValueError, match=r"scorer tests: expected prompts with tests as labels, got none of 2 \(no label\); map `label`"):
        check_tests("tests", [None, "4"])
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        check_tests("tests", [SQUARES, "4", DOUBLES])
    assert "1 of 3 prompts have no tests" in caplog.text
