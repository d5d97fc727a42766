from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from rlhf_core.algorithms.policy_losses import POLICY_LOSSES, aggregate, cispo, dppo_kl, dppo_tv, gspo, ppo_clip, sapo, value_loss

NAN, INF = float("nan"), float("inf")
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def same(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-14) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def random_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three [6, 5] and a mask whose rows have 0 to 5 tokens; ratios on both sides of the clip bounds."""
    generator = torch.Generator().manual_seed(seed)
    a, b, c = torch.randn(3, 6, 5, dtype=torch.float64, generator=generator)
    return 0.3 * a - 1, 0.3 * b - 1, c, torch.rand(6, 5, generator=generator) < 0.6


# ratio, advantage, loss = -min(ratio * A, clip(ratio, 0.8, 1.3) * A), its derivative by log ratio = -ratio * A or 0
CASES = [
    (1.5, 2.0, -2.6, 0.0),  # min(3, 2.6): held
    (1.5, -2.0, 3.0, 3.0),  # min(-3, -2.6): gone too far the wrong way, not held
    (0.5, 2.0, -1.0, -1.0),  # min(1, 1.6)
    (0.5, -2.0, 1.6, 0.0),  # min(-1, -1.6): held
    (1.25, 2.0, -2.5, -2.5),  # between 1 + clip_low and 1 + clip_high: the upper bound is its own
    (1.0, 2.0, -2.0, -2.0),  # on policy
]


def test_ppo_clip_by_hand_with_gradient():
    ratio, advantages, losses, gradients = (row(*column) for column in zip(*CASES, strict=True))
    old_logprobs = row(-1.0, -2.0, -0.5, -3.0, -1.0, -0.1)
    logprobs = (old_logprobs + ratio.log()).requires_grad_()
    token_loss, _ = POLICY_LOSSES["ppo_clip"](logprobs, old_logprobs, advantages, torch.ones_like(ratio, dtype=torch.bool), **CLIP)
    token_loss.sum().backward()
    same(token_loss, losses)
    same(logprobs.grad, gradients)


def test_ppo_clip_statistics_by_hand():
    # Ratios 3/2, 1/2, 1/2, 1; advantages 2, 2, -2, -2. Held: the first and the third.
    # ratio - 1 - ln ratio: 1/2 - ln 1.5;  ln 2 - 1/2, twice;  0
    logprobs = row(1.5, 0.5, 0.5, 1.0, 40.0).log()
    kept = torch.tensor([[True] * 4 + [False]])
    _, stats = ppo_clip(logprobs, torch.zeros_like(logprobs), row(2, 2, -2, -2, 2), kept, **CLIP)
    assert stats["clip_frac_sum"].item() == 2.0
    assert stats["approx_kl_sum"].item() == pytest.approx(0.5 - math.log(1.5) + 2 * (math.log(2) - 0.5), abs=1e-14)
    assert stats["ratio_max"].item() == pytest.approx(1.5, abs=1e-14)
    assert stats["ratio_min"].item() == pytest.approx(0.5, abs=1e-14)
    assert not any(s.requires_grad for s in stats.values())


def nothing_but_zeros(stats: dict[str, torch.Tensor]) -> bool:
    """Of no tokens: sums and the largest ratio are 0, and the smallest is infinite."""
    return stats["ratio_min"] == math.inf and all(s.item() == 0 for name, s in stats.items() if name != "ratio_min")


def test_extreme_ratios_are_not_those_of_padding():
    _, stats = ppo_clip(row(0.5, 0.0).log(), row(0.0, 0.0), row(1, 1), torch.tensor([[True, False]]), **CLIP)
    assert stats["ratio_max"].item() == stats["ratio_min"].item() == pytest.approx(0.5, abs=1e-14)


def test_on_policy_gradient_is_the_policy_gradient():
    logprobs, _, advantages, kept = random_batch(0)
    logprobs.requires_grad_()
    token_loss, stats = ppo_clip(logprobs, logprobs.detach().clone(), advantages, kept, **CLIP)
    token_loss.sum().backward()
    same(logprobs.grad, torch.where(kept, -advantages, 0.0))
    assert stats["clip_frac_sum"] == 0 and stats["approx_kl_sum"] == 0 and stats["ratio_max"] == 1


def test_no_gradient_reaches_old_logprobs_advantages_old_values_or_returns():
    a, b, c, kept = random_batch(1)
    constants = [b.requires_grad_(), c.requires_grad_()]
    ppo_clip(a.requires_grad_(), *constants, kept, **CLIP)[0].sum().backward()
    value_loss(a, *constants, kept, value_clip=0.2).sum().backward()
    assert a.grad.abs().sum() > 0 and all(x.grad is None for x in constants)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_agree_with_finite_differences(seed):
    a, b, c, kept = random_batch(seed)
    a.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ppo_clip(x, b, c, kept, **CLIP)[0], a)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, b, c, kept, value_clip=0.2), a)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, b, c, kept, value_clip=None), a)


# Dual clip


def test_dual_clip_by_hand_with_gradient():
    # Ratios 5, 2, 1/2 and 5 with advantages -2, -2, -2 and 2; bound 3 * 2 = 6 for the negative ones.
    # 2 * 5 = 10: held at 6.  2 * 2 = 4: below it.  2 * 0.8 = 1.6: held by the lower clip.  -2 * 1.3: held by the upper clip, no bound.
    logprobs = row(5.0, 2.0, 0.5, 5.0).log().requires_grad_()
    kept = torch.ones(1, 4, dtype=torch.bool)
    token_loss, stats = ppo_clip(logprobs, torch.zeros(1, 4, dtype=torch.float64), row(-2, -2, -2, 2), kept, **CLIP, dual_clip=3.0)
    token_loss.sum().backward()
    same(token_loss, row(6.0, 4.0, 1.6, -2.6))
    same(logprobs.grad, row(0, 4.0, 0, 0))
    assert stats["clip_frac_sum"].item() == 3.0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(log_ratio=st.floats(-4, 4), advantage=st.floats(-5, 5), dual_clip=st.floats(1.01, 5))
def test_dual_clip_only_lowers_the_loss_of_negative_advantages_and_bounds_it(log_ratio, advantage, dual_clip):
    one = (row(log_ratio), row(0.0), row(advantage), torch.tensor([[True]]))
    plain, dual = ppo_clip(*one, **CLIP)[0].item(), ppo_clip(*one, **CLIP, dual_clip=dual_clip)[0].item()
    assert dual == (min(plain, -dual_clip * advantage) if advantage < 0 else plain)


# GSPO


def test_gspo_by_hand_with_gradient():
    # Row 0: ratios 1.44 and 1: s = sqrt 1.44 = 1.2, A = 1, within 0.8 and 1.3: loss -1.2, derivative -1.2 * 1/2 by each log ratio, at each
    # of two tokens: -1.2.   Row 1: ratio 4, then masked, then 1: s = 2, A = 3: held at -3.9.
    # Row 2: one ratio 1/2, A = -2: max(2 * 1/2, 2 * 0.8) = 1.6, held.
    ratio = torch.tensor([[1.44, 1, NAN], [4, NAN, 1], [0.5, NAN, NAN]], dtype=torch.float64)
    kept = torch.tensor([[True, True, False], [True, False, True], [True, False, False]])
    advantages = torch.tensor([[1.0], [3.0], [-2.0]], dtype=torch.float64).expand(3, 3)
    logprobs = ratio.log().requires_grad_()
    token_loss, stats = gspo(logprobs, torch.zeros_like(ratio), advantages, kept, **CLIP)
    token_loss.sum().backward()
    same(token_loss, torch.tensor([[-1.2, -1.2, 0], [-3.9, 0, -3.9], [1.6, 0, 0]], dtype=torch.float64))
    same(logprobs.grad, torch.tensor([[-1.2, -1.2, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.float64))
    assert stats["clip_frac_sum"].item() == 3.0
    assert stats["ratio_max"].item() == pytest.approx(2.0, abs=1e-14)
    # the tokens' own: 1.44 - 1 - ln 1.44, 4 - 1 - ln 4, 1/2 - 1 + ln 2
    assert stats["approx_kl_sum"].item() == pytest.approx(0.44 - math.log(1.44) + 3 - math.log(4) + math.log(2) - 0.5, abs=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_gspo_under_sequence_mean_is_the_objective_of_whole_responses_and_its_gradient(seed):
    # Written for one response after the other, straight from the paper, without a tensor of token losses.
    logprobs, old_logprobs, advantages, kept = random_batch(seed)
    advantages = advantages[:, :1].expand(6, 5)
    a, b = (logprobs.clone().requires_grad_() for _ in range(2))
    responses = [i for i in range(6) if kept[i].any()]
    objective = 0.0
    for i in responses:
        s = ((a[i][kept[i]] - old_logprobs[i][kept[i]]).sum() / int(kept[i].sum())).exp()
        objective = objective + torch.minimum(s * advantages[i, 0], s.clamp(0.8, 1.3) * advantages[i, 0])
    expected = -objective / len(responses)
    token_loss, _ = gspo(b, old_logprobs, advantages, kept, **CLIP)
    loss = aggregate(token_loss, kept, mode="sequence_mean", num_loss_tokens=int(kept.sum()), num_sequences=len(responses), horizon=5)
    expected.backward(), loss.backward()
    same(loss, expected)
    same(b.grad, a.grad)
    assert a.grad.abs().max() > 0


# CISPO


def test_cispo_by_hand_with_gradient():
    # -w * A * log p with w = clip(ratio, 0.8, 1.3), and -w * A as its derivative. log p = ln 1/2; ratios 2, 1/2, 1.1; A 2, -1, 3.
    # w 1.3, 0.8, 1.1: no token loses its gradient; ppo_clip would leave the first and the second none.
    logprobs = row(0.5, 0.5, 0.5).log().requires_grad_()
    old_logprobs = logprobs.detach() - row(2.0, 0.5, 1.1).log()
    token_loss, stats = cispo(logprobs, old_logprobs, row(2, -1, 3), torch.ones(1, 3, dtype=torch.bool), **CLIP)
    token_loss.sum().backward()
    same(token_loss, row(2.6, -0.8, 3.3) * math.log(2))
    same(logprobs.grad, row(-2.6, 0.8, -3.3))
    assert stats["clip_frac_sum"].item() == 2.0 and stats["ratio_max"].item() == pytest.approx(2.0, abs=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_cispo_within_the_bounds_has_the_gradient_of_the_unclipped_surrogate(seed):
    # r * grad log p = grad r
    logprobs, old_logprobs, advantages, kept = random_batch(seed)
    a, b = (logprobs.clone().requires_grad_() for _ in range(2))
    cispo(a, old_logprobs, advantages, kept, clip_low=0.99, clip_high=100.0)[0].sum().backward()
    (-(b - old_logprobs).exp() * advantages)[kept].sum().backward()
    same(a.grad, b.grad, atol=1e-13)


def gated(*tensors: torch.Tensor, clip_low: float, clip_high: float):
    """SAPO with its paper's temperatures; the bounds are the other losses'."""
    return sapo(*tensors, positive_temperature=1.0, negative_temperature=1.05)


def test_dppo_tv_by_hand_with_gradient():
    # p_old, p; A; loss -p / p_old * A unless p has moved by more than 0.3 upwards (A > 0) or 0.2 downwards (A < 0)
    # 0.001 -> 0.101, A 2: 101 times as likely, but by 0.1 only: -202.   0.5 -> 0.9, A 2: moved by 0.4: 0, where the ratio is only 1.8.
    # 0.6 -> 0.3, A -2: moved down by 0.3: 0.   0.6 -> 0.45, A -2: by 0.15: 1.5.
    # 0.6 -> 0.3, A 2 and 0.5 -> 0.9, A -2: the way back: -1, 3.6
    old, new = row(0.001, 0.5, 0.6, 0.6, 0.6, 0.5).log(), row(0.101, 0.9, 0.3, 0.45, 0.3, 0.9).log().requires_grad_()
    token_loss, stats = dppo_tv(new, old, row(2, 2, -2, -2, 2, -2), torch.ones(1, 6, dtype=torch.bool), **CLIP)
    token_loss.sum().backward()
    same(token_loss, row(-202, 0, 0, 1.5, -1, 3.6), atol=1e-12)
    same(new.grad, row(-202, 0, 0, 1.5, -1, 3.6), atol=1e-12)
    assert stats["clip_frac_sum"].item() == 2.0 and stats["ratio_max"].item() == pytest.approx(101, abs=1e-11)


def test_dppo_kl_by_hand_with_gradient():
    # D(0.5, 0.8) = 0.5 ln(0.5 / 0.8) + 0.5 ln(0.5 / 0.2) = 0.2231;  D(0.5, 0.9) = 0.5108;  D(0.001, 0.101) = 0.001 ln(1 / 101)
    # + 0.999 ln(0.999 / 0.899) = 0.1008.  Bounds 0.2 downwards, 0.3 upwards.
    old, new = row(0.5, 0.5, 0.001, 0.5, 0.5, 0.5).log(), row(0.8, 0.9, 0.101, 0.2, 0.4, 0.9).log().requires_grad_()
    token_loss, stats = dppo_kl(new, old, row(2, 2, 2, -2, -2, -2), torch.ones(1, 6, dtype=torch.bool), **CLIP)
    token_loss.sum().backward()
    expected = row(-3.2, 0, -202, 0, 1.6, 3.6)  # the fourth has D(0.5, 0.2) = 0.2231 > 0.2, the last one is on its way back
    same(token_loss, expected, atol=1e-12)
    same(new.grad, expected, atol=1e-12)
    assert stats["clip_frac_sum"].item() == 2.0


def test_dppo_kl_of_a_certain_token_is_finite():
    certain = torch.zeros(1, 2, requires_grad=True)
    loss, _ = dppo_kl(certain, torch.tensor([[0.0, -0.5]]), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), **CLIP)
    loss.sum().backward()
    assert loss.tolist() == [[-1.0, 0.0]] and certain.grad.tolist() == [[-1.0, 0.0]], "from 0.61 to 1 is D > 0.3"


def test_sapo_by_hand_with_gradient():
    # ratio 1, A 2, tau 1: loss -4 / 1 * 1/2 * 2 = -4, gradient -2.   Ratio 1 + ln 3, A 2: sigmoid(ln 3) = 3/4: loss -6,
    # gradient -4 * 3/4 * 1/4 * 2 * ratio = -1.5 * ratio.   Ratio 1 + ln(3) / 2, A -1, tau 2: loss 4 / 2 * 3/4 = 1.5, gradient 0.75 * ratio
    ratio = row(1.0, 1 + math.log(3), 1 + math.log(3) / 2)
    logprobs = ratio.log().requires_grad_()
    temperatures = {"positive_temperature": 1.0, "negative_temperature": 2.0}
    token_loss, stats = sapo(logprobs, row(0, 0, 0), row(2, 2, -1), torch.ones(1, 3, dtype=torch.bool), **temperatures)
    token_loss.sum().backward()
    same(token_loss, row(-4, -6, 1.5))
    same(logprobs.grad, row(-2, -1.5, 0.75) * torch.tensor([1.0, ratio[0, 1], ratio[0, 2]]))
    assert stats["clip_frac_sum"].item() == 0.0


def test_sapo_of_a_ratio_that_overflows_has_no_gradient():
    logprobs = torch.tensor([[100.0, 0.0]], requires_grad=True)
    loss, _ = gated(logprobs, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), **CLIP)
    loss.sum().backward()
    assert loss.tolist() == [[-4.0, -2.0]] and logprobs.grad.tolist() == [[0.0, -1.0]]


def loop_dppo(new: float, old: float, advantage: float, *, kl: bool) -> tuple[float, float]:
    """Loss and gradient of a token."""
    p, q = math.exp(new), math.exp(old)
    moved = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) if kl else abs(p - q)
    away = (p > q and advantage > 0 and moved > 0.03) or (p < q and advantage < 0 and moved > 0.02)
    loss = 0.0 if away else -p / q * advantage
    return loss, loss


def loop_sapo(new: float, old: float, advantage: float) -> tuple[float, float]:
    ratio, tau = math.exp(new - old), 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * advantage, -advantage * ratio / math.cosh(tau * (ratio - 1) / 2) ** 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("policy_loss", "loop"),
    [(dppo_tv, partial(loop_dppo, kl=False)), (dppo_kl, partial(loop_dppo, kl=True)), (gated, loop_sapo)],
    ids=["dppo_tv", "dppo_kl", "sapo"],
)
def test_losses_equal_loops_over_numbers(policy_loss, loop, seed: int):
    a, b, c, kept = random_batch(seed)
    logprobs, narrow = a.clone().requires_grad_(), {"clip_low": 0.02, "clip_high": 0.03}
    token_loss, stats = policy_loss(logprobs, b, c, kept, **narrow)
    token_loss.sum().backward()
    pairs = [loop(*values) for values in zip(a[kept].tolist(), b[kept].tolist(), c[kept].tolist(), strict=True)]
    losses, gradients = zip(*pairs, strict=True)
    assert token_loss[kept].tolist() == pytest.approx(losses, abs=1e-12)
    assert logprobs.grad[kept].tolist() == pytest.approx(gradients, abs=1e-12)
    assert int(stats["clip_frac_sum"]) == sum(loss == 0 for loss in losses) and (
        policy_loss is gated or 0 < losses.count(0.0) < len(losses)
    )


# Every policy loss


ALL_LOSSES = [*(gated if loss is sapo else loss for loss in POLICY_LOSSES.values()), partial(ppo_clip, dual_clip=1.5)]


@pytest.mark.parametrize("policy_loss", ALL_LOSSES)
def test_every_policy_loss_has_the_policy_gradient_on_policy(policy_loss):
    logprobs, _, advantages, kept = random_batch(0)
    advantages = advantages[:, :1].expand(6, 5)
    logprobs.requires_grad_()
    token_loss, stats = policy_loss(logprobs, logprobs.detach().clone(), advantages, kept, **CLIP)
    token_loss.sum().backward()
    same(logprobs.grad, torch.where(kept, -advantages, 0.0))
    assert stats["clip_frac_sum"] == 0 and stats["approx_kl_sum"] == 0 and stats["ratio_max"] == 1


@pytest.mark.parametrize("policy_loss", [gspo, partial(ppo_clip, dual_clip=1.5), gated, dppo_tv, dppo_kl])
def test_gradients_of_the_losses_that_differentiate_the_ratio_agree_with_finite_differences(policy_loss):
    a, b, c, kept = random_batch(2)
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, b, c, kept, **CLIP)[0], a.requires_grad_())


@pytest.mark.parametrize("policy_loss", ALL_LOSSES)
def test_every_policy_loss_ignores_masked_entries_padding_and_other_rows(policy_loss):
    a, b, c, kept = random_batch(4)
    x = a.clone().requires_grad_()
    token_loss, stats = policy_loss(x, b, c, kept, **CLIP)
    token_loss.sum().backward()
    assert not token_loss[~kept].any() and not x.grad[~kept].any()

    wide = [pad(v.where(kept, NAN), (0, 3), value=INF) for v in (a, b, c)]
    wide[0].requires_grad_()
    again, same_stats = policy_loss(*wide, pad(kept, (0, 3)), **CLIP)
    again.sum().backward()
    same(again, pad(token_loss, (0, 3)))
    same(wide[0].grad, pad(x.grad, (0, 3)))
    for name in stats:
        same(same_stats[name], stats[name])

    parts = [policy_loss(*part, **CLIP) for part in zip(a.split(2), b.split(2), c.split(2), kept.split(2), strict=True)]
    same(torch.cat([loss for loss, _ in parts]), token_loss)
    for name in ("clip_frac_sum", "approx_kl_sum"):
        same(sum(part[name] for _, part in parts), stats[name])
    assert stats["ratio_max"] == max(part["ratio_max"] for _, part in parts)


@pytest.mark.parametrize("policy_loss", ALL_LOSSES)
def test_every_policy_loss_is_zero_on_an_empty_mask_and_without_advantages(policy_loss):
    nothing, empty = row(NAN, NAN), torch.zeros(1, 2, dtype=torch.bool)
    token_loss, stats = policy_loss(nothing, nothing, nothing, empty, **CLIP)
    assert torch.equal(token_loss, row(0, 0)) and nothing_but_zeros(stats)
    a, b, c, kept = random_batch(6)
    a.requires_grad_()
    policy_loss(a, b, torch.zeros_like(c), kept, **CLIP)[0].sum().backward()
    assert not a.grad.any()


@pytest.mark.parametrize("policy_loss", ALL_LOSSES)
def test_every_policy_loss_takes_gradients_for_logprobs_alone(policy_loss):
    a, b, c, kept = random_batch(1)
    constants = [b.requires_grad_(), c.requires_grad_()]
    _, stats = policy_loss(a.requires_grad_(), *constants, kept, **CLIP)
    policy_loss(a, *constants, kept, **CLIP)[0].sum().backward()
    assert a.grad.abs().sum() > 0 and all(x.grad is None for x in constants)
    assert not any(s.requires_grad for s in stats.values())


# Value loss


@pytest.mark.parametrize(
    ("value", "old_value", "target", "value_clip", "expected", "gradient"),
    [
        (1.0, 0.0, 2.0, 0.2, 1.62, 0.0),  # (1 - 2)^2 = 1 against (0.2 - 2)^2 = 3.24: held, 3.24 / 2
        (1.0, 0.0, -1.0, 0.2, 2.0, 2.0),  # (1 + 1)^2 = 4 against (0.2 + 1)^2 = 1.44: 4 / 2, V - R = 2
        (-1.0, 0.0, -2.0, 0.2, 1.62, 0.0),  # the first, mirrored
        (0.1, 0.0, 1.0, 0.2, 0.405, -0.9),  # within the bounds: 0.81 / 2
        (1.0, 0.0, 2.0, None, 0.5, -1.0),  # unclipped
    ],
)
def test_value_clip_by_hand_with_gradient(value, old_value, target, value_clip, expected, gradient):
    values = row(value).requires_grad_()
    loss = value_loss(values, row(old_value), row(target), torch.tensor([[True]]), value_clip=value_clip)
    loss.sum().backward()
    same(loss, row(expected))
    same(values.grad, row(gradient))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(value=st.floats(-5, 5), old_value=st.floats(-5, 5), target=st.floats(-5, 5), value_clip=st.floats(0.01, 2))
def test_clipped_value_loss_is_never_below_the_plain_one(value, old_value, target, value_clip):
    kept = torch.tensor([[True]])
    clipped = value_loss(row(value), row(old_value), row(target), kept, value_clip=value_clip)
    plain = value_loss(row(value), row(old_value), row(target), kept, value_clip=None)
    assert clipped >= plain
    if abs(value - old_value) < value_clip - 1e-9:
        same(clipped, plain, atol=1e-12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(log_ratio=st.floats(-2, 2), advantage=st.floats(-5, 5), low=st.floats(0.05, 0.9), high=st.floats(0.05, 2))
def test_clipped_objective_never_promises_more_than_the_plain_one(log_ratio, advantage, low, high):
    loss, stats = ppo_clip(row(log_ratio), row(0.0), row(advantage), torch.tensor([[True]]), clip_low=low, clip_high=high)
    assert loss.item() >= -math.exp(log_ratio) * advantage - 1e-12
    # from that side the objective is bounded: nothing is gained by moving beyond the clip
    assert loss.item() >= -abs(advantage) * (1 + high if advantage > 0 else -(1 - low)) - 1e-12
    assert stats["approx_kl_sum"].item() >= 0


# Masks


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF, 1e6])
def test_masked_nan_changes_neither_losses_nor_gradients_nor_statistics(rubbish):
    a, b, c, kept = random_batch(4)
    a, b, c = (x.where(kept, rubbish) for x in (a, b, c))
    clean = [x.where(kept, 0.0) for x in (a, b, c)]
    for one_loss in (
        lambda x, y, z: ppo_clip(x, y, z, kept, **CLIP),
        lambda x, y, z: (value_loss(x, y, z, kept, value_clip=0.2), {}),
        lambda x, y, z: (value_loss(x, y, z, kept, value_clip=None), {}),
    ):
        results = []
        for x, y, z in ((a, b, c), clean):
            x = x.clone().requires_grad_()
            loss, stats = one_loss(x, y, z)
            loss.sum().backward()
            results.append((loss.detach(), x.grad, stats))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
        assert results[0][2] == results[1][2]
        assert not results[0][0][~kept].any() and not results[0][1][~kept].any()


def test_losses_are_invariant_to_padding():
    a, b, c, kept = random_batch(5)
    wide = [pad(x, (0, 4), value=NAN) for x in (a, b, c)]
    wide_mask = pad(kept, (0, 4))
    assert torch.equal(ppo_clip(*wide, wide_mask, **CLIP)[0], pad(ppo_clip(a, b, c, kept, **CLIP)[0], (0, 4)))
    assert torch.equal(value_loss(*wide, wide_mask, value_clip=0.2), pad(value_loss(a, b, c, kept, value_clip=0.2), (0, 4)))


def test_an_empty_mask_gives_zero_losses_and_statistics():
    nothing, kept = row(NAN, NAN), torch.zeros(1, 2, dtype=torch.bool)
    token_loss, stats = ppo_clip(nothing, nothing, nothing, kept, **CLIP)
    assert torch.equal(token_loss, row(0, 0)) and nothing_but_zeros(stats)
    assert torch.equal(value_loss(nothing, nothing, nothing, kept, value_clip=0.2), row(0, 0))


def test_statistics_add_up_over_microbatches():
    a, b, c, kept = random_batch(6)
    _, whole = ppo_clip(a, b, c, kept, **CLIP)
    parts = [ppo_clip(*part, **CLIP)[1] for part in zip(a.split(2), b.split(2), c.split(2), kept.split(2), strict=True)]
    assert whole["clip_frac_sum"] == sum(p["clip_frac_sum"] for p in parts) > 0
    same(whole["approx_kl_sum"], sum(p["approx_kl_sum"] for p in parts))
    assert whole["ratio_max"] == max(p["ratio_max"] for p in parts)
    assert whole["ratio_min"] == min(p["ratio_min"] for p in parts)
