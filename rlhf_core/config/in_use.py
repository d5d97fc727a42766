"""What a configuration uses: which keys of params.yaml its chain reads, and of which rows there must be some.

One rule for all: what isn't listed here for a method isn't read, so that nothing is asked of it.
"""

from __future__ import annotations

from rlhf_core.config.params import Params

# Whatever the method is. evaluate draws with rl.rollout.backend, ends answers at rl.rollout.stop and scores by rl.reward.scorers.
ALWAYS = (
    *("seed", "model", "data", "validation", "sft", "reward.enabled", "alignment", "evaluation", "report"),
    *("rl.rollout.backend", "rl.rollout.stop", "rl.reward.scorers"),
    *("checkpoints", "cluster", "tracking", "flow", "promotion"),
)
REWARD_MODEL = ("reward", "gate")  # with reward.enabled
ROUNDS = ("iterative", "dpo")  # of the flow iterative-dpo

Rows = tuple[str, str]  # use and split


def keys_in_use(params: Params, *, rounds: bool = False) -> tuple[str, ...]:
    """Sections and keys that are read, each with all below it. The way to the policy is the section of its name.

    Args:
        rounds: for a series of rounds, which reads further ones.
    """
    return (*ALWAYS, params.alignment.method, *(REWARD_MODEL if params.reward.enabled else ()), *(ROUNDS if rounds else ()))


def is_in_use(key: str, used: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in used)


def rows_needed(params: Params) -> tuple[Rows, ...]:
    """Uses and splits of data/prepared without whose rows a stage has nothing to do.

    train_sft reads demonstrations and evaluate asks held-out prompts. Reward model and gate read preferences of the splits train and test;
    DPO, KTO and conditional SFT learn from those of train, RL and rejection sampling from prompts.
    """
    needed: list[Rows] = [("sft", "train"), ("prompt", "test")]
    if params.reward.enabled:
        needed += [("preference", "train"), ("preference", "test")]
    needed.append(("prompt" if params.method_scorers is not None else "preference", "train"))
    return tuple(sorted(set(needed)))


def needs_pairs(params: Params) -> bool:
    """Whether something learns from two responses to one prompt; KTO and conditional SFT take single responses with a label too."""
    return params.reward.enabled or params.alignment.method == "dpo"
