"""Comparison of several runs: a figure of RL's learning curves, and tables of final results by algorithm or method."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf_core.report.seeds import Trained, evaluated, tables

LAST = 5  # final training steps that are averaged


@dataclass(frozen=True)
class Run:
    """One algorithm on one seed; curves as in plots/train_policy.csv, with a judge among the scorers."""

    algorithm: str
    seed: int
    samples_per_step: int
    curves: pd.DataFrame

    @classmethod
    def read(cls, workspace: Path, algorithm: str, seed: int) -> Run:
        from rlhf_core.config import load_params

        rl = load_params(workspace / "params.yaml").rl
        return cls(algorithm, seed, rl.samples_per_step, pd.read_csv(workspace / "plots" / "train_policy.csv"))

    @property
    def judged(self) -> pd.Series:
        """Share of each step's training samples that the judge accepts."""
        return self.curves["score_judge"]

    @property
    def judged_greedy(self) -> pd.Series:
        """The same for greedy answers to held-out prompts, by step of the evaluation; step 0 is before training."""
        return self.curves.set_index("step")["eval_judge"].dropna()


def table(runs: list[Run], confidence: float) -> str:
    """Initial and final results of each algorithm, over seeds."""

    def figures(run: Run) -> dict[str, float]:
        return {
            "sampled, SFT": float(run.judged.iloc[0]),
            "sampled, end": float(run.judged.tail(LAST).mean()),
            "greedy, end": float(run.judged_greedy.iloc[-1]),
            "KL, nats": float(run.curves["kl_mean"].tail(LAST).mean()),
        }

    return tables([Trained(run.algorithm, run.seed, figures(run)) for run in runs], confidence)


def methods_table(evaluations: list[tuple[str, int, dict[str, Any]]], confidence: float) -> str:
    """Results over seeds, by the judge if all runs have one, else by score. evaluations: method, seed and metrics/evaluate.json."""
    judge = all(evaluation["judge"] for _, _, evaluation in evaluations)
    return tables([Trained(name, seed, evaluated(evaluation, judge=judge)) for name, seed, evaluation in evaluations], confidence)


def draw(runs: list[Run], path: Path) -> None:
    """The judge's acceptance over training samples: thin lines are seeds, thick lines their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    algorithms = list(dict.fromkeys(r.algorithm for r in runs))
    columns = min(4, len(algorithms))
    rows = -(-len(algorithms) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.2 * columns, 2.8 * rows), sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(algorithms) :]:
        axis.axis("off")
    for axis, algorithm in zip(axes.flat, algorithms, strict=False):
        own = [r for r in runs if r.algorithm == algorithm]
        for run in own:
            smooth = run.judged.rolling(5, min_periods=1).mean()
            axis.plot(run.curves["step"] * run.samples_per_step, smooth, color="tab:blue", linewidth=0.7, alpha=0.6)
            axis.plot(run.judged_greedy.index * run.samples_per_step, run.judged_greedy, color="tab:orange", linewidth=0.7, alpha=0.6)
        mean = sum(r.judged for r in own) / len(own)
        axis.plot(own[0].curves["step"] * own[0].samples_per_step, mean.rolling(5, min_periods=1).mean(), color="tab:blue", label="sampled")
        greedy = sum(r.judged_greedy for r in own) / len(own)
        axis.plot(greedy.index * own[0].samples_per_step, greedy, color="tab:orange", label="greedy, held out")
        axis.set_title(algorithm, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("training samples")
    for axis in axes[:, 0]:
        axis.set_ylabel("judge satisfied")
    axes.flat[0].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
