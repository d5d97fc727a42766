"""What check_model tries for a configuration: which parts of the pipeline, with which scorers, and what its refusals say."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rlhf_core.config import LoraConfig, Params, RolloutBackend, ScorerConfig
from rlhf_core.engines.deepspeed_engine import join_world
from rlhf_core.model_check.miniature import cut_config, random_model
from rlhf_core.model_check.ready_made import try_ready_made
from rlhf_core.model_check.trial import Finding, Trial, TrialSettings
from rlhf_core.models.tokenizer import load_tokenizer

SEED = 0  # of the copy's weights: the check is of the architecture and not of a run
ENGINES = "rollout.backend: "  # prefix of an engine's own refusal
TITLES = {
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


def run_trials(params: Params, tokenizer_folder: Path, scratch: Path) -> tuple[str, list[Finding]]:
    """Try a small copy of the configured model with each part of the pipeline that the configuration uses.

    Returns:
        The model's class name, and a finding for each part.
    """
    join_world()
    model, loras = params.model, adapters(params)
    tokenizer = load_tokenizer(str(tokenizer_folder), trust_remote_code=model.trust_remote_code)
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
    """The distinct adapter settings of all stages."""
    sections = (params.sft, *[params.reward] * params.reward.enabled, getattr(params, params.alignment.method))
    return tuple({repr(section.lora): section.lora for section in sections if section.lora is not None}.values())


def backends(params: Params) -> dict[str, RolloutBackend]:
    """Key of params.yaml -> sampling backend: that of RL and evaluation, and that of rejection sampling if it is the method."""
    found = {"rl.rollout.backend": params.rl.rollout.backend}
    if params.alignment.method == "rejection_sampling":
        found["rejection_sampling.sampling.backend"] = params.rejection_sampling.sampling.backend
    return found


def scorers(params: Params) -> list[ScorerConfig]:
    """Scorers of RL and evaluation, and of rejection sampling if it is the method; the first of each name."""
    further = params.rejection_sampling.scorers if params.alignment.method == "rejection_sampling" else []
    return list({scorer.name: scorer for scorer in [*further, *params.evaluation_scorers]}.values())


def title(finding: Finding) -> str:
    return TITLES.get(finding.column, finding.column)


def verdict(finding: Finding) -> str:
    return finding.note or "right" if finding.refusal is None else f"refused: {finding.refusal}"


def message(model: str, finding: Finding, params: Params) -> str:
    """A refusal: what was expected, what came, and which key to set."""
    keys = " and ".join(key for key, backend in backends(params).items() if backend == finding.column)
    remedies = REMEDIES | {"vllm": f"set {keys} to pytorch", "pytorch": f"set {keys} to vllm"}
    if finding.refusal.startswith(ENGINES):
        return f"{title(finding)}: {finding.refusal.removeprefix(ENGINES)}".replace("rollout.backend", keys)
    own = finding.column in TITLES
    expected = f"numbers as transformers computes them for {model}" if own else "scores as its own forward gives them"
    return f"{title(finding)}: expected {expected}, got: {finding.refusal}; {remedies.get(finding.column, 'use another model')}"
