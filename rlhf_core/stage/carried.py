"""What work that resumes from other work (checkpoints.resume_from) keeps of its state, given what has changed between the two.

If a change gives a field of the state another meaning, the field is converted or begun anew, or the work is refused before anything is
loaded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from rlhf_core.algorithms.online import ALGORITHMS
from rlhf_core.config import Params
from rlhf_core.config.base import subsection, with_defaults
from rlhf_core.config.usual import with_usual_rates

if TYPE_CHECKING:
    from rlhf_core.stage.scratch import StageInputs

CONVERTED = "converted"  # it follows the present settings, in the trainer or when it is loaded
ANEW = "begun anew"  # with a sentence in the log
REFUSED = "refused"

# Fields of the state in checkpoints, by the trainers that have them.
STATE = {
    "all": {
        "weights": "of the trained model, the optimizer's float32 ones and adapters included",
        "optimizer": "moments of each trained parameter",
        "average": "of the weights, with ema_decay",
        "scheduler": "optimizer steps that the schedule of the learning rate has counted",
        "position": "steps done, and in RL prompts drawn; the position in the data follows from them",
        "generators": "of random numbers, of each rank",
        "curves": "rows of the steps done",
        "seconds": "of training, which count toward max_minutes",
    },
    "supervised": {
        "best_loss": "step and held-out loss of the best evaluation",
        "pretraining": "weights of the phase before SFT",
    },
    "rl": {
        "critic": "weights and optimizer",
        "reference": "weights, where kl.refresh_reference_every replaces them",
        "kl_coef": "as kl.target has adapted it",
        "moments": "mean and deviation of each normalised scorer",
        "best": "step and value of the best policy by evaluation.metric",
        "start": "mean and deviation of scores in the first step",
        "frontier": "best scores by KL",
        "score_tracks": "histories of limits on scores",
        "kl_tracks": "histories of limits on the KL",
        "tracks": "histories of other limits",
        "warnings": "of limits",
        "stopped": "the limit that ended the run",
        "ahead": "rollouts of later steps, with rollout.max_lag",
        "curriculum": "successes and failures by prompt",
    },
}
RL_PHASE = "checkpoints"  # folder of RL's checkpoints

Fates = Mapping[str, str]  # field -> what becomes of it; one that isn't named is kept
_WEIGHTS: Fates = {"weights": REFUSED}
_SCALE: Fates = {"start": ANEW, "frontier": ANEW, "score_tracks": ANEW}  # what a score means, or whose scores are seen
_SCORES: Fates = {**_SCALE, "best": ANEW, "best_loss": ANEW}
_PROMPTS: Fates = {**_SCORES, "ahead": ANEW}
_SCORER: Fates = {**_SCORES, "moments": REFUSED, "curriculum": ANEW}
_SAMPLES: Fates = {**_SCALE, "kl_tracks": ANEW, "tracks": ANEW, "ahead": ANEW}
_SCHEDULE: Fates = {"scheduler": CONVERTED}
_RANKS: Fates = {"weights": CONVERTED, "optimizer": CONVERTED}

# Keys of params.yaml, sections of data/inputs.json and files, as far as training stages depend on them -> what becomes of the state. A row
# holds for all below its names. `training.x` stands for x in every section that has no row of its own for it. Scorers and limits are
# known by their names, for which * stands.
CARRIED: dict[tuple[str, ...], Fates] = {
    ("seed", "model.trust_remote_code"): {},
    ("model.path", "model.revision", "model.architecture", "model.dtype", "data/inputs.json:model"): _WEIGHTS,
    ("model.chat_template", "model.template_date", "model.template_options", "model.max_length"): _PROMPTS,
    # The optimizer. `_lacking` refuses an average that the checkpoint doesn't have, `_too_far` fewer steps than were done.
    ("training.learning_rate", "training.schedule", "training.min_learning_rate_fraction", "training.decay_fraction"): _SCHEDULE,
    ("training.warmup_fraction", "training.epochs", "training.steps", "rl.warmup_steps", "iterative.learning_rate"): _SCHEDULE,
    ("training.optimizer",): {"optimizer": REFUSED},
    ("training.betas", "training.eps", "training.weight_decay", "training.max_grad_norm"): {},
    ("training.ema_decay",): {"average": CONVERTED},
    # How supervised training computes
    ("training.batch_size",): {"position": CONVERTED},
    ("training.ranks", "rl.trainer.ranks", "rl.placement"): _RANKS,
    ("model.vision",): {"optimizer": REFUSED},  # other weights are trained
    ("training.zero_stage", "rl.trainer.zero_stage"): _WEIGHTS,
    ("training.lora",): _WEIGHTS,
    ("training.lora.dropout",): {},
    ("training.microbatch_tokens", "training.sequence_parallel", "training.offload_optimizer", "training.offload_parameters"): {},
    ("training.gradient_checkpointing", "training.disable_dropout", "training.offload_frozen", "training.reference"): {},
    ("training.checkpoint_every", "training.eval_every", "training.keep_best", "training.max_minutes"): {},
    # What supervised training learns, and its held-out loss
    ("sft.pretrain",): {"pretraining": REFUSED},
    ("sft.train_on", "sft.train_on_thoughts", "reward.margin", "reward.step_separator"): {"best_loss": ANEW},
    ("reward.enabled", "reward.centering_coef", "reward.ensemble", "conditional_sft.wanted", "iterative.promotion"): {},
    ("sft.enabled", "reward.path", "reward.pinned", "external", "data/inputs.json:reward", "data/inputs.json:policy"): {},
    ("training.loss", "training.beta", "dpo.label_smoothing", "dpo.length_normalize", "dpo.simpo_margin", "dpo.nll_coef"): {
        "best_loss": ANEW
    },
    ("kto.desirable_weight", "kto.undesirable_weight"): {"best_loss": ANEW},
    ("rejection_sampling.sampling", "rejection_sampling.scorers", "rejection_sampling.min_score"): {"best_loss": ANEW},
    ("conditional_sft.label_by", "conditional_sft.levels"): {"best_loss": ANEW},
    ("iterative.start",): _WEIGHTS,
    ("iterative.sampling", "iterative.scorers", "iterative.min_margin", "iterative.min_pairs"): {"best_loss": ANEW},
    # RL: the algorithm. `_lacking` refuses one with a critic where the checkpoint has none.
    ("rl.algorithm", *(f"rl.{name}" for name in ALGORITHMS)): {},
    tuple(f"rl.{name}.critic_init" for name, spec in ALGORITHMS.items() if spec.critic): {"critic": REFUSED},
    ("rl.minibatch_size", "rl.ppo_epochs", "rl.loss_aggregation", "rl.clip_low", "rl.clip_high", "rl.dual_clip", "rl.sapo"): {},
    ("rl.samples_per_step", "rl.policy_loss", "rl.distillation", "data/inputs.json:teachers"): {"tracks": ANEW},
    ("rl.entropy_coef", "rl.moe_aux_coef", "rl.max_approx_kl", "rl.correction", "rl.ptx"): {},
    ("rl.kl.coef",): {"kl_coef": ANEW},
    ("rl.kl.placement", "rl.kl.estimator", "rl.kl.target", "rl.kl.horizon", "rl.kl.measure"): {},
    ("rl.kl.refresh_reference_every",): {"reference": CONVERTED},  # `_lacking` refuses null where the reference has moved
    # RL: rewards and samples
    ("rl.reward.scorers.*.weight", "rl.reward.scorers.*.name"): _SCORES,  # `_lacking` refuses other normalised scorers
    ("rl.reward.scorers.*.kind", "rl.reward.scorers.*.path", "rl.reward.scorers.*.members", "rl.reward.scorers.*.std_coef"): _SCORER,
    ("rl.reward.scorers.*.label", "rl.reward.scorers.*.steps", "rl.reward.scorers.*.pattern", "rl.reward.scorers.*.target_length"): _SCORER,
    ("rl.reward.scorers.*.seconds", "rl.reward.scorers.*.memory_mib", "rl.reward.scorers.*.reward"): _SCORER,
    ("rl.reward.scorers.*.url", "rl.reward.scorers.*.dialect"): _SCORER,
    ("rl.reward.scorers.*.model", "rl.reward.scorers.*.mode", "rl.reward.scorers.*.scale", "rl.reward.scorers.*.criteria"): _SCORER,
    ("rl.reward.scorers.*.template", "rl.reward.scorers.*.max_answer_tokens", "rl.reward.scorers.*.request"): _SCORER,
    ("rl.reward.scorers.*.budget_tokens", "rl.reward.scorers.*.budget_cost", "rl.reward.scorers.*.prices"): {},
    ("rl.reward.scorers.*.batch_size", "rl.reward.scorers.*.concurrency", "rl.reward.scorers.*.retries"): {},
    ("rl.reward.scorers.*.request_timeout", "rl.reward.scorers.*.api_key_env", "rl.reward.scorers.*.api_key_file"): {},
    ("rl.reward.scorers.*.normalization",): {"score_tracks": ANEW, "moments": REFUSED},
    ("rl.reward.scorers.*.timeout", "rl.reward.normalization_samples", "rl.reward.max_unscored_fraction"): {},
    ("rl.reward.clip", "rl.reward.no_eos_penalty", "rl.reward.mask_truncated", "rl.reward.overlong"): {"score_tracks": ANEW},
    ("rl.dynamic_sampling",): _SCALE,
    ("rl.curriculum.scorer", "rl.curriculum.threshold"): {"curriculum": ANEW, "ahead": ANEW},
    ("rl.curriculum",): {**_SCALE, "ahead": ANEW},
    ("rl.prompt_weights",): {**_SCALE, "ahead": ANEW},
    ("rl.rollout.temperature", "rl.rollout.top_p", "rl.rollout.top_k"): _SAMPLES,
    ("rl.rollout.max_new_tokens", "rl.rollout.min_new_tokens", "rl.rollout.stop"): {**_SAMPLES, "best": ANEW},
    ("rl.environment", "data/inputs.json:environment"): {**_SCORER, **_SAMPLES},
    ("rl.rollout.backend", "rl.rollout.engines", "rl.rollout.gpus_per_engine", "rl.rollout.gpu_memory_fraction"): {},
    ("rl.rollout.kv_cache_gib", "rl.rollout.max_concurrent_sequences", "rl.rollout.max_logprob_difference"): {},
    ("rl.rollout.bfloat16_mean_difference", "rl.rollout.bfloat16_p999_difference", "rl.rollout.recomputed_fraction"): {},
    ("rl.rollout.max_lag", "rl.rollout.last_tokens", "rl.rollout.dispatch", "rl.rollout.take_turns", "rl.rollout.tensor_parallel_size"): {},
    ("rl.rollout.prefix_caching", "rl.rollout.enforce_eager", "rl.rollout.weight_transfer", "rl.rollout.send_changes"): {},
    ("rl.rollout.quantization", "rl.rollout.schedule"): {},
    # RL: evaluation, limits, processes
    ("rl.evaluation.metric",): {"best": ANEW},
    ("rl.evaluation.prompts", "rl.evaluation.sources", "rl.evaluation.samples", "rl.evaluation.pass_score"): {
        "best": ANEW,
        "score_tracks": ANEW,
    },
    ("rl.evaluation.every", "rl.evaluation.keep_best"): {},
    ("rl.monitor",): {"tracks": CONVERTED, "score_tracks": CONVERTED, "kl_tracks": CONVERTED, "stopped": CONVERTED},
    ("rl.trainer.sequence_parallel", "rl.trainer.gpus_per_rank", "rl.trainer.offload_optimizer", "rl.trainer.offload_parameters"): {},
    ("rl.trainer.offload_frozen", "rl.trainer.gradient_checkpointing", "rl.trainer.microbatch_tokens"): {},
    ("rl.deadlines", "rl.max_replacements", "rl.save_rollouts_every"): {},
    # Inputs outside params.yaml. Functions and judges of the project are code.
    ("models/sft", "models/tokenizer", "models/promoted", "rounds/*/policy"): _WEIGHTS,
    ("models/reward", "data/inputs.json:judges", "data/inputs.json:scorers", "rewards"): _SCORER,
    ("data/inputs.json:round_scorers", "rounds/*/data", "rounds/*/metrics", "rounds/rounds.yaml:rounds"): {"best_loss": ANEW},
    ("data/prepared",): _PROMPTS,
    ("metrics", "checks", "tasks", "rlhf_core"): {},
}
_ROWS = {name: fates for names, fates in CARRIED.items() for name in names}
# Kinds of scorers that a file or a section of hashes belongs to; a reward model with or without a path of its own.
_KINDS_OF = {
    "models/reward": ("reward_model",),
    "data/inputs.json:judges": ("judge",),
    "data/inputs.json:scorers": ("reward_model at a path", "function", "llm_judge"),
    "rewards": ("judge", "function", "llm_judge"),
    "rl.environment": ("environment",),
    "data/inputs.json:environment": ("environment",),
}
BACK = "set it back, or set checkpoints.resume_from to null to begin anew"


@dataclass(frozen=True)
class Carried:
    """What becomes of the state of a checkpoint of other work.

    refusals: why the state can't be resumed from, one line each. begun_anew: changed keys and files by the field of the state that begins
    anew.
    """

    refusals: list[str]
    begun_anew: dict[str, list[str]]


def carried(inputs: StageInputs, older: StageInputs, *, phase: str, step: int, files: Collection[str]) -> Carried:
    """Return which fields of an older work's state begin anew, and why it can't be resumed from if it can't.

    Args:
        phase, step: phase and step of the older work's newest checkpoint. files: names of the files in it.
    """
    shared = inputs.params.keys() & older.params.keys()  # the others are of another version
    now, before = (settings({name: params[name] for name in shared}) for params in (inputs.params, older.params))
    fields = STATE["all"] | STATE["rl" if phase == RL_PHASE else "supervised"]
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    changes = {key: (json.dumps(before.get(key)), json.dumps(now.get(key))) for key in differing}
    changed_files = {path for path in {*inputs.files, *older.files} if inputs.files.get(path) != older.files.get(path)}
    changes |= {path: ("the same file", "another") for path in changed_files if not path.endswith(".md")}  # such as a model's card
    refused: dict[str | None, str] = {}  # by the row, since a row may stand for many keys or files
    begun_anew: dict[str, list[str]] = {}
    for key, (old, new) in sorted(changes.items()):
        row = row_of(key)
        for field, fate in ({} if row is None else _ROWS[row]).items():
            if fate == REFUSED and field in fields and _has(field, key, before, phase, files):
                refused.setdefault(row, f"{key}: expected {old}, as for the {field} in the checkpoint, got {new}; {BACK}")
            elif fate == ANEW and field in fields:
                begun_anew.setdefault(field, []).append(key)
    return Carried([*refused.values(), *_lacking(now, before, files), *_too_far(now, phase, step)], begun_anew)


def row_of(key: str) -> str | None:
    """Return the longest name of CARRIED that covers a key or a file; None if none does, as for keys of older versions."""
    for candidate in (key, f"training.{key.partition('.')[2]}"):
        found = [row for row in _ROWS if any(fnmatchcase(candidate, f"{row}{end}") for end in ("", ".*", "/*"))]
        if found:
            return max(found, key=len)
    return None


def settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return every key of a stage's params with its value, defaults included. Scorers are listed by their names."""
    found: dict[str, Any] = {}
    for name, value in with_usual_rates(dict(params)).items():
        field = Params.model_fields.get(name)
        section = None if field is None else subsection(field.annotation)[0]
        found.update(_leaves(value if section is None else with_defaults(section, value), name))
    return found


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, list) and node and all(isinstance(item, dict) and "name" in item for item in node):
        node = {item["name"]: item for item in node}
    if not isinstance(node, dict) or not node:
        yield path, node
        return
    for key, value in node.items():
        yield from _leaves(value, f"{path}.{key}")


def _has(field: str, key: str, before: Mapping[str, Any], phase: str, files: Collection[str]) -> bool:
    """Return whether the checkpoint has a field of the state that a key belongs to."""
    if field == "critic":
        return any(name.startswith("critic/") for name in files)
    if field == "pretraining":
        return phase != "pretrain"
    if field != "moments":
        return True
    kinds = _KINDS_OF.get(row_of(key) or "")
    named = key.removeprefix("rl.reward.scorers.").partition(".")[0]
    return any(name == named if kinds is None else kind in kinds for name, kind in _normalized(before).items())


def _normalized(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the kind of each scorer whose mean and deviation RL keeps, by the scorer's name."""
    top, found = "rl.reward.scorers.", {}
    for name in {key.removeprefix(top).partition(".")[0] for key in values if key.startswith(top)}:
        scorer = {field: values.get(f"{top}{name}.{field}") for field in ("kind", "path", "weight", "normalization")}
        if scorer["weight"] and scorer["normalization"] != "none":
            at_a_path = scorer["kind"] == "reward_model" and scorer["path"] is not None
            found[name] = f"{scorer['kind']}{' at a path' * at_a_path}"
    return found


def _lacking(now: Mapping[str, Any], before: Mapping[str, Any], files: Collection[str]) -> Iterator[str]:
    """Yield refusals for state that the work needs and the checkpoint lacks, and for state of the checkpoint that the work may not leave
    out.
    """
    algorithm = now.get("rl.algorithm")
    if algorithm in ALGORITHMS and ALGORITHMS[algorithm].critic and files and not any(name.startswith("critic/") for name in files):
        had = before.get("rl.algorithm")
        yield f"rl.algorithm: expected one without a critic, as the checkpoint of {had} has none, got {algorithm}; {BACK}"
    for key in (key for key in now if key.partition(".")[2] == "ema_decay"):
        if now[key] is not None and before.get(key) is None:
            yield f"{key}: expected null, as the checkpoint has no average of the weights, got {now[key]}; {BACK}"
    refreshed = "rl.kl.refresh_reference_every"
    if "reference.pt" in files and refreshed in now and now[refreshed] is None:
        yield f"{refreshed}: expected a number, as the reference of the checkpoint isn't the SFT model any more, got null; {BACK}"
    names, then = sorted(_normalized(now)), sorted(_normalized(before))
    if "rl.algorithm" in now and names != then:
        yield f"rl.reward.scorers: expected to normalise those of the checkpoint, {then}, got {names}; {BACK}"


def _too_far(now: Mapping[str, Any], phase: str, step: int) -> Iterator[str]:
    """Yield a refusal if the checkpoint has more steps than the work."""
    sections = ("rl", "sft", "reward", "rejection_sampling", "conditional_sft", "kto", "iterative", "dpo")  # a round has both of the last
    key = "sft.pretrain.steps" if phase == "pretrain" else next((f"{s}.steps" for s in sections if f"{s}.steps" in now), None)
    if key is not None and now[key] is not None and now[key] < step:  # the trainer checks those of epochs
        yield f"{key}: expected at least the {step} of the checkpoint, got {now[key]}; raise it, or set checkpoints.resume_from to null"
