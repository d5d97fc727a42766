"""TRL's GRPOTrainer with vLLM in its process, on a case: python -m tools.bench.gpu.trl_side CASE.json MODEL FOUND.json PARENT

Writes {"start": seconds to the first step, "seconds": of each step, "tokens": of each step's responses, "note": for the reader}.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

BEGAN = time.perf_counter()

from rlhf_core.process import configure_process, end_with_parent  # noqa: E402
from tools.bench.gpu.engines import inspect_here  # noqa: E402
from tools.bench.gpu.online import ENGINE_MEMORY, Case  # noqa: E402


def main() -> None:
    case, model, found, parent = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    end_with_parent(parent, signal.SIGKILL)
    configure_process()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are loaded by a call within the process
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        torch._dynamo.config.disable = True
    found.write_text(json.dumps(train(Case(**json.loads(case.read_text())), model)))


def train(case: Case, model: str) -> dict:
    import datasets
    import torch
    import trl

    from rlhf_core.models.build import load_language_model
    from rlhf_core.models.tokenizer import load_tokenizer
    from tools.bench.theirs import Watch
    from tools.bench.variety import of_texts
    from tools.bench.work import Run

    note = ""
    if not torch.cuda.is_available():
        inspect_here(model)
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


def arguments(case: Case) -> dict:
    """The case in TRL's terms. The model has float32 weights and computes in the case's dtype, as in TRL's scripts."""
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
    main()
