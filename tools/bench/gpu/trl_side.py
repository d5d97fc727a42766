"""Runs TRL's side of the comparisons: GRPOTrainer with vLLM in its process, and steps of SFT, DPO and the reward model."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from pathlib import Path

BEGAN = time.perf_counter()

from tools.bench.gpu.online import ENGINE_MEMORY  # noqa: E402
from tools.bench.gpu.online import Case as Job  # noqa: E402
from tools.bench.gpu.processes import Case, measure_here  # noqa: E402
from tools.bench.gpu.training import chosen, steps_of  # noqa: E402

SIZES = {"sft": 4, "dpo": 2, "reward": 4}  # rows of a micro-batch; more may not fit 80 GB beside float32 states
STEPS, WARMUP = 6, 2


def measure(case: Case) -> Case:
    if case["what"] != "grpo":
        return train_steps(case)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are loaded by a call within the process
    import torch

    job = Job(**case["case"])
    torch.set_num_threads(job.threads)
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        torch._dynamo.config.disable = True
    return train(job, case["model"])


def train_steps(case: Case) -> Case:
    """Train by TRL.

    seconds: seconds of each timed step. allocated: peak bytes on the GPU. rows: rows of a micro-batch. dtype: dtype of the weights.
    """
    import datasets
    import torch

    from rlhf_core.models.build import load_language_model, new_scalar_model
    from rlhf_core.models.tokenizer import load_tokenizer
    from tools.bench.gpu.shapes import demonstrations, pairs
    from tools.bench.theirs import COLUMNS, TRAINERS, UNTIMED, Watch
    from tools.bench.workload import Run

    method, steps, on_gpu, run = chosen(case).method, steps_of(case), torch.cuda.is_available(), Run()
    params, section, size = steps.params, getattr(steps.params, method), min(steps.rows, SIZES[method])
    rows = (demonstrations if method == "sft" else pairs)(steps.rows, steps.lengths) * STEPS
    precomputed = {"precompute_ref_log_probs": params.dpo.reference == "precomputed", "precompute_ref_batch_size": size}
    own = {
        "sft": {},
        "reward": {"center_rewards_coefficient": params.reward.centering_coef},
        "dpo": {"beta": params.dpo.beta, **precomputed},
    }
    trainer_class, config_class = TRAINERS[method]
    tokenizer = load_tokenizer(steps.model, trust_remote_code=False)
    if method == "reward":
        model = new_scalar_model(Path(steps.model), tokenizer, trust_remote_code=False)
    else:
        model = load_language_model(steps.model)
    with tempfile.TemporaryDirectory() as folder:
        settings = config_class(
            output_dir=folder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps.rows // size,
            max_steps=STEPS,
            learning_rate=section.learning_rate,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=section.weight_decay,
            max_grad_norm=section.max_grad_norm,
            max_length=params.model.max_length,
            train_sampling_strategy="sequential",
            use_cpu=not on_gpu,
            bf16=on_gpu,
            dataloader_pin_memory=on_gpu,
            seed=0,
            **UNTIMED,
            **own[method],
        )
        data = datasets.Dataset.from_list([COLUMNS[method](row) for row in rows])
        trainer_class(model=model, args=settings, train_dataset=data, processing_class=tokenizer, callbacks=[Watch(run)]).train()
    seconds = [end - begin for begin, end in itertools.pairwise(run.ends)][WARMUP - 1 :]
    allocated = torch.cuda.max_memory_allocated() if on_gpu else 0
    return {"seconds": seconds, "allocated": allocated, "rows": size, "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}


def train(case: Job, model: str) -> Case:
    """Train GRPO by TRL.

    start: seconds to the first step. seconds: seconds of each step. tokens: tokens of each step's responses. note: a remark for the reader.
    """
    import datasets
    import torch
    import trl

    from rlhf_core.engines.vllm.start import inspect_here
    from rlhf_core.models.build import load_language_model
    from rlhf_core.models.tokenizer import load_tokenizer
    from tools.bench.theirs import Watch
    from tools.bench.variety import of_texts
    from tools.bench.workload import Run

    note = ""
    if not torch.cuda.is_available():
        inspect_here(model, trust_remote_code=False)
        reload_whole_weights()
        note = "on the CPU vLLM reloads all of TRL's weights at once"
    run, tokens = Run(), []

    def reward(completions, completion_ids, **_) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return of_texts([completion[0]["content"] for completion in completions])

    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=load_language_model(model),
            reward_funcs=reward,
            args=trl.GRPOConfig(output_dir=folder, **arguments(case)),
            train_dataset=datasets.Dataset.from_list([{"prompt": row["messages"]} for row in case.rows()]),
            processing_class=load_tokenizer(model, trust_remote_code=False),
            callbacks=[Watch(run)],
        )
        started = time.perf_counter()
        trainer.train()
    ends = [started, *run.ends]
    seconds = [end - begin for begin, end in itertools.pairwise(ends)]
    return {"start": started - BEGAN, "seconds": seconds, "tokens": tokens, "note": note}


def arguments(case: Job) -> dict:
    """Return TRL's arguments for the case.

    The model has float32 weights and computes in the case's dtype, as in TRL's scripts.
    """
    import torch

    from tools.bench.theirs import UNTIMED

    rl = case.params.rl
    size = max(case.group, case.microbatch_tokens // case.max_length // case.group * case.group)
    size = next(n for n in range(min(size, case.samples), 0, -1) if case.samples % n == 0)
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": case.samples // size,
        "max_steps": case.steps,
        "learning_rate": rl.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": rl.weight_decay,
        "max_grad_norm": rl.max_grad_norm,
        "num_generations": case.group,
        "max_completion_length": case.response,
        "beta": rl.kl.coef,
        "temperature": rl.rollout.temperature,
        "loss_type": "dapo",  # the mean over all tokens of an optimizer step, as here
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": ENGINE_MEMORY,
        "vllm_enable_sleep_mode": case.turns and torch.cuda.is_available(),
        "vllm_max_model_length": case.max_length,
        "vllm_importance_sampling_correction": False,  # rl.correction.kind is none
        "bf16": case.dtype == "bfloat16" and torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        **UNTIMED,
        "seed": case.params.seed,
    }


def reload_whole_weights() -> None:
    """Reload all weights: on a CPU vLLM packs them, and TRL's loading of single weights fails ('weight_loader')."""
    from trl.generation.vllm_generation import VLLMGeneration

    def sync_weights(self) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._iter_named_params()})
        self.llm.reset_prefix_cache()

    VLLMGeneration.sync_weights = sync_weights


if __name__ == "__main__":
    measure_here(measure)
