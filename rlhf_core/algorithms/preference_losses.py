"""Losses on pairs of which a person preferred one, and on single responses that a person found good or bad."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen_scores: torch.Tensor, rejected_scores: torch.Tensor, *, margin: float | torch.Tensor, centering_coef: float
) -> torch.Tensor:
    """Negative log-likelihood of the preferences under a Bradley-Terry model, per pair.

    -log sigmoid(s_chosen - s_rejected - margin) + centering_coef * (s_chosen + s_rejected)^2

    Sources: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 1; the margin, Llama 2, https://arxiv.org/abs/2307.09288,
    equation 2; the centring, which fixes the scores' free offset, Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244.

    Args:
        chosen_scores, rejected_scores: [B].
        margin: by how much the chosen score should lead; one number, or [B].
        centering_coef: 0 leaves the offset free.
    Returns:
        [B]; sum and divide by the pairs of the optimizer step.
    """
    likelihood = logsigmoid(chosen_scores - rejected_scores - margin)
    return centering_coef * (chosen_scores + rejected_scores).square() - likelihood


class PairLogprobs(NamedTuple):
    """Log-probabilities of B pairs, each [B]: summed over the response's tokens, its end included, and how many tokens those are.

    The policy's carry the gradient; the reference's (ref_) are of the model that training started from, and a loss without a reference
    doesn't look at them.
    """

    chosen_logprobs: torch.Tensor
    rejected_logprobs: torch.Tensor
    ref_chosen_logprobs: torch.Tensor
    ref_rejected_logprobs: torch.Tensor
    chosen_lengths: torch.Tensor
    rejected_lengths: torch.Tensor

    def per_token(self) -> PairLogprobs:
        """Means over each response's tokens in the place of sums."""
        c, r = self.chosen_lengths, self.rejected_lengths
        return PairLogprobs(
            self.chosen_logprobs / c, self.rejected_logprobs / r, self.ref_chosen_logprobs / c, self.ref_rejected_logprobs / r, c, r
        )

    def log_ratios(self) -> tuple[torch.Tensor, torch.Tensor]:
        """log policy / reference of the chosen and of the rejected response, [B] each."""
        return self.chosen_logprobs - self.ref_chosen_logprobs, self.rejected_logprobs - self.ref_rejected_logprobs


class PairLosses(NamedTuple):
    """Losses [B] of pairs, to be summed and divided by the pairs of the optimizer step, and their implicit rewards [B], detached."""

    losses: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor


def sigmoid(pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0) -> PairLosses:
    """DPO; with label smoothing, conservative DPO.

    -(1 - eps) log sigmoid(h) - eps log sigmoid(-h),   h = beta (log ratio of chosen - log ratio of rejected)
    Sources: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7; eps, the share of labels that is taken to be flipped,
    Mitchell 2023, https://ericmitchell.ai/cdpo.pdf.

    The paper sums over tokens. With `pairs.per_token()` it is the length-normalised loss of Tulu 3, https://arxiv.org/abs/2411.15124.
    """
    chosen, rejected = _rewards(pairs, beta)
    h = chosen - rejected
    return _with_rewards(-(1 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h), chosen, rejected)


def robust(pairs: PairLogprobs, *, beta: float, label_smoothing: float) -> PairLosses:
    """DPO whose expectation under flipped labels is DPO's under clean ones (rDPO).

    (-(1 - eps) log sigmoid(h) + eps log sigmoid(-h)) / (1 - 2 eps),   h as of `sigmoid`
    Source: Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409. Some implementations leave the denominator out,
    which scales the learning rate. The loss has no lower bound in h.

    Args:
        label_smoothing: eps, below 0.5: the share of the labels that is flipped.
    """
    chosen, rejected = _rewards(pairs, beta)
    h = chosen - rejected
    losses = (-(1 - label_smoothing) * logsigmoid(h) + label_smoothing * logsigmoid(-h)) / (1 - 2 * label_smoothing)
    return _with_rewards(losses, chosen, rejected)


def hinge(pairs: PairLogprobs, *, beta: float) -> PairLosses:
    """max(0, 1 - h), h as of `sigmoid`: nothing is learned from a pair whose rewards are 1 apart.

    Source: SLiC, Zhao et al. 2023, https://arxiv.org/abs/2305.10425, with the log ratios to the reference as in RSO, Liu et al. 2023,
    https://arxiv.org/abs/2309.06657; SLiC itself compares log-probabilities and keeps a likelihood term (nll_coef).
    """
    chosen, rejected = _rewards(pairs, beta)
    return _with_rewards(torch.relu(1 - (chosen - rejected)), chosen, rejected)


def ipo(pairs: PairLogprobs, *, beta: float) -> PairLosses:
    """(h - 1 / (2 beta))^2, h = the difference of the log ratios per token: it is drawn to a finite distance, not to infinity.

    Source: Azar et al. 2023, https://arxiv.org/abs/2310.12036, equation 17, beta being its tau. The paper writes log-probabilities of whole
    responses; its authors' results, and TRL, are with means over tokens, without which the distance would not depend on the length that
    it has to be reached with. OpenRLHF sums.
    """
    chosen, rejected = pairs.per_token().log_ratios()
    return _with_rewards((chosen - rejected - 1 / (2 * beta)).square(), beta * chosen, beta * rejected)


def simpo(pairs: PairLogprobs, *, beta: float, simpo_margin: float) -> PairLosses:
    """-log sigmoid(beta (p_chosen - p_rejected - margin)), p = mean log-probability per token; no reference.

    Source: Meng et al. 2024, https://arxiv.org/abs/2405.14734, equation 6, with margin = gamma / beta (gamma_beta_ratio in its code; TRL's
    simpo_gamma is gamma itself).
    """
    means = pairs.per_token()
    chosen, rejected = beta * means.chosen_logprobs, beta * means.rejected_logprobs
    return _with_rewards(-logsigmoid(chosen - rejected - beta * simpo_margin), chosen, rejected)


def orpo(pairs: PairLogprobs, *, beta: float) -> PairLosses:
    """-p_chosen - beta log sigmoid(log odds(p_chosen) - log odds(p_rejected)), p = mean log-probability per token; no reference.

    log odds(p) = p - log(1 - exp(p))
    Source: Hong et al. 2024, https://arxiv.org/abs/2403.07691, equations 4, 6 and 7, beta being its lambda. The first term is SFT on the
    chosen response, of which every pair has an equal share here; TRL's is a mean over all tokens of the batch, the prompts' included.
    """
    means = pairs.per_token()
    chosen, rejected = means.chosen_logprobs, means.rejected_logprobs
    odds = -beta * logsigmoid((chosen - rejected) - (_log_complement(chosen) - _log_complement(rejected)))
    return _with_rewards(odds - chosen, beta * chosen, beta * rejected)


def apo_zero(pairs: PairLogprobs, *, beta: float) -> PairLosses:
    """1 - sigmoid(r_chosen) + sigmoid(r_rejected): chosen up, rejected down. For chosen responses better than the model's own.

    Source: D'Oosterlinck et al. 2024, https://arxiv.org/abs/2408.06266, equation 7 (-sigmoid(r_chosen) there: 1 less, same gradient).
    """
    chosen, rejected = _rewards(pairs, beta)
    return _with_rewards(torch.sigmoid(-chosen) + torch.sigmoid(rejected), chosen, rejected)


def apo_down(pairs: PairLogprobs, *, beta: float) -> PairLosses:
    """sigmoid(r_chosen) + 1 - sigmoid(r_chosen - r_rejected): both down, rejected further. For chosen responses worse than the model's own.

    Source: as of `apo_zero`, equation 8.
    """
    chosen, rejected = _rewards(pairs, beta)
    return _with_rewards(torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen), chosen, rejected)


def _rewards(pairs: PairLogprobs, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, rejected = pairs.log_ratios()
    return beta * chosen, beta * rejected


def _with_rewards(losses: torch.Tensor, chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor) -> PairLosses:
    return PairLosses(losses, chosen_rewards.detach(), rejected_rewards.detach())


def _log_complement(logprobs: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(p)) for p < 0, precise at both ends; p is held below 0, where a certain response would have infinite odds."""
    p = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    near = p > -math.log(2)  # either branch is evaluated only where it is precise: the other's gradient may be infinite there
    small, large = p.where(near, -1.0), p.where(~near, -1.0)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))


class ResponseLosses(NamedTuple):
    """Losses [B] of responses, to be summed and divided by the responses of the optimizer step, and detached rewards [B]."""

    losses: torch.Tensor
    rewards: torch.Tensor


def kto(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    desirable: torch.Tensor,
    *,
    beta: float,
    kl: torch.Tensor,
    desirable_weight: float,
    undesirable_weight: float,
) -> ResponseLosses:
    """KTO: single responses, each good or bad, against a baseline.

    desirable: w_d (1 - sigmoid(beta (r - kl))); undesirable: w_u (1 - sigmoid(beta (kl - r)));   r = logprobs - ref_logprobs
    Source: Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, equation 8.

    Args:
        logprobs, ref_logprobs: [B] sums over the response's tokens.
        desirable: [B] bool.
        kl: [], at least 0, without gradient: see `kto_baseline`.
    """
    log_ratios = logprobs - ref_logprobs
    sign = torch.where(desirable, 1.0, -1.0)
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    return ResponseLosses(weights * torch.sigmoid(-beta * sign * (log_ratios - kl)), (beta * log_ratios).detach())


def kto_baseline(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """max(0, mean of the log ratios) over prompts with responses to other prompts; [], without gradient.

    Source: as of `kto`, section 4.1: an estimate of KL(policy || reference) that is biased and cheap. The mean is over the whole optimizer
    step (TRL: over a micro-batch on each rank).

    Args:
        logprobs, ref_logprobs: [B] sums over the tokens of the mismatched responses.
    """
    return (logprobs - ref_logprobs).detach().mean().clamp(min=0.0)


def apo_zero_unpaired(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    desirable: torch.Tensor,
    *,
    beta: float,
    kl: torch.Tensor,
    desirable_weight: float,
    undesirable_weight: float,
) -> ResponseLosses:
    """`apo_zero` of single responses: `kto` with the baseline 0; `kl` is ignored.

    desirable: w_d (1 - sigmoid(beta r)); undesirable: w_u sigmoid(beta r). Source: as of `apo_zero`, equation 7.
    """
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    return kto(logprobs, ref_logprobs, desirable, beta=beta, kl=torch.zeros_like(kl), **weights)


# By dpo.loss.
PREFERENCE_LOSSES = {
    "sigmoid": sigmoid,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
}
# By kto.loss.
UNPAIRED_LOSSES = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}
