"""Which shorter ways to the same numbers a rank of RL training can go by its models and settings, and whether experts are balanced."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from rlhf_core.models.branches import can_share_prefixes
from rlhf_core.models.build import trunk
from rlhf_core.models.cpu.packed import can_pack
from rlhf_core.models.cpu.parallel import can_run_side_by_side
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
    return wanted and can_share_prefixes(model, max_length=job.model.max_length)


def can_run_at_once(job: RlJob, world_size: int, modules: list[torch.nn.Module]) -> bool:
    """Whether the models can be asked and trained at once.

    Args:
        modules: those of policy and critic, and the reference.
    """
    return _is_alone(job, world_size) and can_run_side_by_side(*modules)


def can_keep(job: RlJob, world_size: int, modules: list[torch.nn.Module]) -> bool:
    """Whether the update can go on from passes that were made for `forward`. Not where the sampler's distribution is computed too:
    it takes the logits of all tokens, sorted.

    Args:
        modules: those of policy and critic.
    """
    packed = all(can_pack(trunk(module.model)) for module in modules)
    return _is_alone(job, world_size) and packed and job.rl.rollout.samples_any_token


def _is_alone(job: RlJob, world_size: int) -> bool:
    """Whether nothing waits for another rank. With others, and with ZeRO, the order of collectives counts."""
    return world_size == 1 and job.rl.trainer.zero_stage == 0
