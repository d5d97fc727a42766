"""One hand-made run for each possible cause, and the order in which stages are considered."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from clerk_params import CLERK_PARAMS
from report_workspace import curves, evaluation, metrics, set_shares, win_rate

from rlhf_core.config import load_params
from rlhf_core.report.blame import Blame, blame
from rlhf_core.report.inputs import REQUIRED_COLUMNS, ReportInputs

STOPPED = {
    "limit": "kl", "metric": "kl_token_mean", "step": 31, "value": 1.2, "threshold": 1.0, "action": "rollback",
    "message": "step 31: limit kl: expected kl_token_mean at most 1, got 1.2",
}  # fmt: skip


def run(*, judge: bool = True, sft: float = 0.45, policy: float = 0.88, win: float = 0.7, method: str = "rl", **changes) -> ReportInputs:
    """A finished run in which the judge accepts these shares and the reward model prefers the policy that often, in both modes."""
    found, frames = copy.deepcopy(metrics(judge=judge)), curves(np.random.default_rng(0), 60, method)
    result = copy.deepcopy(evaluation(judge=judge))
    for mode in ("greedy", "sampled"):
        if judge:
            set_shares(result, mode, sft=sft, policy=policy)
        result["win_rate"][mode] = win_rate(round(400 * win), 0)
    config = load_params(CLERK_PARAMS)
    scorers = [scorer.model_dump() for scorer in config.evaluation_scorers[1]]
    params = config.model_dump()
    params["alignment"]["method"] = method
    empty = {name: pd.DataFrame(columns=columns) for name, columns in REQUIRED_COLUMNS.items() if name in ("lengths", "heldout", "samples")}
    inputs = ReportInputs(
        title="", params=params, written_params={}, files={}, outs={}, external=[], packages={}, fingerprint="", stopped=None, baselines={},
        evaluation_scorers=scorers, method_scorers=scorers, unusual=[],
        data=found["prepare_data"], validation=found["validation"], model_check=found["check_model"],
        sft=found["train_sft"], reward=found["train_reward"], gate=found["gate"], policy=found["train_policy"], evaluation=result,
        sft_curves=frames["train_sft"], reward_curves=frames["train_reward"], policy_curves=frames["train_policy"], prompts="", **empty,
    )  # fmt: skip
    return replace(inputs, **changes)


def failed_run(**changes) -> ReportInputs:
    """The policy is no better than the SFT model by judge and reward."""
    return run(**{"policy": 0.45, "win": 0.5} | changes)


def test_a_good_run_blames_nobody():
    assert blame(run()) is None
    assert blame(run(judge=False)) is None


def test_data_that_failed_is_named_first_whatever_came_of_it():
    validation = copy.deepcopy(metrics(judge=True)["validation"])
    validation["expectations"][4] |= {"passed": False, "observed": 0.031}  # "duplicate", at most 0.02
    found = blame(run(validation=validation))
    assert (found.stage, found.figure) == ("validate_data", "preference: duplicate is 0.031, expected at most 0.02")
    assert blame(failed_run(validation=validation)).stage == "validate_data"


def test_an_sft_loss_that_did_not_fall():
    curve = run().sft_curves
    still = curve.assign(loss=curve["loss"].where(curve["phase"] == "pretrain", 10.4))
    found = blame(failed_run(sft_curves=still))
    assert (found.stage, found.figure) == ("train_sft", "SFT loss 10.4 in its first steps, 10.4 in its last")
    assert found.checks[0] == "sft.learning_rate, and sft.epochs or sft.steps"
    assert blame(run(sft_curves=still)) is None, "a suspicion is no fault of a run that came out well"
    broken = curve.assign(loss=curve["loss"].where(curve["phase"] == "pretrain", np.nan))
    assert blame(failed_run(sft_curves=broken)).stage == "train_sft"


def test_an_sft_model_trained_past_its_best():
    curve = run().sft_curves
    heldout = pd.Series(np.nan, index=curve.index)
    heldout.iloc[[600, 650, 700, 749]] = [0.9, 0.5, 0.55, 0.58]  # 0.58 / 0.5 = 1.16
    found = blame(failed_run(sft_curves=curve.assign(heldout_loss=heldout)))
    assert (found.stage, found.figure) == ("train_sft", "held-out loss 0.58 at the end, 0.5 at its best")
    heldout.iloc[749] = 0.57  # 1.14
    assert blame(failed_run(sft_curves=curve.assign(heldout_loss=heldout))).stage != "train_sft"


def test_an_sft_model_that_does_not_end_its_answers():
    inputs = failed_run()
    inputs.evaluation["sampled"]["sft"]["truncated_fraction"] = 0.63
    found = blame(inputs)
    assert (found.stage, found.figure) == ("train_sft", "63% of the SFT model’s sampled answers are truncated")


def test_a_reward_model_that_guesses():
    gate = metrics(judge=True)["gate"] | {"accuracy": 0.507, "low": 0.4886, "high": 0.5254, "threshold": 0.0}
    found = blame(failed_run(gate=gate))
    assert found.stage == "train_reward"
    assert found.figure == "held-out accuracy 0.507 on 2812 pairs, at least 0.489; guessing has 0.5"
    assert blame(run(gate=gate)) is None


def test_a_reward_model_trained_past_its_best():
    curve = run().reward_curves
    heldout = pd.Series(np.nan, index=curve.index)
    heldout.iloc[[99, 199, 309]] = [0.5, 0.4, 0.6]
    found = blame(failed_run(reward_curves=curve.assign(heldout_loss=heldout)))
    assert (found.stage, found.figure) == ("train_reward", "held-out loss 0.6 at the end, 0.4 at its best")


def test_a_rejected_reward_model_that_was_used_all_the_same():
    gate = metrics(judge=True)["gate"] | {"passed": False, "message": "rejected: expected more."}
    found = blame(run(gate=gate))
    assert (found.stage, found.figure) == ("gate_reward", "rejected: expected more.")


def test_a_reward_model_that_was_hacked():
    found = blame(run(sft=0.6, policy=0.4, win=0.8))
    assert found.stage == "train_reward" and found.sentence == "The policy exploits errors of the reward model."
    assert found.figure == (
        "the reward prefers the policy on 80.0% of the prompts, the judge accepts 40.0% of its sampled answers and 60.0% of the SFT model’s"
    )


def test_responses_from_another_distribution():
    curve = failed_run().policy_curves
    off = curve.assign(mismatch_kl=np.where(curve["step"] == 17, 0.02, 1e-9))
    found = blame(failed_run(policy_curves=off))
    assert found.stage == "train_policy" and "serving mismatch" in found.sentence
    assert found.figure == "0.02 nats per token between the engine’s and the trainer’s probabilities at step 17"
    # One step off policy they are apart by what the policy has learned in between.
    assert "serving mismatch" not in blame(failed_run(policy_curves=off.assign(policy_lag=1.0))).sentence


def test_distillation_that_came_no_closer_to_its_teachers_is_blamed_and_one_that_did_is_not():
    curve = run().policy_curves.assign(score_mean=np.nan, score_std=np.nan)
    still, fell = (curve.assign(distillation_loss=values) for values in (0.4, np.linspace(0.4, 0.1, len(curve))))
    found = blame(failed_run(policy_curves=still))
    assert (found.stage, found.figure) == (
        "train_policy",
        "divergence from the teachers 0.4 nats per token in the first steps, 0.4 in the last ones",
    )
    assert blame(failed_run(policy_curves=fell)).figure.startswith("share that the judge accepts")


def test_rl_that_did_not_raise_its_reward_or_had_nothing_to_learn_from():
    curve = failed_run().policy_curves
    still = curve.assign(score_mean=0.4, kl_mean=0.003)  # score_std of the first step is 2.1: less than 0.21 was gained
    found = blame(failed_run(policy_curves=still))
    assert (found.stage, found.figure) == ("train_policy", "mean score 0.4 in the first step, 0.4 in the last ones; KL 0.003")
    equal = still.assign(advantage_zero_fraction=0.97)
    assert blame(failed_run(policy_curves=equal)).figure == "97% of the responses had no advantage over the others"


def test_other_ways_to_the_policy_are_judged_by_their_loss():
    inputs = failed_run(method="dpo")
    still = blame(replace(inputs, policy_curves=inputs.policy_curves.assign(loss=0.693)))
    assert (still.stage, still.checks) == ("train_policy", ("dpo.learning_rate, and dpo.epochs or dpo.steps",))
    assert blame(inputs).figure == "share that the judge accepts: +0.0 points greedy, +0.0 sampled, on 400 prompts"


@pytest.mark.parametrize(("policy", "stage"), [(0.47, "evaluate"), (0.45, "train_policy"), (0.2, "train_policy")])
def test_where_no_stage_has_a_figure_against_it(policy: float, stage: str):
    """2 points more on 400 prompts is within chance; nothing more, or less, is the training's."""
    assert blame(run(policy=policy, win=0.5)).stage == stage


def test_with_a_judge_alone_there_is_no_win_rate():
    """No scorer has a weight, as where teachers take the place of a reward."""
    inputs = failed_run()
    for mode in ("greedy", "sampled"):
        inputs.evaluation["win_rate"][mode] |= {"n": 0, "wins": 0, "losses": 0, "ties": 0, "value": None, "low": None, "high": None}
    assert blame(inputs).figure == "share that the judge accepts: +0.0 points greedy, +0.0 sampled, on 400 prompts"


def test_without_a_judge_the_win_rate_counts():
    found = blame(run(judge=False, win=0.52))
    assert (found.stage, found.figure) == ("evaluate", "win rate: +2.0 points greedy, +2.0 sampled, on 400 prompts")


def test_a_policy_that_is_better_in_one_mode_is_not_called_no_better():
    inputs = run(judge=False)
    for mode, win in (("greedy", 0.37), ("sampled", 0.8)):
        inputs.evaluation["win_rate"][mode] = win_rate(round(400 * win), 0)
    found = blame(inputs)
    assert (found.stage, found.figure) == ("evaluate", "win rate: -13.0 points greedy, +30.0 sampled, on 400 prompts")
    assert "the policy is better sampled (win rate 80.0%) and worse greedy (win rate 37.0%)." in found.sentence
    inputs.evaluation["win_rate"]["sampled"] = win_rate(200, 0)
    assert blame(inputs).stage == "train_policy"


def test_a_limit_that_ended_training_is_named_for_a_good_run():
    policy = metrics(judge=True)["train_policy"] | {"monitor": {"stopped": STOPPED, "warnings": [], "chosen_step": 20}}
    assert blame(replace(run(), policy=policy)) == Blame(
        "train_policy",
        STOPPED["message"],
        "The limit kl ended the training at step 31; the best policy before that was kept.",
        ("the column of the limit in plots/train_policy.csv around step 31", "docs/monitors.md: what each limit means"),
    )


def test_earlier_stages_come_first():
    curve, gate = run().sft_curves, metrics(judge=True)["gate"] | {"accuracy": 0.5, "low": 0.48}
    still = curve.assign(loss=curve["loss"].where(curve["phase"] == "pretrain", 10.4))
    inputs = replace(failed_run(), policy_curves=failed_run().policy_curves.assign(score_mean=0.4), gate=gate, sft_curves=still)
    assert blame(inputs).stage == "train_sft"
    assert blame(replace(inputs, sft_curves=curve)).stage == "train_reward"
    assert blame(replace(inputs, sft_curves=curve, gate=metrics(judge=True)["gate"])).stage == "train_policy"


def test_a_training_that_did_not_happen_is_not_blamed():
    """SFT left out, and a policy from elsewhere: neither has curves."""
    inputs = failed_run()
    params = copy.deepcopy(inputs.params)
    params["sft"]["enabled"], params["alignment"]["method"] = False, "external"
    none = {"sft_curves": inputs.sft_curves.iloc[:0], "policy_curves": pd.DataFrame(columns=["step", "loss"])}
    found = blame(replace(inputs, params=params, policy={"method": "external"}, **none))
    assert found.stage == "train_policy" and found.sentence == "The policy from elsewhere is no better here."
    assert found.checks[:2] == ("samples of the policy next to the given model’s", "how the policy was trained elsewhere")


def test_a_given_model_is_at_fault_by_its_name_and_not_by_a_stage_that_did_not_train_it():
    inputs = failed_run()
    assert blame(inputs).title == "Stage at fault: train policy"
    params = copy.deepcopy(inputs.params)
    params["sft"]["enabled"] = False
    inputs.evaluation["sampled"]["sft"]["truncated_fraction"] = 0.63
    found = blame(replace(inputs, params=params, sft_curves=inputs.sft_curves.iloc[:0]))
    assert (found.stage, found.title) == ("train_sft", "At fault: the given model")
