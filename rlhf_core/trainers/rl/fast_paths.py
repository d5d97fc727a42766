"""Which shorter ways to the same numbers a rank of RL training can go by its models and settings, and whether experts are balanced."""

from __future__ import annotations

from transformers import PreTrainedModel

from rlhf_core.engines.deepspeed_engine import device
from rlhf_core.models.backend import Backend
from rlhf_core.models.forward import GENERAL, PolicyModule, ScalarModule, common_backend
from rlhf_core.models.probe import shares_prefixes
from rlhf_core.trainers.rl.job import RlJob


def balanced_experts(model: PreTrainedModel, coef: float) -> int | None:
    """Experts per token, where their load is to be balanced.

    Args:
        coef: rl.moe_aux_coef.
    Raises:
        ValueError: the model has no experts, or none with this loss.
    """
    config = model.config.get_text_config()
    if not coef:
        return None
    if not hasattr(config, "output_router_logits"):
        raise ValueError(
            f"rl.moe_aux_coef: expected 0 with a model without experts that are balanced by a loss, got {coef} with "
            f"{type(model).__name__}; set it to 0"
        )
    return config.num_experts_per_tok


def can_share_prompts(job: RlJob, model: PreTrainedModel, *, experts_per_token: int | None) -> bool:
    """Whether a group's prompt is computed once: there are groups, the model can do it, and nothing else counts whole sequences."""
    rl = job.rl
    wanted = rl.group_size > 1 and rl.algorithm != "ppo" and experts_per_token is None
    return wanted and shares_prefixes(model, device=device(), max_length=job.model.max_length)


def rank_backend(job: RlJob, world_size: int, modules: list[PolicyModule | ScalarModule]) -> Backend:
    """What computes all of these modules. The general backend with other ranks or ZeRO, where the order of collectives counts."""
    alone = world_size == 1 and job.rl.trainer.zero_stage == 0
    return common_backend(*modules) if alone else GENERAL
