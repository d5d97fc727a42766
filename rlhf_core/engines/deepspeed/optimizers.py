"""Optimizers of the training engine, and the average of the weights, which is kept in an optimizer's state.

Each entry of OPTIMIZERS updates a parameter's numbers regardless of its shape, so it also works on the flat pieces of parameters that ranks
have with ZeRO 1 to 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rlhf_core.engines.deepspeed.engine import EngineSettings

AVERAGE = "average"  # in the state of a parameter
_CHUNK = 2**22  # numbers of a parameter that have a temporary copy at once; one of all would be as large as the optimizer's state

Groups = list[dict[str, Any]]


class Lion(torch.optim.Optimizer):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay. Its state is one number for each number of a parameter.

    u = sign(beta1 * m + (1 - beta1) * g);   p <- p - lr * (u + weight_decay * p);   m <- beta2 * m + (1 - beta2) * g

    Each number moves by lr, whatever the gradient's size: the learning rate is 3 to 10 times lower than Adam's, and the weight decay
    that much higher. Source: Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2
    """

    def __init__(self, params: Groups, *, lr: float, betas: tuple[float, float]):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                for piece, gradient, momentum in _pieces(parameter, parameter.grad, state["exp_avg"]):
                    self._update(piece, gradient, momentum, group)

    @staticmethod
    def _update(parameter: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - beta2)


def adamw(groups: Groups, settings: EngineSettings) -> torch.optim.Optimizer:
    """Return Adam with decoupled weight decay. Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101

    With offload_optimizer it computes on the host, where torch's fused kernel runs too; unlike DeepSpeed's it needs no compiler.
    """
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)


def adamw_8bit(groups: Groups, settings: EngineSettings) -> torch.optim.Optimizer:
    """Return AdamW whose moments have 8 bits, with a float32 scale for each 256 numbers; parameters of fewer than 4,096 numbers keep
    float32.

    Source: Dettmers et al. 2022, https://arxiv.org/abs/2110.02861

    Raises:
        ValueError: bitsandbytes isn't installed.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError("optimizer: expected bitsandbytes for adamw_8bit, got no such package; install it or set adamw") from error
    return AdamW8bit(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps)


def lion(groups: Groups, settings: EngineSettings) -> torch.optim.Optimizer:
    return Lion(groups, lr=settings.learning_rate, betas=settings.betas)


OPTIMIZERS: dict[str, Callable[[Groups, EngineSettings], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adamw_8bit": adamw_8bit,
    "lion": lion,
}


class WeightAverage:
    """Exponential moving average of the trained weights after each optimizer step, without a bias towards the initial ones.

    a_t = a_{t-1} + w_t * (p_t - a_{t-1}),   w_t = (1 - decay) / (1 - decay^t),   so a_1 = p_1 and
    a_t = sum over s <= t of decay^(t-s) * p_s / sum over s <= t of decay^(t-s)

    p_t are the optimizer's own float32 weights: with bfloat16 the master weights, with ZeRO this rank's piece of them. a_t lies in the
    optimizer's state, and is sharded, offloaded, saved and loaded with it. A parameter that has had no gradient yet isn't averaged.

    Args:
        steps_done: function that returns the number of optimizer steps before the current one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float, steps_done: Callable[[], int]):
        self._optimizer, self._decay, self._steps_done = optimizer, decay, steps_done
        optimizer.register_step_post_hook(self._update)

    @torch.no_grad()
    def _update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weight = (1 - self._decay) / (1 - self._decay ** (self._steps_done() + 1))
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            state = optimizer.state[parameter]
            if AVERAGE in state:
                state[AVERAGE].lerp_(parameter, weight)
            elif state:
                state[AVERAGE] = parameter.detach().clone()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange weights and averages in place, without a copy of either. A second call restores both, bit for bit."""
        for parameter, state in self._optimizer.state.items():
            if AVERAGE in state:
                for weights, averages in _pieces(parameter, state[AVERAGE]):
                    kept = weights.clone()
                    weights.copy_(averages)
                    averages.copy_(kept)


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views of at most _CHUNK numbers at the same places of several tensors; the tensors themselves if one isn't contiguous."""
    if not all(t.is_contiguous() for t in tensors):
        return iter([tensors])
    return zip(*(t.view(-1).split(_CHUNK) for t in tensors), strict=True)


@torch.no_grad()
def refresh_module(optimizer: Any) -> None:
    """Copy the optimizer's float32 weights into the module that DeepSpeed trains. With ZeRO this is a collective.

    Args:
        optimizer: DeepSpeed's optimizer, or torch's own, whose weights are the module's.
    """
    if hasattr(optimizer, "update_lp_params"):  # ZeRO 1 and 2
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp16_partitioned_groups_flat"):  # ZeRO 3
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif hasattr(optimizer, "fp32_groups"):  # bfloat16 without ZeRO
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
