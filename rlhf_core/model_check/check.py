"""Which parts of the pipeline and which scorers check_model tries for a configuration, and what its refusals say."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from rlhf_core.config import LoraConfig, ModelConfig, Params, RolloutBackend, ScorerConfig
from rlhf_core.engines.deepspeed.engine import device, join_world
from rlhf_core.engines.vllm.refusals import fp8_method, refuse_without_sleep
from rlhf_core.model_check.miniature import check_positions, cut_config, random_model, smaller
from rlhf_core.model_check.trial import Finding, Trial, TrialSettings, judged, largest, random_sequences, refused
from rlhf_core.models.build import check_weights, classifier, language_class, vocabulary_size
from rlhf_core.models.folder import check_model_folder, locate_model, refusals, step_separator
from rlhf_core.models.forward import ScalarModule
from rlhf_core.models.given import base_for_adapters, check_same_architecture, config_of, teacher_folder, tokenizer_of_policy
from rlhf_core.models.rows import check_rows
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.paths import SFT_MODEL
from rlhf_core.planning.models import base_model
from rlhf_core.planning.placement import place, transfer_ways
from rlhf_core.planning.shape import check_engine
from rlhf_core.scorers.needs import ready_made_folder, try_teachers
from rlhf_core.scorers.reward.members import check_ready_made, check_separator
from rlhf_core.scorers.reward.model import score_sequences

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
    Raises:
        ValueError: the model's files don't fit its configuration or its tokenizer, or reward.path has another step separator.
    """
    join_world()
    model, loras = params.model, adapters(params)
    tokenizer = load_tokenizer(str(tokenizer_folder), trust_remote_code=model.trust_remote_code, vision=model.vision)
    check_files(model, tokenizer)
    given = params.reward.enabled and params.reward.path is not None and not params.reward.is_registered
    folder = Path(locate_model(params.reward.path, key="reward.path")) if given else None
    if folder is not None:
        check_separator(folder, params.reward.step_separator)
    config = cut_config(model, tokenizer)
    if model.path is not None:
        path = locate_model(model.path, model.revision)
        check_positions(config_of(path, model), path, params.harness_max_length, key="evaluation.harness.max_length")
    language_model = random_model(config, seed=SEED, kind=language_class(model.vision), trust_remote_code=model.trust_remote_code)
    settings = TrialSettings(
        max_length=model.max_length,
        dpo=params.dpo,
        loras=loras,
        threads=params.cluster.threads,
        trust_remote_code=model.trust_remote_code,
        zero_stage=params.sft.zero_stage if params.sft.enabled else 0,
        vision=model.vision,
    )
    scalar_model = partial(random_model, config, seed=SEED, labels=1, trust_remote_code=model.trust_remote_code)
    trial = Trial(language_model, scalar_model, tokenizer, settings, scratch)
    on_pairs = params.alignment.method in ("dpo", "kto")
    supervised = params.sft.enabled or params.alignment.method in ("rejection_sampling", "conditional_sft")
    columns = [*["sft"] * supervised, *["reward"] * params.reward.is_trained, *["dpo"] * on_pairs, *["lora"] * bool(loras)]
    findings = [trial.run(column) for column in (*columns, *["shared_prefix"] * (model.vision is None))]
    findings += [try_ready_made(scorer, model) for scorer in scorers(params) if scorer.kind == "reward_model" and scorer.path]
    if folder is not None:
        findings.append(try_ready_made(ScorerConfig(name="reward_model", kind="reward_model"), model, folder))
    if params.alignment.method == "external":
        check_external(params, tokenizer)
    for key, path in params.teachers.items():
        if Path(path) != SFT_MODEL:  # which is still to be trained
            teacher_folder(path, tokenizer, model, key=key)
    try_teachers(params, tokenizer)
    for backend in sorted(set(backends(params).values())):  # PyTorch's first: vLLM ends the process group when it goes
        if backend == "vllm" and params.cluster.address is not None and find_spec("vllm") is None:
            findings.append(Finding(backend, note="not tried: vLLM is on the cluster, not here"))
        else:
            findings.append(trial.run(backend))
    return type(language_model).__name__, findings


def check_files(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the files of the whole model without reading a weight, since the small copy has neither its weights nor its vocabulary.

    Raises:
        ValueError: its weights aren't those of its config.json, or its embedding lacks tokens of the tokenizer.
    """
    if model.path is None:
        return
    path = locate_model(model.path, model.revision)
    check_weights(path, trust_remote_code=model.trust_remote_code, vision=model.vision)
    check_rows(tokenizer, vocabulary_size(path, trust_remote_code=model.trust_remote_code), subject=f"model {path}")


def check_external(params: Params, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the files of a policy from elsewhere. The stage that takes it checks the same and reads its weights.

    Raises:
        ValueError: its tokenizer, its template, its architecture or the names of its weights aren't those of the model at `model.path`;
            or, for adapters, of the model to which they belong; or adapters can't be merged.
    """
    external, model = params.external, params.model
    tokenizer_of_policy(external.path, tokenizer, model, own_template=external.own_template)
    folder = Path(locate_model(external.path, key="external.path"))
    whole = base_for_adapters(folder) or folder
    check_weights(whole, trust_remote_code=model.trust_remote_code)
    if model.path is not None:
        check_same_architecture(config_of(whole, model), config_of(locate_model(model.path, model.revision), model))


def check_rl_job(params: Params, gpus: int) -> None:
    """Check what is known of the RL job before the chain trains anything. The job itself checks it again.

    Args:
        gpus: number of GPUs of this machine, which is the job's cluster unless cluster.address is set.
    Raises:
        ValueError: an engine can't divide the model over its GPUs, the machine has too few, or weights can't travel as set.
    """
    rollout, model = params.rl.rollout, base_model(params.model)
    if rollout.tensor_parallel_size > 1 and model is not None and model.shape is not None:
        check_engine(model.shape, rollout.tensor_parallel_size, key="rl.rollout.tensor_parallel_size")
    if params.cluster.address is None:
        transfer_ways(params.rl, place(params.rl, gpus))


def check_build(params: Params, gpus: int) -> None:
    """Check that the RL job's engines can take turns with its trainer and compute in FP8, if params ask for it. Imports vLLM, after it has
    been tried.

    Raises:
        ValueError: this machine, which is the job's cluster, has a GPU or a build of vLLM that can't.
    """
    rl = params.rl
    if params.cluster.address is not None or rl.rollout.backend != "vllm":
        return
    if place(rl, gpus).takes_turns(rl):
        refuse_without_sleep()
    if rl.rollout.quantization is not None:
        fp8_method()


def try_ready_made(scorer: ScorerConfig, model: ModelConfig, folder: Path | None = None) -> Finding:
    """Compare a reward model's scores here with its own forward pass of each sequence alone, on a small copy.

    The finding has the largest difference, or the reason why there is no score.

    Args:
        folder: folder of the reward model; None: the scorer's.
    """
    column = f"scorer {scorer.name}" if folder is None else "reward.path"
    try:
        return judged(column, _score_difference(scorer, ready_made_folder(scorer) if folder is None else folder, model))
    except Exception as error:  # libraries raise anything on a model that they can't compute
        return refused(column, error)


def _score_difference(scorer: ScorerConfig, folder: Path, model: ModelConfig) -> float:
    check_model_folder(folder)
    check_ready_made(scorer, folder)
    load_options = {"trust_remote_code": model.trust_remote_code}
    tokenizer = load_tokenizer(str(folder), template_date=model.template_date, scores=True, vision=model.vision, **load_options)
    check_weights(folder, scalar=True, **load_options)
    check_rows(tokenizer, vocabulary_size(folder, **load_options), subject=f"reward model {folder}")
    with refusals(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    cut = smaller(config, kind=classifier(type(config)), trust_remote_code=model.trust_remote_code)
    copy = random_model(cut, seed=0, labels=cut.num_labels, trust_remote_code=model.trust_remote_code).to(device()).eval()
    module = ScalarModule(copy, label=scorer.label)
    if step_separator(folder) is not None:
        module.check_scores_tokens("process reward model", "take a decoder with a linear score layer")
    longest = min(model.max_length, module.score_head.max_tokens or model.max_length)
    sequences = random_sequences(cut.get_text_config().vocab_size, longest, seed=0)
    ours = score_sequences(module, sequences, pad_id=0, microbatch_tokens=4 * longest, device=device())
    with torch.no_grad():
        rows = [copy(input_ids=torch.tensor([ids], device=device())).logits[0].float().cpu() for ids in sequences]
    number = {str(name): i for i, name in copy.config.id2label.items()}.get(str(scorer.label), scorer.label or 0)
    return largest(ours, torch.stack(rows)[:, number])


def adapters(params: Params) -> tuple[LoraConfig, ...]:
    """Return the distinct adapter settings of all stages."""
    method = params.alignment.method
    sections = (
        *[params.sft] * params.sft.enabled,
        *[params.reward] * params.reward.is_trained,
        *([] if method == "external" else [getattr(params, method)]),
    )
    return tuple({repr(section.lora): section.lora for section in sections if section.lora is not None}.values())


def backends(params: Params) -> dict[str, RolloutBackend]:
    """Return the sampling backends by their keys in params.yaml: for the evaluation, and for a method that samples."""
    found = {"rl.rollout.backend" if params.evaluation.backend is None else "evaluation.backend": params.evaluation_backend}
    if params.alignment.method == "rl":
        found["rl.rollout.backend"] = params.rl.rollout.backend
    if params.alignment.method == "rejection_sampling":
        found["rejection_sampling.sampling.backend"] = params.rejection_sampling.sampling.backend
    return found


def scorers(params: Params) -> list[ScorerConfig]:
    """Scorers of the method and the evaluation; those that differ in their weight or normalisation alone once."""
    used = [scorer for scorers in params.scorers_in_use.values() for scorer in scorers]
    return list({(s.name, s.kind, s.path, s.label, s.steps, s.url): s for s in used}.values())


def title(finding: Finding) -> str:
    """Return what messages call a part of the pipeline."""
    return TITLES.get(finding.column, finding.column)


def verdict(finding: Finding) -> str:
    return finding.note or "right" if finding.refusal is None else f"refused: {finding.refusal}"


def message(model: str, finding: Finding, params: Params) -> str:
    """Return a refusal that says what was expected, what was found, and which key to set."""
    keys = " and ".join(key for key, backend in backends(params).items() if backend == finding.column)
    remedies = REMEDIES | {"vllm": f"set {keys} to pytorch", "pytorch": f"set {keys} to vllm"}
    if finding.refusal.startswith(ENGINES):
        return f"{title(finding)}: {finding.refusal.removeprefix(ENGINES)}".replace("rollout.backend", keys)
    own = finding.column in TITLES
    expected = f"numbers as transformers computes them for {model}" if own else "scores as its own forward gives them"
    return f"{title(finding)}: expected {expected}, got: {finding.refusal}; {remedies.get(finding.column, 'use another model')}"
