"""Jobs of RL in which a tiny model sees pictures, and how far its log-probabilities are from transformers' plain forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from rl_here import RunHere
from safetensors.torch import load_file
from seeing_models import ONE_PICTURE, rows, save_seeing_model, seeing, store
from tiny_models import rl_job
from transformers import AutoModelForImageTextToText

from rlhf_core.data.pictures import Picture, pictures_of
from rlhf_core.data.schema import write_rows
from rlhf_core.models.build import new_scalar_model, save_model, scalar_head
from rlhf_core.models.vision import picture_arguments, undrawn_ids
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.types import Rollout

SCORER = {"name": "length", "kind": "length", "target_length": 3}
# A critic that starts as the reward model, whose scores are the reward as they are.
PPO = {
    "rl.algorithm": "ppo", "rl.ppo.critic_init": "reward_model", "reward.enabled": True, "rl.reward.clip": None,
    "rl.reward.scorers": [{"name": "reward_model", "kind": "reward_model", "normalization": "none"}],
}  # fmt: skip


def seeing_job(folder: Path, family: str, **changes) -> RlJob:
    """A job whose prompts have no, one or two pictures."""
    prepared, model = folder / "prepared", save_seeing_model(folder / "model", family)
    own = {"source": "made", "split": "train", "label": None}
    made = rows(store(prepared, 12), several=family not in ONE_PICTURE)
    write_rows(prepared, "prompt", [{"id": row["id"], "messages": row["messages"], **own} for row in made])
    settings = {
        "model.path": str(model), "model.architecture": None, "model.vision": "frozen", "model.max_length": 128, "reward.enabled": False,
        "alignment.method": "rl", "rl.algorithm": "grpo", "rl.grpo.group_size": 2, "rl.ppo.critic_init": "sft", "rl.samples_per_step": 8,
        "rl.minibatch_size": 8, "rl.steps": 8, "rl.warmup_steps": 0, "rl.learning_rate": 2e-3, "rl.rollout.backend": "pytorch",
        "rl.kl.placement": "loss", "rl.kl.estimator": "k3", "rl.kl.coef": 0.05,
        "rl.rollout.max_new_tokens": 6, "rl.rollout.engines": 1, "rl.checkpoint_every": 1, "rl.reward.scorers": [SCORER],
        "rl.trainer.microbatch_tokens": 300, "conditional_sft.label_by": "preference", "conditional_sft.levels": 2,
        "conditional_sft.wanted": 1, "rejection_sampling.scorers": [SCORER], "iterative.scorers": [SCORER],
        "data.sources": [{"name": "made", "kind": "file", "path": "none.jsonl", "format": "instruction", "uses": ["prompt"]}], **changes,
    }  # fmt: skip
    job = rl_job(model, save_seeing_scorer(folder / "reward", model, prepared), **settings)
    return job.model_copy(update={"work": str(folder / "work"), "prepared": str(prepared)})


@torch.no_grad()
def save_seeing_scorer(folder: Path, model: Path, prepared: Path) -> Path:
    """A reward model with the trunk of a language model and random weights in its head."""
    tokenizer, _ = seeing(model, prepared)
    scorer = new_scalar_model(model, tokenizer, trust_remote_code=False, vision="frozen")
    torch.manual_seed(7)
    scalar_head(scorer).weight.normal_()
    save_model(scorer, scorer.state_dict(), tokenizer, folder)
    return folder


@torch.no_grad()
def plain_values(folder: Path, prepared: Path, ids: Sequence[int], pictures: Sequence[Picture]) -> torch.Tensor:
    """Transformers' last hidden states of a sequence with a reward model's trunk, times its head, [len(ids)]."""
    head, model = load_file(folder / "model.safetensors")["score.weight"][0], AutoModelForImageTextToText.from_pretrained(folder).eval()
    row, seen = torch.tensor([ids]), seeing(folder, prepared)[1](pictures)
    arguments = picture_arguments(model, SimpleNamespace(input_ids=row, pictures=seen))
    return model(input_ids=row, output_hidden_states=True, use_cache=False, **arguments).hidden_states[-1][0] @ head


@torch.no_grad()
def differences(run: RunHere, rollouts: Sequence[Rollout], folder: Path) -> tuple[float, float]:
    """The largest differences of sampled tokens' log-probabilities from transformers' plain forward pass with the weights of the last
    update: those of the engine, and without what keeps tokens of pictures from being drawn.
    """
    run.rank.actors[0].export(str(folder))
    _, sight = seeing(folder, Path(run.job.prepared))
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    (undrawn,) = undrawn_ids(model.config)
    found, unforbidden = [], []
    for rollout in rollouts:
        ids, start = torch.tensor([rollout.ids]), len(rollout.prompt.prompt_ids)
        seen = sight(pictures_of(rollout.prompt.messages))
        types = {"mm_token_type_ids": (ids == undrawn).int(), "token_type_ids": (ids == undrawn).int()}
        taken = {name: types[name] for name in types if seen and name in model.forward.__annotations__}
        logits = model(input_ids=ids, **seen, **taken).logits[0, start - 1 : -1]
        of_engine, sampled = torch.tensor(rollout.rollout_logprobs), ids[0, start:, None]
        unforbidden.append(float((logits.log_softmax(-1).gather(-1, sampled).squeeze(-1) - of_engine).abs().max()))
        logits[:, undrawn] = -torch.inf
        found.append(float((logits.log_softmax(-1).gather(-1, sampled).squeeze(-1) - of_engine).abs().max()))
    return max(found), max(unforbidden)
