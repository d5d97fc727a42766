"""Several runs side by side: RL's learning curves in a figure, and tables of where each algorithm or method ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from tabulate import tabulate

LAST = 5  # training steps over which a run's end is averaged


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
        """The judge's verdict on the training samples of each step, as a share."""
        return self.curves["score_judge"]

    @property
    def judged_greedy(self) -> pd.Series:
        """The same on held-out prompts, greedily, by step, where it was measured; step 0 is before training."""
        return self.curves.set_index("step")["eval_judge"].dropna()


def table(runs: list[Run]) -> str:
    """Mean over seeds of where each algorithm began and ended, and the lowest and highest end."""
    rows = []
    for algorithm in dict.fromkeys(r.algorithm for r in runs):
        own = [r for r in runs if r.algorithm == algorithm]
        ends = [float(r.judged.tail(LAST).mean()) for r in own]
        greedy = [float(r.judged_greedy.iloc[-1]) for r in own]
        kl = [float(r.curves["kl_mean"].tail(LAST).mean()) for r in own]
        rows.append(
            [algorithm, len(own), sum(float(r.judged.iloc[0]) for r in own) / len(own), *_spread(ends), *_spread(greedy), sum(kl) / len(kl)]
        )
    heads = ["algorithm", "seeds", "sampled, SFT", "sampled, end", "lowest", "highest", "greedy, end", "lowest", "highest", "KL, nats"]
    return tabulate(rows, heads, tablefmt="github", floatfmt=".3f") + "\n"


def methods_table(evaluations: list[tuple[str, dict[str, Any]]]) -> str:
    """Name and metrics/evaluate.json of each run: means over a method's runs, and the lowest and highest policy.

    By the judge where there is one, else by the score.
    """
    rows = []
    for method in dict.fromkeys(name for name, _ in evaluations):
        own = [e for name, e in evaluations if name == method]
        key = "judge_ok" if all(e["judge"] for e in own) else "score_mean"
        row: list[Any] = [method, len(own)]
        for mode in ("sampled", "greedy"):
            before, after = ([e[mode][model][key] for e in own] for model in ("sft", "policy"))
            row += [sum(before) / len(before), *_spread(after)]
        rows.append(
            [
                *row,
                *(
                    sum(values) / len(own)
                    for values in ([e["win_rate"]["sampled"]["value"] for e in own], [e["kl"]["sampled"] for e in own])
                ),
            ]
        )
    heads = ["method", "seeds", *(f"{mode}, {what}" for mode in ("sampled", "greedy") for what in ("SFT", "policy", "lowest", "highest"))]
    return tabulate(rows, [*heads, "win rate, sampled", "KL, nats"], tablefmt="github", floatfmt=".3f") + "\n"


def _spread(values: list[float]) -> tuple[float, float, float]:
    return sum(values) / len(values), min(values), max(values)


def draw(runs: list[Run], path: Path) -> None:
    """The judge's verdict against training samples: thin lines the seeds, thick ones their mean; greedy ones dashed."""
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
