"""Groups of Ray actors: placed with a deadline, called with a deadline, and an error that names the role and rank."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


def join_cluster() -> bool:
    """Connect to the cluster that this job runs on. Returns whether it has GPUs."""
    ray.init(address="auto", logging_level="ERROR")
    return ray.cluster_resources().get("GPU", 0) > 0


def leave_cluster() -> None:
    ray.shutdown()


class RoleLost(RuntimeError):
    """An actor died, or didn't answer by its deadline. The message names role and rank."""


class ActorGroup:
    """The actors of one role, rank 0 first.

    Args:
        role: for messages, such as "trainer".
        factory: the class of each actor; it gets `rank` and `kwargs`.
        cpus, gpus: of each actor. Without any it starts wherever, beside the others.
        threads: OMP_NUM_THREADS of each actor's process.
        start_deadline: seconds until every actor must have been placed and made.
    Raises:
        RoleLost: the cluster has no room, or an actor failed to start.
    """

    def __init__(
        self, role: str, factory: type, size: int, *, cpus: float, gpus: float, threads: int, start_deadline: float, kwargs: dict[str, Any]
    ):
        self.role = role
        self._bundles = _place(role, size, cpus=cpus, gpus=gpus, deadline=start_deadline) if cpus or gpus else None
        environment = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        self.actors = [
            ray.remote(factory)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=0,
                runtime_env={"env_vars": environment},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._bundles, placement_group_bundle_index=rank)
                if self._bundles
                else "DEFAULT",
            )
            .remote(rank=rank, **kwargs)
            for rank in range(size)
        ]
        self._start_deadline = start_deadline

    def __len__(self) -> int:
        return len(self.actors)

    def wait_ready(self) -> None:
        self.wait([actor.__ray_ready__.remote() for actor in self.actors], deadline=self._start_deadline, what="start")

    def submit(self, method: str, per_rank: list[tuple], **kwargs: Any) -> list[ray.ObjectRef]:
        """Call a method on each rank with that rank's arguments, without waiting."""
        return [getattr(actor, method).remote(*args, **kwargs) for actor, args in zip(self.actors, per_rank, strict=True)]

    def call(self, method: str, per_rank: list[tuple] | None = None, *, deadline: float, **kwargs: Any) -> list[Any]:
        """Call a method on each rank and return the results, rank 0 first."""
        return self.wait(self.submit(method, per_rank or [()] * len(self), **kwargs), deadline=deadline, what=method)

    def attempt(self, method: str, *args: Any, deadline: float) -> Any:
        """Call a method of the only actor, which may well fail: an exception in it counts as the loss of the role too.

        Raises:
            RoleLost: it died, is late, or raised.
        """
        try:
            (answer,) = self.call(method, [args], deadline=deadline)
        except RayTaskError as error:
            raise RoleLost(f"{self.role}: expected {method} to return, got {type(error.cause).__name__}: {error.cause}") from error
        return answer

    def wait(self, references: list[ray.ObjectRef], *, deadline: float, what: str) -> list[Any]:
        """Results of references, one for each rank.

        Raises:
            RoleLost: naming the first rank that died or is late.
        """
        try:
            return ray.get(references, timeout=deadline)
        except (GetTimeoutError, RayActorError) as error:
            late = self._unfinished(references)
            how = f"no answer within {deadline:.0f} s" if isinstance(error, GetTimeoutError) else f"a dead process ({type(error).__name__})"
            raise RoleLost(
                f"{self.role} rank {late}: expected {what} to finish, got {how}; its log is in the Ray session's folder"
            ) from error

    def _unfinished(self, references: list[ray.ObjectRef]) -> str:
        done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        bad = []
        for rank, reference in enumerate(references):
            try:
                if reference not in done:
                    bad.append(str(rank))
                else:
                    ray.get(reference, timeout=0)
            except (GetTimeoutError, RayActorError):
                bad.append(str(rank))
        return ", ".join(bad) or "unknown"

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        if self._bundles is not None:
            remove_placement_group(self._bundles)


def _place(role: str, size: int, *, cpus: float, gpus: float, deadline: float) -> PlacementGroup:
    bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    bundles = placement_group([bundle] * size, strategy="PACK")
    if not bundles.wait(timeout_seconds=deadline):
        remove_placement_group(bundles)
        raise RoleLost(
            f"{role}: expected room for {size} x {bundle} within {deadline:.0f} s, got none "
            f"(cluster has {ray.cluster_resources()}, free {ray.available_resources()}); add nodes or lower its ranks"
        )
    return bundles
