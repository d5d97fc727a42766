"""The report as one self-contained HTML file: the outcome first, then its evidence.

Texts of data and models are untrusted. They reach the page through Jinja's escaping or as JSON, and the page's content
security policy runs no script but those whose hashes it lists.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rlhf_core.config import reordering_shown
from rlhf_core.report.blame import blame
from rlhf_core.report.canvas import DARK
from rlhf_core.report.differences import Results, figures_that_count, headline, outs_that_differ, params_that_differ, read_as
from rlhf_core.report.figures import Figures, all_figures, logprob_limit
from rlhf_core.report.inputs import ReportInputError, ReportInputs, StageTime, need
from rlhf_core.report.texts import count, measured, number, share, signed, visible
from rlhf_core.report.verdict import (
    MODES,
    data_verdict,
    gate_verdict,
    is_scored,
    judge_selects,
    judged,
    outcome,
    rewarded_by,
    stopped_verdict,
)
from rlhf_core.statistics.intervals import holm, wilson_interval

USES = ("pretrain", "sft", "preference", "prompt")  # in the order of the chain
# Params shown first, in the order of the chain; the others are folded away.
KEY_PARAMS = (
    *("seed", "model.path", "model.architecture", "model.dtype", "sft.steps", "sft.batch_size", "sft.learning_rate"),
    *("reward.epochs", "reward.batch_size", "reward.learning_rate", "alignment.method"),
)
# Further ones for each alignment.method.
METHOD_PARAMS = {
    "rl": (
        *("rl.algorithm", "rl.steps", "rl.samples_per_step", "rl.learning_rate", "rl.kl", "rl.reward.scorers"),
        *("rl.rollout.temperature", "rl.rollout.max_new_tokens"),
    ),
    "dpo": ("dpo.loss", "dpo.beta", "dpo.nll_coef", "dpo.steps", "dpo.batch_size", "dpo.learning_rate"),
    "kto": (
        *("kto.loss", "kto.beta", "kto.desirable_weight", "kto.undesirable_weight"),
        *("kto.steps", "kto.batch_size", "kto.learning_rate"),
    ),
    "rejection_sampling": (
        *("rejection_sampling.sampling", "rejection_sampling.steps", "rejection_sampling.batch_size"),
        *("rejection_sampling.learning_rate", "rejection_sampling.scorers"),
    ),
    "conditional_sft": (
        *("conditional_sft.label_by", "conditional_sft.levels", "conditional_sft.wanted", "conditional_sft.steps"),
        "conditional_sft.learning_rate",
    ),
}
METHOD_TITLES = {
    "rl": "Reinforcement learning",
    "dpo": "Direct alignment on pairs",
    "kto": "Alignment on single responses",
    "rejection_sampling": "Rejection sampling",
    "conditional_sft": "Conditional fine-tuning",
}
LABELS = {
    "demonstrations": "demonstrations",
    "dropped_too_long": "dropped, too long",
    "parameters": "parameters",
    "heldout_loss": "held-out loss",
    "heldout_accuracy": "held-out accuracy",
    "heldout_pairs": "pairs scored for the gate",
    "averaged_steps": "steps at the end, averaged",
    "score_mean": "mean score at the end",
    "score_first_step": "at the first step",
    "kl_mean": "KL at the end",
    "response_length": "tokens per response",
    "truncated_fraction": "share truncated",
    "logprob_difference_max": "largest log-probability difference",
}
# Stage -> section of the page.
SECTIONS = {
    **dict.fromkeys(("prepare_data", "validate_data"), "data"),
    **dict.fromkeys(("check_model", "train_sft", "train_reward", "train_policy"), "training"),
    "gate_reward": "gate",
    "evaluate": "evaluation",
}
CLERK_ASPECTS = ("correct", "polite", "brief", "safe")
MODEL_NAMES = {"sft": "SFT", "policy": "Policy"}
LOOKS_SHOWN = 20  # earlier looks of the gate
# Label, key of a model's figures, format, and whether more is better (None: neither).
EVALUATION_ROWS = (
    ("Judge: accepts", "judge_ok", "share", True),
    ("Tokens per answer", "length_mean", "length", None),
    ("Truncated", "truncated_fraction", "share", False),
    ("Score", "score_mean", "score", True),
)


def render(inputs: ReportInputs) -> str:
    """The page, or the finished part of it if the chain stopped. The same inputs give the same text in every process."""
    scorers = inputs.evaluation_scorers
    training = {"train_sft": inputs.sft, "train_reward": inputs.reward, "train_policy": inputs.policy}
    content = {
        "title": inputs.title if inputs.stopped is None else f"Stopped: {inputs.title}",
        "method_title": METHOD_TITLES[inputs.method],
        "method_name": method_name(inputs.params),
        "rewarder": rewarded_by(scorers),
        "scorers": scorers,
        "method_scores": bool(inputs.method_scorers),
        "scored": inputs.evaluation is not None and is_scored(inputs.evaluation),
        "stopped": inputs.stopped,
        "gate_verdict": None if inputs.gate is None else gate_verdict(inputs.gate),
        "data_verdict": None if inputs.validation is None else data_verdict(inputs.validation),
        "confidence": need(inputs.params, "evaluation", "confidence"),
        "inputs": inputs,
        "uses": [] if inputs.data is None else data_rows(inputs.data),
        "sources": [] if inputs.data is None else source_rows(inputs.data),
        "expectations": None if inputs.validation is None else expectations(inputs.validation),
        "facts": {stage: list(facts(tree)) for stage in ("sft", "reward", "policy") if (tree := getattr(inputs, stage)) is not None},
        "key_params": list(key_params(inputs.params)),
        "all_params": json.dumps(inputs.params, indent=2, ensure_ascii=False),
        "sections": SECTIONS,
        "changes": [changes(which, baseline, inputs) for which, baseline in inputs.baselines.items()],
        "override": None if inputs.gate is None else need(inputs.gate, "override"),
        "looks_shown": LOOKS_SHOWN,
        "taken_over": [(stage, entry) for stage, tree in training.items() if tree is not None for entry in tree.get("resumed_from", [])],
        "monitor": None if inputs.policy is None else inputs.policy.get("monitor"),
        "modes": MODES,
        "samples": [] if inputs.samples is None else list(samples(inputs.samples)),
        "logprob_limit": logprob_limit(inputs.params),
        **(
            _evaluated(inputs, scorers)
            if inputs.stopped is None
            else {"outcome": stopped_verdict(inputs.stopped), "tiles": [], "blame": None}
        ),
    }
    return page("report.html.jinja", all_figures(inputs), content)


def changes(which: str, baseline: Results, inputs: ReportInputs) -> dict[str, Any]:
    """This run compared with an earlier one. which: previous or promoted."""
    metrics = {"train_sft": inputs.sft, "gate_reward": inputs.gate, "evaluate": inputs.evaluation}
    made = {stage: tree for stage, tree in metrics.items() if tree is not None}
    own = Results("this run", inputs.written_params, inputs.outs, made, inputs.prompts)
    rows = figures_that_count(baseline, own)
    return {
        "which": which,
        "names": (baseline.name, own.name),
        "headline": headline(baseline, own, rows),
        "rows": rows,
        "read_as": read_as(baseline, own, rows),
        "params": params_that_differ(baseline.params, own.params),
        "outs": outs_that_differ(baseline, own),
    }


def _evaluated(inputs: ReportInputs, scorers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    confidence = need(inputs.params, "evaluation", "confidence")
    return {
        "blame": blame(inputs),
        "outcome": outcome(
            inputs.evaluation,
            scorers,
            confidence=confidence,
            trained_on=inputs.method_scorers,
            selected=judge_selects(inputs.params),
        ),
        "tiles": list(tiles(inputs.evaluation, rewarded_by(scorers), confidence)),
        "evaluation_rows": evaluation_rows(inputs.evaluation, scorers, confidence),
    }


def render_times(title: str, times: Mapping[str, StageTime]) -> str:
    return page("timings.html.jinja", {}, {"title": title, "times": times, "total": sum(t.seconds for t in times.values())})


def page(template: str, figures: Figures, content: Mapping[str, Any]) -> str:
    """Render a template into one file with its style, scripts and figures."""
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Shows characters that reorder text by number, also where a template doesn't use `visible`. Markup is trusted.
        finalize=lambda value: reordering_shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    environment.filters |= {"share": share, "number": number, "count": count, "visible": visible, "measured": measured, "signed": signed}
    bokeh = ["\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)] if figures else []
    scripts = [*bokeh, (folder / "report.js").read_text(encoding="utf-8")]
    return environment.get_template(template).render(
        policy=content_security_policy(scripts),
        style=(folder / "report.css").read_text(encoding="utf-8"),
        scripts=scripts,
        figures=figures,
        figures_json=json_for_html({"dark": DARK, "figures": figures}),
        **content,
    )


def content_security_policy(scripts: list[str]) -> str:
    """Allows these scripts by their hash and nothing from other hosts, so an injected script doesn't run."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def json_for_html(content: Any) -> str:
    """JSON for a script element: without `<`, so that no text ends the element or opens a comment."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return json.dumps(json.loads(reordering_shown(text)), ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


def tiles(evaluation: Mapping[str, Any], rewarder: str, confidence: float) -> Iterator[dict[str, str]]:
    """The headline figures: before, after, and an interval."""
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
    yield {"label": "Distance", "before": "", "after": f"{number(kl)} nats", "note": "KL to the SFT model per sampled response"}


def data_rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per use: rows by split and source, mean lengths in tokens."""
    by_source, tokens = need(data, "rows_by_source"), need(data, "mean_tokens")
    return [
        {"use": use, "splits": splits, "total": sum(splits.values()), "sources": by_source.get(use, {}), "tokens": tokens.get(use, {})}
        for use, splits in sorted(need(data, "rows").items(), key=lambda row: (*USES, row[0]).index(row[0]))
    ]


def source_rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per source: records read (None: generated), rows kept by use, the largest share dropped, and counts by reason."""
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
    """Notable ones failed, found exceptions or compare a number with a limit; failed ones come first."""
    notable: list[Mapping[str, Any]] = []
    plain: list[Mapping[str, Any]] = []
    for e in need(validation, "expectations"):
        (plain if e["passed"] and e["unexpected"] == 0 else notable).append(e)
    return {"notable": sorted(notable, key=lambda e: e["passed"]), "plain": plain}


def facts(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label and value of each final figure of a stage."""
    known = [key for key in LABELS if key in metrics]
    for key in [*known, *(key for key in metrics if key not in LABELS)]:
        value = metrics[key]
        if isinstance(value, int | float) and not isinstance(value, bool):
            shown = count(value) if isinstance(value, int) else share(value) if key.endswith(("accuracy", "fraction")) else number(value)
            yield LABELS.get(key, key.replace("_", " ")), shown
        elif isinstance(value, str):
            yield key.replace("_", " "), value


def key_params(params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    left_out = {"model.architecture" if need(params, "model", "path") is not None else "model.path"}
    if not need(params, "reward", "enabled"):
        left_out |= {path for path in KEY_PARAMS if path.startswith("reward.")}
    for path in (*KEY_PARAMS, *METHOD_PARAMS[need(params, "alignment", "method")]):
        if path not in left_out:
            value = need(params, *path.split("."))
            yield path, ", ".join(map(scorer_name, value)) if path.endswith(".scorers") else _shown(value)


def method_name(params: Mapping[str, Any]) -> str:
    """The algorithm of RL, otherwise the method with its loss."""
    method = need(params, "alignment", "method")
    if method == "rl":
        return need(params, "rl", "algorithm").upper()
    loss = params[method].get("loss")
    return method.replace("_", " ").upper() + (f", {loss}" if loss and loss != method else "")


def _shown(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def scorer_name(scorer: Mapping[str, Any]) -> str:
    """Name, kind (if it differs from the name) and weight."""
    kind = "" if scorer["kind"] == scorer["name"] else f"{scorer['kind'].replace('_', ' ')}, "
    weight = f"weight {scorer['weight']:g}" if scorer["weight"] else "only measured"
    return f"{scorer['name'].replace('_', ' ')} ({kind}{weight})"


def evaluation_rows(evaluation: Mapping[str, Any], scorers: Sequence[Mapping[str, Any]], confidence: float) -> list[dict[str, Any]]:
    """A row per figure with the change from SFT model to policy in each mode; scores come last.

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
    """The judge's aspects: those of the built-in data in a fixed order, those of rules by name."""
    keys = need(evaluation, "greedy", "policy")
    found = {key.removeprefix("judge_") for key in keys if key.startswith("judge_")} - {"n", "ok"}
    return [a for a in CLERK_ASPECTS if a in found] + sorted(found - set(CLERK_ASPECTS))


def _scorer_rows(evaluation: Mapping[str, Any], scorers: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row per scorer if there are several. With a negative weight, less is better."""
    for scorer in scorers if len(scorers) > 1 else ():
        more_is_better = scorer["weight"] > 0 if scorer["weight"] else None
        path = ("scores", scorer["name"])
        cells = _cells(evaluation, (*path, "mean"), path, more_is_better)
        yield {"label": scorer_name(scorer), "form": "score", "part": True, "cells": cells}


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


def samples(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A card for each prompt and mode, the largest changes in score first."""
    cards = []
    for row in table.to_dict("records"):
        answers = [answer(name, row[f"{m}_response"], row[f"{m}_score"], row[f"{m}_judge_ok"]) for m, name in MODEL_NAMES.items()]
        cards.append({k: row[k] for k in ("id", "source", "prompt", "mode")} | side_by_side(*answers))
    return sorted(cards, key=lambda card: 0.0 if card["gain"] is None else -abs(card["gain"]))


def answer(model: str, text: str, score: float | None, ok: bool | None) -> dict[str, Any]:
    """One side of a card. NaN, which pandas reads for null, becomes None."""
    return {"model": model, "text": text, "score": None if pd.isna(score) else float(score), "ok": None if pd.isna(ok) else bool(ok)}


def side_by_side(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Both answers, the second's gain in score, and the judge's change of mind: fixed, broken or ""."""
    gain = None if None in (first["score"], second["score"]) else second["score"] - first["score"]
    changed = "" if None in (first["ok"], second["ok"]) or first["ok"] == second["ok"] else "fixed" if second["ok"] else "broken"
    return {"answers": [first, second], "gain": gain, "changed": changed}
