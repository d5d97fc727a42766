"""Makes gate.json from held-out scores, the model and the registry's models, for stage gate_reward (docs/gate.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.config import GateConfig, Params
from rlhf_core.gate.heldout import Heldout, distinct_responses, measure_ensemble, measure_judge, measure_scores
from rlhf_core.gate.looks import at_look, look_level, take_look
from rlhf_core.gate.overlap import SplitKeys
from rlhf_core.gate.steps import HeldoutSteps, measure_disagreement, measure_steps, read_steps
from rlhf_core.gate.verdict import read_heldout, with_verdict
from rlhf_core.progress import Bar
from rlhf_core.provenance.file_hashes import dvc_md5

if TYPE_CHECKING:
    from rlhf_core.stage.training import TrainRun


def judge_model(
    params: Params, *, heldout: Path, prepared: Path, reward_model: Path, source_judges: dict[str, str], infer: Callable[..., Any]
) -> dict[str, Any]:
    """Return the content of gate.json for the reward model of this run.

    Args:
        heldout: reward_heldout.parquet, of train_reward. prepared: folder of the prepared data.
        infer: calls a function with a TrainRun and the arguments that follow, on every rank that scores.
    Raises:
        ValueError: scores, a promoted model or external pairs can't be used.
        FileNotFoundError: external pairs are missing.
    """
    if params.reward.step_separator is not None:
        return _judge_steps(params, heldout=heldout, prepared=prepared, reward_model=reward_model, infer=infer)
    # The split test, which training never reads, unlike validation.
    test, validation = (read_heldout(heldout, prepared, split) for split in ("test", "validation"))
    look = take_look(SplitKeys.of_rows(test.rows), dvc_md5(reward_model)) if len(test.pairs) else None
    config = params.gate if look is None else at_look(params.gate, look.number)
    gate = measure_scores(test, validation.pairs.margins, config)
    if look is not None:
        gate["look"] = {**asdict(look), "level": look_level(params.gate.confidence, look.number)}
        found = infer(measure_models, test, config, reward_model)
        gate |= found["measured"]
        gate["ensemble"] = {"members": found["members"], **measure_ensemble(test)}
        gate["judge"] = measure_judge(test, source_judges, config.confidence)
    return with_verdict(gate, config, exact_scores=params.model.dtype == "float32")


def _judge_steps(params: Params, *, heldout: Path, prepared: Path, reward_model: Path, infer: Callable[..., Any]) -> dict[str, Any]:
    """`judge_model` for a process reward model."""
    test, validation = (read_steps(heldout, prepared, split) for split in ("test", "validation"))
    keys = SplitKeys.of_rows([{**row, "chosen": row["response"], "rejected": ""} for row in test.rows])
    look = take_look(keys, dvc_md5(reward_model)) if len(test) else None
    config = params.gate if look is None else at_look(params.gate, look.number)
    gate = measure_steps(test, validation.step_margins, config)
    if look is not None:
        gate["look"] = {**asdict(look), "level": look_level(params.gate.confidence, look.number)}
        found = infer(measure_step_models, test, config, reward_model)
        gate |= found["measured"]
        gate["ensemble"] = {"members": found["members"], **measure_disagreement(test)}
    return with_verdict(gate, config, exact_scores=params.model.dtype == "float32")


def measure_step_models(run: TrainRun, test: HeldoutSteps, config: GateConfig, reward_model: Path) -> dict[str, Any]:
    """`measure_models` for a process reward model: its probes, and promoted models on the same responses."""
    import torch

    from rlhf_core.engines.deepspeed.ranks import threads_of_rank
    from rlhf_core.gate.scoring import compare_steps_to_promoted, probe_steps
    from rlhf_core.scorers.reward.loaded import LoadedModel, reward_options

    torch.set_num_threads(threads_of_rank(run.params.cluster.threads))
    about = run.params.model
    load_options = reward_options(about)
    model = LoadedModel.load(reward_model, **load_options)
    measured: dict[str, Any] = {"probes": probe_steps(test, model)}
    members = len(model.members)
    del model  # there may be no room for both
    for role, promoted in (("incumbent", config.incumbent), ("anchor", config.anchor)):
        if promoted is not None:
            measured[role] = compare_steps_to_promoted(
                test, role, promoted, confidence=config.confidence, scratch=run.scratch, load_options=load_options
            )
    return {"measured": measured, "members": members}


def measure_models(run: TrainRun, test: Heldout, config: GateConfig, reward_model: Path) -> dict[str, Any]:
    """Runs on each rank. Returns `measured`, the keys of gate.json that need forward passes (probes, external pairs, promoted models), and
    `members`, the number of models.

    Args:
        config: the gate's settings at this look, whose confidence sets the width of intervals.
    """
    import torch

    from rlhf_core.engines.deepspeed.ranks import threads_of_rank
    from rlhf_core.gate.probes import format_shifts, invariance
    from rlhf_core.gate.scoring import compare_to_promoted, score_external
    from rlhf_core.scorers.reward.loaded import LoadedModel, reward_options

    torch.set_num_threads(threads_of_rank(run.params.cluster.threads))
    about = run.params.model
    load_options = reward_options(about)
    model = LoadedModel.load(reward_model, **load_options)
    responses, which = distinct_responses(test)
    stored, prompts = np.concatenate([test.pairs.chosen, test.pairs.rejected])[which], np.tile(test.pairs.prompts, 2)[which]
    probed = np.linspace(0, len(test.pairs) - 1, min(config.probe_pairs, len(test.pairs))).astype(int)
    some = np.flatnonzero(np.isin(which % len(test.pairs), probed))  # both responses of a pair, which have a prompt in common
    texts = [responses[i] for i in some]
    with Bar("question", 2 + len(config.external) + sum(promoted is not None for promoted in (config.incumbent, config.anchor))) as bar:
        shifts = format_shifts(model, texts, prompts[some], scale=float(stored.std()) or 1.0, confidence=config.confidence)
        bar.step()
        probes = {**invariance(model, texts, stored[some]), **{f"format: {name}": shift for name, shift in shifts.items()}}
        bar.step()
        measured: dict[str, Any] = {"probes": probes, "external": []}
        for external in config.external:
            measured["external"].append(score_external(external, model, confidence=config.confidence))
            bar.step()
        members = len(model.members)
        del model  # there may be no room for both
        found: dict[str, dict[str, Any]] = {}  # by md5: incumbent and anchor may be one model
        for role, promoted in (("incumbent", config.incumbent), ("anchor", config.anchor)):
            if promoted is None:
                continue
            if promoted.md5 not in found:
                found[promoted.md5] = compare_to_promoted(
                    test, role, promoted, confidence=config.confidence, scratch=run.scratch, load_options=load_options
                )
            measured[role] = {**found[promoted.md5], "version": promoted.version}
            bar.step()
    return {"measured": measured, "members": members}
