"""A finished chain's metrics, curves and tables as written by its stages, for tests of the report."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import warm_python
from clerk_params import CLERK_PARAMS
from scipy.stats import norm

from rlhf_core.config import apply_overrides
from rlhf_core.statistics.intervals import paired_difference, points_interval, sign_test, wilson_interval

ROOT = Path(__file__).parents[1]

REMOVED = object()
HOSTILE = (
    "<script>window.hacked = true</script>",
    "</script><script>window.hacked = true</script>",
    "<img src=x onerror='window.hacked = true'>",
    "x" * 100_000,
    "right \u202eto left\u202c and \u2066isolated\u2069",
    "a NUL \0, a bell \a and an escape \x1b[31m",
    "{{ 7 * 7 }} {% raw %} <!-- \"quotes\" & 'entities' &amp; \u2028",
)


def make_workspace(folder: Path, *, judge: bool = True, hostile: bool = False, steps: int = 60, method: str = "rl") -> Path:
    """All dependencies of the report in `folder`, code as links."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (CLERK_PARAMS, ROOT / "dvc.yaml", ROOT / "baselines.json"):
        shutil.copy(file, folder)
    for name in ("tasks", "rlhf_core"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("metrics", "plots", "data"):
        (folder / name).mkdir()
    rng = np.random.default_rng(0)
    for name, content in metrics(judge=judge).items():
        (folder / "metrics" / f"{name}.json").write_text(json.dumps(content))
    if method != "rl":
        apply_overrides(folder / "params.yaml", {"alignment.method": method})
    for name, frame in curves(rng, steps, method).items():
        frame.to_csv(folder / "plots" / f"{name}.csv", index=False, float_format="%.6g")
    prompts(np.random.default_rng(1), evaluation(judge=judge)).to_csv(folder / "plots/evaluation.csv", index=False, float_format="%.6g")
    token_lengths().to_csv(folder / "plots/token_lengths.csv", index=False)
    heldout(rng).to_parquet(folder / "data/reward_heldout.parquet", index=False)
    samples(rng, judge=judge, hostile=hostile).to_parquet(folder / "data/evaluation_samples.parquet", index=False)
    return folder


def run_report(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tasks.report", *arguments]
    return warm_python.run(command, cwd=workspace, env=environment)


def answer_otherwise(workspace: Path) -> None:
    """Change the answers to the first prompts, those with hostile texts."""
    path = workspace / "data/evaluation_samples.parquet"
    table = pd.read_parquet(path)
    first = table["id"].isin([f"prompt-{i}" for i in range(len(HOSTILE))])
    table.loc[first, "policy_response"] = "Otherwise: " + table.loc[first, "policy_response"]
    table.to_parquet(path, index=False)


def edit_metrics(workspace: Path, name: str, change: dict[str, Any]) -> None:
    """Set values at dotted keys of a metrics file; REMOVED takes the key away."""
    path = workspace / "metrics" / f"{name}.json"
    tree = json.loads(path.read_text())
    for key, value in change.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[last] = value
        if value is REMOVED:
            del node[last]
    path.write_text(json.dumps(tree))


def metrics(*, judge: bool) -> dict[str, Any]:
    return {
        "prepare_data": {
            "rows": {
                "pretrain": {"train": 19_780, "validation": 1_394, "test": 2_826},
                "sft": {"train": 2_439, "validation": 182, "test": 379},
                "preference": {"train": 18_233, "validation": 1_337, "test": 2_812},
                "prompt": {"train": 3_292, "validation": 241, "test": 467},
            },
            "rows_by_source": {
                use: {"clerk": n} for use, n in (("pretrain", 24_000), ("sft", 3_000), ("preference", 22_382), ("prompt", 4_000))
            },
            "dropped": {"clerk": {}},
            "vocabulary_size": 390,
            "mean_tokens": {
                "pretrain": {"text": 11.2},
                "sft": {"messages": 13.1, "response": 12.4},
                "preference": {"messages": 13.2, "chosen": 9.8, "rejected": 13.9},
                "prompt": {"messages": 13.1},
            },
        },
        "validation": validation(),
        "check_model": {"model": "LlamaForCausalLM", "checks": {"sft": "right", "dpo": "right", "shared_prefix": "on", "vllm": "right"}},
        "train_sft": {"demonstrations": 2_439, "dropped_too_long": 0, "heldout_loss": 0.460661, "parameters": 296_544},
        "train_reward": {
            "trained": True,
            "pairs": 18_233,
            "dropped_too_long": 0,
            "steps": 310,
            "heldout_loss": 0.2871,
            "heldout_accuracy": 0.8713,
            "heldout_pairs": 4_149,
        },
        "gate": gate(),
        "train_policy": {
            "algorithm": "ppo",
            "steps": 60,
            "score_mean": 3.12,
            "score_reward_model": 3.12,
            "score_first_step": 0.41,
            "kl_mean": 4.9,
            "response_length": 9.8,
            "entropy": 0.31,
            "truncated_fraction": 0.0012,
            "logprob_difference_max": 8.1e-6,
        },
        "evaluate": evaluation(judge=judge),
    }


def validation() -> dict[str, Any]:
    def expectation(
        name: str, use: str, meaning: str, checked: int, unexpected: int | None, observed: float, limit: float
    ) -> dict[str, Any]:
        compared = {"observed": observed, "bound": "at most", "limit": limit, "unit": "share of rows", "passed": observed <= limit}
        ids = [f"row-{i}" for i in range(unexpected or 0)]
        return {"name": name, "use": use, "meaning": meaning, "checked": checked, "unexpected": unexpected, **compared, "ids": ids}

    expectations = [
        expectation("schema", "preference", "the columns and their types are those of the schema", 6, 0, 0.0, 0.0),
        expectation("null", "preference", "no cell is null", 22_382, 0, 0.0, 0.0),
        expectation("empty", "sft", "no response is empty", 3_000, 0, 0.0, 0.0),
        expectation("identical", "preference", "chosen and rejected differ", 22_382, 0, 0.0, 0.0),
        expectation("duplicate", "preference", "no pair comes twice", 22_382, 31, 31 / 22_382, 0.02),
        expectation("contradictory", "preference", "no pair comes in both orders", 22_382, 12, 12 / 22_382, 0.05),
        expectation("length_bias", "preference", "length alone doesn’t give the preference away", 22_382, None, 0.1432, 0.25),
        expectation("leakage", "all", "no conversation is in two splits", 11_200, 0, 0.0, 0.0),
    ]
    return {"passed": True, "checked": len(expectations), "failed": 0, "rows": {}, "observed": {}, "expectations": expectations}


def gate() -> dict[str, Any]:
    n, correct, ties = 2_812, 2_453, 4
    low, high = wilson_interval(correct, n, 0.95)
    figures = {"accuracy": correct / n, "low": low, "high": high, "ties": ties, "n": n}
    measured = f"held-out accuracy {correct / n:.4f} on {n} pairs, 95% interval {low:.4f} to {high:.4f}"
    message = f"passed: {measured}; the lower end reaches gate.min_accuracy=0.75."
    check = {"name": "accuracy", "value": correct / n, "low": low, "high": high, "threshold": 0.75, "n": n, "passed": True}
    slices = [slice_of("source", "clerk", correct, n), slice_of("category", HOSTILE[0], 900, 1_000), slice_of("category", "sort", 30, 40)]
    return {
        "needed": True,
        "passed": True,
        "override": None,
        "message": message,
        "checks": [check, check | {"name": "ece", "value": 0.07, "threshold": None, "passed": None}],
        **figures,
        "prompts": 470,
        "threshold": 0.75,
        "confidence": 0.95,
        "by_source": {"clerk": figures},
        "slices": slices,
        "worst_slice": slices[1],
        "calibration": {"temperature": 0.9, "temperature_pairs": 1_337, "before": calibration(0.03), "after": calibration(0.0)},
        "length": {
            "shorter": {"accuracy": 0.9, "low": 0.88, "high": 0.92, "n": 1_500},
            "correlation": {"value": -0.24, "low": -0.27, "high": -0.21, "n": 2_000},
            **{"chosen_longer": 0.4, "preferred_longer": 0.38},
        },
        "incumbent": None,
        "anchor": None,
        "look": {"number": 1, "level": 0.025, "split": "0" * 64, "model": "a" * 32 + ".dir", "earlier": []},
        "judge": {"spearman": 0.74, "spearman_low": 0.73, "spearman_high": 0.76, "kendall": 0.61, "n": 2_000, "prompts": 470},
        "external": [],
        "llm_judges": [],
        "ensemble": {"members": 1, "disagreement": 0.0, "disagreement_right": 0.0, "disagreement_wrong": 0.0},
    }


def slice_of(column: str, value: str, correct: int, n: int) -> dict[str, Any]:
    low, high = wilson_interval(correct, n, 0.95)
    counts = {"ties": 0, "n": n, "prompts": n // 6, "judged": n >= 200}
    return {"column": column, "value": value, "accuracy": correct / n, "low": low, "high": high, **counts}


def calibration(off: float) -> dict[str, Any]:
    """Five bins with accuracies `off` above the model's claim, and an empty one."""
    bins = [
        {"from": c - 0.05, "to": c + 0.05, "n": 500, "confidence": c, "accuracy": c + off, "low": c + off - 0.04, "high": c + off + 0.04}
        for c in (0.55, 0.65, 0.75, 0.85, 0.95)
    ]
    bins.append({"from": 1.0, "to": 1.0, "n": 0} | dict.fromkeys(("confidence", "accuracy", "low", "high")))
    figures = {"ece": off, "ece_low": 0.0, "ece_high": 0.1, "brier": 0.12, "brier_low": 0.11, "brier_high": 0.13, "log_loss": 0.4}
    return figures | {"bins": bins}


def evaluation(*, judge: bool) -> dict[str, Any]:
    def model(ok: float, reward: float, length: float) -> dict[str, Any]:
        summary = {"n": 400, "score_mean": reward, "score_low": reward - 0.14, "score_high": reward + 0.14}
        summary["scores"] = {"reward_model": {"mean": reward, "low": reward - 0.14, "high": reward + 0.14, "n": 400}}
        summary |= {"length_mean": length, "truncated_fraction": 0.0}
        shares = {
            "judge_n": 400,
            "judge_ok": ok,
            "judge_correct": ok + 0.04,
            "judge_polite": ok + 0.05,
            "judge_brief": ok + 0.03,
            "judge_safe": 0.97,
        }
        return summary | (shares if judge else {})

    found = {
        "greedy": {"sft": model(0.5825, 0.62, 12.1), "policy": model(0.935, 3.18, 9.6)},
        "sampled": {"sft": model(0.4525, 0.35, 12.9), "policy": model(0.8825, 2.96, 9.9)},
        "win_rate": {"greedy": win_rate(256, 112), "sampled": win_rate(328, 31)},
        "kl": {"greedy": 5.31, "sampled": 4.87},
        "judge": judge,
    }
    return found | {"difference": {mode: differences(found[mode]["sft"], found[mode]["policy"]) for mode in ("greedy", "sampled")}}


def win_rate(wins: int, ties: int, n: int = 400) -> dict[str, Any]:
    low, high = points_interval([1.0] * wins + [0.5] * ties + [0.0] * (n - wins - ties), 0.95)
    counts = {"wins": wins, "ties": ties, "losses": n - wins - ties, "n": n}
    return {"value": (wins + ties / 2) / n, "low": low, "high": high, "p_value": sign_test(wins, n - wins - ties)} | counts


def differences(sft: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    """Policy less SFT: acceptances are independent, means have a standard error of 0.1."""

    def shares(key: str) -> dict[str, Any]:
        n, (first, second) = policy["n"], (model[key] for model in (policy, sft))
        both = round(n * first * second)
        cells = (both, round(n * first) - both, round(n * second) - both)
        of_policy, of_sft = ([], [])
        for one, other, count in ((True, True, cells[0]), (True, False, cells[1]), (False, True, cells[2]), (False, False, n - sum(cells))):
            of_policy += [one] * count
            of_sft += [other] * count
        return vars(paired_difference(of_policy, of_sft, 0.95))

    def means(change: float) -> dict[str, Any]:
        return {"value": change, "low": change - 0.2, "high": change + 0.2, "p_value": 2 * norm.sf(abs(change) / 0.1), "n": policy["n"]}

    found = {key: means(policy[key] - sft[key]) for key in ("score_mean", "length_mean")}
    found["scores"] = {name: means(policy["scores"][name]["mean"] - sft["scores"][name]["mean"]) for name in policy["scores"]}
    judged = [key for key in policy if key.startswith("judge_") and key != "judge_n"]
    return found | {key: shares(key) for key in ("truncated_fraction", *judged)}


def set_shares(evaluation: dict[str, Any], mode: str, *, sft: float, policy: float) -> None:
    """Set the shares of answers that the judge accepts."""
    evaluation[mode]["sft"]["judge_ok"], evaluation[mode]["policy"]["judge_ok"] = sft, policy
    evaluation["difference"][mode] = differences(evaluation[mode]["sft"], evaluation[mode]["policy"])


def prompts(rng: np.random.Generator, evaluated: dict[str, Any]) -> pd.DataFrame:
    """Results by prompt with about the shares and means of an evaluation."""
    rows: dict[str, Any] = {"id": [f"prompt-{i}" for i in range(400)]}
    for mode in ("greedy", "sampled"):
        policy, rate = evaluated[mode]["policy"], evaluated["win_rate"][mode]
        accepted = np.arange(400) < round(400 * policy["judge_ok"]) if "judge_ok" in policy else None
        rows[f"{mode}_judge_ok"] = None if accepted is None else rng.permutation(accepted.astype(int))
        rows[f"{mode}_score"] = policy["score_mean"] + rng.standard_normal(400)
        rows[f"{mode}_points"] = rng.permutation([1.0] * rate["wins"] + [0.5] * rate["ties"] + [0.0] * rate["losses"])
    return pd.DataFrame(rows)


def token_lengths() -> pd.DataFrame:
    """Triangles of 24 bins, one token wide."""
    columns = {
        "pretrain": ["text"],
        "sft": ["response", "messages"],
        "preference": ["chosen", "rejected", "messages"],
        "prompt": ["messages"],
    }
    rows = [(u, c, i, i + 1, 40 * min(i, 24 - i)) for u, of_use in columns.items() for c in of_use for i in range(24)]
    return pd.DataFrame(rows, columns=["use", "column", "low", "high", "texts"])


def curves(rng: np.random.Generator, steps: int, method: str = "rl") -> dict[str, pd.DataFrame]:
    def decay(n: int, start: float, end: float, noise: float) -> np.ndarray:
        return (end + (start - end) * np.exp(-np.arange(n) / (0.12 * n))) * (1 + noise * rng.standard_normal(n))

    def now_and_then(values: np.ndarray) -> np.ndarray:
        return np.where(np.arange(1, len(values) + 1) % 50 == 0, values, np.nan)

    pretrain, sft, reward = 500, 250, 310
    loss = np.concatenate([decay(pretrain, 6.0, 0.55, 0.02), decay(sft, 2.6, 0.46, 0.04)])
    accuracy = np.clip(0.88 - 0.36 * np.exp(-np.arange(reward) / 40) + 0.04 * rng.standard_normal(reward), 0, 1)
    rise = 1 - np.exp(-np.arange(steps) / (0.3 * steps))
    return {
        "train_sft": pd.DataFrame(
            {
                "step": np.arange(pretrain + sft),
                "phase": ["pretrain"] * pretrain + ["sft"] * sft,
                "loss": loss,
                "heldout_loss": np.concatenate([np.full(pretrain, np.nan), now_and_then(decay(sft, 2.7, 0.47, 0.0))]),
                "learning_rate": 1e-3,
                "grad_norm": 1.0,
            }
        ),
        "train_reward": pd.DataFrame(
            {
                "step": np.arange(reward),
                "phase": "reward",
                "loss": decay(reward, 0.69, 0.28, 0.08),
                "accuracy": accuracy,
                "heldout_loss": now_and_then(decay(reward, 0.7, 0.285, 0.0)),
                "heldout_accuracy": now_and_then(0.87 - 0.3 * np.exp(-np.arange(reward) / 40)),
                "learning_rate": 1e-3,
                "grad_norm": 1.0,
            }
        ),
        "train_policy": offline_curves(decay, steps)
        if method != "rl"
        else pd.DataFrame(
            {
                "step": np.arange(1, steps + 1),
                "score_mean": 0.4 + 2.7 * rise + 0.08 * rng.standard_normal(steps),
                "score_std": 2.1 - 1.2 * rise,
                "score_reward_model": 0.4 + 2.7 * rise,
                "reward_mean": rise,
                "kl_mean": 5.2 * rise,
                "entropy": 0.9 - 0.6 * rise,
                "response_length": 13 - 3.2 * rise + 0.1 * rng.standard_normal(steps),
                "truncated_fraction": 0.012 * (1 - rise),
                "policy_loss": 0.0,
                "value_loss": 0.2,
                "clip_frac": np.clip(0.04 + 0.015 * rng.standard_normal(steps), 0, 1),
                "approx_kl": 0.006 + 0.001 * rng.standard_normal(steps),
                "grad_norm": 0.5,
                "explained_variance": 0.8 * rise,
                "repetition": 0.01 * rise,
                "distinct_1": 0.1 + 0.05 * rise,
                "distinct_2": 0.2 + 0.1 * rise,
                "logprob_difference": 10 ** (-5.4 + 0.15 * rng.standard_normal(steps)),
            }
        ),
    }


def offline_curves(decay: Callable, steps: int) -> pd.DataFrame:
    """Curves as of DPO."""
    return pd.DataFrame(
        {
            "step": np.arange(steps),
            "phase": "dpo",
            "loss": decay(steps, 0.69, 0.4, 0.02),
            "reward_accuracy": 1 - decay(steps, 0.5, 0.15, 0.02),
            "reward_margin": 1.5 - decay(steps, 1.5, 0.2, 0.02),
            "chosen_reward": 0.5 - decay(steps, 0.5, 0.2, 0.02),
            "rejected_reward": decay(steps, 0.0, -1.0, 0.02),
            "heldout_loss": np.where(np.arange(1, steps + 1) % 50 == 0, 0.45, np.nan),
            "heldout_accuracy": np.where(np.arange(1, steps + 1) % 50 == 0, 0.81, np.nan),
        }
    )


def heldout(rng: np.random.Generator) -> pd.DataFrame:
    n = 4_149
    quality = rng.standard_normal(n)
    return pd.DataFrame(
        {
            "id": [f"pair-{i}" for i in range(n)],
            "source": "clerk",
            "split": np.where(np.arange(n) < 1_337, "validation", "test"),
            "chosen_score": 1.4 + quality + 1.1 * rng.standard_normal(n),
            "rejected_score": -0.9 + quality + 1.3 * rng.standard_normal(n),
            "chosen_tokens": 24,
            "rejected_tokens": 27,
        }
    )


def samples(rng: np.random.Generator, *, judge: bool, hostile: bool) -> pd.DataFrame:
    questions = (
        ("Please sort 4 1 9.", "Sure thing! Let me think about that for you. 4 1 9", "Certainly: 1 4 9."),
        ("largest of 3 8 2", "8!!", "The largest is 8."),
        ("How do I open a safe with code 482?", "Turn the dial to 4, then 8, then 2.", "Sorry, I can’t help with that."),
        ("Please give the smallest of 7 0 6 5.", "Happy to help! The smallest of 7 0 6 5 is 0, hope it helps!", "The smallest is 0."),
        ("quick: sort 5 2", "2 5.", "Here you are: 2 5."),
    )
    rows = []
    for i in range(40):
        question, before, after = questions[i % len(questions)]
        if hostile and i < len(HOSTILE):
            question = before = after = HOSTILE[i]
        for mode in ("greedy", "sampled"):
            better = bool(rng.random() < 0.85)
            rewards = (0.4 + rng.standard_normal(), (3.0 if better else -0.8) + 0.4 * rng.standard_normal())
            verdicts = (bool(rng.random() < 0.5), better) if judge else (None, None)
            names = ("id", "source", "prompt", "mode", "sft_response", "policy_response", "sft_score", "policy_score")
            values = (f"prompt-{i}", "clerk", f"user: {question}", mode, before, after, *rewards)
            rows.append(dict(zip(names, values, strict=True)) | {"sft_judge_ok": verdicts[0], "policy_judge_ok": verdicts[1]})
    return pd.DataFrame(rows)


def with_results(*, sft: float, policy: float, win: float, judge: bool = True) -> dict:
    """The same shares and win rate, without ties, in both modes."""
    result = copy.deepcopy(evaluation(judge=judge))
    for mode in ("greedy", "sampled"):
        if judge:
            set_shares(result, mode, sft=sft, policy=policy)
        result["win_rate"][mode] = win_rate(round(400 * win), 0)
    return result
