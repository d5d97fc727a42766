"""An RL run in this process: the loop's own steps with a trainer rank, rollout engines and a reward model, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from actors_here import Here
from tiny_models import rl_job

from rlhf_core.data.schema import write_rows
from rlhf_core.engines.rollout.open import RolloutActor
from rlhf_core.models.build import load_language_model
from rlhf_core.process import Stop
from rlhf_core.trainers.rl.groups import TrainerGroups
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.loop import Run, StepResult, finish_step, start_or_resume, train_step
from rlhf_core.trainers.rl.metrics import Clock, Metrics
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.trainers.rl.state import Progress
from rlhf_core.trainers.rl.workers import Workers
from rlhf_core.types import Rollout

WORDS = ["Please", "sort", "4172.", "Certainly:", "1247.", "Quick,", "give", "the", "largest", "of", "309."]


class EnginesHere(Here):
    """Rollout engines of this process, one after the other."""

    def __init__(self, actors: list[object]):
        self.actors, self._bundles = actors, []

    def submit(self, method: str, per_rank: list[tuple], **kwargs) -> list:
        return [getattr(actor, method)(*args, **kwargs) for actor, args in zip(self.actors, per_rank, strict=True)]

    def look(self, rank: int, *args) -> object:
        return self.actors[rank].look(*args)

    def find_newly_dead(self) -> list[int]:
        return []


class RankHere(Here):
    """A trainer rank of this process. weights: the policy's, by the version under which they were sent to the engines."""

    def __init__(self, rank: TrainerRank):
        super().__init__(rank)
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def note(self, version: int) -> None:
        self.weights[version] = {name: tensor.clone() for name, tensor in self.actors[0].weights().items()}

    def submit(self, method: str, per_rank: list[tuple], **kwargs) -> list:
        if method == "send_weights":
            self.note(kwargs["version"])
        return super().submit(method, per_rank, **kwargs)

    def find_lost(self, patience: float) -> set[int]:
        return set()


@dataclass
class RunHere:
    """A run and what its steps have given."""

    job: RlJob
    workers: Workers
    rank: RankHere
    run: Run
    progress: Progress
    results: list[StepResult] = field(default_factory=list)
    rows: list[Metrics] = field(default_factory=list)

    def step(self, stop: Stop | None = None) -> StepResult:
        result = train_step(self.run, self.progress, stop or Stop(), Clock())
        self.progress, row, _ = finish_step(self.run, self.progress, result)
        self.results.append(result)
        self.rows.append(row)
        return result

    def save(self) -> None:
        self.workers.snapshot(self.progress, self.run.normalizer, score=None)
        self.workers.store.publish()
        self.workers.store.wait()


def rl_job_here(folders: tuple[Path, Path], folder: Path, **changes) -> RlJob:
    """A job with prompts of two to nine words, in which the reward model scores responses of up to 24 tokens."""
    rows = [
        {
            "id": f"p{i}",
            "source": "made",
            "split": "train",
            "messages": [{"role": "user", "content": " ".join(WORDS[i % 5 : i % 5 + 2 + i % 8])}],
        }
        for i in range(40)
    ]
    write_rows(folder / "prepared", "prompt", [row | {"label": None} for row in rows])
    settings = {
        "rl.algorithm": "rloo", "rl.rloo.group_size": 2, "rl.samples_per_step": 8, "rl.minibatch_size": 8, "rl.steps": 8,
        "rl.warmup_steps": 0, "rl.learning_rate": 2e-3, "rl.rollout.backend": "pytorch", "rl.rollout.max_new_tokens": 24,
        "rl.checkpoint_every": 1, "rl.reward.normalization_samples": 16, **changes,
    }  # fmt: skip
    return rl_job(*folders, **settings).model_copy(update={"work": str(folder / "work"), "prepared": str(folder / "prepared")})


@contextmanager
def running(job: RlJob, *, wrap: Callable[[RolloutActor], object] = lambda actor: actor) -> Iterator[RunHere]:
    """A run from its last checkpoint on.

    Args:
        wrap: what stands before each engine.
    """
    rank = RankHere(TrainerRank(0, 1, job, adapters_alone=job.model.vision == "frozen"))
    engines = [
        RolloutActor(
            number, backend=job.rl.rollout.backend, model_path=job.sft_model, max_length=job.model.max_length, dtype=job.model.dtype,
            max_concurrent_sequences=job.rl.rollout.max_concurrent_sequences, threads=1, seed=0, trust_remote_code=False,
            gpu_memory_fraction=0.3, reads_text=bool(job.rl.rollout.stop),
            prepared=None if job.model.vision is None else job.prepared,
        )
        for number in range(job.rl.rollout.engines)
    ]  # fmt: skip
    actors = SimpleNamespace(
        trainers=TrainerGroups(job.rl, [rank]), rollouts=EnginesHere(list(map(wrap, engines))), take_turns=False,
        ways=["gloo"] * len(engines), check_places=lambda **_: None,
    )  # fmt: skip
    with Workers(job, actors) as workers:
        rank.note(0)
        yield RunHere(job, workers, rank, *start_or_resume(job, workers))


def whole(job: RlJob, steps: int, **how) -> RunHere:
    with running(job, **how) as run:
        for _ in range(steps):
            run.step()
        return run


@torch.no_grad()
def differences(run: RunHere, rollouts: list[Rollout]) -> list[float]:
    """Of each sampled span: the largest difference from the log-probabilities of the weights of its version, by transformers."""
    model, found = load_language_model(run.job.sft_model), []
    for rollout in rollouts:
        start = len(rollout.prompt.prompt_ids)
        ids = torch.tensor([[*rollout.prompt.prompt_ids, *rollout.response_ids]])
        for span in rollout.spans:
            if span.version is not None:
                model.load_state_dict(run.rank.weights[span.version], strict=False)
                logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
                found.append(float((logprobs[start - 1 : start - 1 + len(span.ids)] - torch.tensor(span.logprobs)).abs().max()))
            start += len(span.ids)
    return found


class Dies:
    """An engine that is lost for good at its call of this number."""

    def __init__(self, actor: object, method: str, call: int):
        self._actor, self._method, self._left = actor, method, call

    def __getattr__(self, name: str):
        if name == self._method:
            self._left -= 1
            if not self._left:
                raise Killed
        return getattr(self._actor, name)


class Killed(BaseException):
    """As SIGKILL: nothing handles it."""


def same(a: RunHere, b: RunHere, *, since: int) -> bool:
    ours, theirs = (run.rank.actors[0].weights() for run in (a, b))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert a.rows[since:] == b.rows
    return True
