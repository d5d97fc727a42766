"""Which stage is to blame when a run came to nothing, by which figure, and what to look at.

Stages are asked in the order of the chain, since each builds on the one before: the first that has a figure against it is named, and the
policy's training only where nothing before it explains the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from rlhf_core.report.inputs import ReportInputs, need
from rlhf_core.report.verdict import (
    MODES,
    NOT_COMPARED,
    by_mode,
    evaluation_scorers,
    judge_direction,
    judged,
    outcome,
    reward_direction,
)

LEARNED = 0.98  # a loss that is still above this share of where it began has not been learned from
OVERFITTED = 1.15  # a held-out loss this many times its lowest value has been passed long ago
EDGE = 10  # steps at a curve's beginning and end that are averaged
ENDLESS = 0.5  # share of the SFT model's sampled answers that are cut off
MISMATCH = 1e-3  # nats per token between the sampling engine and the trainer; a run in sync is below 1e-6 in float32
GAINED = 0.1  # standard deviations of the first step's scores by which RL must have raised their mean
UNLEARNING = 0.9  # share of responses whose advantages are all zero


@dataclass(frozen=True)
class Blame:
    """stage: of dvc.yaml. figure: the measurement, with its value and what it is held against. sentence: what happened.
    look_at: what to do next, most promising first.
    """

    stage: str
    figure: str
    sentence: str
    look_at: tuple[str, ...]


def blame(inputs: ReportInputs) -> Blame | None:
    """None: the policy is better than the SFT model or nothing compared the two, every stage has accepted its work, and no limit ended the
    training.

    A stage's own refusal (data that failed validation, a reward model that failed its gate and was used all the same, a limit of the
    monitor) is named whatever the outcome; a suspicion (a loss that didn't fall) only where the outcome is not good.
    """
    refused = next(_refusals(inputs), None)
    good = outcome(inputs.evaluation, evaluation_scorers(inputs.params), confidence=need(inputs.params, "evaluation", "confidence"))
    if good.tone == "good" or good == NOT_COMPARED:
        return refused
    order = ["validate_data", "train_sft", "train_reward", "gate_reward", "train_policy", "evaluate"]
    found = [*([refused] if refused else []), *_suspicions(inputs)]
    return min(found, key=lambda b: order.index(b.stage))


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
            "The reward model did not pass its gate, and a policy was trained on it all the same.",
            ("the gate's checks, in metrics/gate.json", "more or cleaner pairs, or longer training of the reward model"),
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
    """What speaks against each stage, in the order of the chain; the last one is always there."""
    yield from _sft(inputs)
    if need(inputs.gate, "needed"):
        yield from _reward_model(inputs)
    if inputs.method == "rl":
        yield from _serving(inputs.policy_curves)
        yield from _rl(inputs)
    else:
        yield from _offline(inputs)
    yield _too_close(inputs)


def _sft(inputs: ReportInputs) -> Iterator[Blame]:
    curve = inputs.sft_curves[inputs.sft_curves["phase"] == "sft"]
    start, end = curve["loss"].head(EDGE).mean(), curve["loss"].tail(EDGE).mean()
    truncated = need(inputs.evaluation, "sampled", "sft", "truncated_fraction")
    if not end <= LEARNED * start:
        yield Blame(
            "train_sft",
            f"SFT loss {start:.3g} in its first steps, {end:.3g} in its last",
            "The SFT model has learned next to nothing, and everything after it starts from there.",
            (
                "sft.learning_rate and sft.steps",
                "the demonstrations: do prompts and responses belong together?",
                "sft.lora, if set: its rank",
            ),
        )
    elif _overfitted(curve["heldout_loss"]):
        yield _overfit("train_sft", "SFT model", curve["heldout_loss"], "sft.steps, or more demonstrations")
    if truncated > ENDLESS:
        yield Blame(
            "train_sft",
            f"{truncated:.0%} of the SFT model’s sampled answers are cut off",
            "The SFT model does not end its answers.",
            ("whether demonstrations end with the end token of the chat template", "evaluation.max_new_tokens", "sft.steps"),
        )


def _reward_model(inputs: ReportInputs) -> Iterator[Blame]:
    accuracy, low, n = (need(inputs.gate, key) for key in ("accuracy", "low", "n"))
    if low <= 0.5:
        yield Blame(
            "train_reward",
            f"held-out accuracy {accuracy:.3f} on {n} pairs, at least {low:.3f}; guessing has 0.5",
            "The reward model cannot be told from guessing, so that whatever it rewards is chance.",
            ("whether chosen and rejected are what their columns say", "reward.learning_rate and reward.epochs", "gate.min_accuracy"),
        )
    elif _overfitted(inputs.reward_curves["heldout_loss"]):
        yield _overfit("train_reward", "reward model", inputs.reward_curves["heldout_loss"], "reward.epochs, or more pairs")
    confidence = need(inputs.params, "evaluation", "confidence")
    if (reward_direction(inputs.evaluation, confidence), judge_direction(inputs.evaluation, confidence)) == ("better", "worse"):
        sft, policy = (judged(inputs.evaluation, "sampled", model) for model in ("sft", "policy"))
        rate = need(inputs.evaluation, "win_rate", "sampled", "value")
        yield Blame(
            "train_reward",
            f"the reward prefers the policy on {rate:.1%} of the prompts, the judge accepts {policy[0] / policy[1]:.1%} of its sampled "
            f"answers and {sft[0] / sft[1]:.1%} of the SFT model’s",
            "The policy has found what the reward model is wrong about.",
            (
                "samples with the largest gain in score: what do they have in common?",
                "pairs that show this fault, for the reward model",
                "a higher rl.kl.coef, or a limit in rl.monitor",
            ),
        )


def _serving(curves: pd.DataFrame) -> Iterator[Blame]:
    if "mismatch_kl" not in curves or "policy_lag" in curves:  # one step off policy the two are apart by the step between them
        return
    worst = curves.loc[curves["mismatch_kl"].fillna(0.0).idxmax()]
    if worst["mismatch_kl"] > MISMATCH:
        yield Blame(
            "train_policy",
            f"{worst['mismatch_kl']:.2g} nats per token between the engine’s and the trainer’s probabilities at step {int(worst['step'])}",
            "The responses came from another distribution than the one that was trained: a serving mismatch.",
            ("rl.rollout.max_logprob_difference, which was raised to let this pass", "rl.correction", "model.dtype"),
        )


def _rl(inputs: ReportInputs) -> Iterator[Blame]:
    curves = inputs.policy_curves
    start, end = curves["score_mean"].iloc[0], curves["score_mean"].tail(EDGE).mean()
    unlearned = curves["advantage_zero_fraction"].mean() if "advantage_zero_fraction" in curves else math.nan
    if unlearned > UNLEARNING:
        yield Blame(
            "train_policy",
            f"{unlearned:.0%} of the responses had no advantage over the others",
            "RL had nothing to learn from: nearly all responses to a prompt got the same reward.",
            ("whether the reward tells good from bad responses of this model", "rl.dynamic_sampling", "group_size"),
        )
    elif not end - start > GAINED * curves["score_std"].iloc[0]:
        yield Blame(
            "train_policy",
            f"mean score {start:.3g} in the first step, {end:.3g} in the last ones; KL {curves['kl_mean'].tail(EDGE).mean():.3g}",
            "RL did not raise its own reward.",
            ("rl.learning_rate and rl.steps", "rl.kl.coef, if the KL stays near 0", "grad_norm and entropy in plots/train_policy.csv"),
        )


def _offline(inputs: ReportInputs) -> Iterator[Blame]:
    loss = inputs.policy_curves["loss"]
    start, end = loss.head(EDGE).mean(), loss.tail(EDGE).mean()
    if not end <= LEARNED * start:
        yield Blame(
            "train_policy",
            f"loss {start:.3g} in the first steps, {end:.3g} in the last",
            "The policy’s training has learned next to nothing.",
            (f"{inputs.method}.learning_rate and {inputs.method}.steps",),
        )


def _too_close(inputs: ReportInputs) -> Blame:
    """No stage has a figure against it: too few prompts were asked, the modes differ, or what was learned is not what counts."""
    confidence = need(inputs.params, "evaluation", "confidence")
    gains = [need(inputs.evaluation, "win_rate", mode, "value") - 0.5 for mode in MODES]
    source = "win rate"
    if need(inputs.evaluation, "judge"):
        shares = [(judged(inputs.evaluation, mode, "policy"), judged(inputs.evaluation, mode, "sft")) for mode in MODES]
        gains, source = [p[0] / p[1] - s[0] / s[1] for p, s in shares], "share that the judge accepts"
    figure = (
        f"{source}: {100 * gains[0]:+.1f} points greedy, {100 * gains[1]:+.1f} sampled, "
        f"on {need(inputs.evaluation, 'greedy', 'sft', 'n')} prompts"
    )
    apart = by_mode(inputs.evaluation, "judge" if need(inputs.evaluation, "judge") else "reward", confidence)
    if apart is not None and not apart.worse_alone:
        return Blame(
            "evaluate",
            figure,
            f"No figure of an earlier stage explains it: {apart.sentence}",
            ("samples of both modes beside the SFT model’s", "rl.kl.coef and the steps, if it is worse in one mode", "evaluation.prompts"),
        )
    if min(gains) > 0:
        return Blame(
            "evaluate",
            figure,
            "The policy looks better, but on so few prompts that can be chance.",
            ("evaluation.prompts", "longer training"),
        )
    return Blame(
        "train_policy",
        figure,
        "No figure of an earlier stage explains it: the training of the policy did not make it better.",
        ("samples of the policy beside the SFT model’s", "learning rate, steps and the divergence of the policy’s training", "the reward"),
    )


def _overfitted(heldout: pd.Series) -> bool:
    known = heldout.dropna()
    return len(known) > 1 and bool(known.iloc[-1] > OVERFITTED * known.min())


def _overfit(stage: str, model: str, heldout: pd.Series, look_at: str) -> Blame:
    known = heldout.dropna()
    return Blame(
        stage,
        f"held-out loss {known.iloc[-1]:.3g} at the end, {known.min():.3g} at its best",
        f"The {model} was trained past its best.",
        (look_at,),
    )


def _number(value: float) -> str:
    return f"{value:.4g}"
