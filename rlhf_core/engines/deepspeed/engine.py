"""Trains with DeepSpeed.

The loss handed to `backward` is this rank's share of the step's loss: sums divided by global counts. Shares of micro-batches and ranks are
added up. Therefore the engine's own averaging over ranks is undone here, and it never divides by the number of micro-batches.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlhf_core.checkpoint.saved_state import OPTIMIZER_NAMES
from rlhf_core.checkpoint.saving import without_crc32
from rlhf_core.engines.deepspeed.freeing import free
from rlhf_core.engines.deepspeed.optimizers import OPTIMIZERS, WeightAverage, refresh_module
from rlhf_core.engines.deepspeed.sequence_parallel import split_sequences
from rlhf_core.engines.memory.offload import OnDevice, Stays, tensors_in, weights_of
from rlhf_core.models.build import disable_dropout
from rlhf_core.models.lora import weight_units
from rlhf_core.models.recompute import recompute_layers
from rlhf_core.process import freeze_gc

OPTIMIZER = "optimizer_name"  # in an engine's file: of OPTIMIZERS
DEFAULT_BUCKET = 500_000_000  # DeepSpeed's, of gradients


@dataclass(frozen=True)
class EngineSettings:
    """How one module is trained.

    learning_rate: the peak; `schedule(step)` multiplies it (step counts from 0).
    optimizer: a key of OPTIMIZERS. eps: unused by lion.
    ema_decay: decay of the weights' average (`WeightAverage`); None: no average is kept.
    max_grad_norm: global 2-norm to which gradients are clipped.
    zero_stage: 0 to 3.
    offload_optimizer: the optimizer's state, master weights included, is on the host, where the step is computed; stage 1 and up.
    offload_parameters: a rank's share of the parameters is on the host; stage 3.
    gradient_checkpointing: layers keep only their inputs, and are computed again in the backward pass.
    dtype: float32 or bfloat16, of parameters and activations; master weights are float32.
    disable_dropout: train without the model's own dropout.
    """

    learning_rate: float
    schedule: Callable[[int], float]
    weight_decay: float
    max_grad_norm: float
    zero_stage: int
    offload_optimizer: bool
    offload_parameters: bool
    gradient_checkpointing: bool
    dtype: str
    seed: int
    disable_dropout: bool
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    ema_decay: float | None = None


def join_world(*, rank: int = 0, world_size: int = 1, store: dist.Store | None = None, timeout: float | None = None) -> None:
    """Make this process rank `rank` of the data-parallel world; a world of one needs no network.

    A process that has joined a world stays in it.

    Args:
        timeout: deadline of a collective in seconds; None: torch's default.
    Raises:
        dist.DistStoreError: not all ranks arrived within the timeout of `store`.
    """
    if not dist.is_initialized():
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size))
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=store or dist.HashStore(),
            rank=rank,
            world_size=world_size,
            timeout=None if timeout is None else timedelta(seconds=timeout),
        )
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns that it found none
    import deepspeed

    if deepspeed.comm.is_initialized():
        return
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
    wanted, parts = most_over_ranks(len(parts)), list(parts)
    while len(parts) < wanted:
        parts.sort(key=len)
        largest = parts.pop()
        if len(largest) < 2:
            raise ValueError(f"micro-batches: expected at least {wanted} examples on each rank, got fewer; raise microbatch_tokens")
        parts += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return parts


def most_over_ranks(count: int) -> int:
    """Return the largest of all ranks' counts."""
    most = torch.tensor([count], device=device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' values, bitwise equal on each rank."""
    total = values.to(device(), copy=True)
    dist.all_reduce(total)
    return total


def precision(dtype: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration of parameters and activations."""
    return {"bf16": {"enabled": dtype == "bfloat16"}}


def on_host() -> dict[str, Any]:
    """Return DeepSpeed's configuration of something that is offloaded; a GPU reads pinned memory faster."""
    return {"device": "cpu", "pin_memory": torch.cuda.is_available()}


def shard(module: nn.Module, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Cast and partition a module's parameters over the ranks for ZeRO 3, one parameter at a time, so that the device never holds all.

    The given module is on the host, where transformers maps its files into memory, so weights of the right dtype take none of the process's
    memory. `HfDeepSpeedConfig` would make the module in parts instead, but rounds its float32 buffers, such as rotary frequencies, and
    reports a wrong file on rank 0 only.

    Args:
        config: DeepSpeed's configuration.
    """
    import deepspeed

    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    deepspeed.zero.Init(module=module, config_dict_or_path=config)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device())


def gathered_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names, as in the wrapped Hugging Face model, and the values of a module's weights, with adapters merged.

    With ZeRO 3 this is a collective that gathers a layer at a time: every rank iterates to the end, and a value is valid until the next
    one.
    """
    import deepspeed

    for unit in weight_units(module):
        with deepspeed.zero.GatheredParameters(unit.parameters):  # does nothing with whole parameters
            for name, value in unit.weights().items():
                yield name.removeprefix("model."), value


class TrainEngine:
    """One trained module: forward, backward of loss shares, step, full weights, checkpoint."""

    def __init__(self, module: nn.Module, settings: EngineSettings):
        import deepspeed

        self._settings = settings
        self._world_size = dist.get_world_size()
        # With ZeRO or bfloat16 DeepSpeed's optimizers clip and report the norm; in float32 without ZeRO they don't report it.
        self._clips_itself = settings.zero_stage == 0 and settings.dtype == "float32"
        self._grad_norm = 0.0
        if settings.gradient_checkpointing:
            recompute_layers(module, "gradient_checkpointing")
        self._torch_optimizer, scheduler = self._optimizer(module)
        if settings.zero_stage == 3:
            shard(module, self._config(), getattr(torch, settings.dtype))
        # In bfloat16 without ZeRO DeepSpeed creates Adam's state by a step on zeros. Adam would count the first real step as its second,
        # which changes the bias correction, and the weights would decay once more.
        with self._optimizer_at_rest() if settings.zero_stage == 0 else nullcontext():
            self._engine, self._optim, _, _ = deepspeed.initialize(
                model=module, optimizer=self._torch_optimizer, lr_scheduler=scheduler, config=self._config()
            )
        if self._clips_itself:
            self._torch_optimizer.register_step_pre_hook(self._clip)
        split_sequences(module)
        self._on_device = OnDevice(device(), lambda: weights_of(module), lambda: tensors_in((self._optim, self._torch_optimizer)))
        self.train()

    def keep(self, stays: Stays) -> None:
        """Keep all states, only the module's weights or nothing on the device, and move the rest to the host, which frees the GPU for
        another process.

        Backward pass, step, saving and loading need `all`; everything else needs `weights`.
        """
        self._on_device.keep(stays)

    def _optimizer(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        s = self._settings
        decayed = [p for p in module.parameters() if p.requires_grad and p.ndim > 1]
        plain = [p for p in module.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [{"params": p, "weight_decay": w} for p, w in ((decayed, s.weight_decay), (plain, 0.0)) if p]  # adapters are all matrices
        self._trained, self._decays = [*decayed, *plain], [group["weight_decay"] for group in groups]
        self._num_trained = sum(p.numel() for p in self._trained)
        optimizer = OPTIMIZERS[s.optimizer](groups, s)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, s.schedule)
        self._average = None if s.ema_decay is None else WeightAverage(optimizer, s.ema_decay, lambda: scheduler.last_epoch)
        return optimizer, scheduler

    def _config(self) -> dict[str, Any]:
        s = self._settings
        # Stages 2 and 3 reduce gradients during the backward pass; stages 0 and 1 do once, in the step, and have nothing to overlap with.
        zero: dict[str, Any] = {"stage": s.zero_stage, "overlap_comm": s.zero_stage >= 2 and torch.cuda.is_available()}
        if not torch.cuda.is_available():
            # It still holds all gradients of a small model. DeepSpeed never frees a bucket, and with many of the default 10^9 bytes
            # the kernel refuses the process a child.
            zero["reduce_bucket_size"] = min(DEFAULT_BUCKET, self._num_trained)
        if s.offload_optimizer:
            zero["offload_optimizer"] = on_host()
        if s.offload_parameters:
            zero["offload_param"] = on_host()
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0.0 if self._clips_itself else s.max_grad_norm,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **precision(s.dtype),
            "steps_per_print": None,
            "seed": s.seed,
        }

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        self._grad_norm = float(nn.utils.clip_grad_norm_(parameters, self._settings.max_grad_norm))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._on_device.need("weights", "forward")
        return self._engine(*args, **kwargs)

    def backward(self, loss_share: torch.Tensor) -> None:
        """Accumulate gradients of this micro-batch's share of the step's loss; the engine's average over ranks is turned into a sum."""
        self._on_device.need("all", "backward")
        self._engine.backward(loss_share * self._world_size, scale_wrt_gas=False)

    def step(self) -> float:
        """Reduce gradients over ranks, clip them, update the weights and advance the schedule. Return the gradient norm before clipping."""
        self._on_device.need("all", "step")
        self._engine.step()
        return self._grad_norm if self._clips_itself else float(self._engine.get_global_grad_norm())

    def discard(self) -> None:
        """Drop the gradients since the last step (there must be some); parameters, optimizer state and schedule stay as they are.

        The gradients' buffers depend on the ZeRO stage. Therefore DeepSpeed runs its normal step, which clears all of them, with optimizer
        and schedule disabled.
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

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and values of the weights as `gathered_weights` does."""
        self._on_device.need("weights", "weights")
        return gathered_weights(self.module)

    def state_dict(self, *, every_rank: bool = False) -> dict[str, torch.Tensor]:
        """Return the full weights on the CPU under the names of the wrapped Hugging Face model, adapters merged; empty on ranks other than
        0.

        Every rank calls it, because it is a collective with ZeRO 3.

        Args:
            every_rank: whether all ranks get the weights.
        """
        keep = every_rank or dist.get_rank() == 0
        return {name: value.to("cpu", copy=True) for name, value in self.weights() if keep}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the module's weights by their average within the block, for evaluation and `state_dict`. Without ema_decay nothing
        changes.

        With ZeRO this is a collective. The block must not train, save or load.
        """
        self.exchange_average()
        try:
            yield
        finally:
            self.exchange_average()

    def close(self) -> None:
        """Free the memory of the engine and its module, neither of which can be used afterwards."""
        free(self._engine)

    def exchange_average(self) -> None:
        """Exchange the module's weights and their average. Training can't continue until a second call has exchanged them back."""
        if self._average is not None:
            self._on_device.need("all", "average of the weights")
            self._average.exchange()
            refresh_module(self._optim)

    def save(self, folder: Path, name: str) -> None:
        """Save parameters, optimizer, schedule and counters of this rank. Every rank calls it."""
        self._on_device.need("all", "saving")
        names = {p: name for name, p in self.module.named_parameters()}
        trained = [names[p] for p in self._trained]
        facts = {OPTIMIZER_NAMES: trained, OPTIMIZER: self._settings.optimizer}
        with without_crc32():
            self._engine.save_checkpoint(str(folder), tag=name, save_latest=False, client_state=facts)

    def load(self, folder: Path, name: str) -> None:
        """Load a checkpoint of `save`. The optimizer's settings and clipping come from this engine's settings, not from the checkpoint.

        Raises:
            ValueError: the checkpoint belongs to another engine, model or optimizer.
        """
        self._on_device.need("all", "loading")
        subject, optimizer = f"checkpoint {folder.name}/{name}", self._settings.optimizer
        try:
            loaded, facts = self._engine.load_checkpoint(str(folder), tag=name) if any((folder / name).glob("*.pt")) else (None, {})
        except (KeyError, AssertionError) as error:
            raise ValueError(f"{subject}: expected the state of this model and of {optimizer}, got {error}; remove the folder") from error
        except RuntimeError as error:
            if "size mismatch" not in str(error) and "in state_dict" not in str(error):
                raise
            raise ValueError(f"{subject}: expected the state of this model, got another: {error}; remove the folder") from error
        if loaded is None:
            raise ValueError(f"{subject}: expected the state of a training engine, got nothing that loads; remove the folder")
        if facts.get(OPTIMIZER, optimizer) != optimizer:
            raise ValueError(f"{subject}: expected the state of {optimizer}, got that of {facts[OPTIMIZER]}; set it back or begin anew")
        self._apply_settings()

    def load_universal(self, folder: Path, name: str) -> None:
        """Load a checkpoint made by `convert_to_universal` from any number of ranks.

        Raises:
            ValueError: as `load` and `check_redistributable`.
        """
        self.check_redistributable()
        config = self._engine._config
        config.load_universal_checkpoint = True
        try:
            self.load(folder, name)
        finally:
            config.load_universal_checkpoint = False
        # With ZeRO 3 all groups share one step counter, which each group would advance.
        for state in self._torch_optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    def check_redistributable(self) -> None:
        """Check that DeepSpeed's universal checkpoint can hold the optimizer's state, which with ZeRO is that of adamw without an average.

        Raises:
            ValueError: it can't.
        """
        s = self._settings
        if s.zero_stage and (s.optimizer != "adamw" or s.ema_decay is not None):
            raise ValueError(
                f"checkpoint: expected as many ranks as it was saved with, because with ZeRO only adamw without ema_decay can be moved to "
                f"another number, got another number with {s.optimizer} and ema_decay {s.ema_decay}; set the ranks back or begin anew"
            )

    def _apply_settings(self) -> None:
        """Restore settings that a checkpoint overwrote; with ZeRO 3 a universal checkpoint gives all groups the first group's."""
        s, scheduler = self._settings, self._engine.lr_scheduler
        scheduler.base_lrs = [s.learning_rate] * len(scheduler.base_lrs)
        for group, decay in zip(self._optim.param_groups, self._decays, strict=True):
            group["weight_decay"], group["initial_lr"] = decay, s.learning_rate
            group["lr"] = s.learning_rate * s.schedule(scheduler.last_epoch)
            group["betas"] = s.betas
            if "eps" in group:
                group["eps"] = s.eps
        if not self._clips_itself and hasattr(self._optim, "clip_grad"):
            self._optim.clip_grad = s.max_grad_norm
