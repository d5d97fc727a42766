"""Names for the model that the policy is compared with, and sentences that hold for a policy from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SFT, GIVEN = "SFT model", "given model"
# Sentences of a policy that this chain trained, and what is known of one from elsewhere.
_OF_TRAINING = {
    " it started from": "",
    ", and the policy starts from it": "",
    "but a policy was trained on it": "but it scored the policy’s answers",
    ": the policy has learned to hack its reward": ": the policy satisfies the reward by other means",
    "No earlier stage explains it: the training did not make the policy better.": "The policy from elsewhere is no better here.",
    "learning rate, steps and KL divergence of the policy’s training": "how the policy was trained elsewhere",
}


def start_name(params: Mapping[str, Any]) -> str:
    """Return the page's name for models/sft: fine-tuned by this chain, or given at model.path.

    params: of any version.
    """
    return SFT if (params.get("sft") or {}).get("enabled", True) else GIVEN


def told(text: str, params: Mapping[str, Any]) -> str:
    """Return a sentence of the page about an SFT model and a trained policy, reworded so that it holds for this run."""
    start = start_name(params)
    if start != SFT:
        text = text.replace(SFT, start).replace("(SFT: ", "(given: ")
    if (params.get("alignment") or {}).get("method") == "external":
        for trained, known in _OF_TRAINING.items():
            text = text.replace(trained, known)
    return text
