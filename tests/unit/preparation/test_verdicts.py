"""Which answer is better, as rankings, winners, scores and trees say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config import SourceConfig
from rlhf_core.preparation.drops import Dropped, Misfit
from rlhf_core.preparation.formats import MAX_PAIRS, Rows, convert
from rlhf_core.preparation.notation import Notation, notation_of
from rlhf_core.preparation.verdicts import sign_of_winner

USES = ["sft", "preference", "prompt"]


def source(format: str, **columns) -> SourceConfig:
    return SourceConfig.model_validate({"name": "x", "kind": "file", "path": "x", "format": format, "uses": USES, "columns": columns})


def sides(rows: Rows) -> list[tuple[str, str]]:
    return [(row["chosen"], row["rejected"]) for row in rows["preference"]]


def learned(rows: Rows) -> list[str]:
    return [row["response"] for row in rows["sft"]]


class TestRanked:
    def test_the_best_rank_is_paired_with_every_worse_one(self):
        answers = [{"completion": text, "rank": rank} for text, rank in (("b", 2.0), ("a", 1.0), ("c", 3.0))]
        rows = convert({"prompt": "q", "completions": answers}, source("ranked"))
        assert sides(rows) == [("a", "b"), ("a", "c")] and learned(rows) == ["a"]

    def test_a_higher_score_is_better_and_ties_give_no_pair(self):
        answers = [{"response": text, "overall": score} for text, score in (("b", 1), ("a", 7.5), ("c", "7.5"), ("d", 1))]
        rows = convert({"prompt": "q", "completions": answers}, source("ranked", completion="response", score="overall"))
        assert sides(rows) == [("a", "b"), ("a", "d"), ("c", "b"), ("c", "d")] and learned(rows) == ["a", "c"]

    @pytest.mark.parametrize(("name", "best"), [("rank", "a"), ("score", "b")])
    def test_lists_beside_each_other_are_read_alike(self, name, best):
        record = {"prompt": "q", "completions": ["a", [{"role": "assistant", "content": "b"}]], name: [0, 1]}
        assert learned(convert(record, source("ranked"))) == [best]

    @pytest.mark.parametrize(
        ("record", "reason"),
        [
            ({"completions": ["a", "b"], "score": [1, 1]}, "no completion is better than another"),
            ({"completions": ["a"], "score": [1]}, "no completion is better than another"),
            ({"completions": ["a", "b"], "score": [1, None]}, "score is null"),
            ({"completions": [{"completion": "a", "rank": 1}, {"completion": None, "rank": 2}]}, "completion is null"),
        ],
    )
    def test_a_record_that_orders_nothing_is_dropped(self, record, reason):
        with pytest.raises(Dropped, match=reason):
            convert({"prompt": "q", **record}, source("ranked"))

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"completions": "a", "score": [1]}, "expected a list of completions"),
            ({"completions": [], "score": []}, "expected a list of completions"),
            ({"completions": ["a", "b"], "score": [1]}, "a number for each of 2 completions"),
            ({"completions": ["a", "b"]}, "expected a column 'rank'"),
            ({"completions": [{"completion": "a"}]}, "expected a column 'rank'"),
            ({"completions": ["a", "b"], "score": [1, "good"]}, "expected a number"),
        ],
    )
    def test_a_record_without_ranks_is_no_ranking(self, record, message):
        with pytest.raises(Misfit, match=message):
            convert({"prompt": "q", **record}, source("ranked"))

    def test_too_many_pairs_are_dropped(self):
        record = {"prompt": "q", "completions": ["a"] * (MAX_PAIRS + 2), "rank": [1, *[2] * (MAX_PAIRS + 1)]}
        with pytest.raises(Dropped, match=f"more than {MAX_PAIRS} pairs"):
            convert(record, source("ranked"))

    @given(st.lists(st.integers(0, 4), min_size=2, max_size=8).filter(lambda ranks: len(set(ranks)) > 1))
    def test_a_pair_always_has_the_best_before_a_worse_one(self, ranks):
        record = {"prompt": "q", "completions": [f"{i}" for i in range(len(ranks))], "rank": ranks}
        found = [(ranks[int(a)], ranks[int(b)]) for a, b in sides(convert(record, source("ranked")))]
        best = min(ranks)
        assert len(found) == ranks.count(best) * (len(ranks) - ranks.count(best)) and all(a == best < b for a, b in found)


class TestWinner:
    @pytest.mark.parametrize(
        ("value", "columns", "sign"),
        [
            *(("model_a", ("conversation_a", "conversation_b"), -1), ("Model_B", ("response_a", "response_b"), 1)),
            *(
                ("a", ("response_a", "response_b"), -1),
                ("B", ("answerA_A", "answerB_B"), 1),
                ("first", ("x", "y"), -1),
                ("y", ("x", "y"), 1),
            ),
            *((0, ("response_0", "response_1"), -1), (1.0, ("response_0", "response_1"), 1), ("2", ("answer1", "answer2"), 1)),
            *(("tie", ("x", "y"), 0), ("tie (bothbad)", ("x", "y"), 0), ("second", ("response_a", "response_b"), 1)),
            *(("Assistant B", ("response_a", "response_b"), 1), ("answer1", ("response_1", "response_2"), -1)),
        ],
    )
    def test_a_name_says_which_response_wins(self, value, columns, sign):
        assert sign_of_winner(value, *columns) == sign

    @pytest.mark.parametrize(
        ("value", "columns"),
        [
            (0, ("human_ref_A", "human_ref_B")),
            ("a", ("x", "y")),
            *((model, ("response_a", "response_b")) for model in ("gpt-4", "vicuna-13b", "llama-2-7b")),
            *((model, ("response_1", "response_2")) for model in ("claude-2", "llama-1")),
            (True, ("a_1", "b_1")),
            ("1", ("a_1", "b_1")),
        ],
    )
    def test_what_names_neither_is_refused(self, value, columns):
        with pytest.raises(Misfit, match="map first_score and second_score, or convert it"):
            sign_of_winner(value, *columns)

    def test_a_missing_winner_drops_the_record(self):
        with pytest.raises(Dropped, match="winner is null"):
            sign_of_winner(None, "a", "b")

    def test_conversations_without_a_prompt_share_it(self):
        ask = {"role": "user", "content": "q"}
        talks = {name: [ask, {"role": "assistant", "content": name[-1]}] for name in ("conversation_a", "conversation_b")}
        rows = convert(talks | {"winner": "model_b"}, source("compared", first="conversation_a", second="conversation_b"))
        assert sides(rows) == [("b", "a")] and rows["preference"][0]["messages"] == [ask]

    @pytest.mark.parametrize(("scores", "chosen"), [((2, 1), "one"), ((-0.5, 0.5), "two"), (("3", "12"), "two"), ((1, 0), "one")])
    def test_the_higher_score_wins(self, scores, chosen):
        record = {"prompt": "q", "first": "one", "second": "two", "first_score": scores[0], "second_score": scores[1]}
        assert sides(convert(record, source("compared")))[0][0] == chosen

    def test_equal_scores_are_no_pair_and_a_mapped_verdict_comes_first(self):
        record = {"prompt": "q", "first": "one", "second": "two", "first_score": 1, "second_score": 1, "sign": -1}
        with pytest.raises(Dropped, match="neither response is preferred"):
            convert(record, source("compared"))
        assert sides(convert(record, source("compared", preference="sign")))[0][0] == "one"

    def test_lists_of_turns_as_json_are_conversations(self):
        record = {"prompt": '["q", "r"]', "first": '["a", "b"]', "second": '["a", "c"]', "winner": "second"}
        notation = notation_of([record], source("compared"))
        assert notation.turn_lists and notation_of([record, {**record, "first": "b"}], source("compared")) == Notation(
            unsure=("prompt and answers are JSON lists of turns in 50% of the first 2 records, and are read as they are",)
        )
        rows = convert(record, source("compared"), notation)
        assert [m["content"] for m in rows["preference"][0]["messages"]] == ["q", "a", "r"] and sides(rows) == [("c", "b")]
        for other, reason in (
            ('["x", "b"]', "prompts of chosen and rejected differ"),
            ('["a"]', "same number"),
            ('["a", null]', "turn is null"),
        ):
            with pytest.raises(Dropped, match=reason):
                convert({**record, "first": other}, source("compared"), notation)


def said(text: str, *replies: dict, rank: int | None = None, role: str = "assistant", **more) -> dict:
    return {"text": text, "role": role, "rank": rank, "replies": list(replies), **more}


class TestTree:
    """q has the replies a (best), b and c (not ranked); a has the reply r, which has the only reply d; b has s with e."""

    ROOT = said(
        "q",
        said("b", said("s", said("e"), role="prompter"), rank=1),
        said("a", said("r", said("d", rank=0), role="prompter"), rank=0),
        said("c"),
        said("x", rank=-1, deleted=True),
        role="prompter",
    )

    def test_each_reply_is_compared_with_the_best_one(self):
        rows = convert({"prompt": self.ROOT}, source("tree", tree="prompt"))
        assert sides(rows) == [("a", "b")]
        assert [[m["content"] for m in row["messages"]] for row in rows["prompt"]] == [["q"], ["q", "b", "s"], ["q", "a", "r"]]

    def test_only_the_best_replies_to_the_best_replies_are_demonstrations(self):
        rows = convert({"prompt": self.ROOT}, source("tree", tree="prompt"))
        assert [([m["content"] for m in row["messages"]], row["response"]) for row in rows["sft"]] == [(["q"], "a"), (["q", "a", "r"], "d")]

    def test_several_replies_without_a_rank_are_no_demonstrations(self):
        rows = convert({"tree": said("q", said("a"), said("b"), role="user")}, source("tree"))
        assert rows["sft"] == rows["preference"] == [] and len(rows["prompt"]) == 1

    @pytest.mark.parametrize("root", [None, "q", said("q"), said("q", role="king"), {**said("q", role="user"), "replies": ["a"]}])
    def test_what_is_no_tree_is_refused(self, root):
        with pytest.raises((Misfit, Dropped)):
            convert({"tree": root}, source("tree"))

    def test_a_deep_tree_is_read(self):
        node = said("end", role="user")
        for i in range(2000):
            node = said(f"{i}", node, role=("assistant", "user")[i % 2])
        assert len(convert({"tree": node}, source("tree"))["prompt"]) == 1001
