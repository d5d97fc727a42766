"""Splits, ids and shares by hash."""

from __future__ import annotations

from random import Random

import numpy as np
from gate_pairs import write_slices

from rlhf_core.data.hashing import conversation_text, distinct_prompts, kept_by_weight, split_of, split_text, with_ids
from rlhf_core.data.schema import read_slices

FRACTIONS = {"validation_fraction": 0.06, "test_fraction": 0.12, "promotion_fraction": 0.08}


def test_the_shares_are_as_configured():
    splits = [split_of(f"prompt {i}", **FRACTIONS) for i in range(20_000)]
    assert abs(splits.count("test") / 20_000 - 0.12) < 0.01  # 4 standard deviations are 0.0092
    assert abs(splits.count("validation") / 20_000 - 0.06) < 0.007
    assert abs(splits.count("promotion") / 20_000 - 0.08) < 0.008


def test_a_larger_test_share_only_adds_to_the_test_split():
    for i in range(2000):
        if split_of(f"{i}", **FRACTIONS | {"test_fraction": 0.1}) == "test":
            assert split_of(f"{i}", **FRACTIONS | {"test_fraction": 0.2}) == "test"


def test_a_promotion_split_that_is_taken_from_the_test_split_moves_no_other_row():
    """What was trained on before is trained on after, and what is set aside was held out before."""
    for i in range(5000):
        without = split_of(f"{i}", validation_fraction=0.06, test_fraction=0.12, promotion_fraction=0.0)
        divided = split_of(f"{i}", validation_fraction=0.06, test_fraction=0.06, promotion_fraction=0.06)
        assert divided == without if without != "test" else divided in ("test", "promotion")


def test_case_and_white_space_make_no_other_conversation_and_words_and_roles_do():
    def text(role, content):
        return conversation_text([{"role": role, "content": content}])

    assert text("user", "Sort  21.\n") == text("user", "sort 21.")
    assert text("user", "Sort 21.") != text("user", "Sort 12.")
    assert text("user", "Sort 21.") != text("system", "Sort 21.")
    together = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert conversation_text(together) != text("user", "a\nassistant\tb")


def test_the_first_message_of_the_user_and_what_is_before_it_decide_the_split():
    """Of a conversation with one message of the user that is all of it, so its split depends on the whole text."""
    asked, more = {"role": "user", "content": "Sort  4066."}, {"role": "user", "content": "And 12?"}
    system, answer = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "0466."}
    assert split_text({"messages": [asked]}) == split_text({"messages": [asked, answer, more]}) == "user\tsort 4066."
    assert split_text({"messages": [system, asked]}) == split_text({"messages": [system, asked, answer, more]})
    assert split_text({"messages": [system, asked]}) == "system\tbe brief.\nuser\tsort 4066."
    assert split_text({"messages": [answer]}) == "assistant\t0466." and split_text({"text": "Sort  12"}) == "Sort  12"


def test_ids_are_unique_even_for_equal_rows_and_survive_shuffling():
    rows = [{"text": str(i % 70)} for i in range(100)]
    shuffled = rows.copy()
    Random(0).shuffle(shuffled)
    ids = [r["id"] for r in with_ids(rows, "a")]
    assert len(set(ids)) == 100
    assert set(ids) == {r["id"] for r in with_ids(shuffled, "a")}
    assert not set(ids) & {r["id"] for r in with_ids(rows, "b")}


def test_a_share_keeps_the_lowest_ids_and_a_smaller_one_is_a_part_of_it():
    ids = np.array([int(row["id"], 16) for row in with_ids([{"text": str(i)} for i in range(200)], "a")], dtype=np.uint64)
    half, tenth = kept_by_weight(ids, 0.5, None), kept_by_weight(ids, 0.1, None)
    assert (half.sum(), tenth.sum()) == (100, 20)
    assert ids[half].max() < ids[~half].min()
    assert half[tenth].all()
    assert kept_by_weight(ids, 1.0, 20).tolist() == tenth.tolist()
    assert (
        kept_by_weight(ids, 1.0, None).all() and not kept_by_weight(ids, 0.001, None).any() and len(kept_by_weight(ids[:0], 1.0, None)) == 0
    )


def test_slices_change_no_id_and_come_back_from_their_file(tmp_path):
    row = {"messages": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "b"}
    (plain,), (sliced,) = with_ids([row], "s"), with_ids([row | {"slices": {"category": "x"}}], "s")
    assert sliced["id"] == plain["id"]
    write_slices(tmp_path, {sliced["id"]: sliced["slices"]})
    assert read_slices(tmp_path) == {plain["id"]: {"category": "x"}} and read_slices(tmp_path / "nothing") == {}


def test_ids_are_those_of_earlier_versions():
    row = {"messages": [{"role": "user", "content": "é"}], "response": "b"}
    ids = [r["id"] for r in with_ids([row, {"text": "c"}, row | {"origin": "d.jsonl line 3"}, row], "s")]
    assert ids == ["c29850f64f68ffb3", "7726ed28ffdbdcb6", "0357e3c55e2e5b5c", "c8b9de9c3579d010"]


def test_a_conversation_is_a_prompt_once():
    rows = [{"id": str(i), "messages": [{"role": "user", "content": text}]} for i, text in enumerate(("a", "b", "A ", "c", "b"))]
    assert [row["id"] for row in distinct_prompts(rows)] == ["0", "1", "3"]
