"""The ledger of looks, in real repositories and worktrees, and the levels that follow from it."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.config import ConfigError, load_params
from rlhf_core.gate.looks import LEDGER, SPLITS, at_look, look_level, take_look, write_result
from rlhf_core.gate.overlap import KEPT, SplitKeys, split_hash

ROOT = Path(__file__).parents[3]
MODELS = [f"{i:032x}.dir" for i in range(20)]


def pair(number: int, **texts: str) -> dict:
    """A pair with a prompt and responses of its own, or with other texts."""
    texts = {"prompt": f"Which is question {number}?", "chosen": f"It is a good answer, number {number}.", "rejected": "No."} | texts
    return {"messages": [{"role": "user", "content": texts["prompt"]}], "chosen": texts["chosen"], "rejected": texts["rejected"]}


def keys(*numbers: int) -> SplitKeys:
    return SplitKeys.of_rows([pair(number) for number in numbers])


KEYS, OTHER_KEYS = keys(*range(40)), keys(*range(100, 140))
SPLIT = KEYS.sha256


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
    config = load_params(CLERK_PARAMS).gate
    assert at_look(config, 1) == config
    assert at_look(config, 2).confidence == pytest.approx(0.975) and at_look(config, 5).confidence == pytest.approx(0.9975)


def test_a_split_is_what_its_pairs_say():
    rows = [{"id": str(i), "messages": [{"role": "user", "content": "2 + 2"}], "chosen": f"4{i}", "rejected": "5"} for i in range(3)]
    renamed = [row | {"id": "x" + row["id"], "source": "elsewhere"} for row in reversed(rows)]
    assert split_hash(rows) == split_hash(renamed)
    swapped = [rows[0] | {"chosen": "5", "rejected": "40"}, *rows[1:]]
    assert len({split_hash(rows), split_hash(swapped), split_hash(rows[:2])}) == 3


EDITED = {
    "one pair less": [pair(i) for i in range(1, 40)],
    "one pair more": [pair(i) for i in range(41)],
    "a tenth of it": [pair(i) for i in range(4)] + [pair(i) for i in range(200, 236)],
    "nine times as many new pairs": [pair(i) for i in range(40)] + [pair(i) for i in range(200, 560)],
    "one space more": [pair(0, prompt="Which is  question 0?"), *(pair(i) for i in range(1, 40))],
    "each prompt in other letters": [pair(i, prompt=f"\u200bWHICH is \uff51uestion\u00a0{i} ...") for i in range(40)],
    "each prompt in other words": [pair(i, prompt=f"Please say: what is the {i}th question") for i in range(40)],
    "each response in other words": [pair(i, chosen=f"{i} it is, and this is another long answer.") for i in range(40)],
    "sides exchanged": [pair(i, chosen="No.", rejected=f"It is a good answer, number {i}.") for i in range(40)],
    "system messages": [{**pair(i), "messages": [{"role": "system", "content": "Be kind."}, *pair(i)["messages"]]} for i in range(40)],
    "a known prompt with a tenth of the pairs": [pair(0, chosen=f"{i}") for i in range(5)] + [pair(i) for i in range(200, 245)],
}


@pytest.mark.parametrize("rows", EDITED.values(), ids=EDITED)
def test_an_edited_split_continues_the_count(tmp_path, rows):
    for number in range(9):
        take_look(KEYS, MODELS[number], tmp_path)
    found = take_look(SplitKeys.of_rows(rows), MODELS[9], tmp_path)
    assert found.number == 10 and all(0.1 <= look["shared"] <= 1 for look in found.earlier)


NEW = {
    "other pairs": [pair(i) for i in range(100, 140)],
    "less than a tenth of it": [pair(i) for i in range(3)] + [pair(i) for i in range(200, 237)],
    "the same short responses": [pair(i, chosen="Yes.") for i in range(100, 140)],
    "another operator": [pair(i, prompt=f"What is {i}-{i}?", chosen="0") for i in range(40)],
}


@pytest.mark.parametrize("rows", NEW.values(), ids=NEW)
def test_a_split_of_other_pairs_starts_a_count(tmp_path, rows):
    earlier = [pair(i, chosen="Yes.") for i in range(40)] + [pair(i, prompt=f"What is {i}+{i}?", chosen="0") for i in range(40)]
    take_look(SplitKeys.of_rows(earlier), MODELS[0], tmp_path)
    assert take_look(KEYS, MODELS[0], tmp_path).number == 2
    assert take_look(SplitKeys.of_rows(rows), MODELS[1], tmp_path).number == 1


def test_a_line_of_an_older_version_counts_for_the_same_pairs(tmp_path):
    old = {"kind": "look", "split": SPLIT, "model": MODELS[0], "run": "main", "at": "2026-01-01T00:00:00+00:00"}
    (tmp_path / LEDGER.name).write_text(json.dumps(old) + "\n")
    assert take_look(keys(*range(39)), MODELS[1], tmp_path).number == 1  # nothing tells what the older split had
    assert take_look(KEYS, MODELS[2], tmp_path).number == 3
    assert take_look(keys(*range(38)), MODELS[3], tmp_path).number == 4  # now it does
    assert take_look(keys(*range(39)), MODELS[1], tmp_path).number == 1  # an earlier look keeps its number


def test_the_share_of_a_large_split_is_estimated_from_a_bounded_sketch(tmp_path):
    """Of 10,000 pairs 1,500 are in the first split, or 500; its sketch has 4,096 of its 10,000 prompts."""
    take_look(keys(*range(10_000)), MODELS[0], tmp_path)
    assert len((tmp_path / SPLITS.name).read_bytes()) < 2 * 8 * KEPT * 4 / 3 + 1000
    (look,) = take_look(keys(*range(8_500, 18_500)), MODELS[1], tmp_path).earlier
    assert look["shared"] == pytest.approx(0.15, abs=0.02)
    assert take_look(keys(*range(9_500, 19_500)), MODELS[1], tmp_path).number == 2  # 0.05 of it in the first, 0.9 in the second
    assert take_look(keys(*range(100)), MODELS[1], tmp_path).earlier[0]["shared"] == 1.0  # a small part of a large split


def test_worktrees_share_one_count_and_a_model_keeps_its_number(repository):
    worktree = repository / "worktree"
    first = take_look(KEYS, MODELS[0], repository)
    write_result(SPLIT, MODELS[0], passed=False, accuracy=0.7, confidence=0.95, root=repository)
    second = take_look(KEYS, MODELS[1], worktree)
    assert (first.number, first.earlier, second.number) == (1, [], 2)
    result = {"passed": False, "accuracy": 0.7, "confidence": 0.95}
    assert second.earlier == [{"number": 1, "model": MODELS[0], "run": "main", **result, "shared": 1.0}]
    assert take_look(KEYS, MODELS[0], worktree) == first and take_look(KEYS, MODELS[1], repository) == second
    assert take_look(OTHER_KEYS, MODELS[1], repository).number == 1
    assert LEDGER.path(repository) == LEDGER.path(worktree) == (repository / ".git" / LEDGER.name)
    third = take_look(KEYS, MODELS[2], repository)
    assert [(look["run"], look["passed"]) for look in third.earlier] == [("main", False), ("run/a", None)]


def test_interrupted_before_the_result_is_one_look(repository):
    take_look(KEYS, MODELS[0], repository)
    again = take_look(KEYS, MODELS[0], repository)
    for _ in range(2):
        write_result(SPLIT, MODELS[0], passed=True, accuracy=0.8123456789, confidence=0.95, root=repository)
    lines = [json.loads(line) for line in LEDGER.path(repository).read_text().splitlines()]
    assert again.number == 1 and [line["kind"] for line in lines] == ["look", "result"]  # all that older versions know
    (split,) = [json.loads(line) for line in SPLITS.path(repository).read_text().splitlines()]
    assert split.keys() == {"split", "line", "prompts", "responses"} and split["split"] == SPLIT


def test_other_thresholds_change_no_earlier_look(repository):
    """The result of a look in a later model's gate.json stays that of its first judgement, so that the stage can be repeated."""
    take_look(KEYS, MODELS[0], repository)
    write_result(SPLIT, MODELS[0], passed=False, accuracy=0.7, confidence=0.95, root=repository)
    second = take_look(KEYS, MODELS[1], repository)
    write_result(SPLIT, MODELS[0], passed=True, accuracy=0.7, confidence=0.95, root=repository)
    assert take_look(KEYS, MODELS[1], repository) == second
    results = [json.loads(line) for line in LEDGER.path(repository).read_text().splitlines()]
    assert [line["passed"] for line in results if line["kind"] == "result"] == [False, True]


def test_a_look_that_ends_after_another_began_changes_nothing_of_that_one(repository):
    """Two runs at once: the second one's gate.json must not depend on who was faster."""
    take_look(KEYS, MODELS[0], repository)
    second = take_look(KEYS, MODELS[1], repository)
    write_result(SPLIT, MODELS[0], passed=False, accuracy=0.7, confidence=0.95, root=repository)
    assert take_look(KEYS, MODELS[1], repository) == second and second.earlier[0]["passed"] is None
    assert take_look(KEYS, MODELS[2], repository).earlier[0]["passed"] is False


def look_at(job: tuple[SplitKeys, str, Path]) -> int:
    return take_look(*job).number


def test_looks_at_once_get_different_numbers(repository):
    jobs = [(KEYS, model, folder) for model in MODELS for folder in (repository, repository / "worktree")]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        numbers = pool.map(look_at, jobs, chunksize=1)
    assert numbers[::2] == numbers[1::2] and sorted(numbers[::2]) == list(range(1, 21))


def test_without_git_the_ledger_is_in_the_folder(tmp_path):
    assert take_look(KEYS, MODELS[0], tmp_path).number == 1 and take_look(KEYS, MODELS[1], tmp_path).number == 2
    assert (tmp_path / LEDGER.name).is_file()


def test_git_that_refuses_does_not_start_another_count(repository):
    (repository / ".git/config").write_text("[core\n")
    with pytest.raises(ConfigError, match=f"{LEDGER.name}: expected git to name the repository's common folder, got: .*bad config"):
        take_look(KEYS, MODELS[0], repository)


OF_A_SPLIT = b'{"split": "' + b"5" * 64 + b'", "line": 0, "prompts": "%s", "responses": ""}\n'


@pytest.mark.parametrize(
    "bad",
    [
        OF_A_SPLIT % b"",
        OF_A_SPLIT % b"AAAA",
        OF_A_SPLIT % b"\\u00e9",
        b"{}\n",
        b'{"kind": "look"',
        b"\xff\xfe\n",
        b"[1]\n",
        b'"\x1b[31m"\n',
        b"\n",
    ],
)
def test_a_line_that_the_gate_did_not_write_is_refused_by_its_number(tmp_path, bad):
    take_look(KEYS, MODELS[0], tmp_path)
    path = tmp_path / (SPLITS if bad.startswith(OF_A_SPLIT[:10]) else LEDGER).name
    path.write_bytes(path.read_bytes() + bad)
    with pytest.raises(ConfigError, match=rf"{path.name}, line 2: expected one that the gate wrote, got .*; correct or remove") as error:
        take_look(KEYS, MODELS[1], tmp_path)
    assert "\x1b" not in str(error.value)


def test_a_ledger_that_can_not_be_written_is_an_error(tmp_path):
    (tmp_path / LEDGER.name).mkdir()
    with pytest.raises(ConfigError, match="expected the gate to be able to write there"):
        take_look(KEYS, MODELS[0], tmp_path)
