"""Which models of an RL job share trainer ranks, and what the ranks have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field
from pydantic_core import PydanticCustomError

from rlhf_core.config.base import Section
from rlhf_core.config.model import offload_conflicts, sequence_conflicts

# The share of a GPU for one actor; rlhf_core/planning/placement.py resolves auto.
GpuShare = Literal["auto"] | Annotated[float, Field(gt=0)]


def share_conflicts(key: str, share: float | str, todo: str) -> Iterator[str]:
    """The conflict of a GPU share above 1.

    todo: what the message says to do instead.
    """
    if share != "auto" and share > 1:
        yield f"{key}: expected auto or at most 1, got {share:g}; {todo}"


Role = Literal["policy", "critic", "reference", "reward_models", "teachers"]
ROLES: tuple[Role, ...] = get_args(Role)
PLACEMENTS: dict[str, tuple[tuple[Role, ...], ...]] = {
    "together": (ROLES,),
    "two_groups": (("policy", "reference"), ("critic", "reward_models", "teachers")),
    "apart": tuple((role,) for role in ROLES),
}


class RoleGroup(Section):
    """Models that share trainer ranks.

    ranks: None means trainer.ranks.
    """

    roles: list[Role] = Field(min_length=1)  # the models of the group
    ranks: int | None = Field(default=None, ge=1)

    @property
    def name(self) -> str:
        """The group's name: its roles joined by +."""
        return "+".join(self.roles)

    @property
    def learns(self) -> bool:
        """Whether the group has a model that is trained."""
        return "policy" in self.roles or "critic" in self.roles


def named_placement(value: Any) -> Any:
    """Return the groups that a placement's name stands for; a list of groups is returned unchanged."""
    if not isinstance(value, str):
        return value
    if value not in PLACEMENTS:
        raise PydanticCustomError("placement", f"{', '.join(PLACEMENTS)} or a list of groups")
    return [{"roles": list(roles)} for roles in PLACEMENTS[value]]


class TrainerConfig(Section):
    """Settings of RL's trainer ranks.

    sequence_parallel: number of ranks that share each sequence. offload_frozen: reference, reward models and teachers keep their weights on
    the host while they compute nothing.
    """

    ranks: int = Field(ge=1)
    sequence_parallel: int = Field(default=1, ge=1)
    gpus_per_rank: GpuShare
    # what DeepSpeed divides among ranks: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: bool  # the optimizer's state is in the host's memory
    offload_parameters: bool = False  # the weights too, with zero_stage 3
    offload_frozen: bool = False
    gradient_checkpointing: bool = False  # compute activations again in the backward pass: less memory, a third more time
    microbatch_tokens: int = Field(gt=0)  # tokens with padding of one forward pass on a rank

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks, or of groups of ranks that share sequences, which take different rollouts."""
        return self.ranks // self.sequence_parallel

    def of_ranks(self, shares: Sequence[Any]) -> list[Any]:
        """Return a list with one share for each rank, from a list with one for each group that shares sequences."""
        return [share for share in shares for _ in range(self.sequence_parallel)]

    def of_groups(self, results: Sequence[Any]) -> list[Any]:
        """Return a list with one result for each group that shares sequences, from a list with one for each rank."""
        return list(results[:: self.sequence_parallel])

    def conflicts(self) -> Iterator[str]:
        yield from sequence_conflicts(self.ranks, self.sequence_parallel)
        yield from offload_conflicts(self.zero_stage, offload_optimizer=self.offload_optimizer, offload_parameters=self.offload_parameters)
        yield from share_conflicts("gpus_per_rank", self.gpus_per_rank, "raise ranks instead, because a rank uses one GPU only")
