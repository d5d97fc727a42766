"""Stage check_model: a small copy of the configured model goes through training and rollouts before anything is trained; functions that
score are loaded; and the machine's GPUs, where it has some, are enough for the RL job.

What would be computed wrongly is refused here, in seconds, and not after SFT, reward model and gate were paid for. The copy has every kind
of layer of the model and the model's own heads, ties and windows (rlhf_core/model_check). Figures differ from machine to machine, so they
are in reports/check_model.json, which DVC doesn't track; verdicts are in metrics/check_model.json. metrics/model_accepted.json, which
train_sft waits for, says the same whatever the engine is: another engine takes no new SFT.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.paths import METRICS, TOKENIZER
from rlhf_core.stage.files import write_json
from rlhf_core.stage.run import Stage, StageFailed, no_arguments

if TYPE_CHECKING:
    from rlhf_core.config import LoraConfig, Params, RolloutBackend, ScorerConfig
    from rlhf_core.model_check.trial import Finding

FIGURES = Path("reports/check_model.json")
SEED = 0  # of the copy's weights: the check is of the model's kind, not of a run
ENGINES = "rollout.backend: "  # what an engine's own refusal begins with, which says what to set
NAMES = {
    "sft": "fine-tuning",
    "reward": "the reward model",
    "dpo": "preference training",
    "lora": "adapters",
    "shared_prefix": "shared prefixes",
    "vllm": "rollouts by vLLM",
    "pytorch": "rollouts by PyTorch",
}
REMEDIES = {
    "reward": "use another model, or set reward.enabled to false",
    "lora": "set lora to null, or name other target_modules",
}

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("check_model", resumable=False) as stage:
        check_functions(stage.params)
        check_gpus(stage.params)
        stage.use_threads()
        name, findings = try_all(stage.params, stage.scratch / "trial")
        shutil.rmtree(stage.scratch / "trial", ignore_errors=True)
        write_json(FIGURES, {"model": name, "findings": [asdict(finding) for finding in findings]})
        write_json(METRICS / "check_model.json", {"model": name, "checks": {f.column: verdict(f) for f in findings}})
        for finding in findings:
            difference = "" if finding.difference is None else f", {finding.difference:.1g} apart at most"
            log.info("%s: %s%s", named(finding), verdict(finding), difference)
        if refused := [message(name, finding, stage.params) for finding in findings if finding.refusal is not None]:
            raise StageFailed("\n".join(refused))
        write_json(METRICS / "model_accepted.json", {"model": name, "accepted": True})


def check_functions(params: Params) -> None:
    """The functions that will score can be loaded, in a stage's environment, and take what they will be called with.

    Raises:
        ValueError: one can't, or doesn't.
    """
    from rlhf_core.scorers.text import TextScorers

    TextScorers(0, [scorer for scorer in scorers(params) if scorer.kind == "function"], {})


def check_gpus(params: Params) -> None:
    """Where this machine will be the RL job's cluster and has GPUs, they are enough for it.

    Raises:
        ValueError: they aren't.
    """
    import torch

    from rlhf_core.trainers.rl.placement import place

    if params.alignment.method == "rl" and params.cluster.address is None:
        place(params.rl, torch.cuda.device_count())


def try_all(params: Params, scratch: Path) -> tuple[str, list[Finding]]:
    """Name of the model's class, and what came of each column that this configuration uses."""
    from rlhf_core.engines.deepspeed_engine import join_world
    from rlhf_core.model_check.miniature import cut_config, random_model
    from rlhf_core.model_check.ready_made import try_ready_made
    from rlhf_core.model_check.trial import Finding, Trial, TrialSettings
    from rlhf_core.models.tokenizer import load_tokenizer

    join_world()
    model, loras = params.model, adapters(params)
    tokenizer = load_tokenizer(str(TOKENIZER), trust_remote_code=model.trust_remote_code)
    config = cut_config(model, tokenizer)
    language_model = random_model(config, seed=SEED, trust_remote_code=model.trust_remote_code)
    settings = TrialSettings(
        max_length=model.max_length,
        dpo=params.dpo,
        loras=loras,
        threads=params.cluster.threads,
        trust_remote_code=model.trust_remote_code,
        zero_stage=params.sft.zero_stage,
    )
    scalar_model = partial(random_model, config, seed=SEED, labels=1, trust_remote_code=model.trust_remote_code)
    trial = Trial(language_model, scalar_model, tokenizer, settings, scratch)
    on_pairs = params.alignment.method in ("dpo", "kto")
    columns = ["sft", *["reward"] * params.reward.enabled, *["dpo"] * on_pairs, *["lora"] * bool(loras), "shared_prefix"]
    findings = [trial.run(column) for column in columns]
    findings += [try_ready_made(scorer, model) for scorer in scorers(params) if scorer.kind == "reward_model" and scorer.path]
    for backend in sorted(set(backends(params).values())):  # PyTorch's first: vLLM ends the process group when it goes
        if backend == "vllm" and params.cluster.address is not None and find_spec("vllm") is None:
            findings.append(Finding(backend, note="not tried: vLLM is on the cluster, not here"))
        else:
            findings.append(trial.run(backend))
    return type(language_model).__name__, findings


def adapters(params: Params) -> tuple[LoraConfig, ...]:
    """Of all stages, each once."""
    sections = (params.sft, *[params.reward] * params.reward.enabled, getattr(params, params.alignment.method))
    return tuple({repr(section.lora): section.lora for section in sections if section.lora is not None}.values())


def backends(params: Params) -> dict[str, RolloutBackend]:
    """What draws responses, by the key that says so: RL and the evaluation, and rejection sampling, where it is the way to the policy."""
    found = {"rl.rollout.backend": params.rl.rollout.backend}
    if params.alignment.method == "rejection_sampling":
        found["rejection_sampling.sampling.backend"] = params.rejection_sampling.sampling.backend
    return found


def scorers(params: Params) -> list[ScorerConfig]:
    """Those of RL and the evaluation, and of rejection sampling, where it is the way to the policy; of two with one name the first."""
    further = params.rejection_sampling.scorers if params.alignment.method == "rejection_sampling" else []
    return list({scorer.name: scorer for scorer in [*further, *params.evaluation_scorers]}.values())


def named(finding: Finding) -> str:
    return NAMES.get(finding.column, finding.column)


def verdict(finding: Finding) -> str:
    return finding.note or "right" if finding.refusal is None else f"refused: {finding.refusal}"


def message(model: str, finding: Finding, params: Params) -> str:
    """What was expected, what came, and what to set."""
    keys = " and ".join(key for key, backend in backends(params).items() if backend == finding.column)
    remedies = REMEDIES | {"vllm": f"set {keys} to pytorch", "pytorch": f"set {keys} to vllm"}
    if finding.refusal.startswith(ENGINES):
        return f"{named(finding)}: {finding.refusal.removeprefix(ENGINES)}".replace("rollout.backend", keys)
    own = finding.column in NAMES
    expected = f"numbers as transformers computes them for {model}" if own else "scores as its own forward gives them"
    return f"{named(finding)}: expected {expected}, got: {finding.refusal}; {remedies.get(finding.column, 'use another model')}"


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
