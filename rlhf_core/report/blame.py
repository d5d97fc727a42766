"""The stage at fault when a policy is no better than the SFT model: the figure that shows it, and what to check.

Stages are checked in the order of the chain, since each builds on the one before. The first with a figure against it is named; the
training of the policy is named last, if no earlier stage explains the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from rlhf_core.report.inputs import ReportInputs, need
from rlhf_core.report.naming import GIVEN, SFT, start_name, told
from rlhf_core.report.verdict import (
    MODES,
    NOT_COMPARED,
    by_mode,
    judge_direction,
    judged,
    outcome,
    reward_direction,
)

LEARNED = 0.98  # final over initial loss above which nothing was learned
OVERFITTED = 1.15  # final over lowest held-out loss above which the model is overfitted
EDGE = 10  # steps averaged at the beginning and the end of a curve
ENDLESS = 0.5  # share of the SFT model's sampled answers that are truncated
MISMATCH = 1e-3  # nats per token between rollout engine and trainer; in sync it is below 1e-6 in float32
GAINED = 0.1  # least gain of RL's mean score, in standard deviations of the first step's scores
UNLEARNING = 0.9  # share of responses with an advantage of zero


@dataclass(frozen=True)
class Blame:
    """The stage at fault.

    stage: its name in dvc.yaml. figure: the measurement and its limit. sentence: what happened. checks: what to check, most likely cause
    first. title: the name that the page gives it, also to a model that no stage has trained.
    """

    stage: str
    figure: str
    sentence: str
    checks: tuple[str, ...]
    title: str = field(default="", compare=False)


def blame(inputs: ReportInputs) -> Blame | None:
    """The stage at fault; None if the policy is better than the SFT model, or if nothing compared the two and no stage refused its work.

    A refusal (data that failed validation, an overridden gate, a limit of the monitor) is named whatever the outcome. A suspicion (such as
    a loss that didn't fall) is named only if the outcome isn't good.
    """
    refused = next(_refusals(inputs), None)
    good = outcome(inputs.evaluation, inputs.evaluation_scorers, confidence=need(inputs.params, "evaluation", "confidence"))
    if good.tone == "good" or good == NOT_COMPARED:
        return refused and _told(refused, inputs)
    order = ["validate_data", "train_sft", "train_reward", "gate_reward", "train_policy", "evaluate"]
    found = [*([refused] if refused else []), *_suspicions(inputs)]
    return _told(min(found, key=lambda b: order.index(b.stage)), inputs)


def _told(found: Blame, inputs: ReportInputs) -> Blame:
    params = inputs.params
    checks = tuple(told(check, params) for check in found.checks)
    is_given = found.stage == "train_sft" and start_name(params) == GIVEN
    title = f"At fault: the {GIVEN}" if is_given else f"Stage at fault: {found.stage.replace('_', ' ')}"
    return replace(found, figure=told(found.figure, params), sentence=told(found.sentence, params), checks=checks, title=title)


def _refusals(inputs: ReportInputs) -> Iterator[Blame]:
    failed = [e for e in need(inputs.validation, "expectations") if not e["passed"]]
    if failed:
        first = failed[0]
        figure = f"{first['use']}: {first['name']} is {_number(first['observed'])}, expected {first['bound']} {_number(first['limit'])}"
        yield Blame(
            "validate_data",
            figure,
            f"The data failed {len(failed)} of its expectations.",
            ("the rows that validation names, in metrics/validation.json", "the sources' columns and format in data.sources"),
        )
    if need(inputs.gate, "needed") and not need(inputs.gate, "passed"):
        yield Blame(
            "gate_reward",
            str(need(inputs.gate, "message")),
            "The reward model did not pass its gate, but a policy was trained on it.",
            ("the gate's checks, in metrics/gate.json", "more or cleaner pairs, or longer training of the reward model"),
        )
    for judge in (judge for judge in need(inputs.gate, "llm_judges") if not judge["passed"]):
        yield Blame(
            "gate_reward",
            f"{judge['key']}: {judge['message']}",
            f"The judge {judge['name']} did not pass its gate, but a policy was trained on it.",
            ("the judge's checks, in metrics/gate.json", "a better judge, another mode or template, or clearer criteria"),
        )
    stopped = inputs.policy.get("monitor", {}).get("stopped")
    if stopped is not None:
        what = "the best policy before that was kept" if stopped["action"] == "rollback" else "the policy of that step was kept"
        yield Blame(
            "train_policy",
            stopped["message"],
            f"The limit {stopped['limit']} ended the training at step {stopped['step']}; {what}.",
            (f"the column of the limit in plots/train_policy.csv around step {stopped['step']}", "docs/monitors.md: what each limit means"),
        )


def _suspicions(inputs: ReportInputs) -> Iterator[Blame]:
    """Figures that speak against each stage, in the order of the chain; the last one always exists."""
    yield from _sft(inputs)
    if need(inputs.gate, "needed"):
        yield from _reward_model(inputs)
    if inputs.method == "rl":
        yield from _serving(inputs.policy_curves)
        yield from _rl(inputs)
    elif inputs.method != "external":
        yield from _offline(inputs)
    yield _too_close(inputs)


def _sft(inputs: ReportInputs) -> Iterator[Blame]:
    curve = inputs.sft_curves[inputs.sft_curves["phase"] == "sft"]
    start, end = curve["loss"].head(EDGE).mean(), curve["loss"].tail(EDGE).mean()
    truncated = need(inputs.evaluation, "sampled", "sft", "truncated_fraction")
    if start_name(inputs.params) != SFT:
        if truncated > ENDLESS:
            yield Blame(
                "train_sft",
                f"{truncated:.0%} of the given model’s sampled answers are truncated",
                "The given model does not end its answers, and the policy starts from it.",
                ("whether model.chat_template is the one that it was trained with", "evaluation.max_new_tokens", "SFT first (sft.enabled)"),
            )
        return
    if not end <= LEARNED * start:
        yield Blame(
            "train_sft",
            f"SFT loss {start:.3g} in its first steps, {end:.3g} in its last",
            "The SFT model has learned almost nothing, and all later stages start from it.",
            (
                "sft.learning_rate, and sft.epochs or sft.steps",
                "whether the demonstrations’ prompts and responses match",
                "sft.lora, if set: its rank",
            ),
        )
    elif _overfitted(curve["heldout_loss"]):
        yield _overfit("train_sft", "SFT model", curve["heldout_loss"], "sft.epochs or sft.steps, or more demonstrations")
    if truncated > ENDLESS:
        yield Blame(
            "train_sft",
            f"{truncated:.0%} of the SFT model’s sampled answers are truncated",
            "The SFT model does not end its answers.",
            ("whether demonstrations end with the end token of the chat template", "evaluation.max_new_tokens", "sft.epochs or sft.steps"),
        )


def _process_reward_model(found: Mapping[str, Any]) -> Iterator[Blame]:
    if found["n"] and found["low"] <= 0.1:
        yield Blame(
            "train_reward",
            f"F1 {found['f1']:.3f} of finding the first wrong step in {found['n']} responses, at least {found['low']:.3f}",
            "The process reward model hardly finds first wrong steps, so its rewards are noise.",
            ("whether the labels of steps are mapped correctly", "reward.learning_rate, and reward.epochs or reward.steps"),
        )


def _reward_model(inputs: ReportInputs) -> Iterator[Blame]:
    accuracy, low, n = (need(inputs.gate, key) for key in ("accuracy", "low", "n"))
    is_trained = inputs.params["reward"].get("path") is None
    if "first_error" in inputs.gate:
        yield from _process_reward_model(inputs.gate["first_error"])
    elif low <= 0.5:
        yield Blame(
            "train_reward",
            f"held-out accuracy {accuracy:.3f} on {n} pairs, at least {low:.3f}; guessing has 0.5",
            "The reward model is no better than guessing, so its rewards are noise.",
            (
                "whether the columns chosen and rejected are mapped correctly",
                "reward.learning_rate, and reward.epochs or reward.steps" if is_trained else "the model at reward.path",
                "gate.min_accuracy",
            ),
        )
    elif _overfitted(inputs.reward_curves["heldout_loss"]):
        yield _overfit("train_reward", "reward model", inputs.reward_curves["heldout_loss"], "reward.epochs or reward.steps, or more pairs")
    confidence = need(inputs.params, "evaluation", "confidence")
    if (reward_direction(inputs.evaluation, confidence), judge_direction(inputs.evaluation, confidence)) == ("better", "worse"):
        sft, policy = (judged(inputs.evaluation, "sampled", model) for model in ("sft", "policy"))
        rate = need(inputs.evaluation, "win_rate", "sampled", "value")
        yield Blame(
            "train_reward",
            f"the reward prefers the policy on {rate:.1%} of the prompts, the judge accepts {policy[0] / policy[1]:.1%} of its sampled "
            f"answers and {sft[0] / sft[1]:.1%} of the SFT model’s",
            "The policy exploits errors of the reward model.",
            (
                "what the samples with the largest gain in score have in common",
                "preference pairs that show this error, for the reward model",
                "a higher rl.kl.coef, or a limit in rl.monitor",
            ),
        )


def _serving(curves: pd.DataFrame) -> Iterator[Blame]:
    if "mismatch_kl" not in curves or "policy_lag" in curves:  # with rollouts ahead they differ by what was learned since
        return
    worst = curves.loc[curves["mismatch_kl"].fillna(0.0).idxmax()]
    if worst["mismatch_kl"] > MISMATCH:
        yield Blame(
            "train_policy",
            f"{worst['mismatch_kl']:.2g} nats per token between the engine’s and the trainer’s probabilities at step {int(worst['step'])}",
            "Rollout engine and trainer disagree about the policy’s probabilities: a serving mismatch.",
            ("rl.rollout.max_logprob_difference, which is too high to stop such a run", "rl.correction", "model.dtype"),
        )


def _rl(inputs: ReportInputs) -> Iterator[Blame]:
    curves = inputs.policy_curves
    if curves["score_mean"].isna().all():
        yield from _distillation(curves["distillation_loss"])
        return
    start, end = curves["score_mean"].iloc[0], curves["score_mean"].tail(EDGE).mean()
    unlearned = curves["advantage_zero_fraction"].mean() if "advantage_zero_fraction" in curves else math.nan
    if unlearned > UNLEARNING:
        yield Blame(
            "train_policy",
            f"{unlearned:.0%} of the responses had no advantage over the others",
            "RL had no learning signal: nearly all responses to a prompt got the same reward.",
            ("whether the reward distinguishes good from bad responses of this model", "rl.dynamic_sampling", "group_size"),
        )
    elif not end - start > GAINED * curves["score_std"].iloc[0]:
        yield Blame(
            "train_policy",
            f"mean score {start:.3g} in the first step, {end:.3g} in the last ones; KL {curves['kl_mean'].tail(EDGE).mean():.3g}",
            "RL did not raise its own reward.",
            (
                "rl.learning_rate, and rl.epochs or rl.steps",
                "rl.kl.coef, if the KL stays near 0",
                "grad_norm and entropy in plots/train_policy.csv",
            ),
        )


def _distillation(loss: pd.Series) -> Iterator[Blame]:
    start, end = loss.head(EDGE).mean(), loss.tail(EDGE).mean()
    if not end <= LEARNED * start:
        yield Blame(
            "train_policy",
            f"divergence from the teachers {start:.3g} nats per token in the first steps, {end:.3g} in the last ones",
            "The policy did not come closer to its teachers.",
            ("rl.learning_rate, and rl.epochs or rl.steps", "rl.distillation.loss and coef", "rl.kl.coef, which holds it back"),
        )


def _offline(inputs: ReportInputs) -> Iterator[Blame]:
    loss = inputs.policy_curves["loss"]
    start, end = loss.head(EDGE).mean(), loss.tail(EDGE).mean()
    if not end <= LEARNED * start:
        yield Blame(
            "train_policy",
            f"loss {start:.3g} in the first steps, {end:.3g} in the last",
            "The training of the policy has learned almost nothing.",
            (f"{inputs.method}.learning_rate, and {inputs.method}.epochs or {inputs.method}.steps",),
        )


def _too_close(inputs: ReportInputs) -> Blame:
    """The reason where no figure speaks against a stage: few prompts, results that differ by mode, or a reward that misses the goal."""
    confidence = need(inputs.params, "evaluation", "confidence")
    if need(inputs.evaluation, "judge"):
        shares = [(judged(inputs.evaluation, mode, "policy"), judged(inputs.evaluation, mode, "sft")) for mode in MODES]
        gains, source = [p[0] / p[1] - s[0] / s[1] for p, s in shares], "share that the judge accepts"
    else:
        gains, source = [need(inputs.evaluation, "win_rate", mode, "value") - 0.5 for mode in MODES], "win rate"
    figure = (
        f"{source}: {100 * gains[0]:+.1f} points greedy, {100 * gains[1]:+.1f} sampled, "
        f"on {need(inputs.evaluation, 'greedy', 'sft', 'n')} prompts"
    )
    apart = by_mode(inputs.evaluation, "judge" if need(inputs.evaluation, "judge") else "reward", confidence)
    if apart is not None and not apart.worse_alone:
        return Blame(
            "evaluate",
            figure,
            f"No figure of an earlier stage explains this: {apart.sentence}",
            ("samples of both modes next to the SFT model’s", "rl.kl.coef and the steps, if it is worse in one mode", "evaluation.prompts"),
        )
    if min(gains) > 0:
        return Blame(
            "evaluate",
            figure,
            "The policy looks better, but on so few prompts this can be chance.",
            ("evaluation.prompts", "longer training"),
        )
    return Blame(
        "train_policy",
        figure,
        "No earlier stage explains it: the training did not make the policy better.",
        ("samples of the policy next to the SFT model’s", "learning rate, steps and KL divergence of the policy’s training", "the reward"),
    )


def _overfitted(heldout: pd.Series) -> bool:
    known = heldout.dropna()
    return len(known) > 1 and bool(known.iloc[-1] > OVERFITTED * known.min())


def _overfit(stage: str, model: str, heldout: pd.Series, check: str) -> Blame:
    known = heldout.dropna()
    return Blame(
        stage,
        f"held-out loss {known.iloc[-1]:.3g} at the end, {known.min():.3g} at its best",
        f"The {model} is overfitted: it was trained past its best step.",
        (check,),
    )


def _number(value: float) -> str:
    return f"{value:.4g}"
