"""Rollout engines of the RL loop: responses for a step, responses for the next step in advance, and weight sync."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_core.agents.environment import Environment
from rlhf_core.config import RlConfig
from rlhf_core.engines.ray.actors import ActorGroup
from rlhf_core.engines.requests import Sample, SamplingSettings, request_seeds
from rlhf_core.trainers.rl.dispatch import Dispatcher, Requests
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.mismatch import LogprobMismatch, WeightSyncCheck
from rlhf_core.trainers.rl.recovery import EngineCall, Replacements, RolloutRecovery
from rlhf_core.trainers.rl.transfer import WeightTransfer
from rlhf_core.trainers.rl.turns import Turns
from rlhf_core.types import Prompt, Rollout, Span

# Step numbers for seeds of responses that belong to no step.
CALIBRATION_STEP = 2**31 - 1
CHECK_STEP = CALIBRATION_STEP - 1
CHECK_TOKENS, CHECK_RESPONSES = 4, 8  # compared tokens of a short response; short responses of each engine
PREFETCHED = "ahead.json"  # in a checkpoint


@dataclass(frozen=True)
class Generation:
    """Responses that engines are generating. shards: for each engine, positions of its prompts."""

    prompts: Sequence[Prompt]
    shards: list[list[int]]
    call: EngineCall


@dataclass(frozen=True)
class Prefetched:
    """Rollouts for a step, generated during the step before."""

    step: int
    rollouts: list[Rollout]


class RolloutEngines:
    """Engines that hold the same policy. An engine that is lost is replaced: see `RolloutRecovery`.

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
        turns: Turns,
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
        self._sampling = sampling_settings(job.rl)
        self._prefetching: tuple[int, Generation] | None = None
        self._prefetched: Prefetched | None = None
        self._short: Generation | None = None

    def wait_ready(self) -> None:
        self._engines.wait_ready()

    def start(self, trainer_probe: list[float]) -> None:
        """Compare the initial model of the engines with the trainer's: see `WeightSyncCheck.start`."""
        self._turns.engines()
        self.sync_check.start(self.recovery.probes(), trainer_probe)

    # Responses

    def generate(self, prompts: Sequence[Prompt], *, step: int, turn: int = 0) -> list[Rollout]:
        """`group_size` rollouts of each prompt, a prompt's adjacent. They depend on seed, step, turn and policy only.

        Rollouts that were generated in advance for the step are returned as they are.
        """
        group_size, prefetched = self._job.rl.group_size, self._prefetched
        wanted = [p.id for p in prompts for _ in range(group_size)]
        if prefetched is not None and prefetched.step == step and [r.prompt.id for r in prefetched.rollouts] == wanted:
            return prefetched.rollouts
        if self._environment is not None:
            return self._play(prompts, request_seeds(self._job.seed, step, len(wanted), turn=turn), self._sampling)
        seeds = request_seeds(self._job.seed, step, len(prompts), turn=turn)
        return self._generate(prompts, seeds, self._sampling, group_size=group_size)

    def generate_for_calibration(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """One rollout of each prompt."""
        return self._one_each(prompts, request_seeds(self._job.seed, CALIBRATION_STEP, len(prompts)), self._sampling)

    def generate_greedy(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """The policy's greedy response to each prompt."""
        return self._one_each(prompts, [0] * len(prompts), self._sampling.greedy)

    def _one_each(self, prompts: Sequence[Prompt], seeds: list[int], sampling: SamplingSettings) -> list[Rollout]:
        if self._environment is not None:
            return self._play(prompts, seeds, sampling)
        return self._generate(prompts, seeds, sampling, group_size=1)

    def _play(self, prompts: Sequence[Prompt], seeds: list[int], sampling: SamplingSettings) -> list[Rollout]:
        """An episode for each seed, equally many of each prompt."""

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
            return self._wait(self._submit(prompts, seeds, sampling, group_size=group_size))
        rl, how = self._job.rl, {"settings": sampling, "stop_ids": self._stop_ids, "group_size": group_size}
        dispatcher = Dispatcher(
            self._engines,
            self.recovery.replace,
            Requests([p.prompt_ids for p in prompts], seeds, how),
            at_a_time=max(1, rl.rollout.max_concurrent_sequences // group_size),
            joins=rl.rollout.backend == "vllm",
            deadline=rl.deadlines.step,
            drain=self._turns.on,
        )
        return self._rollouts(prompts, dispatcher.run())

    def _submit(self, prompts: Sequence[Prompt], seeds: list[int], sampling: SamplingSettings, *, group_size: int) -> Generation:
        """Prompts are dealt out in turn, so that each engine gets its share of long and short ones."""
        count = len(self._engines)
        shards = [list(range(len(prompts)))[rank::count] for rank in range(count)]
        per_rank = [([prompts[i].prompt_ids for i in shard], [seeds[i] for i in shard], sampling) for shard in shards]
        call = self.recovery.submit("generate", per_rank, stop_ids=self._stop_ids, group_size=group_size)
        return Generation(prompts, shards, call)

    def _wait(self, generation: Generation) -> list[Rollout]:
        results = self.recovery.wait_with_weights(generation.call)
        pairs = zip(generation.shards, results, strict=True)
        by_prompt = {i: samples for shard, result in pairs for i, samples in zip(shard, result, strict=True)}
        return self._rollouts(generation.prompts, [by_prompt[i] for i in range(len(generation.prompts))])

    def _rollouts(self, prompts: Sequence[Prompt], by_prompt: list[list[Sample]]) -> list[Rollout]:
        """
        Raises:
            LogprobMismatch: an engine has sampled with other weights than those that it was last sent.
        """
        expected = self.recovery.version
        if others := {s.version for samples in by_prompt for s in samples} - {expected}:
            raise LogprobMismatch(
                f"rollout engines: expected responses of policy version {expected}, got some of {sorted(others)}; weights didn't arrive"
            )
        return [
            Rollout(prompt, [Span(s.response_ids, s.logprobs, s.version)], s.finished, group_id=i)
            for i, (prompt, samples) in enumerate(zip(prompts, by_prompt, strict=True))
            for s in samples
        ]

    # One step off policy

    def prefetch(self, prompts: Sequence[Prompt], *, step: int) -> None:
        """Start to generate the rollouts of the next step with the current policy, while the trainer updates it.

        Before them each engine generates a few short responses, which the trainer compares while it has the same policy.

        Args:
            prompts: empty where no step follows.
        """
        if not prompts:
            return
        rl, seed, count = self._job.rl, self._job.seed, len(self._engines)
        # The engine excludes the end token from the first min_new_tokens tokens, which can't be compared.
        tokens = min(self._sampling.max_new_tokens, self._sampling.min_new_tokens + CHECK_TOKENS)
        short, repeated = replace(self._sampling, max_new_tokens=tokens), [prompts[i % len(prompts)] for i in range(count)]
        responses = max(CHECK_RESPONSES, rl.most_ranks)
        self._short = self._submit(repeated, request_seeds(seed, CHECK_STEP, count), short, group_size=responses)
        generation = self._submit(prompts, request_seeds(seed, step, len(prompts)), self._sampling, group_size=rl.group_size)
        self._prefetching, self.recovery.background = (step, generation), generation.call

    def short_rollouts(self) -> list[Rollout]:
        """The short responses of the last `prefetch`, at least one for each trainer rank; none if it had no prompts."""
        generation, self._short = self._short, None
        return [] if generation is None else self._wait(generation)

    def wait_prefetched(self) -> None:
        """Wait for the rollouts of the next step, if they are generated in advance; the engines can then load weights."""
        if self._prefetching is not None:
            (step, generation), self._prefetching, self.recovery.background = self._prefetching, None, None
            self._prefetched = Prefetched(step, self._wait(generation))

    def save_prefetched(self, folder: Path, *, step: int) -> None:
        """Write the rollouts that were generated in advance for a step into a checkpoint."""
        if self._prefetched is not None and self._prefetched.step == step:
            state = {"sampling": asdict(self._sampling), "rollouts": [asdict(r) for r in self._prefetched.rollouts]}
            (folder / PREFETCHED).write_text(json.dumps(state), encoding="utf-8")

    def load_prefetched(self, folder: Path, *, step: int) -> None:
        """Read what `save_prefetched` wrote, if the run still generates in advance with the same sampling settings."""
        if not (self._job.rl.rollout.one_step_off_policy and (folder / PREFETCHED).exists()):
            return
        state = json.loads((folder / PREFETCHED).read_text(encoding="utf-8"))
        if state["sampling"] == json.loads(json.dumps(asdict(self._sampling))):
            self._prefetched = Prefetched(step, [_rollout(row) for row in state["rollouts"]])

    # Weights

    def load_weights(self, *, version: int) -> None:
        """Send the trainer's policy to every engine, and compare log-probabilities of the probe.

        Raises:
            LogprobMismatch: the weights didn't arrive, or engine and trainer compute different log-probabilities with them.
            RoleLost: a trainer rank is lost, or an engine that may not be replaced.
        """
        engines, trainer = self.recovery.load_weights(version=version)
        self.sync_check.check(engines, trainer, version=version)


def _rollout(fields: dict[str, Any]) -> Rollout:
    """The inverse of `asdict`."""
    return Rollout(**fields | {"prompt": Prompt(**fields["prompt"]), "spans": [Span(**span) for span in fields["spans"]]})


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
