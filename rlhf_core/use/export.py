"""Exports a copy of a model's folder, with a card that also describes what followed training: evaluation, gate, licences, commit and tags.

Metrics of a run are included only if dvc.lock ties them to this exact model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhf_core.config import ConfigError, read_yaml_text
from rlhf_core.models.card import CARD, GATE_HEADING, split_card, table, verdict, with_metadata
from rlhf_core.paths import EVALUATION_METRICS, GATE_METRICS, POLICY_MODEL, REWARD_MODEL, ROUNDS, ROUNDS_PIPELINE, round_folder
from rlhf_core.process import without_git_places
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.provenance.lineage import external_inputs, history, named_inputs
from rlhf_core.report.harness import difference, harness_rows
from rlhf_core.use.choice import Chosen

GIT_SECONDS = 60.0
READ = Callable[[str], str | None]  # path inside the project -> its text; None: no such file
LOCKS = ("dvc.lock", str(ROUNDS_PIPELINE.with_suffix(".lock")))
NOT_EVALUATED = "None for this model: the stage hasn't run, or ran on another model.\n"
OWN = "the reward model of this run"
_ROUND = re.compile(rf"{ROUNDS}/([1-9][0-9]*)/policy")
COLUMNS = (("judge_ok", "judge accepts"), ("score_mean", "mean score"), ("truncated_fraction", "truncated"), ("length_mean", "mean tokens"))


def export(chosen: Chosen, folder: Path, *, root: Path = Path()) -> Path:
    """Copy the model and its extended card into a new folder. Returns the folder.

    Raises:
        ConfigError: the folder exists, or the model has no card written by this pipeline.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: expected a new folder, got an existing one; choose another or remove it")
    path = chosen.folder / CARD
    if not path.is_file():
        raise ConfigError(f"{path}: expected the model's card, got none; another tool or an older version made the model: train it again")
    try:
        head, body = split_card(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    md5 = chosen.md5 or dvc_md5(chosen.folder)
    commit, read = _source(chosen, root)
    sections = [body, *_after_training(md5, read, body), *_licences(read), _origin(md5, commit, root)]
    aside = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(chosen.folder, aside, copy_function=shutil.copyfile)
        (aside / CARD).write_text(with_metadata(head, "\n".join(sections)), encoding="utf-8", newline="\n")
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _source(chosen: Chosen, root: Path) -> tuple[str | None, READ]:
    """Return the commit of the model's run (None if unknown) and a reader of the run's files. A version's files come from its commit."""
    if "@" in chosen.name and chosen.project is None:
        commit = _git(root, "rev-parse", "--verify", f"refs/tags/{chosen.name}^{{commit}}")
        return commit, lambda path: _git(root, "show", f"{commit}:{path}", strip=False) if commit else None
    if chosen.project is None:
        return None, lambda _: None
    project = chosen.project
    return _git(
        project, "rev-parse", "--verify", "HEAD"
    ), lambda path: (project / path).read_text(encoding="utf-8") if (project / path).is_file() else None


def _after_training(md5: str, read: READ, body: str) -> Iterator[str]:
    """Card sections with the results of gate, evaluation or a round's comparison for this model, and hashes of its external inputs.

    Args:
        body: of the card, which has the gate's verdict if the training used the reward model.
    """
    stages = {name: stage for lock in LOCKS for name, stage in ((_yaml(read, lock) or {}).get("stages") or {}).items()}
    path = next((out["path"] for stage in stages.values() for out in stage.get("outs", []) if out["md5"] == md5), None)
    if path is None:
        yield "## Evaluation\n\nNone: no run's `dvc.lock` contains this model.\n"
    elif path == str(REWARD_MODEL):
        gate = _of_this_model(stages, path, md5, str(GATE_METRICS), read)
        yield "## Gate\n\n" + (f"{verdict(gate)}\n" if gate else NOT_EVALUATED)
    elif (number := _ROUND.fullmatch(path)) is not None:
        found = _of_this_model(stages, path, md5, str(round_folder(int(number[1])) / EVALUATION_METRICS), read)
        outcome = "Accepted" if found and found["accepted"] else "Not accepted"
        yield f"## Comparison of round {number[1]}\n\n" + (f"{outcome}: {found['reason']}\n" if found else NOT_EVALUATED)
    elif path == str(POLICY_MODEL):
        found = _of_this_model(stages, path, md5, str(EVALUATION_METRICS), read)
        scorers = _scorers(stages)
        yield "## Evaluation\n\n" + (_evaluation(found, scorers) if found else NOT_EVALUATED)
        if found and OWN in scorers and GATE_HEADING not in body:
            yield from _gate_of_the_evaluation(stages, read)
    if path is not None:
        yield from _external_inputs(stages, path)


def _gate_of_the_evaluation(stages: dict[str, Any], read: READ) -> Iterator[str]:
    used = {dep["path"]: dep["md5"] for dep in stages.get("evaluate", {}).get("deps", [])}.get(str(REWARD_MODEL))
    gate = None if used is None else _of_this_model(stages, str(REWARD_MODEL), used, str(GATE_METRICS), read)
    if gate is not None:
        yield f"## Gate of the reward model that scored the evaluation\n\nThe training didn't use this reward model. {verdict(gate)}\n"


def _external_inputs(stages: dict[str, Any], path: str) -> Iterator[str]:
    """Hashes from dvc.lock of the external sources and models that led to the model."""
    lock = {"stages": stages}
    if rows := list(named_inputs(external_inputs(lock, history(lock, path)))):
        by = "Files and folders by sha256, data sets and models of the hub by commit, services by address."
        yield f"## Sources and base model\n\n{by}\n\n" + table(("key", "path, name or address", "sha256 or commit"), rows)


def _of_this_model(stages: dict[str, Any], path: str, md5: str, metrics: str, read: READ) -> dict[str, Any] | None:
    """Return a metrics file if dvc.lock has a stage that read this model and wrote exactly this file, else None."""
    for stage in stages.values():
        deps = {dep["path"]: dep["md5"] for dep in stage.get("deps", [])}
        outs = {out["path"]: out["md5"] for out in stage.get("outs", [])}
        if metrics in outs and deps.get(path) == md5:
            text = read(metrics)
            return None if text is None or hashlib.md5(text.encode()).hexdigest() != outs[metrics] else json.loads(text)
    return None


def _scorers(stages: dict[str, Any]) -> dict[str, float]:
    """Name and weight from dvc.lock of each scorer of the evaluation's score; the chain's own reward model is called OWN."""
    params = stages.get("evaluate", {}).get("params", {}).get("params.yaml", {})
    own_list = params.get("evaluation", {}).get("scorers")
    scorers = (params.get("rl.reward.scorers") if own_list is None else own_list) or []
    own = {s["name"] for s in scorers if s["kind"] == "reward_model" and not s.get("path")}
    used = [s for s in scorers if s.get("weight", 1.0) and (params.get("reward.enabled", True) or s["name"] not in own)]
    return {OWN if s["name"] in own else f"{s['name']} ({s['kind']})": s.get("weight", 1.0) for s in used}


def _evaluation(found: dict[str, Any], scorers: dict[str, float]) -> str:
    """Markdown of the SFT model's and the policy's results on the test split's prompts.

    scorers: result of `_scorers`.
    """
    named = ", ".join(f"{name}, weight {weight:g}" if len(scorers) > 1 else name for name, weight in scorers.items())
    rows = [
        (mode, name, *(_figure(found[mode][name].get(key)) for key, _ in COLUMNS))
        for mode in ("greedy", "sampled")
        for name in ("sft", "policy")
    ]
    wins = (f"{mode} {_figure(win['value'])} ({_figure(win['low'])} to {_figure(win['high'])})" for mode, win in found["win_rate"].items())
    return (
        "On held-out prompts, beside `models/sft`, the model that the chain starts from.\n\n"
        + table(("answers", "model", *(label for _, label in COLUMNS)), rows)
        + f"\nMean score and win rate are by: {named or 'no known scorer'}.\n\nWin rate of the policy: {'; '.join(wins)}.\n"
        + _harness(found)
    )


def _harness(found: dict[str, Any]) -> str:
    """Markdown of the harness's figures with their standard errors; empty without tasks."""
    rows = harness_rows(found)
    if not rows:
        return ""
    harness = found["harness"]
    limit = "" if harness["limit"] is None else f", at most {harness['limit']} documents of each task"
    how = f"{'with' if harness['chat_template'] else 'without'} the chat template{limit}"
    columns = ("task", "metric", "examples", "documents", "sft", "policy", f"difference, {harness['confidence']:.0%} interval")
    cells = [(r["task"], f"{r['metric']} {r['direction']}", r["num_fewshot"], r["n"], r["sft"], r["policy"], difference(r)) for r in rows]
    cut = ", ".join(f"{task}: {count}" for task, count in {r["task"]: r["truncated"] for r in rows}.items() if count)
    note = f"\nDocuments whose context lost its beginning at {harness['max_length']} tokens: {cut}.\n" if cut else ""
    return f"\nlm-evaluation-harness {harness['lm_eval']}, {how}:\n\n" + table(columns, cells) + note


def _licences(read: READ) -> Iterator[str]:
    sources = ((_yaml(read, "params.yaml") or {}).get("data") or {}).get("sources") or []
    rows = [(source["name"], source.get("license") or "not stated") for source in sources]
    if rows:
        yield "## Licences of the data\n\n" + table(("source", "licence"), rows)


def _origin(md5: str, commit: str | None, root: Path) -> str:
    tags = (_git(root, "tag", "--points-at", commit) or "").split() if commit else []
    rows = [("md5 of the model's folder (DVC)", md5), ("commit", commit or "unknown"), ("tags", ", ".join(tags) or "none")]
    return "## Origin\n\n" + table(("", ""), rows)


def _yaml(read: READ, path: str) -> dict[str, Any] | None:
    text = read(path)
    return None if text is None else read_yaml_text(text, path)


def _figure(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def _git(root: Path, *command: str, strip: bool = True) -> str | None:
    """Return the output of a git command; None if it failed or git isn't installed."""
    process_options = {"cwd": root, "env": without_git_places(), "timeout": GIT_SECONDS, "encoding": "utf-8"}
    try:
        done = subprocess.run(["git", *command], **process_options, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return (done.stdout.strip() if strip else done.stdout) if done.returncode == 0 else None
