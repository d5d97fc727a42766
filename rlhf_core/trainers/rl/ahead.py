"""Rollouts ahead of the trainer: engines sample for later steps while it trains, at most rl.rollout.max_lag policy versions ahead.

A group belongs to its step when it is admitted. Step s is admitted when the trainer's version is s - max_lag, and is complete before the
update that it is for, so no token is older than max_lag. Nothing is dropped.

While a step is trained on, engines continue all admitted responses until those of the next step have ended. At the weight update what is in
flight is cut: its tokens stay, and prompt and tokens are sent again to the engines, which have new weights, with a seed of their own. So
between two calls of the engines the driver has the whole state. With rl.rollout.schedule `counted` where engines stop depends on seeds and
weights only, never on time: a run has the same bits each time, also when it was interrupted. With `free` engines go on until the update has
ended, and the journal (journal.py) has what was trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_core.config import RlConfig
from rlhf_core.data.pictures import pictures_of
from rlhf_core.engines.rollout.requests import Request, Sample, request_seeds, segment_seed
from rlhf_core.trainers.rl.data import PromptStream
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.rollouts import CALIBRATION_STEP, Dealt, RolloutEngines
from rlhf_core.types import Prompt, Rollout, Span

CHECK_STEP = CALIBRATION_STEP - 1  # step number for seeds of short responses
CHECK_TOKENS, CHECK_RESPONSES = 4, 8  # compared tokens of a short response; short responses of each engine
SAVED = "ahead.json"  # in a checkpoint

Place = tuple[int, int]  # of a rollout: its step, and its position in it


@dataclass(frozen=True)
class Admitted:
    """Rollouts that aren't trained on yet, between two calls of the engines.

    position: in the prompt stream, of the next prompt that is admitted.
    rollouts: of each step; a prompt's are adjacent. One that has no token yet has no span.
    complete: of the steps up to this one nothing is sampled any more.
    """

    position: int
    rollouts: Mapping[int, list[Rollout]] = field(default_factory=dict)
    complete: int = -1

    def admit(self, stream: PromptStream, rl: RlConfig, *, version: int) -> Admitted:
        """Return these rollouts with the groups of each step that may begin at this version, and without those of steps trained on."""
        rollouts, position = {step: rows for step, rows in self.rollouts.items() if step >= version}, self.position
        for step in range(version, min(version + rl.rollout.max_lag + 1, rl.steps)):
            if step not in rollouts:
                rollouts[step] = begun(stream.take(position, rl.rollout_batch_size), rl.group_size)
                position = stream.after(position, rl.rollout_batch_size)
        return replace(self, position=position, rollouts=rollouts)

    def open(self, rl: RlConfig, steps: Iterable[int]) -> list[Place]:
        """Return the rollouts of these steps that haven't ended."""
        limit, known = rl.rollout.max_new_tokens, [step for step in steps if step in self.rollouts and step > self.complete]
        growing = [(s, i) for s in known for i, r in enumerate(self.rollouts[s]) if not r.finished and r.num_tokens < limit]
        return [(s, i) for s, i in growing if self.rollouts[s][i].dialogue is None]

    def extended(self, samples: Mapping[Place, Sample]) -> Admitted:
        """Return these rollouts with further tokens."""
        rollouts = {
            step: [extended(r, samples[step, i]) if (step, i) in samples else r for i, r in enumerate(rows)]
            for step, rows in self.rollouts.items()
        }
        return replace(self, rollouts=rollouts)


def state_of(admitted: Admitted, *, since: int) -> dict[str, Any]:
    """Return the rollouts of steps from `since` on, as JSON has them, but for rollouts, which `json` gets by `vars`."""
    return vars(admitted) | {"rollouts": {step: rows for step, rows in admitted.rollouts.items() if step >= since}}


def begun(prompts: Sequence[Prompt], group_size: int) -> list[Rollout]:
    """Rollouts without tokens."""
    return [Rollout(prompt, [], False, group_id=i) for i, prompt in enumerate(prompts) for _ in range(group_size)]


def extended(rollout: Rollout, sample: Sample) -> Rollout:
    """Return a rollout with the tokens that an engine has added. Those of one version in a row are one span."""
    spans = list(rollout.spans)
    if spans and sample.response_ids and spans[-1].version == sample.version:
        last = spans.pop()
        spans.append(Span([*last.ids, *sample.response_ids], [*last.logprobs, *sample.logprobs], last.version))
    elif sample.response_ids:
        spans.append(Span(sample.response_ids, sample.logprobs, sample.version))
    return replace(rollout, spans=spans, finished=sample.finished)


def request(rollout: Rollout, seed: int, limit: int) -> Request:
    """Return the request that continues a rollout.

    Args:
        seed: of the whole rollout.
        limit: of further tokens.
    """
    given = rollout.response_ids
    return Request(rollout.prompt.prompt_ids, given, segment_seed(seed, len(given)), limit, pictures_of(rollout.prompt.messages))


@dataclass(frozen=True)
class Sampling:
    """Admitted rollouts that engines continue. places: of the rollouts that engines have, in the order of the requests."""

    admitted: Admitted
    places: list[Place]
    dealt: Dealt


class RolloutsAhead:
    """Draws each step's rollouts, and those of later steps at the same time."""

    def __init__(self, job: RlJob, engines: RolloutEngines):
        self._job, self._rl, self._engines = job, job.rl, engines
        self._admitted: Admitted | None = None  # at the end of the last step
        self._drawn: Admitted | None = None  # with what was sampled in this step
        self._running: Sampling | None = None
        self._short: tuple[list[Rollout], Dealt] | None = None

    def draw(self, stream: PromptStream, start: int, count: int, *, step: int, turn: int = 0) -> list[Rollout]:
        """Return the rollouts of a step, or in further turns of `count` more prompts for it.

        Args:
            start: position in the prompt stream at which a run begins that has no rollouts yet.
        """
        if turn == 0:
            self._drawn = (self._admitted or Admitted(start)).admit(stream, self._rl, version=step)
            if self._drawn.complete < step:
                self._drawn = self._complete(self._drawn, due=step)
            return self._drawn.rollouts[step]
        position = self._drawn.position
        self._drawn = replace(self._drawn, position=stream.after(position, count))
        return self._whole(stream.take(position, count), step=step, turn=turn)

    def _complete(self, admitted: Admitted, *, due: int) -> Admitted:
        """Return what is admitted with the first step's rollouts sampled to their end, since none were sampled ahead."""
        return self._finish(self._submit(admitted, due=due))

    def _whole(self, prompts: Sequence[Prompt], *, step: int, turn: int) -> list[Rollout]:
        """Rollouts of further prompts by the current policy."""
        further = begun(prompts, self._rl.group_size)
        seeds = request_seeds(self._job.seed, step, len(further), turn=turn)
        limit = self._rl.rollout.max_new_tokens
        dealt = self._engines.submit_segments(
            [request(*pair, limit) for pair in zip(further, seeds, strict=True)], due=len(further), least=0
        )
        return [extended(*pair) for pair in zip(further, self._engines.wait_segments(dealt), strict=True)]

    def begin(self, *, step: int) -> None:
        """Start to sample while the trainer updates the policy of this step. Before that each engine samples a few tokens, which the
        trainer compares while it has the same policy.
        """
        if step + 1 == self._rl.steps:
            return
        self._short = self._submit_short(step + 1)
        longest = max(rollout.num_sampled for rollout in self._drawn.rollouts[step])
        # Responses that are in flight during max_lag updates then end in time for theirs, as long as they aren't longer than these.
        least = None if self._rl.rollout.samples_freely else math.ceil(longest / self._rl.rollout.max_lag)
        self._running = self._submit(self._drawn, due=step + 1, least=least, last_tokens=self._rl.rollout.last_tokens)
        self._engines.recovery.background = self._running.dealt.call

    def end(self) -> None:
        """Wait until the rollouts of the next step are complete; the engines can then load weights."""
        running, self._running, self._engines.recovery.background = self._running, None, None
        if running is not None and self._rl.rollout.samples_freely:
            self._engines.end_segments(running.dealt)
        self._admitted = self._drawn if running is None else self._finish(running)

    def look(self) -> None:
        """Raise what has ended something that works in the background, as far as it can't be replaced."""
        self._engines.recovery.look()

    def short_rollouts(self) -> list[Rollout]:
        """Rollouts whose last few tokens are of the current policy, at least one for each trainer rank; none before the last update. Only
        these tokens are compared: `trained` is False for the others.
        """
        short, self._short = self._short, None
        if short is None:
            return []
        rollouts, dealt = short
        before = [replace(r, spans=[replace(span, trained=False) for span in r.spans]) for r in rollouts]
        return [
            replace(r, spans=[*r.spans, Span(s.response_ids, s.logprobs, s.version)], finished=s.finished)
            for r, s in zip(before, self._wait_short(dealt), strict=True)
        ]

    def _wait_short(self, dealt: Dealt) -> list[Sample]:
        return self._engines.wait_segments(dealt)

    def _submit(self, admitted: Admitted, *, due: int, least: int | None = 0, last_tokens: int | None = None) -> Sampling:
        """Submit the rollouts that haven't ended to the engines.

        Args:
            due: the step whose responses must end.
            least: see `RolloutEngines.submit_segments`.
            last_tokens: that these may still get.
        """
        rl = self._rl
        first, rest = admitted.open(rl, [due]), admitted.open(rl, sorted(s for s in admitted.rollouts if s > due))
        seeds = {step: request_seeds(self._job.seed, step, len(rows)) for step, rows in admitted.rollouts.items()}
        requests = []
        for step, i in (*first, *rest):
            rollout = admitted.rollouts[step][i]
            limit = rl.rollout.max_new_tokens - rollout.num_sampled
            requests.append(request(rollout, seeds[step][i], min(limit, last_tokens or limit) if step == due else limit))
        dealt = self._engines.submit_segments(requests, due=len(first), least=least)
        return Sampling(replace(admitted, complete=due), [*first, *rest], dealt)

    def _finish(self, sampling: Sampling) -> Admitted:
        samples = self._engines.wait_segments(sampling.dealt)
        return sampling.admitted.extended(dict(zip(sampling.places, samples, strict=True)))

    def _submit_short(self, due: int) -> tuple[list[Rollout], Dealt]:
        rl = self._rl
        responses = max(CHECK_RESPONSES * self._engines.count, rl.most_ranks)
        steps = sorted(step for step in self._drawn.rollouts if step >= due)
        # Where all have ended, their prompts alone are sampled from.
        rollouts = [self._drawn.rollouts[s][i] for s, i in self._drawn.open(rl, steps)] or begun(
            [rollout.prompt for rollout in self._drawn.rollouts[due]], 1
        )
        rollouts = [rollouts[i % len(rollouts)] for i in range(responses)]
        seeds, sampling = request_seeds(self._job.seed, CHECK_STEP, responses), self._engines.sampling
        requests = []
        for rollout, seed in zip(rollouts, seeds, strict=True):
            # The engine excludes the end token from the first min_new_tokens tokens, which can't be compared.
            uncompared = max(0, sampling.min_new_tokens - rollout.num_sampled)
            room = min(sampling.max_new_tokens - rollout.num_tokens, self._job.model.max_length - len(rollout.ids))
            limit = min(uncompared + CHECK_TOKENS, room)
            requests.append(request(rollout, seed, limit))
        return rollouts, self._engines.submit_segments(requests, due=responses, least=0)

    # State

    def save(self, folder: Path, *, step: int) -> None:
        """Write the rollouts of later steps than those that are done into a checkpoint."""
        if self._admitted is not None:
            state = {"drawn_with": self._drawn_with, "max_lag": self._rl.rollout.max_lag, **state_of(self._admitted, since=step)}
            (folder / SAVED).write_text(json.dumps(state, default=vars), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, if this run samples in the same way and may lag as far; its rollouts begin anew otherwise."""
        if not (self._rl.rollout.max_lag and (folder / SAVED).exists()):
            return
        state = json.loads((folder / SAVED).read_text(encoding="utf-8"))
        if state.get("drawn_with") == self._drawn_with and state["max_lag"] <= self._rl.rollout.max_lag:
            self.restore(state)

    def state(self, *, step: int) -> dict[str, Any] | None:
        """What `restore` needs to go on behind this step, as JSON has it but for rollouts."""
        return None if self._drawn is None else state_of(self._drawn, since=step + 1)

    def restore(self, state: dict[str, Any]) -> None:
        rollouts = {int(step): list(map(Rollout.of_tree, rows)) for step, rows in state["rollouts"].items()}
        self._admitted = Admitted(state["position"], rollouts, state["complete"])

    @property
    def _drawn_with(self) -> dict[str, Any]:
        """Settings that rollouts depend on, as JSON has them."""
        rl = self._rl
        settings = {"sampling": asdict(self._engines.sampling), "prompts": rl.rollout_batch_size, "group_size": rl.group_size}
        return json.loads(json.dumps(settings))
