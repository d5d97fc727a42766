"""Runs TRL's side: its trainers on the same weights, rows, order and optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from transformers import TrainerCallback

from rlhf_core.models.build import load_language_model, load_scalar_model
from rlhf_core.models.tokenizer import load_tokenizer
from tools.bench.variety import of_texts
from tools.bench.workload import Run, Workload

datasets.disable_progress_bars()

# TRL's arguments that switch off what takes time and isn't part of the work.
UNTIMED = {"gradient_checkpointing": False, "logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True}


class Watch(TrainerCallback):
    def __init__(self, run: Run):
        self._run = run

    def on_step_end(self, args, state, control, **_) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._run.end_step()


def train(work: Workload, folder: Path) -> Run:
    if work.is_online:
        return train_online(work, folder)
    run = Run()
    losses: list[torch.Tensor] = []
    trainer_class, config_class = TRAINERS[work.method]

    class Recorded(trainer_class):
        """Records unrounded losses; TRL's log rounds them."""

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.detach())
            return loss

    trainer = Recorded(
        model=load_scalar_model(work.model) if work.method == "reward" else load_language_model(work.model),
        args=config_class(output_dir=str(folder), **common(work), **OPTIONS[work.method](work)),
        train_dataset=datasets.Dataset.from_list([COLUMNS[work.method](row) for row in work.drawn_rows()]),
        processing_class=load_tokenizer(work.model, trust_remote_code=False),
        callbacks=[Watch(run)],
    )
    trainer.train()
    run.losses = [float(loss) for loss in losses]
    return run


def train_online(work: Workload, folder: Path) -> Run:
    """Train online by TRL with its own generation, since its vLLM mode fails on a CPU (1.16: 'Parameter' object has no attribute
    'weight_loader').
    """
    run, rl = Run(), work.params.rl
    trainer_class, config_class = ONLINE_TRAINERS[work.method]

    def reward(completions, **_) -> list[float]:
        scores = of_texts([completion[0]["content"] for completion in completions])
        run.losses.append(sum(scores) / len(scores))
        return scores

    arguments = config_class(
        output_dir=str(folder),
        **optimization(work, rl.learning_rate, rl.weight_decay, rl.max_grad_norm),
        num_generations=rl.group_size,
        max_completion_length=rl.rollout.max_new_tokens,
        generation_kwargs={"min_new_tokens": rl.rollout.min_new_tokens},
        beta=rl.kl.coef,
        temperature=rl.rollout.temperature,
    )
    trainer = trainer_class(
        model=load_language_model(work.model),
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": row["messages"]} for row in work.read_rows()]),
        processing_class=load_tokenizer(work.model, trust_remote_code=False),
        callbacks=[Watch(run)],
    )
    trainer.train()
    return run


def common(work: Workload) -> dict[str, Any]:
    """Return TRL's arguments for this project's section."""
    section = getattr(work.params, work.method)
    return {
        "max_length": work.params.model.max_length,
        "train_sampling_strategy": "sequential",
        **optimization(work, section.learning_rate, section.weight_decay, section.max_grad_norm),
    }


def optimization(work: Workload, learning_rate: float, weight_decay: float, max_grad_norm: float) -> dict[str, Any]:
    """Return TRL's arguments for the same optimizer."""
    params = work.params
    return {
        "per_device_train_batch_size": work.batch_size,
        "max_steps": work.steps,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": weight_decay,
        "max_grad_norm": max_grad_norm,
        "seed": params.seed,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": params.model.dtype == "bfloat16",
        "dataloader_pin_memory": torch.cuda.is_available(),
        **UNTIMED,
    }


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


COLUMNS = {
    "sft": lambda row: {"prompt": row["messages"], "completion": answer(row["response"])},
    "reward": lambda row: {side: row["messages"] + answer(row[side]) for side in ("chosen", "rejected")},
    "dpo": lambda row: {"prompt": row["messages"], **{side: answer(row[side]) for side in ("chosen", "rejected")}},
}
OPTIONS = {
    "sft": lambda work: {},
    "reward": lambda work: {"center_rewards_coefficient": work.params.reward.centering_coef},
    "dpo": lambda work: {
        "loss_type": [work.params.dpo.loss],
        "beta": work.params.dpo.beta,
        "label_smoothing": work.params.dpo.label_smoothing,
        "precompute_ref_log_probs": work.params.dpo.reference == "precomputed",
        "precompute_ref_batch_size": work.batch_size,
    },
}
TRAINERS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
}
ONLINE_TRAINERS = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}
