"""From rows to token ids, and the groups in which they go through a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import PAD, sequences, tiny_params

from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.tokenizer import build_tokenizer, encode_conversation
from rlhf_core.trainers.preference.objectives import Continuation, Example, ResponseForward, group_by_prompt, mismatched
from rlhf_core.trainers.preference.train import begin_examples, begin_pairs


def row(chosen: str | None, rejected: str | None, question: str = "Please sort 41.") -> dict:
    return {"id": "x", "messages": [{"role": "user", "content": question}], "chosen": chosen, "rejected": rejected}


def item(prompt: str, response: str) -> Continuation:
    return Continuation(tuple(map(ord, prompt)), tuple(map(ord, response)))


def test_a_pair_is_a_prompt_as_the_policy_sees_it_and_two_finished_responses(tokenizer):
    (pair,), dropped = begin_pairs([row("14", "41")], tokenizer, max_length=64)()
    ids, start = encode_conversation(tokenizer, row("", "")["messages"], "14")
    assert (list(pair.chosen.prompt_ids), list(pair.chosen.response_ids), dropped) == (ids[:start], ids[start:], 0)
    assert pair.rejected.prompt_ids == pair.chosen.prompt_ids
    assert tokenizer.decode(pair.rejected.response_ids) == "41<|end|>"


def test_equal_tokens_and_the_prompts_of_a_pair_are_held_once():
    texts = [f"Please sort {i} apples and pears." for i in range(50)]
    tokenizer = build_tokenizer(texts, vocab_size=320)
    pairs, _ = begin_pairs([row("pears apples", "apples", text) for text in texts], tokenizer, max_length=500)()
    assert all(pair.rejected.prompt_ids is pair.chosen.prompt_ids for pair in pairs)
    objects = {id(token): token for pair in pairs for side in pair for ids in side for token in ids}
    assert max(objects.values()) > 256 and len(objects) == len(set(objects.values()))  # Python itself holds those up to 256 once


def test_pairs_with_a_side_that_is_too_long_are_dropped_and_counted_and_unpaired_rows_left_out(tokenizer):
    long = "14 " * 40
    rows = [row("14", "41"), row(long, "41"), row("14", long), row("14", None), row(None, long), row("no", "14")]
    pairs, dropped = begin_pairs(rows, tokenizer, max_length=40)()
    assert ([tokenizer.decode(p.chosen.response_ids) for p in pairs], dropped) == (["14<|end|>", "no<|end|>"], 2)


def test_a_pair_is_dropped_at_one_token_too_many(tokenizer):
    needed = max(len(encode_conversation(tokenizer, row("", "")["messages"], text)[0]) for text in ("1 4", "41"))
    assert begin_pairs([row("1 4", "41")], tokenizer, max_length=needed)()[1] == 0
    assert begin_pairs([row("1 4", "41")], tokenizer, max_length=needed - 1)() == ([], 1)


def test_a_pair_is_a_desirable_and_an_undesirable_response_and_an_unpaired_row_one_of_them(tokenizer):
    examples, dropped = begin_examples([row("14", "41"), row("9", None), row(None, "x"), row("14 " * 40, "7")], tokenizer, max_length=40)()
    found = [(tokenizer.decode(e.continuation.response_ids), e.desirable) for e in examples]
    assert found == [("14<|end|>", True), ("41<|end|>", False), ("9<|end|>", True), ("x<|end|>", False), ("7<|end|>", False)]
    assert dropped == 1


def test_mismatched_responses_are_those_further_on_and_leave_the_prompt_whole():
    examples, kto = [Example(item(*texts), True) for texts in (("abc", "d"), ("e", "fgh"), ("ij", "k"))], tiny_params().kto
    assert mismatched(examples, kto, shift=1, max_length=9) == [item("abc", "fgh"), item("e", "k"), item("ij", "d")]
    assert mismatched(examples, kto, shift=2, max_length=9)[0] == item("abc", "k")
    assert mismatched(examples, kto, shift=1, max_length=5)[0] == item("abc", "fg")  # cut to the model's length


def test_groups_by_hand():
    a, b, c, d = item("ppp", "a"), item("ppp", "bb"), item("q", "c"), item("q", "dddd")
    groups = group_by_prompt([a, b, c, d, b, a], together=2, max_tokens=100, shares_prefix=True)
    assert [(g.items, g.positions) for g in groups] == [([a, b, b, a], [0, 1, 4, 5]), ([c, d], [2, 3])]
    assert groups[0].responses == {a.response_ids: 0, b.response_ids: 1}  # each computed once
    assert [len(r) for r in groups[0].rows] == [6]  # ppp a bb in one row: 6 tokens for the 9 of ppp a and ppp bb
    # Six tokens and three more don't fit into eight.
    split = group_by_prompt([a, b, c, d, b, a], together=2, max_tokens=8, shares_prefix=True)
    assert [(g.items, g.positions) for g in split] == [([a, b], [0, 1]), ([c, d], [2, 3]), ([b, a], [4, 5])]


@settings(max_examples=50)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    max_tokens=st.integers(1, 80),
    shares_prefix=st.booleans(),
)
def test_microbatches_hold_every_item_once_pairs_together_within_the_budget(prompts, max_tokens: int, shares_prefix: bool):
    items = [Continuation((9 + p,) * (3 + 2 * p), tuple(range(n))) for p, *lengths in prompts for n in lengths]
    parts = [part for part, _ in ResponseForward(PAD, shares_prefix, max_tokens).microbatches(items, together=2)]
    groups = [group for part in parts for group in part]
    assert sorted(i for g in groups for i in g.positions) == list(range(len(items)))
    for group in groups:
        assert group.items == [items[i] for i in group.positions]
        assert group.positions[::2] == [i - 1 for i in group.positions[1::2]] and not any(i % 2 for i in group.positions[::2])
    for part in parts:
        padded = sum(len(g.rows) for g in part) * max(len(row) for g in part for row in g.rows)
        assert padded <= max_tokens or len(part) == 1
        assert all(len(row) <= max_tokens or len(row.branches) == 1 for group in part for row in group.rows)  # no shared row is larger


@torch.no_grad()
def test_log_probabilities_are_those_of_whole_sequences_alone(sft_folder: Path):
    module = PolicyModule(load_language_model(sft_folder))
    prompts = [tuple(ids) for ids in sequences(3, seed=1, shortest=6)]
    responses = [tuple(ids) for ids in sequences(7, seed=2, shortest=1)]
    items = [Continuation(prompts[i % 3], responses[(3 * i) % 7]) for i in range(14)]
    expected = {
        i: module(collate_tokens([[*i.prompt_ids, *i.response_ids]], [len(i.prompt_ids)], pad_id=PAD)).logprobs.sum() for i in items
    }
    for shares_prefix in (True, False):
        forward = ResponseForward(PAD, shares_prefix, 60)
        shared = 0
        for part, _ in forward.microbatches(items):
            requested = [i for group in part for i in group.items]
            torch.testing.assert_close(forward.logprobs(module, part), torch.stack([expected[i] for i in requested]), rtol=0, atol=1e-5)
            shared += sum(len(row.branches) > 1 for group in part for row in group.rows)
        assert (shared > 0) == shares_prefix


@pytest.mark.parametrize("shares_prefix", [True, False])
def test_each_distinct_response_is_computed_once(sft_folder: Path, shares_prefix: bool):
    items = [item("ppp", "abc"), item("ppp", "def")] * 5
    ((part, _),) = ResponseForward(PAD, shares_prefix, 1000).microbatches(items)
    rows = [row for group in part for row in group.rows]
    assert sum(len(row.branches) for row in rows) == 2
