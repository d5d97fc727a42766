"""Rollout engines of the RL loop: whole responses, parts of responses (ahead.py), and weight sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlhf_core.agents.environment import Environment
from rlhf_core.config import RlConfig
from rlhf_core.data.pictures import Picture, pictures_of
from rlhf_core.engines.ray.actors import ActorGroup, Pending, RoleLost
from rlhf_core.engines.rollout.requests import Request, Sample, SamplingSettings, request_seeds
from rlhf_core.trainers.rl.dispatch import Dispatcher, Requests
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.mismatch import LogprobMismatch, WeightSyncCheck
from rlhf_core.trainers.rl.recovery import EngineCall, Replacements, RolloutRecovery
from rlhf_core.trainers.rl.transfer import WeightTransfer
from rlhf_core.trainers.rl.turns import GpuTimeSharing
from rlhf_core.types import Prompt, Rollout, Span

# Step numbers for seeds of responses that belong to no step.
CALIBRATION_STEP = 2**31 - 1
EVALUATION_STEP = CALIBRATION_STEP - 1
LOOK_SECONDS = 0.02  # between two looks at engines that sample until they are told to end


@dataclass(frozen=True)
class Dealt:
    """What engines are working at. shards: for each engine, positions of what it was given."""

    shards: list[list[int]]
    call: EngineCall


class RolloutEngines:
    """Engines that hold the same policy; none for a run that is trained again from its journal. An engine that is lost is replaced: see
    `RolloutRecovery`.

    Args:
        stop_ids: tokens of which each ends a response.
        transfer: sends the trainer's policy to engines.
        turns: of engines and trainer ranks.
        renew: sends every engine the weights of its version again.
        check_trainers: raises RoleLost if a trainer rank is lost.
        vocabulary: number of tokens that the model knows.
        environment: plays episodes in place of single responses.
    Raises:
        RoleLost: an engine doesn't start, or rl.max_replacements is reached.
    """

    def __init__(
        self,
        job: RlJob,
        engines: ActorGroup,
        *,
        stop_ids: tuple[int, ...],
        replacements: Replacements,
        transfer: WeightTransfer,
        turns: GpuTimeSharing,
        renew: Callable[[], None],
        check_trainers: Callable[[], None],
        vocabulary: int,
        environment: Environment | None = None,
    ):
        self._environment = environment
        self._turns, self._renew = turns, renew
        self._job, self._engines, self._stop_ids = job, engines, stop_ids
        self.sync_check = WeightSyncCheck(job, vocabulary=vocabulary)
        self.recovery = RolloutRecovery(
            job,
            engines,
            replacements=replacements,
            sync_check=self.sync_check,
            transfer=transfer,
            turns=turns,
            renew=renew,
            check_trainers=check_trainers,
        )
        self.sampling = sampling_settings(job.rl)
        self._segments = 0  # calls of `submit_segments` that go on until they are told to end

    @property
    def count(self) -> int:
        """The number of engines."""
        return len(self._engines)

    def wait_ready(self) -> None:
        self._engines.wait_ready()

    def start(self, trainer_probe: list[float]) -> None:
        """Compare the initial model of the engines with the trainer's: see `WeightSyncCheck.start`."""
        if self.count:
            self._turns.engines()
            self.sync_check.start(self.recovery.probes(), trainer_probe)

    def close(self) -> None:
        """End what plays episodes."""
        if self._environment is not None:
            self._environment.close()

    # Responses

    def generate(self, prompts: Sequence[Prompt], *, step: int, turn: int = 0) -> list[Rollout]:
        """`group_size` rollouts of each prompt, a prompt's adjacent. They depend on seed, step, turn and policy only."""
        return self._several_each(prompts, self._job.rl.group_size, step=step, turn=turn)

    def generate_for_evaluation(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """`rl.evaluation.samples` rollouts of each prompt, a prompt's adjacent, with the same seeds in every evaluation."""
        return self._several_each(prompts, self._job.rl.evaluation.samples, step=EVALUATION_STEP)

    def generate_for_calibration(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Return one rollout of each prompt."""
        return self._one_each(prompts, request_seeds(self._job.seed, CALIBRATION_STEP, len(prompts)), self.sampling)

    def generate_greedy(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Return the policy's greedy response to each prompt."""
        return self._one_each(prompts, [0] * len(prompts), self.sampling.greedy)

    def _several_each(self, prompts: Sequence[Prompt], count: int, *, step: int, turn: int = 0) -> list[Rollout]:
        if self._environment is not None:
            return self._play(prompts, request_seeds(self._job.seed, step, count * len(prompts), turn=turn), self.sampling)
        return self._generate(prompts, request_seeds(self._job.seed, step, len(prompts), turn=turn), self.sampling, group_size=count)

    def _one_each(self, prompts: Sequence[Prompt], seeds: list[int], sampling: SamplingSettings) -> list[Rollout]:
        if self._environment is not None:
            return self._play(prompts, seeds, sampling)
        return self._generate(prompts, seeds, sampling, group_size=1)

    def _play(self, prompts: Sequence[Prompt], seeds: list[int], sampling: SamplingSettings) -> list[Rollout]:
        """Return an episode for each seed, equally many of each prompt."""

        def sample(ids: list[list[int]], seeds: list[int], sampling: SamplingSettings) -> list[Sample]:
            rollouts = self._generate([Prompt("", "", [], of_one, None) for of_one in ids], seeds, sampling, group_size=1)
            return [Sample(r.response_ids, r.rollout_logprobs, r.finished, self.recovery.version) for r in rollouts]

        return self._environment.play(prompts, seeds, sampling, sample, copies=len(seeds) // len(prompts))

    def _generate(self, prompts: Sequence[Prompt], seeds: list[int], sampling: SamplingSettings, *, group_size: int) -> list[Rollout]:
        """Rollouts of each prompt, in order."""
        self._turns.engines()
        if self._turns.stale:
            self._renew()
        if self._job.rl.dispatch(on_gpu=self._engines.has_gpus) == "equal":
            return self._rollouts(prompts, self._wait(self._submit(prompts, seeds, sampling, group_size=group_size)))
        rl, arguments = self._job.rl, {"settings": sampling, "stop_ids": self._stop_ids, "group_size": group_size}
        dispatcher = Dispatcher(
            self._engines,
            self.recovery.replace,
            Requests([p.prompt_ids for p in prompts], seeds, arguments, pictures_of_all(prompts)),
            at_a_time=max(1, rl.rollout.max_concurrent_sequences // group_size),
            joins=rl.rollout.backend == "vllm",
            deadline=rl.deadlines.step,
            drain=self._turns.on,
        )
        return self._rollouts(prompts, dispatcher.run())

    def _submit(self, prompts: Sequence[Prompt], seeds: list[int], sampling: SamplingSettings, *, group_size: int) -> Dealt:
        """Prompts are dealt out in turn, so that each engine gets its share of long and short ones."""
        shards = self._deal(range(len(prompts)))
        per_rank = [([prompts[i].prompt_ids for i in shard], [seeds[i] for i in shard], sampling) for shard in shards]
        if pictures := pictures_of_all(prompts):
            per_rank = [(*of_rank, [pictures[i] for i in shard]) for of_rank, shard in zip(per_rank, shards, strict=True)]
        return Dealt(shards, self.recovery.submit("generate", per_rank, stop_ids=self._stop_ids, group_size=group_size))

    def submit_segments(self, requests: Sequence[Request], *, due: int, least: int | None) -> Dealt:
        """Start to continue responses, without waiting. Each engine goes on until its share of the first `due` responses has ended, and for
        at least so many steps; None: until `end_segments`.
        """
        first, rest = self._deal(range(due)), self._deal(range(due, len(requests)))
        shards = [[*mine, *further] for mine, further in zip(first, rest, strict=True)]
        per_rank = [([requests[i] for i in shard], self.sampling, len(mine)) for shard, mine in zip(shards, first, strict=True)]
        arguments = {"least": least}
        if least is None:
            self._segments += 1
            arguments = {"least": 0, "call": self._segments}
        return Dealt(shards, self.recovery.submit("advance", per_rank, stop_ids=self._stop_ids, **arguments))

    def end_segments(self, dealt: Dealt) -> None:
        """End a call that goes on until now, once its due responses have ended on every engine. A lost engine isn't waited for, and a new
        one in its place ends by itself.
        """
        call, until, engines = dealt.call.kwargs.pop("call"), time.monotonic() + self._job.rl.deadlines.step, self._engines

        def look(*, end: bool) -> list[Pending]:
            return [engines.look(rank, call, end) for rank in range(len(engines))]

        with suppress(RoleLost):  # which is raised again where the call is waited for
            while not all(engines.wait(look(end=False), deadline=self._job.rl.deadlines.step, what="look")) and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
        look(end=True)

    def wait_segments(self, dealt: Dealt) -> list[Sample]:
        """What the engines have added to each response."""
        samples: list[Sample] = self._wait(dealt)
        self._check_versions({sample.version for sample in samples})
        return samples

    def _deal(self, positions: range) -> list[list[int]]:
        return [list(positions)[rank :: len(self._engines)] for rank in range(len(self._engines))]

    def _wait(self, dealt: Dealt) -> list[Any]:
        """Return the results of each position."""
        results = self.recovery.wait_with_weights(dealt.call)
        pairs = zip(dealt.shards, results, strict=True)
        found = {i: result for shard, of_rank in pairs for i, result in zip(shard, of_rank, strict=True)}
        return [found[i] for i in range(len(found))]

    def _check_versions(self, versions: Collection[int]) -> None:
        """Check that all engines sampled with the weights that they were last sent.

        Raises:
            LogprobMismatch: an engine has sampled with other weights than those that it was last sent.
        """
        expected = self.recovery.version
        if others := set(versions) - {expected}:
            raise LogprobMismatch(
                f"rollout engines: expected responses of policy version {expected}, got some of {sorted(others)}; weights didn't arrive"
            )

    def _rollouts(self, prompts: Sequence[Prompt], by_prompt: list[list[Sample]]) -> list[Rollout]:
        self._check_versions({s.version for samples in by_prompt for s in samples})
        return [
            Rollout(prompt, [Span(s.response_ids, s.logprobs, s.version)], s.finished, group_id=i)
            for i, (prompt, samples) in enumerate(zip(prompts, by_prompt, strict=True))
            for s in samples
        ]

    # Weights

    def load_weights(self, *, version: int) -> None:
        """Send the trainer's policy to every engine, and compare log-probabilities of the probe.

        Raises:
            LogprobMismatch: the weights didn't arrive, or engine and trainer compute different log-probabilities with them.
            RoleLost: a trainer rank is lost, or an engine that may not be replaced.
        """
        if not self.count:
            return
        engines, trainer = self.recovery.load_weights(version=version)
        self.sync_check.check(engines, trainer, version=version)


def pictures_of_all(prompts: Sequence[Prompt]) -> list[tuple[Picture, ...]]:
    """Return the pictures of each prompt; empty: none has any."""
    found = [pictures_of(prompt.messages) for prompt in prompts]
    return found if any(found) else []


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
