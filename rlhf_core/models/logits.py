"""From a language model's hidden states to its logits: what its head says, and what the architecture does to that afterwards.

    logits = cap * tanh(scale * head(hidden) / cap)        without a cap: scale * head(hidden)

Most models have a scale of 1 and no cap. Gemma 2 caps; Cohere, Granite and Falcon-H1 scale. A rule is taken from the model's
configuration and compared with the model's own logits. Where none gives them (ModernBERT's decoder has layers before its head), the model's
own forward is asked.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.models.trying import TRIAL_ERRORS, agree, on_trial

log = logging.getLogger(__name__)

PROBE = 8  # tokens
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier")  # or divisors
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True)
class LogitRule:
    """What is done to the head's output."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        """Logits of the head's output, of the same shape; where they differ, in float32 at least."""
        if self == PLAIN:
            return output
        logits = output.to(torch.promote_types(output.dtype, torch.float32)) * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def output_gradient(self, gradient: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        """The gradient by the head's output, given that by the logits.

        d logits / d output = scale * (1 - (logits / cap)^2)

        Args:
            logits: not looked at without a cap.
        """
        if self.cap is not None:
            gradient = gradient * (1 - (logits / self.cap) ** 2)
        return gradient if self.scale == 1.0 else gradient * self.scale


PLAIN = LogitRule()


@torch.no_grad()
def logit_rule(model: PreTrainedModel, hidden_states: Callable[[torch.Tensor], torch.Tensor]) -> LogitRule | None:
    """The rule by which the model's logits follow from its hidden states, tried on a few tokens; None: no known one.

    Args:
        hidden_states: of token ids [1, T] the trunk's output [T, H], computed as in training.
    Raises:
        ValueError: the model gives no logits for each token of a sequence.
    """
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, PROBE), generator=torch.Generator().manual_seed(0))
    with on_trial(model):
        expected = _own_logits(model, ids.to(model.device))
        try:
            output = model.get_output_embeddings()(hidden_states(ids.to(model.device)))
        except TRIAL_ERRORS as error:
            output, why = None, f"{type(error).__name__}: {error}"
        else:
            why = "none of the rules known for its head's output gives them"
    for rule in _rules(model.config.get_text_config()):
        if output is not None and agree(rule(output), expected):
            return rule
    log.info("model: logits of %s come from its whole forward, which takes longer and more memory (%s)", type(model).__name__, why)
    return None


def _own_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """[T, V], of the model's own forward.

    Raises:
        ValueError: it gives none.
    """
    name = type(model).__name__
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    except TRIAL_ERRORS as error:
        raise ValueError(
            f"model: expected a causal language model, got {name}, whose forward ends in {type(error).__name__} on {ids.shape[1]} tokens: "
            f"{error}; choose another one"
        ) from error
    if logits is None or logits.shape[:-1] != ids.shape:
        got = "none" if logits is None else f"some of shape {tuple(logits.shape)}"
        raise ValueError(f"model: expected logits of shape (1, {ids.shape[1]}, V) from {name}'s forward, got {got}; choose another one")
    return logits[0]


def _rules(config: PretrainedConfig) -> Iterator[LogitRule]:
    """Those that the configuration names come first: near 0 a capped logit is hardly another one."""
    values = [getattr(config, name, None) for name in SCALES]
    scales = [scale for value in values if value for scale in (float(value), 1.0 / value)]
    caps = [float(cap) for name in CAPS if (cap := getattr(config, name, None))]
    for scale, cap in itertools.product([*dict.fromkeys([*scales, 1.0])], [*caps, None]):
        yield LogitRule(scale, cap)
