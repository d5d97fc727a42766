"""The RL loop's rollout engines: responses for a step or ahead of it, and the policy's weights in every engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_core.config import RlConfig
from rlhf_core.engines.ray_actors import ActorGroup, Pending, RoleLost
from rlhf_core.sampling import SamplingSettings, request_seeds
from rlhf_core.trainers.rl_job import RlJob
from rlhf_core.trainers.rl_metrics import largest_difference
from rlhf_core.trainers.rl_replacements import Replacements
from rlhf_core.types import Prompt, Rollout

log = logging.getLogger("rlhf")

CALIBRATION_STEP = 2**31 - 1  # a step number of its own for the seeds of the calibration samples
CHECKED_TOKENS = 4  # of a response by which a new engine, or one that draws ahead, is compared with the trainer
AHEAD = "ahead.json"  # in a checkpoint


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
        trainer_logprobs: of rollouts by the trainer's policy of now, flat [N], of the distribution that was sampled from.
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
        trainer_logprobs: Callable[[list[Rollout]], torch.Tensor],
    ):
        self._job, self._engines, self._stop_ids, self._replacements = job, engines, stop_ids, replacements
        self._packed_weights, self._trainer_logprobs = packed_weights, trainer_logprobs
        self._sampling = sampling_settings(job.rl)
        self._version = 0
        self._loaded: Pending | None = None  # kept where the trainer's own move on while engines draw
        self._beginning: Request | None = None
        self._checked: list[Rollout] = []  # what it gave and the trainer has agreed with, of every engine
        self._drawing: tuple[int, Request] | None = None
        self._ahead: Ahead | None = None

    def wait_ready(self) -> None:
        self._engines.wait_ready()

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
        request = self._ask(prompts, seeds, sampling, group_size=group_size)
        return self._answer(request, lambda lost: self._replace(lost, prompts[0]))

    def _ask(self, prompts: Sequence[Prompt], seeds: list[int], sampling: SamplingSettings, *, group_size: int) -> Request:
        shards = _shards(len(prompts), len(self._engines))
        per_rank = [([prompts[i].prompt_ids for i in shard], [seeds[i] for i in shard], sampling) for shard in shards]
        how = {"stop_ids": self._stop_ids, "group_size": group_size}
        return Request(prompts, shards, per_rank, how, self._engines.submit("generate", per_rank, **how))

    def _answer(self, request: Request, replace: Callable[[RoleLost], None]) -> list[Rollout]:
        answers = self._engines.wait_and_replace(
            request.answers, "generate", request.per_rank, deadline=self._job.rl.deadlines.step, replace=replace, **request.how
        )
        pairs = zip(request.shards, answers, strict=True)
        by_prompt = {i: samples for shard, answer in pairs for i, samples in zip(shard, answer, strict=True)}
        return [
            Rollout(prompt, s.response_ids, s.logprobs, s.finished, group_id=i, policy_version=self._version)
            for i, prompt in enumerate(request.prompts)
            for s in by_prompt[i]
        ]

    # Ahead

    def generate_ahead(self, prompts: Sequence[Prompt], *, step: int, checked: Prompt) -> None:
        """Have the rollouts of a later step drawn by the policy of now, while the trainer's moves on.

        Args:
            prompts: none where no step follows.
            checked: by the first tokens of a response to it, drawn before, `difference` compares engines and trainer.
        """
        count, size = len(self._engines), self._job.rl.group_size
        self._beginning, self._checked = self._ask([checked] * count, [self._job.seed] * count, self._first_tokens, group_size=1), []
        if prompts:
            self._drawing = step, self._ask(prompts, request_seeds(self._job.seed, step, len(prompts)), self._sampling, group_size=size)

    def difference(self) -> float:
        """Between every engine's and the trainer's log-probabilities of what was drawn to be checked: the largest, in nats. To be called
        before the trainer's policy moves on.
        """
        self._checked = self._answer(self._beginning, self._replace_and_ask_again)
        return self._difference(self._checked)

    def collect_ahead(self) -> None:
        """Wait for what is drawn ahead, if anything is; then weights may be loaded again."""
        if self._drawing is not None:
            step, request = self._drawing
            self._ahead, self._drawing = Ahead(step, self._answer(request, self._replace_behind)), None

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

    def load_weights(self, weights: Pending, *, version: int, given_by: ActorGroup) -> None:
        """Into every engine. That they arrived shows in the log-probabilities of what is drawn next."""
        per_rank = [(weights, version)] * len(self._engines)
        references = self._engines.submit("load_weights", per_rank)
        versions = self._engines.wait_and_replace(
            references,
            "load_weights",
            per_rank,
            deadline=self._job.rl.deadlines.step,
            replace=self._start,
            given_by=given_by,
        )
        if versions != [version] * len(versions):
            raise RuntimeError(f"rollout engines: expected policy version {version} everywhere, got {versions}")
        self._version = version
        if self._job.rl.rollout.one_step_off_policy:
            self._loaded = weights

    @property
    def _first_tokens(self) -> SamplingSettings:
        """Of a response, as far as they can be compared."""
        tokens = self._sampling.min_new_tokens + CHECKED_TOKENS
        return replace(self._sampling, max_new_tokens=min(self._sampling.max_new_tokens, tokens))

    def _difference(self, rollouts: list[Rollout]) -> float:
        seen = self._trainer_logprobs(rollouts).split([len(r.response_ids) for r in rollouts])
        first = self._job.rl.rollout.min_new_tokens  # before, the engine forbids the end token
        differences = torch.cat([(torch.tensor(r.rollout_logprobs) - s)[first:] for r, s in zip(rollouts, seen, strict=True)])
        return largest_difference(differences, self._job.rl)

    def _start(self, lost: RoleLost) -> None:
        """New engines for lost ones, with the weights that every engine begins with.

        Raises:
            RoleLost: the limit of replacements is reached, or there is no room.
        """
        if not self._replacements.allow(lost):
            raise lost
        self._engines.replace(lost.ranks)

    def _replace(self, lost: RoleLost, prompt: Prompt) -> None:
        """New engines for lost ones, with the trainer's policy of now, which the beginning of a response to `prompt` shows."""
        self._start(lost)
        weights, limit = self._packed_weights(), self._job.rl.rollout.max_logprob_difference
        for rank in lost.ranks:
            version, drawn = self._equip(rank, weights, prompt)
            difference = self._difference([drawn])
            if version != self._version or not difference <= limit:
                raise RoleLost(
                    f"{lost}; rollout rank {rank}: expected a new engine with policy version {self._version} and log-probabilities within "
                    f"{limit} of the trainer's, got version {version} and {difference:.3g}"
                )
            log.warning("rollout rank %d: new, with policy version %d; log-probabilities within %.2g", rank, version, difference)

    def _replace_behind(self, lost: RoleLost) -> None:
        """New engines for lost ones, with the weights that the others have: the trainer may have moved on. What they draw of the response
        that the trainer has agreed with has to be the same; where it hasn't been asked yet, `difference` looks at them.
        """
        self._start(lost)
        for rank in lost.ranks:
            before = self._checked[rank] if self._checked else None
            _, drawn = self._equip(rank, self._loaded, before and before.prompt)
            if before is not None:
                limit = self._job.rl.rollout.max_logprob_difference
                same = drawn.response_ids == before.response_ids
                if not (same and np.allclose(drawn.rollout_logprobs, before.rollout_logprobs, rtol=0, atol=limit)):
                    raise RoleLost(f"{lost}; rollout rank {rank}: expected of a new engine what the old one drew, got something else")
        log.warning("rollout rank %s: new, with policy version %d", ", ".join(map(str, lost.ranks)), self._version)

    def _equip(self, rank: int, weights: Pending | None, prompt: Prompt | None) -> tuple[int, Rollout | None]:
        """Give a new engine weights and let it begin a response, where there are any; one that is lost meanwhile is replaced in its turn.

        Returns:
            The version of its weights, and what it drew.
        Raises:
            RoleLost: the limit of replacements is reached.
        """
        while True:
            try:
                version = self._version if weights is None else self._load_one(rank, weights)
                return version, None if prompt is None else self._begin(rank, prompt)
            except RoleLost as again:
                self._start(again)

    def _replace_and_ask_again(self, lost: RoleLost) -> None:
        """The same, and what was to be drawn ahead is asked of the new ones."""
        self._replace_behind(lost)
        if self._drawing is not None:
            _, request = self._drawing
            self._engines.submit_again(lost.ranks, request.answers, "generate", request.per_rank, **request.how)

    def _begin(self, rank: int, prompt: Prompt) -> Rollout:
        """The beginning of a response by one engine."""
        how = {"stop_ids": self._stop_ids, "group_size": 1, "deadline": self._job.rl.deadlines.step}
        ((sample,),) = self._engines.call_one(rank, "generate", [prompt.prompt_ids], [self._job.seed], self._first_tokens, **how)
        return Rollout(prompt, sample.response_ids, sample.logprobs, sample.finished, group_id=0, policy_version=self._version)

    def _load_one(self, rank: int, weights: Pending) -> int:
        return self._engines.call_one(rank, "load_weights", weights, self._version, deadline=self._job.rl.deadlines.step)


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
