"""The report as one self-contained HTML file: the outcome first, then its evidence.

Texts of data and models are untrusted. They reach the page through Jinja's escaping or as JSON, and the page's content
security policy runs no script but those whose hashes it lists.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rlhf_core.config import reordering_shown
from rlhf_core.report.blame import EDGE, blame
from rlhf_core.report.colors import DARK
from rlhf_core.report.differences import Results, figures_that_count, headline, outs_that_differ, params_that_differ, read_as
from rlhf_core.report.figures import Figures, all_figures, logprob_limit
from rlhf_core.report.harness import difference, harness_rows
from rlhf_core.report.inputs import ReportInputs, StageTime, need
from rlhf_core.report.naming import start_name, told
from rlhf_core.report.tables import (
    data_rows,
    driving_rows,
    evaluation_rows,
    expectations,
    facts,
    key_params,
    method_name,
    samples,
    setup_rows,
    source_rows,
    tiles,
)
from rlhf_core.report.texts import count, measured, number, share, signed, visible
from rlhf_core.report.verdict import (
    MODES,
    data_verdict,
    gate_verdict,
    is_scored,
    judge_selects,
    outcome,
    rewarded_by,
    stopped_verdict,
)

METHOD_TITLES = {
    "rl": "Reinforcement learning",
    "dpo": "Direct alignment on pairs",
    "kto": "Alignment on single responses",
    "rejection_sampling": "Rejection sampling",
    "conditional_sft": "Conditional fine-tuning",
    "external": "A policy from elsewhere",
}
# Stage -> section of the page.
SECTIONS = {
    **dict.fromkeys(("prepare_data", "validate_data"), "data"),
    **dict.fromkeys(("check_model", "train_sft", "train_reward", "train_policy"), "training"),
    "gate_reward": "gate",
    "evaluate": "evaluation",
}
LOOKS_SHOWN = 20  # earlier looks of the gate


def render(inputs: ReportInputs) -> str:
    """Return the page, or the finished part of it if the chain stopped. The same inputs give the same text in every process."""
    scorers = inputs.evaluation_scorers
    training = {"train_sft": inputs.sft, "train_reward": inputs.reward, "train_policy": inputs.policy}
    content = {
        "title": inputs.title if inputs.stopped is None else f"Stopped: {inputs.title}",
        "method_title": METHOD_TITLES[inputs.method],
        "method_name": method_name(inputs.params),
        "start": start_name(inputs.params),
        "rewarder": rewarded_by(scorers),
        "scorers": scorers,
        "driving": driving_rows(inputs.policy_curves, inputs.method_scorers) if inputs.method == "rl" else [],
        "edge": EDGE,
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
        "setups": setup_rows({"SFT": inputs.sft, "Reward model": inputs.reward, "Policy": inputs.policy}),
        "key_params": list(key_params(inputs.params)),
        "all_params": json.dumps(inputs.params, indent=2, ensure_ascii=False),
        "sections": SECTIONS,
        "changes": [changes(which, baseline, inputs) for which, baseline in inputs.baselines.items()],
        "override": None if inputs.gate is None else need(inputs.gate, "override"),
        "looks_shown": LOOKS_SHOWN,
        "taken_over": [(stage, entry) for stage, tree in training.items() if tree is not None for entry in tree.get("resumed_from", [])],
        "cut_short": [(stage, tree) for stage, tree in training.items() if tree is not None and tree.get("ended_by") == "max_minutes"],
        "monitor": None if inputs.policy is None else inputs.policy.get("monitor"),
        "modes": MODES,
        "samples": [] if inputs.samples is None else list(samples(inputs.samples, start_name(inputs.params))),
        "logprob_limit": logprob_limit(inputs.params),
        **(
            _evaluated(inputs, scorers)
            if inputs.stopped is None
            else {"outcome": stopped_verdict(inputs.stopped), "tiles": [], "blame": None, "harness_rows": []}
        ),
    }
    return page("report.html.jinja", all_figures(inputs), content)


def changes(which: str, baseline: Results, inputs: ReportInputs) -> dict[str, Any]:
    """Comparison of this run with an earlier one.

    which: previous or promoted.
    """
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
    selected = judge_selects(inputs.params)
    verdict = outcome(inputs.evaluation, scorers, confidence=confidence, trained_on=inputs.method_scorers, selected=selected)
    details = tuple(told(sentence, inputs.params) for sentence in verdict.details)
    return {
        "blame": blame(inputs),
        "outcome": replace(verdict, headline=told(verdict.headline, inputs.params), details=details),
        "tiles": [
            {name: told(text, inputs.params) for name, text in tile.items()}
            for tile in tiles(inputs.evaluation, rewarded_by(scorers), confidence)
        ],
        "evaluation_rows": evaluation_rows(inputs.evaluation, scorers, confidence),
        "harness_rows": [row | {"difference": difference(row)} for row in harness_rows(inputs.evaluation)],
    }


def render_times(title: str, times: Mapping[str, StageTime], nodes: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]]) -> str:
    """Return the page of timings.

    nodes: result of `read_processes`.
    """
    total = sum(t.seconds for t in times.values())
    return page("timings.html.jinja", {}, {"title": title, "times": times, "total": total, "nodes": nodes})


def page(template: str, figures: Figures, content: Mapping[str, Any], *, script: str = "report.js", style: str | None = None) -> str:
    """Render a template into one file with its style, scripts and figures.

    script, style: files of the page's own script, and of rules after those that all pages have.
    """
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
    scripts = [*bokeh, (folder / script).read_text(encoding="utf-8")]
    return environment.get_template(template).render(
        policy=content_security_policy(scripts),
        style="".join((folder / name).read_text(encoding="utf-8") for name in ("report.css", style) if name is not None),
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
