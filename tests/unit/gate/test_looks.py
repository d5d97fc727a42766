"""The ledger of looks, in real repositories and worktrees, and the levels that follow from it."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
from pathlib import Path

import pytest

from rlhf_core.config import ConfigError, load_params
from rlhf_core.gate.looks import LEDGER, at_look, ledger_path, look_level, split_hash, take_look, write_result

ROOT = Path(__file__).parents[3]
SPLIT, OTHER_SPLIT = "5" * 64, "6" * 64
MODELS = [f"{i:032x}.dir" for i in range(20)]


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository on branch main with a worktree, worktree/, on branch run/a."""
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "commit", "--quiet", "--allow-empty", "-m", "one")
    git(root, "worktree", "add", "--quiet", "-b", "run/a", str(root / "worktree"))
    return root


def test_levels_by_hand():
    # alpha = 0.025; at look 2 alpha / 2, at look 5 alpha / 20.
    assert [look_level(0.95, k) for k in (1, 2, 5)] == pytest.approx([0.025, 0.0125, 0.00125])
    assert sum(look_level(0.95, k) for k in range(1, 2000)) == pytest.approx(0.05, abs=2e-5)
    config = load_params(ROOT / "params.yaml").gate
    assert at_look(config, 1) == config
    assert at_look(config, 2).confidence == pytest.approx(0.975) and at_look(config, 5).confidence == pytest.approx(0.9975)


def test_a_split_is_what_its_pairs_say():
    rows = [{"id": str(i), "messages": [{"role": "user", "content": "2 + 2"}], "chosen": f"4{i}", "rejected": "5"} for i in range(3)]
    renamed = [row | {"id": "x" + row["id"], "source": "elsewhere"} for row in reversed(rows)]
    assert split_hash(rows) == split_hash(renamed)
    swapped = [rows[0] | {"chosen": "5", "rejected": "40"}, *rows[1:]]
    assert len({split_hash(rows), split_hash(swapped), split_hash(rows[:2])}) == 3


def test_worktrees_share_one_count_and_a_model_keeps_its_number(repository):
    worktree = repository / "worktree"
    first = take_look(SPLIT, MODELS[0], repository)
    write_result(SPLIT, MODELS[0], passed=False, accuracy=0.7, confidence=0.95, root=repository)
    second = take_look(SPLIT, MODELS[1], worktree)
    assert (first.number, first.earlier, second.number) == (1, [], 2)
    assert second.earlier == [{"number": 1, "model": MODELS[0], "run": "main", "passed": False, "accuracy": 0.7, "confidence": 0.95}]
    assert take_look(SPLIT, MODELS[0], worktree) == first and take_look(SPLIT, MODELS[1], repository) == second
    assert take_look(OTHER_SPLIT, MODELS[1], repository).number == 1
    assert ledger_path(repository) == ledger_path(worktree) == (repository / ".git" / LEDGER)
    third = take_look(SPLIT, MODELS[2], repository)
    assert [(look["run"], look["passed"]) for look in third.earlier] == [("main", False), ("run/a", None)]


def test_interrupted_before_the_result_is_one_look(repository):
    take_look(SPLIT, MODELS[0], repository)
    again = take_look(SPLIT, MODELS[0], repository)
    for _ in range(2):
        write_result(SPLIT, MODELS[0], passed=True, accuracy=0.8123456789, confidence=0.95, root=repository)
    lines = [json.loads(line) for line in ledger_path(repository).read_text().splitlines()]
    assert again.number == 1 and [line["kind"] for line in lines] == ["look", "result"]


def test_other_thresholds_change_no_earlier_look(repository):
    """The result of a look in a later model's gate.json stays that of its first judgement, so that the stage can be repeated."""
    take_look(SPLIT, MODELS[0], repository)
    write_result(SPLIT, MODELS[0], passed=False, accuracy=0.7, confidence=0.95, root=repository)
    second = take_look(SPLIT, MODELS[1], repository)
    write_result(SPLIT, MODELS[0], passed=True, accuracy=0.7, confidence=0.95, root=repository)
    assert take_look(SPLIT, MODELS[1], repository) == second
    assert [json.loads(line).get("passed") for line in ledger_path(repository).read_text().splitlines()] == [None, False, None, True]


def test_a_look_that_ends_after_another_began_changes_nothing_of_that_one(repository):
    """Two runs at once: the second one's gate.json must not depend on who was faster."""
    take_look(SPLIT, MODELS[0], repository)
    second = take_look(SPLIT, MODELS[1], repository)
    write_result(SPLIT, MODELS[0], passed=False, accuracy=0.7, confidence=0.95, root=repository)
    assert take_look(SPLIT, MODELS[1], repository) == second and second.earlier[0]["passed"] is None
    assert take_look(SPLIT, MODELS[2], repository).earlier[0]["passed"] is False


def look_at(job: tuple[str, str, Path]) -> int:
    return take_look(*job).number


def test_looks_at_once_get_different_numbers(repository):
    jobs = [(SPLIT, model, folder) for model in MODELS for folder in (repository, repository / "worktree")]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        numbers = pool.map(look_at, jobs, chunksize=1)
    assert numbers[::2] == numbers[1::2] and sorted(numbers[::2]) == list(range(1, 21))


def test_without_git_the_ledger_is_in_the_folder(tmp_path):
    assert take_look(SPLIT, MODELS[0], tmp_path).number == 1 and take_look(SPLIT, MODELS[1], tmp_path).number == 2
    assert (tmp_path / LEDGER).is_file()


def test_git_that_refuses_does_not_start_another_count(repository):
    (repository / ".git/config").write_text("[core\n")
    with pytest.raises(ConfigError, match=f"{LEDGER}: expected git to name the repository's common folder, got: .*bad config"):
        take_look(SPLIT, MODELS[0], repository)


@pytest.mark.parametrize("bad", [b"{}\n", b'{"kind": "look"', b"\xff\xfe\n", b"[1]\n", b'"\x1b[31m"\n', b"\n"])
def test_a_line_that_the_gate_did_not_write_is_refused_by_its_number(tmp_path, bad):
    take_look(SPLIT, MODELS[0], tmp_path)
    path = tmp_path / LEDGER
    path.write_bytes(path.read_bytes() + bad)
    with pytest.raises(ConfigError, match=r"looks\.jsonl, line 2: expected one that the gate wrote, got .*; correct or remove") as error:
        take_look(SPLIT, MODELS[1], tmp_path)
    assert "\x1b" not in str(error.value)


def test_a_ledger_that_can_not_be_written_is_an_error(tmp_path):
    (tmp_path / LEDGER).mkdir()
    with pytest.raises(ConfigError, match="expected to be able to write the gate's looks there"):
        take_look(SPLIT, MODELS[0], tmp_path)
