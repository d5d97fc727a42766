"""Ranks as processes of this machine, for tests of collectives."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

# Processes that are forked from one that has the imports, and has sent nothing over gloo: a copy of one that has may hang.
CLEAN = multiprocessing.get_context("forkserver")
# Modules of tests/ aren't found there. The trainers' engine imports DeepSpeed but for ZeRO's optimizers, which import torch's compiler.
CLEAN.set_forkserver_preload(
    [
        *(f"rlhf_core.engines.{name}" for name in ("deepspeed.engine", "transfer.adapter_source", "transfer.gloo", "transfer.sender")),
        *(f"deepspeed.runtime.zero.{name}" for name in ("muon.muon_optimizer", "stage_1_and_2", "stage3")),
        *("rlhf_core.models.build", "rlhf_core.trainers.rl.rank", "transformers.models.llama.modeling_llama", "pytest"),
        *(
            "dvc.cli",
            "dvc.commands.repro",
            "dvc.repo",
            "rlhf_core.gate.run",
            "rlhf_core.report.page",
            "rlhf_core.preparation.validation.validate",
        ),
        *("rlhf_core.stage.training", "rlhf_core.preparation.prepare", "rlhf_core.look.propose"),
    ]
)


def run_processes(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]], *, deadline: float) -> None:
    """Call a function of a module in a process for each rank, rank 0's arguments first, and wait for all.

    Raises:
        RuntimeError: a process failed, or `deadline` seconds passed. None of them is left.
    """
    processes = [CLEAN.Process(target=target, args=args) for args in arguments]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(deadline)
        codes = [process.exitcode for process in processes]
        if any(code != 0 for code in codes):
            raise RuntimeError(f"ranks: expected all to end with 0 within {deadline} s, got {codes}; their tracebacks are above")
    finally:
        for process in processes:
            process.kill()
            process.join()
