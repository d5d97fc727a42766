"""The method that fits the data and the model, with its reason, and what it leaves out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_core.look.facts import DataFacts, ModelFacts

# Below this, chat models solve hardly any task of GSM8K without training on solutions: about one in a hundred with 135M parameters.
SOLVES_FROM = 400_000_000  # parameters
COMPARED = 0.9  # share of the labels that a scorer must be able to compare
NO_VERDICT = (
    "no verdict on the answers, because nothing judges them: the report has curves and samples; for a verdict set reward.enabled=true, "
    "whose reward model then scores both models' answers, give the source a judge, or name a scorer in evaluation.scorers (docs/scorers.md)"
)


@dataclass(frozen=True)
class Choice:
    """The chosen method, with the reason.

    name: empty if the data is enough for no method. why: the reason. left_out: what else could be done, and how.
    sft: whether SFT comes first; sft_why: the reason. uses: uses of the data's source. settings: keys of params.yaml that the method needs.
    """

    name: Literal["dpo", "kto", "grpo", "sft", ""]
    why: str
    sft: bool = False
    sft_why: str = ""
    uses: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


def choose(data: DataFacts, model: ModelFacts) -> Choice:
    """Return the method for this data, with its reason.

    DPO for pairs, KTO for marked responses, GRPO for prompts with labels that a program can compare, SFT alone for demonstrations.
    """
    if data.pairs and data.pairs >= data.marked:
        return _preference(
            data,
            model,
            "dpo",
            f"{data.pairs:,} pairs: DPO learns from them directly",
            "no reward model and no RL, because DPO needs neither; for RL set alignment.method=rl, reward.enabled=true "
            "and rl.rollout.max_new_tokens, which has to fit into model.max_length with the prompts",
        )
    if data.marked:
        return _preference(
            data,
            model,
            "kto",
            f"{data.marked:,} responses, each marked good or bad and without a partner: KTO learns from them directly",
            "no reward model, which needs two responses to one prompt",
        )
    kind, share = _verifier(data)
    if kind:
        return _verified(data, model, kind, share)
    if data.rows("sft"):
        return _demonstrations(data, model)
    return _nothing(data)


def _preference(data: DataFacts, model: ModelFacts, name: Literal["dpo", "kto"], why: str, left_out: str) -> Choice:
    sft, sft_why = _sft(data, model, good="the good responses")
    uses = ("sft", "preference", "prompt") if sft else ("preference", "prompt")
    settings = {"reward.enabled": False, "alignment.method": name}
    return Choice(name, why, sft, sft_why, uses, (left_out, NO_VERDICT), settings)


def _sft(data: DataFacts, model: ModelFacts, *, good: str) -> tuple[bool, str]:
    if model.is_chat:
        return False, "it is a chat model, which already answers; SFT would only pull it towards this data's style"
    if not data.rows("sft"):
        return False, "the data has no demonstrations"
    return True, f"it is a base model, which learns to answer from {good} first"


def _verifier(data: DataFacts) -> tuple[str, float]:
    """Return the kind of scorer that compares most labels, and their share; empty if it can't compare nearly all of them.

    math reads numbers too, and exact_match any text.
    """
    labels, total = data.labels, data.labels.total()
    readable = {
        "number": labels["number"],
        "math": labels["number"] + labels["math"],
        "exact_match": labels["exact_match"] + labels["number"] + labels["math"],
    }
    for kind, count in readable.items():
        if total and count >= COMPARED * total:
            return kind, count / total
    return "", 0.0


def _verified(data: DataFacts, model: ModelFacts, kind: str, share: float) -> Choice:
    sft, why = _sft(data, model, good="the solutions")
    small = model.parameters is not None and model.parameters < SOLVES_FROM
    if model.is_chat and small and data.rows("sft"):
        sft, why = True, f"a chat model of {model.parameters / 1e6:.0f}M parameters solves too few tasks by itself for RL to learn from"
    elif model.is_chat and data.rows("sft"):
        why = "it is a chat model, whose own solutions are better training than short ones of the data; if it solves under a few percent "
        why += "of the prompts, set sft.enabled=true and add sft to the uses"
    reads = {"number": "the last number of a response", "math": "a response's last expression", "exact_match": "the whole response"}
    compares = (
        f"{data.rows('prompt'):,} prompts with answers: GRPO, with {reads[kind]} compared with the label as the reward (scorer {kind})"
    )
    settings = {
        "reward.enabled": False,
        "alignment.method": "rl",
        "rl.algorithm": "grpo",
        "rl.reward.scorers": [{"name": "correct", "kind": kind}],
        "rl.reward.no_eos_penalty": 0.0,  # in units of a reward model's scores
        "rl.kl.coef": 0.001,  # as verl's and DeepSeek-R1's; a verifier can't be deceived as a reward model can
    }
    if small:  # most groups fail as a whole and teach nothing
        settings["rl.dynamic_sampling.enabled"] = True
    left_out = ["no reward model, because the labels say what is right"]
    if share < 1:
        left_out.append(
            f"{1 - share:.1%} of the labels are of another kind: the scorer {kind} leaves their responses unscored or gives them 0"
        )
    return Choice("grpo", compares, sft, why, ("sft", "prompt") if sft else ("prompt",), tuple(left_out), settings)


def _demonstrations(data: DataFacts, model: ModelFacts) -> Choice:
    # The chain's end compares the SFT model with the model that it started from, as a policy from elsewhere.
    settings = {"reward.enabled": False, "alignment.method": "external", "external.path": model.path}
    left_out = ("no alignment: pairs, marked responses or answers that a program can compare would be needed",)
    why = (
        f"{data.rows('sft'):,} demonstrations and nothing that says which answer is better: SFT alone; end the chain with --until train_sft"
    )
    return Choice("sft", why, True, "it is all that the data is for", ("sft", "prompt"), left_out, settings)


def _nothing(data: DataFacts) -> Choice:
    if data.rows("stepwise"):
        why = (
            "responses with labelled steps train a process reward model: add demonstrations or a chat model, and set reward.step_separator "
        )
        return Choice("", f"{why}(docs/process.md)", uses=("stepwise", "prompt"))
    if data.rows("prompt"):
        long = "the labels are long texts that no program can compare, and there" if data.labels["text"] else "there"
        why = f"{long} are no demonstrations, pairs or answers to compare with: RL on these prompts needs a reward, such as reward.path (a "
        return Choice("", f"{why}reward model from elsewhere) or a scorer of kind function (docs/scorers.md)", uses=("prompt",))
    why = "plain text is for the pretraining of a new model (model.path: null); a pretrained one needs demonstrations: prompt and response"
    return Choice("", why, uses=("pretrain",))
