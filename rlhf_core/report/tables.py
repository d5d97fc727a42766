"""Rows of the report's tables and tiles, from the stages' metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from rlhf_core.report.blame import EDGE
from rlhf_core.report.inputs import ReportInputError, need
from rlhf_core.report.naming import SFT
from rlhf_core.report.texts import count, measured, number, share
from rlhf_core.report.verdict import MODES, is_scored, judged
from rlhf_core.statistics.intervals import holm, wilson_interval

MAX_PREVIEW = 2**15  # characters of a preview's data URL
_PREVIEW = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]+={0,2}")
USES = ("pretrain", "sft", "preference", "stepwise", "prompt")  # in the order of the chain
# Params shown first, in the order of the chain; the others are folded away.
KEY_PARAMS = (
    *("seed", "model.path", "model.architecture", "model.dtype", "sft.enabled", "sft.epochs", "sft.steps"),
    *("sft.batch_size", "sft.learning_rate"),
    *("reward.path", "reward.epochs", "reward.steps", "reward.batch_size", "reward.learning_rate", "alignment.method"),
)
# Further ones for each alignment.method.
METHOD_PARAMS = {
    "rl": (
        *("rl.algorithm", "rl.epochs", "rl.steps", "rl.samples_per_step", "rl.learning_rate", "rl.kl", "rl.distillation"),
        "rl.reward.scorers",
        *("rl.rollout.temperature", "rl.rollout.max_new_tokens"),
    ),
    "dpo": ("dpo.loss", "dpo.beta", "dpo.nll_coef", "dpo.epochs", "dpo.steps", "dpo.batch_size", "dpo.learning_rate"),
    "kto": (
        *("kto.loss", "kto.beta", "kto.desirable_weight", "kto.undesirable_weight"),
        *("kto.epochs", "kto.steps", "kto.batch_size", "kto.learning_rate"),
    ),
    "rejection_sampling": (
        *("rejection_sampling.sampling", "rejection_sampling.epochs", "rejection_sampling.steps", "rejection_sampling.batch_size"),
        *("rejection_sampling.learning_rate", "rejection_sampling.scorers"),
    ),
    "conditional_sft": (
        *("conditional_sft.label_by", "conditional_sft.levels", "conditional_sft.wanted", "conditional_sft.epochs"),
        "conditional_sft.steps",
        "conditional_sft.learning_rate",
    ),
    "external": ("external.path", "external.own_template"),
}
LABELS = {
    "method": "method",
    "algorithm": "algorithm",
    "loss": "loss",
    "steps": "steps",
    "planned_steps": "steps planned",
    "epochs": "passes over the training rows",
    "demonstrations": "demonstrations",
    "dropped_too_long": "dropped, too long",
    "parameters": "parameters",
    "heldout_loss": "held-out loss",
    "heldout_accuracy": "held-out accuracy",
    "heldout_pairs": "pairs scored for the gate",
    "heldout_solutions": "responses scored for the gate",
    "labelled_steps": "labelled steps",
    "score_first_step": "score at the first step",
    "score_mean": "score at the end",
    "kl_mean": "KL at the end",
    "entropy": "entropy at the end",
    "response_length": "tokens per response",
    "truncated_fraction": "share truncated",
    "logprob_difference_max": "largest log-probability difference",
    "averaged_steps": "steps averaged at the end",
}
# Keys of a stage's `setup` that the report names where they are true.
SHARDING = {
    "offload_optimizer": "optimizer on the host",
    "offload_parameters": "parameters on the host",
    "gradient_checkpointing": "gradient checkpointing",
}
DISPATCH = {"equal": "equal shares of prompts", "dynamic": "prompts as engines become free"}
CLERK_ASPECTS = ("correct", "polite", "brief", "safe")
# Label, key of a model's figures, format, and whether more is better (None: neither).
EVALUATION_ROWS = (
    ("Judge: accepts", "judge_ok", "share", True),
    ("Tokens per answer", "length_mean", "length", None),
    ("Truncated", "truncated_fraction", "share", False),
    ("Score", "score_mean", "score", True),
)


def tiles(evaluation: Mapping[str, Any], rewarder: str, confidence: float) -> Iterator[dict[str, str]]:
    """Tiles with the headline figures: before, after, and an interval."""
    for mode in MODES:
        sft, policy = need(evaluation, mode, "sft"), need(evaluation, mode, "policy")
        if need(evaluation, "judge"):
            accepted, n = judged(evaluation, mode, "policy")
            low, high = wilson_interval(accepted, n, confidence)
            note = f"accepted by the judge; {confidence:.0%} interval {share(low)} to {share(high)}"
            yield {"label": f"Judge, {mode}", "before": share(sft["judge_ok"]), "after": share(policy["judge_ok"]), "note": note}
        elif is_scored(evaluation):
            low, high = measured(policy["score_low"], "score"), measured(policy["score_high"], "score")
            note = f"by the {rewarder}; {confidence:.0%} interval {low} to {high}"
            yield {
                "label": f"Score, {mode}",
                "before": measured(sft["score_mean"], "score"),
                "after": measured(policy["score_mean"], "score"),
                "note": note,
            }
    if is_scored(evaluation):
        rate = need(evaluation, "win_rate", "greedy")
        note = f"by the {rewarder}, greedy; {share(rate['low'])} to {share(rate['high'])}, {count(rate['ties'])} of {count(rate['n'])} tied"
        yield {"label": "Win rate", "before": "", "after": share(rate["value"]), "note": note}
    kl = need(evaluation, "kl", "sampled")
    yield {"label": "Distance", "before": "", "after": f"{number(kl)} nats", "note": "KL to the reference model per sampled response"}


def data_rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per use: rows by split and source, mean lengths in tokens."""
    by_source, tokens = need(data, "rows_by_source"), need(data, "mean_tokens")
    return [
        {"use": use, "splits": splits, "total": sum(splits.values()), "sources": by_source.get(use, {}), "tokens": tokens.get(use, {})}
        for use, splits in sorted(need(data, "rows").items(), key=lambda row: (*USES, row[0]).index(row[0]))
    ]


def source_rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per source: records read (None: generated), rows kept by use, the largest share dropped, and counts by reason."""
    by_source, records, shares = need(data, "rows_by_source"), data.get("records", {}), data.get("dropped_fraction", {})
    return [
        {
            "source": source,
            "records": records.get(source),
            "kept": {use: by_source[use].get(source, 0) for use in USES if use in by_source},
            "share": max(shares[source].values(), default=0.0) if source in shares else None,
            "reasons": dict(sorted(reasons.items(), key=lambda entry: -entry[1])),
        }
        for source, reasons in need(data, "dropped").items()
    ]


def expectations(validation: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the notable expectations, failed ones first: those that failed, found exceptions or compare a number with a limit."""
    notable: list[Mapping[str, Any]] = []
    plain: list[Mapping[str, Any]] = []
    for e in need(validation, "expectations"):
        (plain if e["passed"] and e["unexpected"] == 0 else notable).append(e)
    return {"notable": sorted(notable, key=lambda e: e["passed"]), "plain": plain}


def facts(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label and value of each final figure of a stage; its warning stands below them."""
    known = [key for key in LABELS if key in metrics]
    for key in [*known, *(key for key in metrics if key not in LABELS and key != "warning")]:
        value = metrics[key]
        if isinstance(value, int | float) and not isinstance(value, bool):
            shown = count(value) if isinstance(value, int) else share(value) if key.endswith(("accuracy", "fraction")) else number(value)
            yield LABELS.get(key, key.replace("_", " ")), shown
        elif isinstance(value, str):
            yield key.replace("_", " "), value


def setup_rows(trained: Mapping[str, Mapping[str, Any] | None]) -> list[dict[str, str]]:
    """Rows that say how each stage was trained: ranks, ZeRO, adapters, and for RL the rollout engines and the path of the weights to them.

    Args:
        trained: label -> the stage's metrics.
    """
    setups = {label: metrics["setup"] for label, metrics in trained.items() if metrics is not None and "setup" in metrics}
    return [
        {
            "stage": label,
            "ranks": _ranks(setup),
            "zero": ", ".join([str(setup["zero_stage"]), *(words for key, words in SHARDING.items() if setup[key])]),
            "adapters": _adapters(setup["lora"]),
            "engines": _engines(setup) if "engines" in setup else "",
            "transfer": ", ".join(dict.fromkeys(setup.get("weight_transfer", ()))),
        }
        for label, setup in setups.items()
    ]


def _ranks(setup: Mapping[str, Any]) -> str:
    groups = [f"{group['ranks']} for {', '.join(group['roles']).replace('_', ' ')}" for group in setup.get("groups", ())]
    shared = f"; {setup['sequence_parallel']} share each sequence" if setup["sequence_parallel"] > 1 else ""
    gpus = f"; {setup['gpus']['per_rank']:g} GPU each" if setup.get("gpus") else ""
    return ("; ".join(groups) if len(groups) > 1 else str(setup["ranks"])) + shared + gpus


def _engines(setup: Mapping[str, Any]) -> str:
    backend = {"vllm": "vLLM", "pytorch": "PyTorch"}[setup["backend"]]
    gpus = f"; {setup['gpus']['per_engine']:g} GPU each" if setup["gpus"] else ""
    turns = "; by turns with the ranks" if setup.get("take_turns") else ""
    dispatch = f"; {DISPATCH[setup['dispatch']]}" if setup["engines"] > 1 and "dispatch" in setup else ""  # older metrics lack it
    return f"{setup['engines']} {backend}, tensor parallel {setup['tensor_parallel_size']}{gpus}{turns}{dispatch}"


def _adapters(lora: Mapping[str, Any] | None) -> str:
    if lora is None:
        return "none"
    modules = lora["target_modules"] if isinstance(lora["target_modules"], str) else " ".join(lora["target_modules"])
    return f"rank {lora['rank']}, alpha {lora['alpha']:g}, {modules}" + (f", {lora['quantize']}" if lora["quantize"] else "")


def key_params(params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The params that matter most for the method, each with its value."""
    left_out = {"model.architecture" if need(params, "model", "path") is not None else "model.path"}
    given = need(params, "reward", "path") is not None
    if given or not need(params, "reward", "enabled"):
        left_out |= {path for path in KEY_PARAMS if path.startswith("reward.") and not (given and path == "reward.path")}
    else:
        left_out.add("reward.path")
    if need(params, "rl").get("distillation") is None:
        left_out.add("rl.distillation")
    if need(params, "sft", "enabled"):
        left_out.add("sft.enabled")
    else:
        left_out |= {path for path in KEY_PARAMS if path.startswith("sft.") and path != "sft.enabled"}
    for path in (*KEY_PARAMS, *METHOD_PARAMS[need(params, "alignment", "method")]):
        if path not in left_out:
            value = need(params, *path.split("."))
            yield path, ", ".join(map(scorer_name, value)) if path.endswith(".scorers") else _shown(value)


def method_name(params: Mapping[str, Any]) -> str:
    """Return the name of the RL algorithm, or of the method with its loss."""
    method = need(params, "alignment", "method")
    if method == "rl":
        rl = need(params, "rl")
        rewarded, taught = any(s["weight"] for s in need(rl, "reward", "scorers")), rl.get("distillation") is not None
        return " and ".join([need(rl, "algorithm").upper()] * (rewarded or not taught) + ["distillation"] * taught)
    loss = params[method].get("loss")
    return method.replace("_", " ").upper() + (f", {loss}" if loss and loss != method else "")


def _shown(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def scorer_name(scorer: Mapping[str, Any]) -> str:
    """Return a scorer's name, kind (if it differs from the name) and weight as text."""
    kind = "" if scorer["kind"] == scorer["name"] else f"{scorer['kind'].replace('_', ' ')}, "
    weight = f"weight {scorer['weight']:g}" if scorer["weight"] else "only measured"
    return f"{scorer['name'].replace('_', ' ')} ({kind}{weight})"


def evaluation_rows(evaluation: Mapping[str, Any], scorers: Sequence[Mapping[str, Any]], confidence: float) -> list[dict[str, Any]]:
    """Return a row per figure with the change from SFT model to policy in each mode; scores come last.

    A change has a tone if it is significant after Holm's correction for all changes of the table that have a better direction.
    """
    rows = [*_figure_rows(evaluation), *_scorer_rows(evaluation, scorers)]
    judged = [cell for row in rows for cell in row["cells"] if cell["more_is_better"] is not None and cell["change"] is not None]
    for cell, p_value in zip(judged, holm([cell["p_value"] for cell in judged]), strict=True):
        if p_value < 1 - confidence:
            cell["tone"] = "good" if (cell["change"] > 0) == cell["more_is_better"] else "bad"
    return rows


def _figure_rows(evaluation: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for label, key, form, more_is_better in EVALUATION_ROWS:
        if key == "score_mean" and not is_scored(evaluation):
            continue
        if key not in need(evaluation, "greedy", "policy"):
            if key == "judge_ok":
                continue
            raise ReportInputError(f"metrics of evaluation: expected the key {key} for each model, got none; run the stage evaluate again")
        yield {"label": label, "form": form, "part": False, "cells": _cells(evaluation, (key,), (key,), more_is_better)}
        for aspect in judge_aspects(evaluation) if key == "judge_ok" else ():
            path = (f"judge_{aspect}",)
            yield {"label": aspect.replace("_", " "), "form": "share", "part": True, "cells": _cells(evaluation, path, path, True)}


def judge_aspects(evaluation: Mapping[str, Any]) -> list[str]:
    """Names of the judge's aspects: those of the built-in data in a fixed order, those of rules by name."""
    keys = need(evaluation, "greedy", "policy")
    found = {key.removeprefix("judge_") for key in keys if key.startswith("judge_")} - {"n", "ok"}
    return [a for a in CLERK_ASPECTS if a in found] + sorted(found - set(CLERK_ASPECTS))


def _scorer_rows(evaluation: Mapping[str, Any], scorers: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each scorer if there are several. With a negative weight, less is better."""
    for scorer in scorers if len(scorers) > 1 else ():
        more_is_better = scorer["weight"] > 0 if scorer["weight"] else None
        path = ("scores", scorer["name"])
        cells = _cells(evaluation, (*path, "mean"), path, more_is_better)
        yield {"label": scorer_name(scorer), "form": "score", "part": True, "cells": cells}


def driving_rows(curves: pd.DataFrame | None, scorers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How much of an RL run's update each rewarded scorer drove, and how far it agrees with the others; nothing with a single one.

    shares: means of the advantages' variance over the first EDGE steps, the last EDGE and all. correlations: means over all steps, by
    the other scorer's name; None: with itself, or never measured. The last row has what the scorers leave to penalties and clipping.
    """
    names = [s["name"] for s in scorers if s["weight"] and curves is not None and f"share_{s['name']}" in curves]
    if len(names) < 2:
        return []
    by_name = {name: _edges(curves[f"share_{name}"]) for name in names}
    rest = [None if None in column else 1 - sum(column) for column in zip(*by_name.values(), strict=True)]
    rows = [
        {"name": name.replace("_", " "), "shares": by_name[name], "correlations": [_correlation(curves, name, other) for other in names]}
        for name in names
    ]
    return [*rows, {"name": "penalties, KL and clipping", "shares": rest, "correlations": [None] * len(names)}]


def _edges(column: pd.Series) -> list[float | None]:
    """Means over the first and the last EDGE values, and over all."""
    known = column.dropna()
    return [None if known.empty else float(part.mean()) for part in (known.head(EDGE), known.tail(EDGE), known)]


def _correlation(curves: pd.DataFrame, first: str, second: str) -> float | None:
    for pair in (f"correlation_{first}.{second}", f"correlation_{second}.{first}"):
        if pair in curves and curves[pair].notna().any():
            return float(curves[pair].mean())
    return None


def _cells(
    evaluation: Mapping[str, Any], path: tuple[str, ...], of_difference: tuple[str, ...], more_is_better: bool | None
) -> list[dict[str, Any]]:
    """One cell per mode. change: None if no prompt has both figures."""
    cells = []
    for mode in MODES:
        sft, policy = need(evaluation, mode, "sft", *path), need(evaluation, mode, "policy", *path)
        difference = need(evaluation, "difference", mode, *of_difference)
        cell = {key: difference[key] for key in ("low", "high", "p_value")}
        cells.append(cell | {"sft": sft, "policy": policy, "change": difference["value"], "more_is_better": more_is_better, "tone": ""})
    return cells


def samples(table: pd.DataFrame, start: str = SFT) -> list[dict[str, Any]]:
    """Return a card for each prompt and mode, the largest changes in score first.

    start: result of `start_name`.
    """
    cards, names = [], {"sft": "SFT" if start == SFT else "Given", "policy": "Policy"}
    for row in table.to_dict("records"):
        answers = [
            answer(name, row[f"{m}_response"], row[f"{m}_score"], row[f"{m}_judge_ok"], row.get(f"{m}_steps")) for m, name in names.items()
        ]
        cards.append({k: row[k] for k in ("id", "source", "prompt", "mode")} | {"pictures": shown_previews(row)} | side_by_side(*answers))
    return sorted(cards, key=lambda card: 0.0 if card["gain"] is None else -abs(card["gain"]))


def shown_previews(row: Mapping[str, Any]) -> list[str]:
    """Return the previews of a sample's pictures, as data URLs; other texts are left out."""
    found = row.get("pictures")
    return [url for url in ([] if found is None else found) if len(url) <= MAX_PREVIEW and _PREVIEW.fullmatch(url)]


def answer(model: str, text: str, score: float | None, ok: bool | None, steps: str | None = None) -> dict[str, Any]:
    """Return one side of a card, with None for NaN, as which pandas reads null.

    steps: probabilities of a process reward model, as text.
    """
    known = {"score": None if pd.isna(score) else float(score), "ok": None if pd.isna(ok) else bool(ok)}
    return {"model": model, "text": text, **known, "steps": None if pd.isna(steps) else steps}


def side_by_side(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Both answers, the second's gain in score, and how the judge's verdict changed: fixed, broken or ""."""
    gain = None if None in (first["score"], second["score"]) else second["score"] - first["score"]
    changed = "" if None in (first["ok"], second["ok"]) or first["ok"] == second["ok"] else "fixed" if second["ok"] else "broken"
    return {"answers": [first, second], "gain": gain, "changed": changed}
