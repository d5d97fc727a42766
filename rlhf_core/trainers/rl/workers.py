"""The RL loop's hands: rollout engines, trainer ranks and scorers as Ray actors, each call with a deadline."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlhf_core.checkpoint.store import Found
from rlhf_core.engines.ray_actors import Pending
from rlhf_core.models.build import vocabulary_size
from rlhf_core.models.tokenizer import load_tokenizer, stop_ids
from rlhf_core.sampling.scoring import ResponseScorer, RewardNormalizer, ScorerMetrics
from rlhf_core.trainers.rl.advantages import ValueUnits
from rlhf_core.trainers.rl.data import sequences_of
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.metrics import Metrics, update_metrics
from rlhf_core.trainers.rl.minibatch import Minibatch, Totals, gather
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.trainers.rl.rollouts import RolloutEngines
from rlhf_core.trainers.rl.scoring import ActorScorers
from rlhf_core.trainers.rl.state import Progress, RunStore
from rlhf_core.types import Rollout, RolloutBatch, ScoredRollout

if TYPE_CHECKING:
    from rlhf_core.trainers.rl.driver import Actors

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class Asked:
    """Rollouts that the trainer ranks are looking at.

    shards: for each rank, positions of its rollouts.
    recomputed: of each rank's rollouts the policy is asked of so many.
    answers: where they will be.
    """

    rollouts: Sequence[Rollout]
    shards: list[list[int]]
    recomputed: int
    answers: list[Pending]


class Workers:
    """Connects the trainers, and gives the loop one method for each of its steps; `rollouts` has those of the engines.

    A rollout engine or scorer that dies or is late is replaced and asked again, at most rl.max_replacements times; since what an engine
    draws follows from seeds alone, the run ends as if nothing had happened. A trainer rank has state that only a checkpoint can give back.

    Raises:
        RoleLost: a trainer rank dies or is late, an actor doesn't start, or one more engine would have to be replaced than
            rl.max_replacements.
    """

    def __init__(self, job: RlJob, actors: Actors):
        self._job = job
        self._trainers = actors.trainers
        self.store = RunStore(Path(job.work), job.checkpoints)
        tokenizer = load_tokenizer(job.sft_model, trust_remote_code=job.model.trust_remote_code)
        self._tokenizer, self._stops = tokenizer, stop_ids(tokenizer, job.sft_model)
        self.pad_id = tokenizer.pad_token_id
        self._updated: Pending | None = None  # the weights after the last update, asked for ahead of their sync
        self._seen: list[Pending] = []  # its log-probabilities, where it was on policy
        self.replacements = Replacements(job.rl.max_replacements)
        self.rollouts = RolloutEngines(
            job,
            actors.rollouts,
            stop_ids=self._stops,
            replacements=self.replacements,
            packed_weights=self._weights,
            vocabulary=min(len(tokenizer), vocabulary_size(job.sft_model, trust_remote_code=job.model.trust_remote_code)),
        )

    def __enter__(self) -> Workers:
        start = self._job.rl.deadlines.start
        self._scorers = ActorScorers(self._job, self._trainers, self.replacements)
        self._scorer = ResponseScorer(self._scorers, self._tokenizer, stops=self._stops)
        (address, *_) = self._trainers.call("address", deadline=start)
        self._trainers.call("connect", [address] * len(self._trainers), deadline=start)
        probed = self._probe()
        self.rollouts.wait_ready()
        self.rollouts.begin(self._trainers.wait(probed, deadline=start, what="probe")[0])
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()
        self._scorers.close()

    # Before the update

    def score(
        self, rollouts: Sequence[Rollout], metrics: ScorerMetrics | None = None, *, meanwhile: Callable[[], None] = lambda: None
    ) -> list[ScoredRollout]:
        """Raw scores by every scorer; NaN = not scored.

        Args:
            metrics: collects what scorers measure beside their scores.
            meanwhile: called once the reward models are at work; the trainer ranks do what it asks of them after that.
        """
        pending = self._scorer.submit(rollouts)
        meanwhile()
        components = self._scorer.collect(pending, metrics)
        return [ScoredRollout(r, {name: scores[i] for name, scores in components.items()}) for i, r in enumerate(rollouts)]

    def ask(self, rollouts: Sequence[Rollout], *, share: float, learn: bool = False) -> Asked:
        """Have policy, reference and critic look at rollouts, without waiting.

        Args:
            share: of each rank's rollouts, from the first on, of which the policy is asked; the others have the engine's log-probabilities.
                With 0 there are no `old_logprobs`.
            learn: the next update has all of them in one optimizer step.
        """
        sequences, starts = sequences_of(rollouts)
        shards = _contiguous_shards(len(sequences), len(self._trainers))
        recomputed = math.ceil(share * max(map(len, shards)))
        per_rank = [([sequences[i] for i in s], [starts[i] for i in s]) for s in shards]
        return Asked(rollouts, shards, recomputed, self._trainers.submit("forward", per_rank, recomputed=recomputed, learn=learn))

    def forward(self, asked: Asked) -> dict[str, torch.Tensor]:
        """What policy, reference and critic say of every response token, flat [N] in the order of the rollouts."""
        answers = self._trainers.wait(asked.answers, deadline=self._job.rl.deadlines.step, what="forward")
        recomputed = asked.recomputed
        for shard, answer in zip(asked.shards, answers, strict=True) if recomputed else ():
            trusted = torch.tensor([x for i in shard[recomputed:] for x in asked.rollouts[i].rollout_logprobs])
            answer["old_logprobs"] = torch.cat([answer["old_logprobs"], trusted])
        return {name: torch.cat([a[name] for a in answers]) for name in answers[0]}

    # Training

    def update(self, plans: list[list[Minibatch]], *, kl_coef: float, train_policy: bool, on_policy: bool) -> Metrics:
        """The optimizer steps of a step, of each rank its plan. Returns means over tokens and optimizer steps."""
        how = {"kl_coef": kl_coef, "train_policy": train_policy, "on_policy": on_policy}
        references = self._trainers.submit("update", [(plan,) for plan in plans], **how)
        self._seen = self._trainers.submit("updated_logprobs", [()] * len(self._trainers)) if on_policy else []
        self._updated = self._weights()  # rank 0 packs them while the answers are on their way
        answers = self._trainers.wait(references, deadline=self._job.rl.deadlines.step, what="update")
        totals: Totals = {}
        for answer in answers:
            gather(totals, answer)
        return update_metrics(totals, ranks=len(answers))

    def updated_logprobs(self, plans: list[list[Minibatch]], batch: RolloutBatch) -> torch.Tensor:
        """Old log-probabilities [B, R] that the last update, on policy, has computed; the engine's of what it masked."""
        found = batch.rollout_logprobs.clone()
        answers = self._trainers.wait(self._seen, deadline=self._job.rl.deadlines.step, what="updated_logprobs")
        for (minibatch,), seen in zip(plans, answers, strict=True):
            mask = minibatch.batch.response_mask
            width = mask.shape[1]
            found[minibatch.rows, :width] = torch.where(mask, seen, found[minibatch.rows, :width])
        return found

    def set_value_units(self, units: ValueUnits) -> None:
        """What the critic's output means; see `TrainerRank.set_value_units`."""
        self._trainers.call("set_value_units", [(units,)] * len(self._trainers), deadline=self._job.rl.deadlines.step)

    def refresh_reference(self) -> None:
        """The reference becomes the current policy."""
        self._trainers.call("refresh_reference", deadline=self._job.rl.deadlines.step)

    def sync_weights(self, *, version: int) -> None:
        """Give the policy's weights to every rollout engine.

        Raises:
            LogprobMismatch: they didn't arrive, or engine and trainer compute different things with them.
        """
        weights, self._updated = self._updated or self._weights(), None
        probed = self._probe()  # computed while engines load
        engines = self.rollouts.load_weights(weights, version=version, given_by=self._trainers)
        trainer, *_ = self._trainers.wait(probed, deadline=self._job.rl.deadlines.step, what="probe")
        self.rollouts.sync_check.check(engines, trainer, version=version)

    def _probe(self) -> list[Pending]:
        return self._trainers.submit("probe", [(self.rollouts.sync_check.ids,)] * len(self._trainers))

    def _weights(self) -> Pending:
        """The policy's weights of now, to be handed on to engines."""
        weights, *_ = self._trainers.submit("packed_weights", [()] * len(self._trainers))
        return weights

    def export(self, folder: Path) -> None:
        """The policy as a Hugging Face folder."""
        self._on_every_rank("export", folder)

    # State

    def snapshot(self, progress: Progress, normalizer: RewardNormalizer, *, score: float | None) -> None:
        """Everything that the loop needs to go on, in one folder: every rank's engines and generators, and the driver's state.

        It becomes a checkpoint by `store.publish()`.
        """

        def save(folder: Path) -> None:
            self._on_every_rank("save", folder)
            self.rollouts.save_ahead(folder, step=progress.step)

        self.store.write(progress, normalizer, save, score=score)

    def resume(self, normalizer: RewardNormalizer) -> Progress | None:
        """Load the newest whole checkpoint, weights into the rollout engines too. None: there is none.

        Raises:
            ValueError: it has more steps than are asked for, or isn't one of this work.
        """
        rl = self._job.rl
        progress = self.store.load(normalizer, self._load_ranks)
        if progress is None:
            return None
        if progress.step > rl.steps:
            raise ValueError(f"rl.steps: expected at least the {progress.step} of the checkpoint, got {rl.steps}; raise it or begin anew")
        self.sync_weights(version=progress.step)
        return progress if rl.kl.target is not None else replace(progress, kl_coef=rl.kl.coef)

    def _load_ranks(self, found: Found) -> None:
        self.rollouts.load_ahead(found.folder, step=found.manifest["step"])
        ranks, wanted = found.manifest["world_size"], self._job.rl.trainer.ranks
        if ranks == wanted:
            self._on_every_rank("load", found.folder)
            return
        log.warning(
            "rl: the checkpoint of step %d was made with rl.trainer.ranks=%d and goes on with %d, by DeepSpeed's universal checkpoint: "
            "as an uninterrupted run within rounding, not bit for bit",
            *(found.step, ranks, wanted),
        )
        universal = Path(self._job.work) / "universal"
        shutil.rmtree(universal, ignore_errors=True)
        self._on_every_rank("convert", found.folder, universal)
        self._on_every_rank("load_converted", found.folder, universal)
        shutil.rmtree(universal, ignore_errors=True)

    def _on_every_rank(self, method: str, *folders: Path) -> None:
        self._trainers.call(method, [tuple(map(str, folders))] * len(self._trainers), deadline=self._job.rl.deadlines.step)


def _contiguous_shards(count: int, parts: int) -> list[list[int]]:
    return [list(map(int, part)) for part in np.array_split(np.arange(count), parts)]
