"""The RL loop's rollout engines: responses for a step or ahead of it, and the policy's weights in every engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_core.config import RlConfig
from rlhf_core.engines.ray_actors import ActorGroup, Pending, RoleLost
from rlhf_core.sampling.requests import SamplingSettings, request_seeds
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.mismatch import WeightSyncCheck
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.types import Prompt, Rollout

log = logging.getLogger("rlhf")

CALIBRATION_STEP = 2**31 - 1  # a step number of its own for the seeds of the calibration samples
AHEAD = "ahead.json"  # in a checkpoint
BEGINNING_STEP = CALIBRATION_STEP - 1  # the same for beginnings
BEGINNING_TOKENS, BEGINNINGS = 4, 8  # of a response that can be compared; responses of each engine


@dataclass(frozen=True)
class Request:
    """What engines were asked to draw, and where their answers will be.

    shards: for each engine, positions of its prompts.
    per_rank: its arguments.
    """

    prompts: Sequence[Prompt]
    shards: list[list[int]]
    per_rank: list[tuple]
    how: dict[str, Any]
    answers: list[Pending]


@dataclass(frozen=True)
class Ahead:
    """Rollouts for a step, drawn while the step before it was trained."""

    step: int
    rollouts: list[Rollout]


class RolloutEngines:
    """Engines that hold the same policy. One that dies or is late is replaced and asked again.

    Args:
        stop_ids: tokens of which each ends a response.
        packed_weights: of the trainer's policy of now.
        vocabulary: tokens that there are.
    Raises:
        RoleLost: an engine doesn't start, or one more would have to be replaced than rl.max_replacements.
    """

    def __init__(
        self,
        job: RlJob,
        engines: ActorGroup,
        *,
        stop_ids: tuple[int, ...],
        replacements: Replacements,
        packed_weights: Callable[[], Pending],
        vocabulary: int,
    ):
        self._job, self._engines, self._stop_ids, self._replacements = job, engines, stop_ids, replacements
        self._packed_weights = packed_weights
        self.sync_check = WeightSyncCheck(job, vocabulary=vocabulary)
        self._sampling = sampling_settings(job.rl)
        self._version = 0
        self._loaded: Pending | None = None  # kept where the trainer's own move on while engines draw
        self._drawing: tuple[int, Request] | None = None
        self._ahead: Ahead | None = None
        self._beginning: Request | None = None

    def wait_ready(self) -> None:
        self._engines.wait_ready()

    def begin(self, trainer: list[float]) -> None:
        """See `WeightSyncCheck.begin`. Args: trainer: what its policy says of the probe, before the first sync."""
        per_rank = [(self.sync_check.ids,)] * len(self._engines)
        references, deadline = self._engines.submit("probe", per_rank), self._job.rl.deadlines.step
        engines = self._engines.wait_and_replace(references, "probe", per_rank, deadline=deadline, replace=self._start)
        self.sync_check.begin(engines, trainer)

    # Responses

    def generate(self, prompts: Sequence[Prompt], *, step: int, turn: int = 0) -> list[Rollout]:
        """`group_size` rollouts of each prompt, a prompt's next to each other; what is drawn follows from seed, step and turn.

        Those that were drawn ahead for the step, if they are of these prompts.
        """
        group_size, ahead = self._job.rl.group_size, self._ahead
        if ahead is not None and ahead.step == step:
            asked = [p.id for p in prompts for _ in range(group_size)]
            if [r.prompt.id for r in ahead.rollouts] == asked:
                return ahead.rollouts
        seeds = request_seeds(self._job.seed, step, len(prompts), turn=turn)
        return self._generate(prompts, seeds, self._sampling, group_size=group_size)

    def generate_for_calibration(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """One rollout of each prompt."""
        return self._generate(prompts, request_seeds(self._job.seed, CALIBRATION_STEP, len(prompts)), self._sampling, group_size=1)

    def generate_greedy(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """The policy's greedy response to each prompt."""
        return self._generate(prompts, [0] * len(prompts), self._sampling.greedy, group_size=1)

    def _generate(self, prompts: Sequence[Prompt], seeds: list[int], sampling: SamplingSettings, *, group_size: int) -> list[Rollout]:
        return self._answer(self._ask(prompts, seeds, sampling, group_size=group_size))

    def _ask(self, prompts: Sequence[Prompt], seeds: list[int], sampling: SamplingSettings, *, group_size: int) -> Request:
        shards = _shards(len(prompts), len(self._engines))
        per_rank = [([prompts[i].prompt_ids for i in shard], [seeds[i] for i in shard], sampling) for shard in shards]
        how = {"stop_ids": self._stop_ids, "group_size": group_size}
        return Request(prompts, shards, per_rank, how, self._engines.submit("generate", per_rank, **how))

    def _answer(self, request: Request) -> list[Rollout]:
        answers = self._engines.wait_and_replace(
            request.answers, "generate", request.per_rank, deadline=self._job.rl.deadlines.step, replace=self._replace, **request.how
        )
        pairs = zip(request.shards, answers, strict=True)
        by_prompt = {i: samples for shard, answer in pairs for i, samples in zip(shard, answer, strict=True)}
        return [
            Rollout(prompt, s.response_ids, s.logprobs, s.finished, group_id=i, policy_version=self._version)
            for i, prompt in enumerate(request.prompts)
            for s in by_prompt[i]
        ]

    # Ahead

    def generate_ahead(self, prompts: Sequence[Prompt], *, step: int) -> None:
        """Have the rollouts of a later step drawn by the policy of now, while the trainer's moves on; before them each engine draws the
        beginnings of some responses, to be compared with the trainer while it has the same.

        Args:
            prompts: none where no step follows.
        """
        if prompts:
            count = len(self._engines)
            asked, drawn = [prompts[i % len(prompts)] for i in range(count)], max(BEGINNINGS, self._job.rl.trainer.ranks)
            beginning = request_seeds(self._job.seed, BEGINNING_STEP, count)
            self._beginning = self._ask(asked, beginning, self._few_tokens, group_size=drawn)
            seeds, size = request_seeds(self._job.seed, step, len(prompts)), self._job.rl.group_size
            self._drawing = step, self._ask(prompts, seeds, self._sampling, group_size=size)

    def beginnings(self) -> list[Rollout]:
        """The beginnings that `generate_ahead` has asked for, if it has: at least one for each trainer rank."""
        request, self._beginning = self._beginning, None
        return [] if request is None else self._answer(request)

    @property
    def _few_tokens(self) -> SamplingSettings:
        """Of a response: those in which the engine forbids the end token, and a few that can be compared."""
        tokens = self._sampling.min_new_tokens + BEGINNING_TOKENS
        return replace(self._sampling, max_new_tokens=min(self._sampling.max_new_tokens, tokens))

    def collect_ahead(self) -> None:
        """Wait for what is drawn ahead, if anything is; then weights may be loaded again."""
        if self._drawing is not None:
            (step, request), self._drawing = self._drawing, None
            self._ahead = Ahead(step, self._answer(request))

    def save_ahead(self, folder: Path, *, step: int) -> None:
        """What was drawn ahead for a step, into a checkpoint."""
        if self._ahead is not None and self._ahead.step == step:
            kept = {"sampling": asdict(self._sampling), "rollouts": [asdict(r) for r in self._ahead.rollouts]}
            (folder / AHEAD).write_text(json.dumps(kept), encoding="utf-8")

    def load_ahead(self, folder: Path, *, step: int) -> None:
        """What `save_ahead` wrote, where the run still draws ahead and in the same way."""
        if not (self._job.rl.rollout.one_step_off_policy and (folder / AHEAD).exists()):
            return
        kept = json.loads((folder / AHEAD).read_text(encoding="utf-8"))
        if kept["sampling"] == json.loads(json.dumps(asdict(self._sampling))):
            self._ahead = Ahead(step, [Rollout(**row | {"prompt": Prompt(**row["prompt"])}) for row in kept["rollouts"]])

    # Weights

    def load_weights(self, weights: Pending, *, version: int, given_by: ActorGroup) -> list[list[float]]:
        """Into every engine. Returns what each then says of the probe."""
        per_rank = [(weights, version, self.sync_check.ids)] * len(self._engines)
        references = self._engines.submit("load_weights", per_rank)
        answers = self._engines.wait_and_replace(
            references,
            "load_weights",
            per_rank,
            deadline=self._job.rl.deadlines.step,
            replace=self._start,
            given_by=given_by,
        )
        versions = [loaded for loaded, _ in answers]
        if versions != [version] * len(versions):
            raise RuntimeError(f"rollout engines: expected policy version {version} everywhere, got {versions}")
        self._version = version
        if self._job.rl.rollout.one_step_off_policy:
            self._loaded = weights
        return [said for _, said in answers]

    def _start(self, lost: RoleLost) -> None:
        """New engines for lost ones, with the weights that every engine begins with.

        Raises:
            RoleLost: the limit of replacements is reached, or there is no room.
        """
        if not self._replacements.allow(lost):
            raise lost
        self._engines.replace(lost.ranks)

    def _replace(self, lost: RoleLost) -> None:
        """New engines for lost ones, with the weights that the others have, which the probe shows; they are asked for what is drawn ahead.

        Raises:
            RoleLost: the limit of replacements is reached, or a new engine doesn't say what the trainer said of these weights.
        """
        self._start(lost)
        off_policy = self._job.rl.rollout.one_step_off_policy  # then the trainer may have moved on
        weights = self._loaded if off_policy else self._packed_weights()
        for rank in lost.ranks:
            version, said = self._equip(rank, weights)
            reason = self.sync_check.agrees(said)
            if version != self._version or reason:
                raise RoleLost(
                    f"{lost}; rollout rank {rank}: expected a new engine with policy version {self._version} and the trainer's "
                    f"log-probabilities, got version {version}{' and ' + reason if reason else ''}"
                )
            log.warning("rollout rank %d: new, with policy version %d, which it gives the trainer's log-probabilities", rank, version)
        if self._drawing is not None:
            _, request = self._drawing
            self._engines.submit_again(lost.ranks, request.answers, "generate", request.per_rank, **request.how)

    def _equip(self, rank: int, weights: Pending | None) -> tuple[int, list[float]]:
        """Give a new engine weights, where there are any; one that is lost meanwhile is replaced in its turn.

        Returns:
            The version of its weights, and what it says of the probe.
        Raises:
            RoleLost: the limit of replacements is reached.
        """
        deadline, ids = self._job.rl.deadlines.step, self.sync_check.ids
        while True:
            try:
                if weights is None:
                    return self._version, self._engines.call_one(rank, "probe", ids, deadline=deadline)
                return self._engines.call_one(rank, "load_weights", weights, self._version, ids, deadline=deadline)
            except RoleLost as again:
                self._start(again)


def sampling_settings(rl: RlConfig) -> SamplingSettings:
    rollout = rl.rollout
    return SamplingSettings(
        rollout.max_new_tokens,
        rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_new_tokens=rollout.min_new_tokens,
        stop=tuple(rollout.stop),
    )


def _shards(count: int, parts: int) -> list[list[int]]:
    """Positions dealt out in turn, so that each part gets its share of long and short ones."""
    return [list(range(count))[k::parts] for k in range(parts)]
