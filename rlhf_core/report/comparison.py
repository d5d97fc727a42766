"""Comparison of configurations over seeds: tables of means and differences, and a figure of RL's learning curves.

An interval over prompts describes one checkpoint. Another seed of the same configuration gives another checkpoint, so configurations are
compared by the variation between seeds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from tabulate import tabulate

from rlhf_core.report.differences import Results, of_one_configuration
from rlhf_core.statistics.intervals import MeanDifference, detectable_mean_difference, holm, mean_interval, paired_means

Table = tuple[list[str], list[list[Any]]]  # heads and rows
LAST = 5  # final training steps that are averaged


@dataclass(frozen=True)
class Trained:
    """One run of a configuration.

    figures: name -> value, in the order of the table; all compared runs have the same names. None: the run lacks it, such as a win rate
    without scores; the tables then leave the figure out.
    """

    configuration: str
    seed: int
    figures: Mapping[str, float | None]


def evaluated(evaluation: Mapping[str, Any], *, judge: bool) -> dict[str, float | None]:
    """Figures of metrics/evaluate.json, by the judge or by score."""
    key, what = ("judge_ok", "judge") if judge else ("score_mean", "score")
    found = {}
    for mode in ("sampled", "greedy"):
        found |= {f"{what}, {mode}, {name}": evaluation[mode][model][key] for model, name in (("sft", "SFT"), ("policy", "policy"))}
    return found | {"win rate, sampled": evaluation["win_rate"]["sampled"]["value"], "KL, nats": evaluation["kl"]["sampled"]}


def configurations(runs: Sequence[Results]) -> dict[str, list[Results]]:
    """Runs grouped by configuration (`of_one_configuration`), each group named after its first run.

    Raises:
        ValueError: a run has no evaluation, or one configuration has two runs of one seed.
    """
    names: dict[str, list[Results]] = {}
    for run in runs:
        if "evaluate" not in run.metrics:
            raise ValueError(f"{run.name}: expected a run with an evaluation, got none; finish the run")
        same = (name for name, group in names.items() if of_one_configuration(group[0], run))
        names.setdefault(next(same, run.name), []).append(run)
    for name, group in names.items():
        if len({run.params["seed"] for run in group}) < len(group):
            twice = ", ".join(run.name for run in group)
            raise ValueError(f"{name}: expected one run of each seed of a configuration, got {twice}; leave out repeated seeds")
    return names


def trained(runs: Sequence[Results]) -> list[Trained]:
    """Runs in the order of their configurations. Errors are those of `configurations`."""
    judge = all(run.metrics.get("evaluate", {}).get("judge") for run in runs)
    return [
        Trained(name, run.params["seed"], evaluated(run.metrics["evaluate"], judge=judge))
        for name, group in configurations(runs).items()
        for run in group
    ]


def tables(runs: Sequence[Trained], confidence: float) -> str:
    """Markdown tables of each configuration's means and of its differences from the first one, with notes on how to read them."""
    parts = [_markdown(means_table(runs, confidence)) + "\n", note(runs, confidence)]
    differences = _markdown(difference_table(runs, confidence))
    return "\n".join([*parts, *([f"\n{differences}"] if differences else [])]) + "\n"


def _markdown(table: Table) -> str:
    heads, rows = table
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True) if rows else ""


def _complete(runs: Sequence[Trained]) -> list[Trained]:
    """The runs without the figures that one of them lacks."""
    missing = {name for run in runs for name, value in run.figures.items() if value is None}
    return [replace(run, figures={name: run.figures[name] for name in run.figures if name not in missing}) for run in runs]


def means_table(runs: Sequence[Trained], confidence: float) -> Table:
    """Heads and rows: each configuration's means over its seeds, with their intervals."""
    runs = _complete(runs)
    groups = _grouped(runs)
    names = list(runs[0].figures)
    rows = []
    for configuration, of_seed in groups.items():
        cells = [_mean([run.figures[name] for run in of_seed.values()], confidence) for name in names]
        rows.append([configuration, len(of_seed), *cells])
    return ["configuration", "seeds", *names], rows


def _mean(values: list[float], confidence: float) -> str:
    mean = f"{sum(values) / len(values):.3f}"
    if len(values) < 2:
        return mean
    low, high = mean_interval(values, confidence)
    return f"{mean} ({low:.3f} to {high:.3f})"


def note(runs: Sequence[Trained], confidence: float) -> str:
    """How to read the table of means."""
    remarks = []
    groups = _grouped(runs).values()
    if any(len(of_seed) > 1 for of_seed in groups):
        remarks.append(f"In brackets: {confidence:.0%} t interval over seeds.")
    if any(len(of_seed) == 1 for of_seed in groups):
        remarks.append("A row of one seed describes that checkpoint; another seed would give other figures.")
    return " ".join(remarks)


def difference_table(runs: Sequence[Trained], confidence: float) -> Table:
    """Heads and rows: each configuration's differences from the first one by seed; no rows if none has two seeds in common with it.

    Holm's method corrects all p-values of the table together.
    """
    runs = _complete(runs)
    first, *others = _grouped(runs).items()
    found: dict[tuple[str, str], MeanDifference] = {}
    for name, of_seed in others:
        common = [seed for seed in of_seed if seed in first[1]]
        for figure in runs[0].figures if len(common) > 1 else ():
            own, base = ([group[seed].figures[figure] for seed in common] for group in (of_seed, first[1]))
            if own != base or "SFT" not in figure:  # equal figures of a common SFT model are no test
                found[name, figure] = paired_means(own, base, confidence)
    if not found:
        return [], []
    corrected = holm([difference.p_value for difference in found.values()])
    unclear = sum(p >= 1 - confidence for p in corrected)

    def verdict(d: MeanDifference, p_value: float) -> str:
        if p_value < 1 - confidence:
            return "clear"
        if not d.varied:
            return "not clear; all seeds differ equally, so their variation is unknown"
        detectable = detectable_mean_difference(d.low, d.high, d.n, confidence, tests=unclear)
        return f"not clear; detectable: {detectable:.3f}"

    rows = [
        [name, figure, d.n, f"{d.value:+.3f}", f"{d.low:+.3f} to {d.high:+.3f}" if d.varied else "", f"{p:.3f}", verdict(d, p)]
        for ((name, figure), d), p in zip(found.items(), corrected, strict=True)
    ]
    heads = [f"less {first[0]}", "figure", "seeds", "difference", f"{confidence:.0%} interval over seeds", "p, corrected (Holm)", ""]
    return heads, rows


def _grouped(runs: Sequence[Trained]) -> dict[str, dict[int, Trained]]:
    groups: dict[str, dict[int, Trained]] = defaultdict(dict)
    for run in runs:
        groups[run.configuration][run.seed] = run
    return dict(groups)


@dataclass(frozen=True)
class Run:
    """One RL algorithm on one seed.

    The curves are those of plots/train_policy.csv, with a judge among the scorers.
    """

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
        """Share of greedy answers to held-out prompts that the judge accepts, by step of the evaluation; step 0 is before training."""
        return self.curves.set_index("step")["eval_judge"].dropna()


def table(runs: list[Run], confidence: float) -> str:
    """Table of initial and final results of each algorithm over seeds."""

    def figures(run: Run) -> dict[str, float]:
        return {
            "sampled, SFT": float(run.judged.iloc[0]),
            "sampled, end": float(run.judged.tail(LAST).mean()),
            "greedy, end": float(run.judged_greedy.iloc[-1]),
            "KL, nats": float(run.curves["kl_mean"].tail(LAST).mean()),
        }

    return tables([Trained(run.algorithm, run.seed, figures(run)) for run in runs], confidence)


def methods_table(evaluations: list[tuple[str, int, dict[str, Any]]], confidence: float) -> str:
    """Table of each method's results over seeds, by the judge if all runs have one, else by score.

    evaluations: method, seed and metrics/evaluate.json of each run.
    """
    judge = all(evaluation["judge"] for _, _, evaluation in evaluations)
    return tables([Trained(name, seed, evaluated(evaluation, judge=judge)) for name, seed, evaluation in evaluations], confidence)


def draw(runs: list[Run], path: Path) -> None:
    """Draw the share of training samples that the judge accepts: thin lines are seeds, thick lines their mean."""
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
        axis.set_ylabel("judge accepts")
    axes.flat[0].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
