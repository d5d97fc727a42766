"""How fast a machine computes: matrix products are measured on this CPU, and GPUs have the figures of `GPUS`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from rlhf_core.planning.hardware import Efficiency, Gpu

ROWS = 256  # tokens of the measured product: so short that some of many run undisturbed by other processes
MEASURED_SECONDS = 1.0
# Shares of the measured product's FLOP/s that updates, forward passes and decoding of whole models reach on a CPU; docs/planning.md
# compares them with runs. In bfloat16 (with AMX) products are so fast that what lies between them takes most of the time.
CPU_SHARES = {"float32": (0.7, 0.9, 0.3), "bfloat16": (0.25, 0.25, 0.1)}
GPU_DECODE_STEP = 0.01  # seconds of launches and scheduling; assumed
START, GPU_START = 25.0, 60.0  # seconds of a stage before and after it computes: imports, loading, saving, hashing


@dataclass(frozen=True)
class Speed:
    """Speed of all devices together: FLOP/s in an update, in a forward pass and in decoding.

    bandwidth: bytes/s at which decoding reads all devices' memory; None: FLOP/s limit it. decode_step: further seconds of a decoding step.
    start: seconds of a stage besides its computing. basis: where the figures come from, in words. devices: number of GPUs; 1 for a CPU.
    shares_prompts: whether two responses to one prompt are computed with one pass over it.
    """

    update: float
    forward: float
    decode: float
    bandwidth: float | None
    decode_step: float
    start: float
    basis: str
    devices: int = 1
    shares_prompts: bool = False

    @property
    def of_one(self) -> Speed:
        """Speed of one of the devices."""
        n = self.devices
        bandwidth = None if self.bandwidth is None else self.bandwidth / n
        return replace(self, update=self.update / n, forward=self.forward / n, decode=self.decode / n, bandwidth=bandwidth, devices=1)


def of_gpus(gpu: Gpu, count: int) -> Speed:
    """Return the speed of `count` GPUs of a kind, by the planner's shares of their peaks."""
    shares = Efficiency()
    flops = gpu.flops * shares.flops * count
    basis = f"{count} x {gpu.name}: {shares.flops:.0%} of {gpu.flops / 1e12:.0f} TFLOP/s each"
    return Speed(flops, flops, flops, gpu.bandwidth * shares.bandwidth * count, GPU_DECODE_STEP, GPU_START, basis, count)


def of_cpu(hidden: int, intermediate: int, dtype: str, cores: int) -> Speed:
    """Return the speed of this machine's CPU, from a matrix product of the model's size that one core computes for MEASURED_SECONDS."""
    flops = cores * measured_flops(hidden, intermediate, dtype)
    product = f"a product of {ROWS} x {hidden} x {intermediate} in {dtype} on one of them"
    basis = f"{flops / 1e9:.0f} GFLOP/s of {cores} cores, by {product}, just now; other work slows it"
    update, forward, decode = (share * flops for share in CPU_SHARES[dtype])
    return Speed(update, forward, decode, None, 0.0, START, basis, shares_prompts=True)


def measured_flops(hidden: int, intermediate: int, dtype: str) -> float:
    """Return the FLOP/s of the product [ROWS, hidden] x [hidden, intermediate] on one core, from the fastest of several tries.

    Beside other processes two threads rarely run at the same time, so one core's speed can be measured and a whole machine's can't.
    """
    import torch

    kind, threads = getattr(torch, dtype), torch.get_num_threads()
    a, b = torch.ones(ROWS, hidden, dtype=kind), torch.ones(hidden, intermediate, dtype=kind)
    torch.set_num_threads(1)
    try:
        torch.mm(a, b)
        best, end = float("inf"), time.perf_counter() + MEASURED_SECONDS
        while (start := time.perf_counter()) < end:
            torch.mm(a, b)
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 2 * ROWS * hidden * intermediate / best
