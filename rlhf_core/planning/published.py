"""Compares predictions with published and measured figures: the table of docs/planning.md.

The figures of OpenRLHF are from benchmark/README.md and README.md of its repository (A800 80 GB, prompts and responses of 1,024
tokens, 1,024 samples a step, 128 an optimizer step, all models of one size); those of NeMo RL are from docs/about/performance-summary.md of
its repository.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlhf_core.planning.hardware import GIB, GPUS, Cluster, Efficiency, Gpu
from rlhf_core.planning.phases import predict
from rlhf_core.planning.plan import CRITIC, ENGINE, POLICY, REFERENCE, REWARD, Group, Placement, Workload
from rlhf_core.planning.search import colocated
from rlhf_core.planning.shape import SIZES, ModelShape

CALIBRATES = "calibrates"


@dataclass(frozen=True)
class Row:
    """A published or measured time beside its prediction.

    seconds: published or measured. phases: phases assumed to be included. note: assumptions about the source.
    """

    name: str
    work: Workload
    placement: Placement
    cluster: Cluster
    phases: tuple[str, ...]
    seconds: float
    note: str = ""
    efficiency: Efficiency = field(default_factory=Efficiency)

    @property
    def predicted(self) -> float:
        times = predict(self.work, self.placement, self.cluster, self.efficiency).seconds
        return sum(times[phase] for phase in self.phases)

    @property
    def ratio(self) -> float:
        """Predicted over published or measured seconds."""
        return self.predicted / self.seconds


GENERATE = ("generate",)
STEP = ("generate", "score", "update", "sync")


def openrlhf_work(size: str, micro_batch: int) -> Workload:
    shape = SIZES[size]
    return Workload(shape, shape, True, (shape,), 1024, 1, 128, 1, 1024, 1024, 1024, 2048 * micro_batch)


def openrlhf_parts(reference: int, reward: int, policy: int, critic: int, engines: int, **options) -> Placement:
    """Return a placement in OpenRLHF's notation 1:1:2:2:2, each role on its own GPUs.

    Gradient checkpointing, ZeRO 3 and Adam on the host are as in OpenRLHF's scripts.
    """
    roles = ((engines, ENGINE), (policy, POLICY), (critic, CRITIC), (reference, REFERENCE), (reward, REWARD))
    groups = tuple(Group(gpus, (role,)) for gpus, role in roles)
    return Placement(groups, zero_stage=3, offload=True, checkpointing=True, **options)


def _half_for_engines(gpus: int, tensor_parallel: int) -> Placement:
    groups = (Group(gpus // 2, (ENGINE,)), Group(gpus // 4, (POLICY, REFERENCE)), Group(gpus // 4, (CRITIC, REWARD)))
    return Placement(groups, zero_stage=3, offload=True, tensor_parallel=tensor_parallel, checkpointing=True)


def _a800(gpus: int) -> Cluster:
    return Cluster(GPUS["a800-80"], gpus)


def openrlhf_phases() -> list[Row]:
    small, middle, large = (openrlhf_work(*pair) for pair in (("llama2-7b", 8), ("llama2-13b", 4), ("llama2-70b", 4)))
    one_group = Placement(colocated(small, 8), zero_stage=2, offload=True, checkpointing=True)
    # Assumes that an engine gets one micro-batch of generation at a time: 16, 8 and 4 responses.
    of_seven, of_thirteen = (openrlhf_parts(1, 1, 2, 2, 2, max_concurrent=at_a_time) for at_a_time in (16, 8))
    of_seventy = openrlhf_parts(2, 2, 4, 4, 4, tensor_parallel=4, max_concurrent=4)
    open_offload = "offload and stage not given"
    return [
        Row("7B, 8 GPUs, one group: training", small, one_group, _a800(8), ("update",), 256.97, f"{CALIBRATES} flops; {open_offload}"),
        Row("7B, ray+vllm, 8 GPUs: generation", small, of_seven, _a800(8), GENERATE, 481.86, f"{CALIBRATES} bandwidth, see below"),
        Row("7B, ray+vllm: training", small, of_seven, _a800(8), ("update",), 403.29, open_offload),
        Row("13B, ray+vllm, 8 GPUs: generation", middle, of_thirteen, _a800(8), GENERATE, 1425.75),
        Row("13B, ray+vllm: training", middle, of_thirteen, _a800(8), ("update",), 967.15, open_offload),
        Row("70B, ray+vllm, 16 GPUs: generation", large, of_seventy, _a800(16), GENERATE, 7122.65, "tensor parallel 4 assumed"),
        Row("70B, ray+vllm: training", large, of_seventy, _a800(16), ("update",), 2699.97, open_offload),
    ]


def openrlhf_steps() -> list[Row]:
    note = "placement not given: half engines, quarters policy and critic"
    sizes = (("llama2-7b", 16, 1, 471.11), ("llama2-13b", 32, 1, 608.93), ("codellama-34b", 32, 2, 1526.4), ("llama2-70b", 32, 4, 4488.53))
    return [
        Row(
            f"{size.split('-')[1].upper()}, {gpus} GPUs: whole step",
            openrlhf_work(size, 4),
            _half_for_engines(gpus, width),
            _a800(gpus),
            STEP,
            s,
            note,
        )
        for size, gpus, width, s in sizes
    ]


def _nemo(name: str, size: str, gpus: int, mean: int, tensor_parallel: int, seconds: float) -> Row:
    work = Workload(SIZES[size], None, True, (), 2048, 32, 512, 1, 150, mean - 150, 4096 - 150, 8192)
    placement = Placement(colocated(work, gpus), zero_stage=3, tensor_parallel=tensor_parallel, checkpointing=True, max_concurrent=1024)
    note = "prompts of 150 tokens, groups of 32 and a reference assumed; it trains with Megatron, not ZeRO"
    return Row(f"{name}, {gpus} H100: whole step", work, placement, Cluster(GPUS["h100"], gpus, network=50e9), STEP, seconds, note)


def nemo_steps() -> list[Row]:
    return [
        _nemo("NeMo RL, GRPO, Llama 3.1 8B", "llama3-8b", 16, 1060, 1, 97.7),
        _nemo("NeMo RL, GRPO, Qwen3 32B", "qwen3-32b", 32, 3206, 4, 393.0),
    ]


# The default model of params.yaml, and two cores of a virtual machine modelled as a GPU with 83 GFLOP/s of matrix products.
SMALL = ModelShape(layers=3, hidden=96, intermediate=256, heads=3, kv_heads=3, head_width=32, vocab=390)
CORES = Gpu("two cores", 20 * GIB, 83e9, 20e9, 20e9)
CPU = Cluster(CORES, 1, 1, network=1e9, reserve=0)


def measured_here() -> list[Row]:
    """Return figures of docs/performance.md. SFT's 64 samples have 1,428 tokens; a PPO sample has 26, of which 8 are the response."""
    sft = Workload(SMALL, None, False, (), 64, 1, 64, 1, 14.3, 8, 16, 4096, "float32")
    ppo = Workload(SMALL, SMALL, True, (SMALL,), 256, 1, 128, 1, 18, 8, 32, 4096, "float32")
    alone = (Placement(colocated(w, 1), max_concurrent=128) for w in (sft, ppo))
    (of_sft, of_ppo), cpu = alone, replace(Efficiency(), flops=0.52)
    cores = "two cores, flops 0.52 from the SFT row"
    return [
        Row("SFT, 0.4M parameters, 64 samples", sft, of_sft, CPU, ("update",), 64 / 871, f"{CALIBRATES} flops on two cores", cpu),
        Row("PPO, 0.4M, 256 samples: score and forward", ppo, of_ppo, CPU, ("score",), 0.40, cores, cpu),
        Row("PPO, 0.4M: update", ppo, of_ppo, CPU, ("update",), 0.65, cores, cpu),
        Row("PPO, 0.4M: generate", ppo, of_ppo, CPU, ("generate",), 0.42, f"{cores}; memory of 20 GB/s assumed", cpu),
        Row("PPO, 0.4M: sync", ppo, of_ppo, CPU, ("sync",), 0.07, cores, cpu),
    ]


def rows() -> list[Row]:
    return [*openrlhf_phases(), *openrlhf_steps(), *nemo_steps(), *measured_here()]


def table() -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| what | published or measured, s | predicted, s | ratio | |", "|---|---|---|---|---|"]
    lines += [f"| {r.name} | {r.seconds:.4g} | {r.predicted:.4g} | {r.ratio:.2f} | {r.note} |" for r in rows()]
    return "\n".join(lines)
