"""Training with DeepSpeed: the only file that imports it.

The loss handed to `backward` is this rank's share of the step's loss: sums divided by global counts. Micro-batches and ranks
then only have to be added up, so the engine's own averaging over ranks is undone here and it never divides by the number
of micro-batches.
"""

from __future__ import annotations

import gc
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlhf_core.checkpoint.digest import OPTIMIZER_NAMES
from rlhf_core.models.build import disable_dropout
from rlhf_core.models.lora import merged_state_dict
from rlhf_core.process import freeze_gc


@dataclass(frozen=True)
class EngineSettings:
    """How one module is trained.

    learning_rate: the peak; `schedule(step)` multiplies it (step counts from 0).
    max_grad_norm: global 2-norm to which gradients are clipped.
    zero_stage: 0 to 3; offload_optimizer moves the optimizer state to the host (stage 1 and up).
    dtype: float32 | bfloat16 of parameters and activations; master weights are float32.
    disable_dropout: train without the model's own dropout.
    """

    learning_rate: float
    schedule: Callable[[int], float]
    weight_decay: float
    max_grad_norm: float
    zero_stage: int
    offload_optimizer: bool
    dtype: str
    seed: int
    disable_dropout: bool


def warmup_cosine(step: int, *, total: int, warmup: int, floor: float) -> float:
    """Linear from 1/warmup to 1, then a cosine down to `floor` at step `total`. Factor of the peak learning rate."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def join_world(*, rank: int = 0, world_size: int = 1, store: dist.Store | None = None) -> None:
    """Make this process rank `rank` of the data-parallel world; a world of one needs no network.

    Raises:
        dist.DistStoreError: not all ranks arrived within the timeout of `store`.
    """
    if dist.is_initialized():
        return
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", store=store or dist.HashStore(), rank=rank, world_size=world_size
    )
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns that it found none
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    # Avoids compiling DeepSpeed's shared-memory collectives for the CPU, which needs a compiler; gloo is used instead.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    freeze_gc()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def release_memory() -> None:
    """Free the memory of unused models before the next one is loaded: reference cycles, and GPU memory cached by PyTorch."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def equal_count(parts: list[list[int]]) -> list[list[int]]:
    """Split micro-batches until all ranks have equally many: with ZeRO each forward and backward is a collective.

    Raises:
        ValueError: a rank has fewer examples than another rank has micro-batches.
    """
    if dist.get_world_size() == 1:
        return parts
    wanted = torch.tensor([len(parts)], device=device())
    dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
    parts = list(parts)
    while len(parts) < int(wanted):
        parts.sort(key=len)
        largest = parts.pop()
        if len(largest) < 2:
            raise ValueError(f"micro-batches: expected at least {int(wanted)} examples on each rank, got fewer; raise microbatch_tokens")
        parts += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return parts


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' values, bitwise equal on each rank."""
    total = values.to(device(), copy=True)
    dist.all_reduce(total)
    return total


class TrainEngine:
    """One trained module: forward, backward of loss shares, step, full weights, checkpoint."""

    def __init__(self, module: nn.Module, settings: EngineSettings):
        import deepspeed

        self._settings = settings
        self._world_size = dist.get_world_size()
        # With ZeRO or bfloat16 DeepSpeed's optimizers clip and report the norm; in float32 without ZeRO they don't report it.
        self._clips_itself = settings.zero_stage == 0 and settings.dtype == "float32"
        self._grad_norm = 0.0
        self._torch_optimizer, scheduler = self._optimizer(module)
        # In bfloat16 without ZeRO DeepSpeed creates Adam's state by a step on zeros. Adam would count the first real step as its second,
        # which changes the bias correction, and the weights would decay once more.
        with self._optimizer_at_rest() if settings.zero_stage == 0 else nullcontext():
            self._engine, self._optim, _, _ = deepspeed.initialize(
                model=module, optimizer=self._torch_optimizer, lr_scheduler=scheduler, config=self._config()
            )
        if self._clips_itself:
            self._torch_optimizer.register_step_pre_hook(self._clip)
        self.train()

    def _optimizer(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        s = self._settings
        decayed = [p for p in module.parameters() if p.requires_grad and p.ndim > 1]
        plain = [p for p in module.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [{"params": p, "weight_decay": w} for p, w in ((decayed, s.weight_decay), (plain, 0.0)) if p]  # adapters are all matrices
        self._trained, self._decays = [*decayed, *plain], [group["weight_decay"] for group in groups]
        if s.offload_optimizer:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer = DeepSpeedCPUAdam(groups, lr=s.learning_rate, betas=(0.9, 0.95), adamw_mode=True)
        else:
            optimizer = torch.optim.AdamW(groups, lr=s.learning_rate, betas=(0.9, 0.95), fused=True)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, s.schedule)

    def _config(self) -> dict[str, Any]:
        s = self._settings
        zero: dict[str, Any] = {"stage": s.zero_stage, "overlap_comm": False}
        if s.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0.0 if self._clips_itself else s.max_grad_norm,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": s.dtype == "bfloat16"},
            "steps_per_print": None,
            "seed": s.seed,
        }

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        self._grad_norm = float(nn.utils.clip_grad_norm_(parameters, self._settings.max_grad_norm))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def backward(self, loss_share: torch.Tensor) -> None:
        """Accumulate gradients of this micro-batch's share of the step's loss; the engine's average over ranks is turned into a sum."""
        self._engine.backward(loss_share * self._world_size, scale_wrt_gas=False)

    def step(self) -> float:
        """Reduce over ranks, clip, update, advance the schedule. Returns the gradient norm before clipping."""
        self._engine.step()
        return self._grad_norm if self._clips_itself else float(self._engine.get_global_grad_norm())

    def discard(self) -> None:
        """Drop the gradients since the last step (there must be some); parameters, optimizer state and schedule stay as they are.

        Their buffers depend on the ZeRO stage. DeepSpeed therefore runs its normal step, which clears all of them, with optimizer and
        schedule disabled.
        """
        schedule, self._engine.lr_scheduler = self._engine.lr_scheduler, None
        try:
            with self._optimizer_at_rest():
                self._engine.step()
        finally:
            self._engine.lr_scheduler = schedule

    @contextmanager
    def _optimizer_at_rest(self) -> Iterator[None]:
        """Disable the optimizer's step within the block."""
        step, self._torch_optimizer.step = self._torch_optimizer.step, lambda *_, **__: None
        try:
            yield
        finally:
            self._torch_optimizer.step = step

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self._optim.param_groups[0]["lr"])

    def train(self) -> None:
        self._engine.train()
        if self._settings.disable_dropout:
            disable_dropout(self.module)

    def eval(self) -> None:
        self._engine.eval()

    @property
    def module(self) -> nn.Module:
        return self._engine.module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Full weights on the CPU, under the names of the wrapped Hugging Face model, adapters merged. Collective with ZeRO 3."""
        import deepspeed

        parameters = list(self.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters, enabled=self._settings.zero_stage == 3):
            state = {k.removeprefix("model."): v.detach().cpu().clone() for k, v in merged_state_dict(self.module).items()}
        return state

    def save(self, folder: Path, name: str) -> None:
        """Parameters, optimizer, schedule and counters of this rank. Every rank calls it."""
        names = {p: name for name, p in self.module.named_parameters()}
        trained = [names[p] for p in self._trained]
        self._engine.save_checkpoint(str(folder), tag=name, save_latest=False, client_state={OPTIMIZER_NAMES: trained})

    def load(self, folder: Path, name: str) -> None:
        """Load a checkpoint of `save`. Learning rate, weight decay and clipping come from the settings, not from the checkpoint.

        Raises:
            ValueError: the checkpoint belongs to another engine or model.
        """
        subject = f"checkpoint {folder.name}/{name}"
        try:
            loaded = any((folder / name).glob("*.pt")) and self._engine.load_checkpoint(str(folder), tag=name)[0] is not None
        except (KeyError, AssertionError) as error:
            raise ValueError(f"{subject}: expected the state of this model, got {error}; remove the folder") from error
        except RuntimeError as error:
            if "size mismatch" not in str(error) and "in state_dict" not in str(error):
                raise
            raise ValueError(f"{subject}: expected the state of this model, got another: {error}; remove the folder") from error
        if not loaded:
            raise ValueError(f"{subject}: expected the state of a training engine, got nothing that loads; remove the folder")
        self._apply_settings()

    def load_universal(self, folder: Path, name: str) -> None:
        """Load a checkpoint made by `convert_to_universal` from any number of ranks."""
        config = self._engine._config
        config.load_universal_checkpoint = True
        try:
            self.load(folder, name)
        finally:
            config.load_universal_checkpoint = False
        # With ZeRO 3 all groups share one step counter, which each group would advance.
        for state in self._torch_optimizer.state.values():
            if isinstance(state["step"], torch.Tensor):
                state["step"] = state["step"].clone()

    def _apply_settings(self) -> None:
        """Restore settings that a checkpoint overwrote; with ZeRO 3 a universal one gives the first group's to all groups."""
        s, scheduler = self._settings, self._engine.lr_scheduler
        scheduler.base_lrs = [s.learning_rate] * len(scheduler.base_lrs)
        for group, decay in zip(self._optim.param_groups, self._decays, strict=True):
            group["weight_decay"], group["initial_lr"] = decay, s.learning_rate
            group["lr"] = s.learning_rate * s.schedule(scheduler.last_epoch)
        if not self._clips_itself and hasattr(self._optim, "clip_grad"):
            self._optim.clip_grad = s.max_grad_norm
