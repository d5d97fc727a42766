"""GPUs, clusters, and the shares of their peaks that programs reach."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Peaks of one GPU.

    memory: usable bytes. flops: FLOP/s of dense matrix products in the training's number format.
    bandwidth: bytes/s of its memory. link: bytes/s to the other GPUs of its node, in one direction.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float


@dataclass(frozen=True)
class Cluster:
    """Equal GPUs in equal nodes.

    network: bytes/s between nodes for each GPU, in one direction (InfiniBand NDR: 400 Gbit/s = 50e9).
    host_link: bytes/s between a GPU and its host. host_bandwidth: bytes/s of a host's memory, shared by its GPUs.
    host_memory: bytes of each node's memory; infinite: not checked.
    gloo: bytes/s that a process sends by gloo to all others together, measured between two processes of a host (docs/performance.md).
    reserve: bytes of each GPU for context, communication buffers and fragmentation.
    """

    gpu: Gpu
    gpus: int
    gpus_per_node: int = 8
    network: float = 25e9
    host_link: float = 25e9
    host_bandwidth: float = 200e9
    gloo: float = 2.1e9
    reserve: float = 3 * GIB
    host_memory: float = float("inf")

    @property
    def available(self) -> float:
        """Bytes of each GPU without the reserve."""
        return self.gpu.memory - self.reserve

    def bandwidth_between(self, gpus: int) -> float:
        """Return bytes/s in one direction between this number of GPUs: the link within a node, otherwise the slower network."""
        return self.gpu.link if gpus <= self.gpus_per_node else min(self.network, self.gpu.link)


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that are reached; docs/planning.md has the source of each default.

    flops: share for matrix products in training, scoring and prefill. bandwidth: for the GPU's memory while decoding. network: for links.
    decode_overhead: seconds of each decoding step besides computing and reading (scheduler, kernel launches).
    """

    flops: float = 0.37
    bandwidth: float = 0.87
    network: float = 0.7
    decode_overhead: float = 0.0


# Vendors' figures for dense bfloat16; memory is what the driver leaves of 24, 48, 80, 141 and 180 GB. The figures of A100 and A800 are
# from data sheets, the others unverified (docs/planning.md).
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("rtx4090", 23.5 * GIB, 165e12, 1008e9, 25e9),
        Gpu("l40s", 44.5 * GIB, 362e12, 864e9, 25e9),
        Gpu("a100-80", 79 * GIB, 312e12, 2039e9, 300e9),
        Gpu("a800-80", 79 * GIB, 312e12, 2039e9, 200e9),
        Gpu("h100", 79 * GIB, 989e12, 3350e9, 450e9),
        Gpu("h200", 139 * GIB, 989e12, 4800e9, 450e9),
        Gpu("b200", 178 * GIB, 2250e12, 8000e9, 900e9),
    )
}
