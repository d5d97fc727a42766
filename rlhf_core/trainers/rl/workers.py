"""Rollout engines, trainer ranks and scorers of the RL loop: Ray actors, each call with a deadline."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlhf_core.agents.environment import Environment
from rlhf_core.checkpoint.store import Found
from rlhf_core.checkpoint.stored import download_for_driver, remove_folder
from rlhf_core.config import bytes_shown
from rlhf_core.data.batching import deal_out_groups
from rlhf_core.engines.deepspeed.universal import of_other_ranks
from rlhf_core.engines.ray.actors import Pending, RoleLost
from rlhf_core.models.build import vocabulary_size
from rlhf_core.models.tokenizer import load_tokenizer, stop_ids
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.sampling.scoring import PendingScores, ResponseScorer, ScorerMetrics, StepScores
from rlhf_core.storage.node import job_storage
from rlhf_core.trainers.rl.actor_scorers import ActorScorers
from rlhf_core.trainers.rl.ahead import RolloutsAhead
from rlhf_core.trainers.rl.credit import ValueUnits
from rlhf_core.trainers.rl.data import PromptStream, pack, pack_for_teachers
from rlhf_core.trainers.rl.episodes import EpisodesAhead
from rlhf_core.trainers.rl.groups import TrainerGroup
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.metrics import update_metrics
from rlhf_core.trainers.rl.minibatch import Minibatch, Totals, add_totals
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.trainers.rl.rollouts import RolloutEngines
from rlhf_core.trainers.rl.state import Progress, RunStore
from rlhf_core.trainers.rl.taught import Taught, TeacherServices
from rlhf_core.trainers.rl.transfer import WeightTransfer
from rlhf_core.trainers.rl.turns import GpuTimeSharing
from rlhf_core.trainers.rl.update import RankUpdate
from rlhf_core.types import RewardComponents, Rollout, RolloutBatch, Sequences, UpdateResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.trainers.rl.driver import Actors

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class GroupForward:
    """Forward passes of a group's ranks that may still be running.

    shards: positions of the rollouts of each rank, or group of ranks that share sequences.
    recomputed: for so many of each shard's rollouts, from the first on, the policy's log-probabilities are computed.
    pending: each rank's outputs.
    """

    group: TrainerGroup
    shards: list[list[int]]
    recomputed: int
    pending: list[Pending]


@dataclass(frozen=True)
class PendingForward:
    """Forward passes over rollouts, of each group with a model that computes them."""

    rollouts: Sequence[Rollout]
    sequences: Sequences
    groups: list[GroupForward]


class Workers:
    """The actors of an RL job, with a method for each step of the loop; `rollouts` has those of the rollout engines, and `ahead` those for
    rl.rollout.max_lag above 0.

    A rollout engine or scorer that dies or misses a deadline is replaced, and its call repeated, at most rl.max_replacements times. Since
    responses depend on seeds and weights only, the run ends as if nothing had happened. A trainer rank has state that only a checkpoint
    can restore.

    Raises:
        RoleLost: a trainer rank dies or misses a deadline, an actor doesn't start, or rl.max_replacements is reached.
    """

    def __init__(self, job: RlJob, actors: Actors):
        self._job, self._actors = job, actors
        self._trainers = actors.trainers
        self.store = RunStore(Path(job.work), job.checkpoints, check=self._damage)
        tokenizer = load_tokenizer(job.sft_model, **job.load_options)
        self._tokenizer, self._stops = tokenizer, stop_ids(tokenizer, job.sft_model)
        self.replacements = Replacements(job.rl.max_replacements)
        self.turns = GpuTimeSharing(actors.rollouts, actors.trainers, on=actors.take_turns, deadline=job.rl.deadlines.step)
        rollout = job.rl.rollout
        self.transfer = WeightTransfer(
            self._trainers.policy,
            actors.rollouts,
            actors.ways,
            workers=rollout.tensor_parallel_size,
            deadline=job.rl.deadlines.step,
            sends_changes=rollout.send_changes,
        )
        environment = open_environment(job, tokenizer, self._stops)
        self.rollouts = RolloutEngines(
            job,
            actors.rollouts,
            stop_ids=self._stops,
            replacements=self.replacements,
            transfer=self.transfer,
            turns=self.turns,
            renew=lambda: self.sync_weights(version=self.rollouts.recovery.version),
            check_trainers=lambda: self._trainers.check(),
            environment=environment,
            vocabulary=(vocabulary := min(len(tokenizer), vocabulary_size(job.sft_model, trust_remote_code=job.model.trust_remote_code))),
        )
        distillation = job.rl.distillation
        has_services = distillation is not None and bool(distillation.services)
        self._services = TeacherServices(distillation, vocabulary=vocabulary) if has_services else None
        self.ahead = RolloutsAhead(job, self.rollouts) if environment is None else EpisodesAhead(job, self.rollouts, environment)

    def __enter__(self) -> Workers:
        start, trainers = self._job.rl.deadlines.start, self._trainers
        self._actors.check_places(engines=False)
        if self.turns.on:  # an engine takes all of its memory until it falls asleep
            self.rollouts.wait_ready()
            self.turns.begin()
        self._scorers = ActorScorers(self._job, trainers.find("reward_models"), self.replacements, self.turns)
        for group in (*(of_role.actors for of_role in trainers.all), *self._scorers.groups):
            group.meanwhile = self._look
        self._scorer = ResponseScorer(self._scorers, self._tokenizer, stops=self._stops)
        addresses = {id(group): found[0] for group, found in zip(trainers.all, trainers.call("address", deadline=start), strict=True)}
        trainers.call("connect", lambda group, _: (addresses[id(group)],), deadline=start)
        if self._job.rl.starts_rounded and (reference := trainers.find("reference")) not in (None, trainers.policy):
            self._send_reference(reference)
        probed = self._probe()
        self.rollouts.wait_ready()
        self._actors.check_places(engines=True)
        self.rollouts.start(trainers.policy.wait(probed, deadline=start, what="probe")[0])
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.rollouts.close()
        self.store.close(self._trainers.find_lost() if kind is not None else ())
        self._scorers.close()

    def _look(self) -> None:
        """Raise what has ended something in the background, while the driver waits for ranks or scorers."""
        self.store.look()
        self.ahead.look()

    # Before the update

    def draw(self, stream: PromptStream, start: int, count: int, *, step: int, turn: int = 0) -> list[Rollout]:
        """`group_size` rollouts of `count` prompts for a step, a prompt's adjacent.

        Args:
            start: position of the first prompt in the stream; of rollouts ahead, only where a run begins.
            turn: of generation within the step.
        """
        if self._job.rl.rollout.max_lag:
            return self.ahead.draw(stream, start, count, step=step, turn=turn)
        return self.rollouts.generate(stream.take(start, count), step=step, turn=turn)

    def submit_scores(self, rollouts: Sequence[Rollout]) -> PendingScores:
        """Start the reward models on the trainer ranks, without waiting."""
        return self._scorer.submit(rollouts)

    def collect_scores(
        self, pending: PendingScores, metrics: ScorerMetrics | None = None, steps: dict[str, StepScores] | None = None
    ) -> RewardComponents:
        """Run the other scorers, and wait for the reward models. Raw scores by every scorer.

        Args:
            metrics: collects what scorers measure beside their scores.
            steps: gets what process reward models say of steps.
        """
        return {name: scores.float() for name, scores in self._scorer.collect(pending, metrics, steps=steps).items()}

    def score(
        self, rollouts: Sequence[Rollout], metrics: ScorerMetrics | None = None, steps: dict[str, StepScores] | None = None
    ) -> RewardComponents:
        return self.collect_scores(self.submit_scores(rollouts), metrics, steps)

    def ask_teachers(self, rollouts: Sequence[Rollout]) -> Callable[[], Taught | None]:
        """Ask teachers at an address, without waiting. Returns what waits for them."""
        return (lambda: None) if self._services is None else self._services.submit(rollouts)

    def submit_forward(self, rollouts: Sequence[Rollout], *, recomputed_fraction: float, keep_graphs: bool = False) -> PendingForward:
        """Start the forward passes of policy, reference, critic and teachers over rollouts, without waiting.

        Args:
            recomputed_fraction: of each rank's rollouts, from the first on, for which the policy's log-probabilities are computed.
            keep_graphs: the next update takes all of these rollouts in one optimizer step, and may continue from these passes.
        """
        self.turns.trainers()
        sequences, taught = pack(rollouts), pack_for_teachers(rollouts)
        sizes = sequences.lengths.tolist()
        of_prompts = [[i for i, _ in group] for _, group in groupby(enumerate(rollouts), key=lambda item: item[1].group_id)]
        computing, submitted = {"policy", "critic", "reference"}, []
        computing |= set() if self._job.rl.teaches_whole_distributions else {"teachers"}
        for group in self._trainers.all:
            if not computing & set(group.roles.roles):
                continue
            shards = deal_out_groups(of_prompts, sizes, ranks=group.trainer.data_parallel_size)
            recomputed = math.ceil(recomputed_fraction * max(map(len, shards)))
            per_rank = group.trainer.of_ranks([(sequences.select(s), None if taught is None else taught.select(s)) for s in shards])
            pending = group.submit("forward", per_rank, recomputed=recomputed, keep_graphs=keep_graphs)
            submitted.append(GroupForward(group, shards, recomputed, pending))
        return PendingForward(rollouts, sequences, submitted)

    def collect_forward(self, forward: PendingForward) -> dict[str, torch.Tensor]:
        """Outputs for every response token, flat [N] in the order of the rollouts: see `TrainerRank.forward`.

        old_logprobs are the engine's where they are not recomputed, and absent where none is.
        """
        found, sizes = {}, [rollout.num_tokens for rollout in forward.rollouts]
        for part in forward.groups:
            outputs = part.group.wait(part.pending, deadline=self._job.rl.deadlines.step, what="forward")
            outputs = part.group.trainer.of_groups(outputs)
            if "old_logprobs" in outputs[0]:
                for shard, of_rank in zip(part.shards, outputs, strict=True):
                    rest = [x for i in shard[part.recomputed :] for x in forward.rollouts[i].rollout_logprobs]
                    of_rank["old_logprobs"] = torch.cat([of_rank["old_logprobs"], torch.tensor(rest)])
            found |= {name: in_order(part.shards, [of_rank[name] for of_rank in outputs], sizes) for name in outputs[0]}
        return found

    # Training

    def update(self, plans: list[list[list[Minibatch]]], batch: RolloutBatch, *, kl_coef: float, train_policy: bool) -> UpdateResult:
        """All optimizer steps of a step. A critic apart from the policy learns at the same time, or, where rl.max_approx_kl can end the
        step early, after it: from as many minibatches.

        Args:
            plans: for each of rl.learning_groups, each rank's minibatches.
            batch: the rollouts that they were made from.
        """
        self.turns.trainers()
        (policy, *critic), (plan, *critic_plan) = self._trainers.learning, plans
        can_end_early = train_policy and self._job.rl.max_approx_kl is not None and batch.old_logprobs is not None

        def submit(group: TrainerGroup, plan: list[list[Minibatch]], count: int | None = None) -> list[Pending]:
            return group.submit("update", [(minibatches[:count],) for minibatches in plan], kl_coef=kl_coef, train_policy=train_policy)

        def wait(group: TrainerGroup, pending: list[Pending]) -> list[RankUpdate]:
            return group.trainer.of_groups(group.wait(pending, deadline=self._job.rl.deadlines.step, what="update"))

        pending = submit(policy, plan)
        learning = [] if can_end_early else list(map(submit, critic, critic_plan))
        results = wait(policy, pending)
        totals = summed(results)
        if can_end_early:
            counted = int(totals["optimizer_steps"] + totals["skipped_steps"]) // len(results)
            learning = [submit(group, of_group, counted) for group, of_group in zip(critic, critic_plan, strict=True)]
        found = {}
        for group, of_critic in zip(critic, learning, strict=True):
            theirs = wait(group, of_critic)
            found |= update_metrics(summed(theirs), ranks=len(theirs))
        old_logprobs = old_logprobs_of(batch, policy.trainer.of_groups(plan), results)
        return UpdateResult(found | update_metrics(totals, ranks=len(results)), old_logprobs)

    def set_value_units(self, units: ValueUnits) -> None:
        """See `TrainerRank.set_value_units`."""
        group = self._trainers.find("critic")
        group.call("set_value_units", [(units,)] * len(group), deadline=self._job.rl.deadlines.step)

    def refresh_reference(self) -> None:
        """The current policy becomes the reference."""
        self.turns.trainers()
        group = self._trainers.find("reference")
        if group is self._trainers.policy:
            group.call("refresh_reference", deadline=self._job.rl.deadlines.step)
        else:
            self._send_reference(group)

    def _send_reference(self, group: TrainerGroup) -> None:
        """Load the policy's weights into a reference in another group."""
        weights, *_ = self._trainers.policy.submit("policy_weights")
        self._trainers.policy.actors.wait_ready("policy_weights")  # a lost rank is the policy's, not the reference's
        group.call("refresh_reference", [(weights,)] * len(group), deadline=self._job.rl.deadlines.step)

    def sync_weights(self, *, version: int) -> None:
        """Send the policy's weights to every rollout engine: see `RolloutEngines.load_weights`."""
        self.rollouts.load_weights(version=version)

    def _probe(self) -> list[Pending]:
        policy = self._trainers.policy
        return policy.submit("probe", [(self.rollouts.sync_check.probe_ids,)] * len(policy))

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        self.turns.trainers()
        policy = self._trainers.policy
        policy.call("export", [(str(folder),)] * len(policy), deadline=self._job.checkpoints.save_timeout)

    # State

    def snapshot(self, progress: Progress, normalizer: RewardNormalizer, *, score: float | None) -> None:
        """Write the state of ranks and driver into a folder, which `store.publish()` makes a checkpoint.

        Args:
            score: of the policy by rl.evaluation.metric, if it was evaluated after this step.
        """
        # see TrainerRank.save; a single rank may be on another node
        ranks = range(self._trainers.ranks) if self._trainers.ranks > 1 or job_storage() is not None else ()

        self.turns.trainers()

        def save(folder: Path) -> None:
            try:
                self._trainers.call(
                    "save", lambda group, rank: (str(folder), group.first + rank if ranks else None), deadline=self._save_timeout
                )
            except RoleLost as lost:
                raise save_lost(lost, folder) from lost
            self.ahead.save(folder, step=progress.step)

        self.store.write(progress, normalizer, save, score=score, ranks=ranks)

    def load_step(self, step: int) -> None:
        """Load the trainers' state after a step that has a checkpoint; the rollout engines keep their weights.

        Raises:
            SaveFailed: the checkpoint is damaged.
        """
        self._load_trainers(self.store.of_step(step))

    def resume(self, normalizer: RewardNormalizer) -> Progress | None:
        """Load the newest complete checkpoint, and its weights into the rollout engines. None: there is none.

        Raises:
            ValueError: the checkpoint has more steps than rl.steps, or is of another job.
        """
        rl = self._job.rl
        progress = self.store.load(rl, normalizer, self._load_ranks)
        if progress is None:
            return None
        if progress.step > rl.steps:
            raise ValueError(
                f"rl.steps: expected at least the {progress.step} of the checkpoint, got {rl.steps}; raise it or rl.epochs, or begin anew"
            )
        self.sync_weights(version=progress.step)
        return progress

    def _load_ranks(self, found: Found) -> None:
        if "ahead" not in found.begun_anew:
            self.ahead.load(found.folder)
        self._load_trainers(found)

    def _load_trainers(self, found: Found) -> None:
        self.turns.trainers()
        universal, step = Path(self._job.work) / "universal", found.manifest["step"]
        converted: dict[str, tuple[str, ...]] = {}  # a group's name -> further arguments of `load`
        ranks_of, world_size = found.manifest.get("engine_ranks", {}), found.manifest["world_size"]
        for group in self._trainers.learning:
            name = group.roles.name
            others = {ranks_of.get(role, world_size) for role in group.roles.roles if role in ("policy", "critic")} - {len(group)}
            if others:
                key = "rl.trainer.ranks" if len(self._trainers.all) == 1 else f"ranks of {name}"
                log.warning("%s", of_other_ranks("rl", step, key=key, saved_by=max(others), ranks=len(group)))
                converted[name] = (str(universal / name),)
                group.call("convert", [(str(found.folder), *converted[name])] * len(group), deadline=self._save_timeout)
        self._trainers.call("load", lambda group, _: (str(found.folder), *converted.get(group.roles.name, ())), deadline=self._save_timeout)
        remove_folder(universal)

    def _damage(self, folder: Path) -> str | None:
        """What is wrong with a checkpoint's folder; each rank reads a share of the files."""
        ranks = self._trainers.ranks
        found = self._trainers.call("damage", lambda group, rank: (str(folder), group.first + rank, ranks), deadline=self._save_timeout)
        return next(filter(None, (*chain.from_iterable(found), download_for_driver(folder))), None)

    @property
    def _save_timeout(self) -> float:
        return self._job.checkpoints.save_timeout


def open_environment(job: RlJob, tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> Environment | None:
    """Return the environment of rl.environment; None without one.

    Raises:
        ValueError: it can't be used.
    """
    if job.rl.environment is None:
        return None
    takes_scores = any(s.kind == "environment" for s in job.rl.reward.scorers)
    limits = {"max_length": job.model.max_length, "deadline": job.rl.deadlines.step}
    return Environment(job.rl.environment, tokenizer, stops=stops, takes_scores=takes_scores, **limits)


def in_order(shards: list[list[int]], outputs: list[torch.Tensor], sizes: list[int]) -> torch.Tensor:
    """Values of each item, flat [N], in the items' order.

    Args:
        shards: positions of the items whose values each of `outputs` has, one item after the other.
        sizes: values of each item.
    """
    values: dict[int, torch.Tensor] = {}
    for shard, flat in zip(shards, outputs, strict=True):
        values.update(zip(shard, flat.split([sizes[i] for i in shard]), strict=True))
    return torch.cat([values[i] for i in range(len(sizes))])


def summed(results: list[RankUpdate]) -> Totals:
    totals: Totals = {}
    for result in results:
        add_totals(totals, result.totals)
    return totals


def old_logprobs_of(batch: RolloutBatch, plans: list[list[Minibatch]], results: list[RankUpdate]) -> torch.Tensor:
    """Return the policy's log-probabilities before the update [B, R]: the batch's, or else what the only optimizer step computed."""
    if batch.old_logprobs is not None:
        return batch.old_logprobs
    old_logprobs = batch.rollout_logprobs.clone()
    for (minibatch,), result in zip(plans, results, strict=True):
        mask = minibatch.batch.response_mask
        rows, width = minibatch.rows, mask.shape[1]
        old_logprobs[rows, :width] = torch.where(mask, result.logprobs, old_logprobs[rows, :width])
    return old_logprobs


def save_lost(lost: RoleLost, folder: Path) -> RoleLost:
    """Return the loss of a rank during a save, with folder, bytes and what to do."""
    written = bytes_shown(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    what = f"got {written} of the checkpoint in {folder}; raise checkpoints.save_timeout if the rank is late, or use a faster disk"
    return RoleLost(f"{lost}; {what}", lost.ranks)
