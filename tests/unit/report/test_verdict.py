"""What the report concludes from a run's figures."""

from __future__ import annotations

import re

import pytest
from clerk_params import CLERK_PARAMS
from report_workspace import (
    gate,
    set_shares,
    validation,
    win_rate,
    with_results,
)

from rlhf_core.config import load_params
from rlhf_core.report.verdict import data_verdict, gate_verdict, judge_selects, outcome

ABOVE, ACROSS, BELOW = 0.65, 0.5, 0.35
REWARD_MODEL = {"name": "reward_model", "kind": "reward_model", "weight": 1.0, "normalization": "initial"}
JUDGE = {"name": "judge", "kind": "judge", "weight": 1.0, "normalization": "none"}


@pytest.mark.parametrize(
    ("sft", "policy", "win", "tone", "words"),
    [
        (0.5, 0.9, ABOVE, "good", "The policy is better than the SFT model it started from."),
        (0.5, 0.9, BELOW, "good", "although the reward model prefers the SFT model"),
        # 200 and 208 of 400: the difference of 2 points is well within its interval, about -5 to +9.
        (0.5, 0.52, ABOVE, "open", "the judge sees no clear difference"),
        (0.5, 0.52, ACROSS, "open", "There is no clear difference"),
        (0.9, 0.5, ABOVE, "bad", "hack its reward"),
        (0.9, 0.5, ACROSS, "bad", "worse than the SFT model by the judge"),
        (0.9, 0.5, BELOW, "bad", "The policy is worse"),
    ],
)
def test_the_judge_decides_and_disagreement_is_named(sft, policy, win, tone, words):
    verdict = outcome(with_results(sft=sft, policy=policy, win=win), [REWARD_MODEL], confidence=0.95)
    assert verdict.tone == tone and words in verdict.headline
    assert f"{policy:.1%} of the policy’s greedy answers (SFT: {sft:.1%}; 95% interval of the difference" in verdict.details[0]


def test_better_needs_both_modes_and_worse_only_one():
    mixed = with_results(sft=0.5, policy=0.9, win=ABOVE)
    set_shares(mixed, "sampled", sft=0.5, policy=0.5)
    assert outcome(mixed, [REWARD_MODEL], confidence=0.95).tone == "open"
    set_shares(mixed, "sampled", sft=0.5, policy=0.2)
    assert outcome(mixed, [REWARD_MODEL], confidence=0.95).tone == "bad"


def with_win_rates(*, greedy: float, sampled: float) -> dict:
    """Without a judge."""
    result = with_results(sft=0.5, policy=0.5, win=0.5, judge=False)
    for mode, win in (("greedy", greedy), ("sampled", sampled)):
        result["win_rate"][mode] = win_rate(round(400 * win), 0)
    return result


@pytest.mark.parametrize(
    ("greedy", "sampled", "tone", "words"),
    [
        (0.37, 0.8, "open", "better sampled (win rate 80.0%) and worse greedy (win rate 37.0%)."),
        (0.8, 0.37, "open", "worse sampled (win rate 37.0%) and better greedy (win rate 80.0%)."),
        (0.5, 0.8, "open", "better sampled (win rate 80.0%) and not clearly different greedy (win rate 50.0%)."),
        (0.37, 0.5, "bad", "not clearly different sampled (win rate 50.0%) and worse greedy (win rate 37.0%)."),
    ],
)
def test_different_results_of_the_modes_are_both_named(greedy, sampled, tone, words):
    verdict = outcome(with_win_rates(greedy=greedy, sampled=sampled), [REWARD_MODEL], confidence=0.95)
    assert (verdict.tone, verdict.headline) == (tone, f"By the reward model, the policy is {words}")
    printed = " ".join(verdict.details)
    assert "Mean score: sampled " in printed and ("The two modes disagree" in printed) is (0.5 not in (greedy, sampled))
    assert ("however small" in printed) is (greedy < 0.5 < sampled)


def test_the_judge_decides_about_modes_that_differ_too():
    mixed = with_results(sft=0.5, policy=0.9, win=ACROSS)
    set_shares(mixed, "sampled", sft=0.5, policy=0.2)
    verdict = outcome(mixed, [REWARD_MODEL], confidence=0.95)
    words = "worse sampled (50.0% → 20.0% accepted) and better greedy (50.0% → 90.0% accepted)."
    assert (verdict.tone, verdict.headline) == ("open", f"By the judge, the policy is {words}")
    hacked = with_results(sft=0.5, policy=0.9, win=ABOVE)
    set_shares(hacked, "sampled", sft=0.5, policy=0.2)
    verdict = outcome(hacked, [REWARD_MODEL], confidence=0.95)
    assert verdict.tone == "bad" and "hack its reward" in verdict.headline and words in verdict.headline


@pytest.mark.parametrize(("win", "tone"), [(ABOVE, "good"), (ACROSS, "open"), (BELOW, "bad")])
def test_without_a_judge_the_win_rate_decides_and_says_who_speaks(win, tone):
    verdict = outcome(with_results(sft=0, policy=0, win=win, judge=False), [REWARD_MODEL], confidence=0.95)
    assert verdict.tone == tone and "reward model" in verdict.headline
    assert "There is no judge for this data" in verdict.details[1]


def test_a_judge_that_scores_a_policy_of_pairs_was_no_part_of_its_reward():
    results = with_results(sft=0.5, policy=0.9, win=ABOVE)
    config = load_params(CLERK_PARAMS)
    for method, printed in (("rl", True), ("dpo", False)):
        of_method = config.model_copy(update={"alignment": config.alignment.model_copy(update={"method": method})}).method_scorers
        verdict = outcome(results, [JUDGE], confidence=0.95, trained_on=[] if of_method is None else [JUDGE])
        assert any("trained to satisfy it" in detail for detail in verdict.details) is printed


@pytest.mark.parametrize(
    ("scorers", "trained_on", "printed"),
    [([REWARD_MODEL], [REWARD_MODEL | {"weight": 0.5}], True), ([REWARD_MODEL], [JUDGE], False), ([REWARD_MODEL], [], False)],
)
def test_the_policy_was_trained_to_maximise_only_what_it_was_trained_on(scorers, trained_on, printed):
    verdict = outcome(with_results(sft=0, policy=0, win=ABOVE, judge=False), scorers, confidence=0.95, trained_on=trained_on)
    assert ("trained to maximise it" in verdict.details[1]) is printed


def test_prompts_that_the_gate_has_read_are_reported():
    results = with_results(sft=0.5, policy=0.9, win=ABOVE)
    printed = "12 of the prompts were also used by the gate"
    assert any(printed in detail for detail in outcome(results | {"prompts_of_gate": 12}, [REWARD_MODEL], confidence=0.95).details)
    assert not any("used by the gate" in detail for detail in outcome(results, [REWARD_MODEL], confidence=0.95).details)
    own = {"name": "own", "kind": "function", "weight": 1.0, "path": "my_rewards:own"}
    for others in ([own], [own, REWARD_MODEL | {"weight": 0.0}], [REWARD_MODEL | {"path": "models/other"}]):
        assert not any("used by the gate" in d for d in outcome(results | {"prompts_of_gate": 12}, others, confidence=0.95).details)


def test_a_reward_that_is_no_reward_model_is_not_called_one():
    results = with_results(sft=0.5, policy=0.9, win=ABOVE)
    verdict = outcome(results, [JUDGE, REWARD_MODEL | {"weight": 0.0}], confidence=0.95)
    assert verdict.details[1].startswith("The reward prefers the policy") and "trained to satisfy it" in verdict.details[2]
    measured_only = outcome(results, [JUDGE | {"weight": 0.0}, REWARD_MODEL], confidence=0.95)
    assert measured_only.details[1].startswith("The reward model prefers the policy") and len(measured_only.details) == 2
    alone = outcome(with_results(sft=0, policy=0, win=BELOW, judge=False), [JUDGE, REWARD_MODEL], confidence=0.95)
    assert alone.headline == "The reward prefers the SFT model’s answers to those of the policy."


def test_gate_and_data_verdicts():
    not_needed = gate() | {"needed": False, "passed": False, "message": "not needed: none was trained."}
    assert gate_verdict(not_needed).tone == "open" and gate_verdict(not_needed).details == ("None was trained.",)
    assert gate_verdict(gate()).tone == "good" and gate_verdict(gate()).details[0].startswith("Held-out accuracy 0.8723")
    rejected = gate() | {"passed": False, "message": "rejected: too few pairs."}
    assert (gate_verdict(rejected).tone, gate_verdict(rejected).details) == ("bad", ("Too few pairs.",))
    checked = validation()
    assert data_verdict(checked).tone == "good"
    checked["expectations"][4]["passed"] = False
    assert data_verdict(checked).tone == "bad" and data_verdict(checked).details == ("preference: duplicate",)


def test_the_verdicts_four_tests_are_corrected_together():
    """The sampled answers are worse by the judge with p = 0.02: alone clear, of four tests not."""
    result = with_results(sft=0.5, policy=0.5, win=ACROSS)
    result["difference"]["sampled"]["judge_ok"] |= {"value": -0.05, "p_value": 0.02}
    verdict = outcome(result, [REWARD_MODEL], confidence=0.95)
    assert verdict.tone == "open" and re.search(
        r"a true difference of \d+\.\d points \(greedy\) or \d+\.\d points \(sampled\)", verdict.details[1]
    )
    result["difference"]["sampled"]["judge_ok"]["p_value"] = 0.012
    verdict = outcome(result, [REWARD_MODEL], confidence=0.95)
    assert verdict.tone == "bad" and not any("true difference" in detail for detail in verdict.details)


def params_with(*, weight: float = 0.0, **changes) -> dict:
    """With a judge that is measured; changes by dotted key of rl."""
    tree = load_params(CLERK_PARAMS).model_dump()
    tree["rl"]["reward"]["scorers"] = [REWARD_MODEL, JUDGE | {"weight": weight}]
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree["rl"][section][name] = value
    return tree


LIMIT = {"metric": "score_judge", "above": None, "below": 0.3, "fall": None, "window": 1, "patience": 1, "from_step": 1, "action": "stop"}


def test_a_judge_that_chose_the_policy_is_no_stranger_to_it():
    assert judge_selects(params_with()) == []
    assert judge_selects(params_with(evaluation__keep_best=True)) == []  # by the score
    (printed,) = judge_selects(params_with(evaluation__keep_best=True, evaluation__metric="judge"))
    assert printed.startswith("The judge selected this policy during training")
    verdict = outcome(with_results(sft=0.5, policy=0.9, win=ABOVE), [REWARD_MODEL], confidence=0.95, selected=[printed])
    assert verdict.details[-1] == printed
    (printed,) = judge_selects(params_with(monitor__low=LIMIT))
    assert "influences when the training ends (rl.monitor: low)" in printed
    assert judge_selects(params_with(monitor__low=LIMIT | {"action": "warn"})) == []
    (printed,) = judge_selects(params_with(evaluation__metric="judge", monitor__back=LIMIT | {"metric": "kl_mean", "action": "rollback"}))
    assert "If the limit back ends the training, the judge selects" in printed
    rule = params_with(evaluation__keep_best=True, evaluation__metric="mine")
    rule["rl"]["reward"]["scorers"].append({"name": "mine", "kind": "function", "path": "rules.py:good", "weight": 0.0})
    assert judge_selects(rule) == []
    rule["data"]["sources"][0]["judge"] = "rules.py:good"
    assert len(judge_selects(rule)) == 1
    rule["alignment"]["method"] = "dpo"
    assert judge_selects(rule) == []
