"""Two ranks that share prompts and texts sample and score as one does: samples, scores, comparison and gate."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from inference_ranks import ROWS, run_everything, run_ranks

RANKS = 2  # of which the second has no prompt where there is one, and fewer of the five
ROUNDING = 1e-5  # absolute, of scores of size 1: batches differ


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inference-ranks")


@pytest.fixture(scope="module")
def alone(sft_folder: Path, reward_folder: Path, out: Path) -> dict[str, Any]:
    (out / "one").mkdir()
    return json.loads(json.dumps(run_everything(sft_folder, reward_folder, out / "one")))


@pytest.fixture(scope="module")
def ranks(sft_folder: Path, reward_folder: Path, out: Path) -> list[dict[str, Any]]:
    return run_ranks(RANKS, sft_folder, reward_folder, out / "two")


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal, floats up to rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or abs(one - other) <= ROUNDING
    return type(one) is type(other) and one == other


def test_each_rank_computes_every_second_item_and_all_get_every_result_in_order(ranks):
    expected = [["a", 0, 3], ["b", 1, 2], ["c", 0, 3], ["d", 1, 2], ["e", 0, 3]]
    assert [found["shares"] for found in ranks] == [expected] * RANKS


def test_ranks_with_one_share_leave_it_to_the_first(ranks):
    assert [found["shares of all"] for found in ranks] == [[[item, 0, 5] for item in "abcde"]] * RANKS


@pytest.mark.parametrize("kind", ["answers", "logprobs", "rejection all", "rejection one", "comparison", "rated", "gate", "nothing"])
def test_two_ranks_sample_and_score_as_one(ranks, alone, kind: str):
    assert all(same(found[kind], alone[kind]) for found in ranks), (ranks[0][kind], alone[kind])


def test_responses_differ_and_some_have_no_score(alone):
    responses = [response for group in alone["rejection all"] for response in group]
    assert len(responses) == 3 * len(ROWS) and len({tuple(r["response_ids"]) for r in responses}) > len(ROWS)
    assert [math.isnan(score) for score in alone["rated"]["train"]] == [False] * 4 + [True]
    assert len(set(alone["gate"])) == 2 * len(ROWS)


def test_a_stop_of_rank_0_stops_every_rank(ranks):
    assert [found["stopped"] for found in ranks] == [True] * RANKS
