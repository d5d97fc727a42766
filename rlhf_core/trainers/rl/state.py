"""State of an RL run: the driver's progress, and checkpoints, of which one has the best policy so far."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rlhf_core.algorithms.kl import adaptive_kl_coef
from rlhf_core.checkpoint.digest import write_digest
from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.checkpoint.store import CheckpointStore, Found
from rlhf_core.checkpoint.stored import check_checkpoint
from rlhf_core.config import RlConfig
from rlhf_core.sampling.rewards import Moments, RewardNormalizer
from rlhf_core.trainers.rl.curriculum import Seen
from rlhf_core.trainers.rl.monitor import MonitorState, begun_anew, under_limits
from rlhf_core.trainers.supervised.time_limit import out_of_time

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class BestPolicy:
    """The step after which the policy was the best (0: the initial policy), and its value by the metric of this name."""

    step: int
    value: float
    metric: str


@dataclass(frozen=True)
class Progress:
    """The driver's state between two steps.

    step: completed steps, which is also the policy version of the rollout engines.
    prompts_drawn: position in the prompt stream.
    kl_coef: of the next step.
    curriculum: measured success by prompt.
    seconds: of training, up to the end of the last step. In a checkpoint's manifest.
    """

    step: int
    prompts_drawn: int
    kl_coef: float
    best: BestPolicy | None
    monitor: MonitorState = field(default_factory=MonitorState)
    curriculum: Seen = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def start(cls, rl: RlConfig) -> Progress:
        return cls(step=0, prompts_drawn=0, kl_coef=rl.kl.coef, best=None)

    def after_step(self, rl: RlConfig, *, kl: float, prompts_drawn: int) -> Progress:
        """Progress after a step; the KL coefficient is adapted if rl.kl.target is set.

        Args:
            kl: the step's mean KL per response, in nats.
        """
        coef = self.kl_coef
        if rl.kl.target is not None:
            coef = adaptive_kl_coef(coef, kl, target=rl.kl.target, horizon=rl.kl.horizon, samples=rl.samples_per_step)
        return replace(self, step=self.step + 1, prompts_drawn=prompts_drawn, kl_coef=coef)

    def is_last(self, rl: RlConfig) -> bool:
        """Return whether all steps are done, or rl.max_minutes are over."""
        return self.step == rl.steps or out_of_time(self.seconds, rl.max_minutes)

    def finished(self, rl: RlConfig) -> bool:
        """Return whether this step is the last, or a limit ended the run."""
        return self.is_last(rl) or self.monitor.stopped is not None

    @property
    def is_best(self) -> bool:
        """Whether the policy of this step is the best so far."""
        return self.best is not None and self.best.step == self.step

    def improves(self, value: float) -> bool:
        """Return whether a policy with this value is better than the best before; at the same value the earlier one stays."""
        return math.isfinite(value) and (self.best is None or value > self.best.value)

    def write(self, path: Path, normalizer: RewardNormalizer) -> None:
        moments = {name: asdict(m) for name, m in normalizer.moments.items()}
        state = {name: value for name, value in asdict(self).items() if name != "seconds"}
        path.write_text(json.dumps({**state, "normalizer": moments}, indent=1))

    @classmethod
    def read(cls, path: Path, normalizer: RewardNormalizer) -> Progress:
        """Read what `write` wrote, and set the normalizer's moments.

        Raises:
            ValueError: the moments are of other scorers.
        """
        state = json.loads(path.read_text())
        moments = {name: Moments(**m) for name, m in state.pop("normalizer").items()}
        if moments.keys() != normalizer.moments.keys():
            raise ValueError(
                f"rl.reward.scorers: expected to normalise those of the checkpoint, {sorted(moments)}, got {sorted(normalizer.moments)}; "
                "set them back, or start again without the checkpoint"
            )
        normalizer.moments = moments
        best, monitor = state.pop("best"), MonitorState.read(state.pop("monitor"))
        state["curriculum"] = {prompt: (*counts,) for prompt, counts in state.get("curriculum", {}).items()}  # older checkpoints lack it
        return cls(**state, best=best and BestPolicy(**{"metric": "", **best}), monitor=monitor)

    def resumed(self, rl: RlConfig, names: Collection[str] = ()) -> Progress:
        """Return the state for a run that resumes with this configuration; the log says what begins anew.

        Args:
            names: fields of the state that mean something else in this run (rlhf_core/stage/carried.py).
        """
        best, coef = self.best, self.kl_coef
        if best is not None and ("best" in names or best.metric != rl.evaluation.metric):
            log.warning("rl: the best policy by %s so far, of step %d, isn't compared with later ones", best.metric, best.step)
            best = None
        if rl.kl.target is None or "kl_coef" in names:
            coef = rl.kl.coef
        curriculum = self.curriculum
        if curriculum and (not rl.measures_success or "curriculum" in names):
            log.warning("rl: the prompts' measured success so far means something else in this run: it is measured anew")
            curriculum = {}
        monitor, words = under_limits(begun_anew(self.monitor, names), rl.limits)
        for word in words:
            log.warning("rl: %s", word)
        return replace(self, best=best, kl_coef=coef, monitor=monitor, curriculum=curriculum)


class RunStore:
    """Checkpoints of a run. The best policy so far is that of one of them, which stays as long as a checkpoint refers to it.

    Args:
        check: what is wrong with a checkpoint's folder, or None.
    """

    def __init__(self, work: Path, settings: StoreSettings | None = None, *, check: Callable[[Path], str | None] = check_checkpoint):
        self._checkpoints = CheckpointStore(work / "checkpoints", settings, write_digest=write_digest)
        self._check = check

    def write(
        self,
        progress: Progress,
        normalizer: RewardNormalizer,
        save_ranks: Callable[[Path], None],
        *,
        score: float | None = None,
        ranks: Collection[int] = (),
    ) -> None:
        """Write a snapshot. `publish` makes it a checkpoint in the background; `wait` waits for that.

        Args:
            score: of the current policy by rl.evaluation.metric, if it was evaluated.
            ranks: see `CheckpointStore.write`.
        """

        def write(folder: Path) -> None:
            save_ranks(folder)
            progress.write(folder / "driver.json", normalizer)

        best = None if progress.best is None else progress.best.step
        self._checkpoints.write(progress.step, write, score=score, ranks=ranks, best=best, seconds=progress.seconds)

    def publish(self) -> None:
        self._checkpoints.publish()

    def look(self) -> None:
        """See `CheckpointStore.look`."""
        self._checkpoints.look()

    @property
    def surely_done(self) -> int:
        """See `CheckpointStore.surely_done`."""
        return self._checkpoints.surely_done

    def wait(self) -> None:
        self._checkpoints.wait()

    def close(self, lost: Collection[int] = ()) -> None:
        """See `CheckpointStore.close`."""
        self._checkpoints.close(lost)

    def load(self, rl: RlConfig, normalizer: RewardNormalizer, load_ranks: Callable[[Found], None]) -> Progress | None:
        """Load the newest complete checkpoint for a run with this configuration. None: there is no checkpoint."""
        found = self._checkpoints.latest(self._check)
        if found is None:
            return None
        load_ranks(found)
        progress = Progress.read(found.folder / "driver.json", normalizer).resumed(rl, found.begun_anew)
        return replace(progress, seconds=found.manifest.get("seconds", 0.0))

    def of_step(self, step: int) -> Found:
        """Return the checkpoint of a step.

        Raises:
            SaveFailed: it is damaged.
        """
        return self._checkpoints.of_step(step, self._check)
