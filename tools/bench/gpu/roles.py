"""Measures the device memory of a PPO step's roles by phase (a trainer rank as in the RL job), and of a rollout engine.

Runs in the part's child process. Without a GPU tensors are counted the same way, and the resident set replaces the allocator's figure.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.config import Params, parse_params, set_key
from rlhf_core.engines.deepspeed.engine import TrainEngine, device
from rlhf_core.models.tokenizer import encode_prompt, load_tokenizer
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.credit import compute_advantages
from rlhf_core.trainers.rl.data import DemonstrationStream, collate, pack
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.minibatch import plan_update
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.types import Prompt, Rollout, Span
from tools.bench.gpu.memory import PASSES
from tools.bench.gpu.shapes import MAX_LENGTH, Lengths, model_folder, prompts
from tools.bench.gpu.steps import peak_bytes, reset_peak, synchronize
from tools.clerk import clerk_tree

SCORER = "reward_model"
STACKS = 12  # the largest that are kept
Bytes = dict[str, float]


def measure_trainer(case: dict[str, Any]) -> dict[str, Any]:
    """Return the memory of a trainer rank in a PPO step.

    roles: tensor bytes by role and kind. phases: bytes before, after and at the peak of each phase, by step.
    stacks: code locations that hold most bytes when a backward pass begins.
    """
    models = Path(case["models"])
    job = describe(case, model_folder(case["shape"], models), model_folder(case["shape"], models, "reward"))
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(enabled="state", context="state", stacks="python")
    watch = Watch()
    rank = TrainerRank(0, 1, job)
    with watch.phase("load"):
        rank.connect(rank.address())
    rollouts = drawn(job, case)
    for step in range(case["steps"]):
        one_step(rank, job, rollouts, watch, step)
    return {"roles": held_by(rank) | watch.held, "phases": watch.phases, "stacks": watch.stacks}


def one_step(rank: TrainerRank, job: RlJob, rollouts: list[Rollout], watch: Watch, step: int) -> None:
    """Do what the loop does after sampling, in its order."""
    sequences = pack(rollouts)
    with watch.phase("score"):
        scores = rank.score_by_reward_model(SCORER, sequences.lists())[:, 0]
    with watch.phase("forward"):
        outputs = rank.forward(sequences)
    batch = collate(rollouts, sequences, {SCORER: scores}, outputs, None, old_logprobs_source="recompute")
    train_batch, _ = compute_advantages(batch, job.rl, RewardNormalizer(job.rl.reward), kl_coef=job.rl.kl.coef)
    (plan,) = plan_update(train_batch, DemonstrationStream(job), job.rl, seed=job.seed, step=step)
    with watch.phase("update"), watch.engines(rank):
        rank.update(plan, kl_coef=job.rl.kl.coef, train_policy=True)
    with watch.phase("weights to the engines"):
        rank.weights()


def params_of(case: dict[str, Any]) -> Params:
    tree = clerk_tree()
    scorer = {"name": SCORER, "kind": "reward_model", "weight": 1.0, "normalization": "none"}
    samples, response = case["samples"], case["response"][1]
    for key, value in {
        "model.dtype": "bfloat16",
        "model.max_length": MAX_LENGTH,
        "rl.algorithm": "ppo",
        "rl.samples_per_step": samples,
        "rl.minibatch_size": samples,
        "rl.rollout.max_new_tokens": response,
        "rl.reward.scorers": [scorer],
        "rl.trainer.zero_stage": 2,
        "rl.trainer.microbatch_tokens": case["microbatch_tokens"],
    }.items():
        set_key(tree, key, value)
    return parse_params(tree)


def describe(case: dict[str, Any], language: Path, reward: Path) -> RlJob:
    params, work = params_of(case), Path(case["models"]) / "work"
    return RlJob(
        seed=0,
        model=params.model,
        train_on=params.sft.train_on,
        train_on_thoughts=params.sft.train_on_thoughts,
        rl=params.rl,
        threads=torch.get_num_threads(),
        prepared=str(work / "prepared"),
        sft_model=str(language),
        reward_model=str(reward),
        scorer_models={SCORER: str(reward)},
        source_judges={},
        work=str(work),
        checkpoints=StoreSettings(),
        output=str(work / "policy"),
        timings=str(work / "timings.csv"),
    )


def drawn(job: RlJob, case: dict[str, Any]) -> list[Rollout]:
    """Return random tokens in place of an engine's responses; sizes don't depend on them."""
    tokenizer, draw = load_tokenizer(job.sft_model, trust_remote_code=False), random.Random(0)
    lengths = Lengths(tuple(case["prompt"]), tuple(case["response"]))
    made = []
    for i, row in enumerate(prompts(case["samples"], lengths)):
        prompt = Prompt(str(i), "gpu", row["messages"], encode_prompt(tokenizer, row["messages"]), None)
        ids = [draw.randrange(8, len(tokenizer)) for _ in range(draw.randint(*lengths.response) - 1)]
        ids.append(tokenizer.eos_token_id)
        made.append(Rollout(prompt, [Span(ids, [-7.0] * len(ids), 0)], finished=True, group_id=i))
    return made


# What the roles hold


def held_by(rank: TrainerRank) -> Bytes:
    """The bytes that a rank's roles hold after a step; Adam's moments are created in the first one."""
    found: Bytes = {}
    seen: set[int] = set()  # a float32 engine's optimizer holds the weights themselves
    for name, engine in rank.roles.learning.items():
        found[f"{name}: weights"] = storage_bytes(whole(engine.module), seen)
        groups, state = engine._torch_optimizer.param_groups, engine._torch_optimizer.state.values()
        tensors = [p for group in groups for p in group["params"]]
        tensors += [value for values in state for value in values.values() if isinstance(value, torch.Tensor)]
        found[f"{name}: optimizer"] = storage_bytes(tensors, seen)
    if rank.roles.reference is not None:
        found["reference: weights"] = storage_bytes(whole(rank.roles.reference.module), seen)
    found["reward: weights"] = storage_bytes((t for members in rank.roles.scorers.values() for m in members for t in whole(m.module)), seen)
    return found


def whole(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def gradient_bytes(engine: TrainEngine) -> float:
    """The bytes of gradients when an optimizer step begins: the parameters' own, and ZeRO's."""
    tensors = [getattr(p, name, None) for p in engine.module.parameters() for name in ("grad", "grad_accum")]
    for name in ("averaged_gradients", "all_grad_tensors"):
        for group in getattr(engine._optim, name, {}).values():  # a tensor for all parameters, one per parameter, or none yet
            tensors += group if isinstance(group, list) else [group]
    return storage_bytes((t for t in tensors if isinstance(t, torch.Tensor)), set())


def storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> float:
    """The bytes of tensors on the device. Each storage counts once, and not if it was counted before."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device().type and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return float(total)


class Watch:
    """Records phases, and within an update the engines' bytes at the start of backward passes and optimizer steps."""

    def __init__(self) -> None:
        self.phases: dict[str, list[Bytes]] = {}
        self.held: Bytes = {}
        self.stacks: list[tuple[str, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        synchronize()
        reset_peak()
        before = now()
        yield
        synchronize()
        self.phases.setdefault(name, []).append({"before": before, "after": now(), **peak_bytes()})

    @contextmanager
    def engines(self, rank: TrainerRank) -> Iterator[None]:
        """Context in which the rank's engines record their bytes."""
        names = {id(engine): name for name, engine in rank.roles.learning.items()}
        forward, backward, step = TrainEngine.__call__, TrainEngine.backward, TrainEngine.step
        at_forward: dict[int, float] = {}

        def watched_forward(engine: TrainEngine, *args: Any, **kwargs: Any) -> Any:
            at_forward[id(engine)] = now()
            return forward(engine, *args, **kwargs)

        def watched_backward(engine: TrainEngine, loss: torch.Tensor) -> None:
            name = names[id(engine)]
            self._keep(f"{name}: {PASSES}", now() - at_forward[id(engine)])
            if not self.stacks:
                self.stacks = by_place(torch.cuda.memory._snapshot()) if torch.cuda.is_available() else []
            backward(engine, loss)

        def watched_step(engine: TrainEngine) -> float:
            self._keep(f"{names[id(engine)]}: gradients", gradient_bytes(engine))
            return step(engine)

        TrainEngine.__call__, TrainEngine.backward, TrainEngine.step = watched_forward, watched_backward, watched_step
        try:
            yield
        finally:
            TrainEngine.__call__, TrainEngine.backward, TrainEngine.step = forward, backward, step

    def _keep(self, name: str, size: float) -> None:
        self.held[name] = max(size, self.held.get(name, 0.0))


def now() -> float:
    """Return the bytes that torch has allocated on the GPU; without a GPU the resident set."""
    return float(torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss)


def by_place(snapshot: dict[str, Any]) -> list[tuple[str, float]]:
    """Live bytes by the innermost function outside torch that allocated them, largest first."""
    sums: Counter[str] = Counter()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                sums[_place(block.get("frames") or [])] += block.get("requested_size", block["size"])
    return [(place, float(size)) for place, size in sums.most_common(STACKS)]


def _place(frames: list[dict[str, Any]]) -> str:
    for frame in frames:
        path = frame["filename"]
        if "/torch/" not in path and path.endswith(".py"):
            short = path.rpartition("-packages/")[2]
            return f"{'/'.join(Path(short).parts[-3:])}, {frame['name']}"
    return "torch itself, no Python caller"


# The engine


def measure_engine(case: dict[str, Any]) -> dict[str, Any]:
    """Return the memory of a rollout engine.

    bytes: peak while it starts and samples; held: bytes held afterwards; weights: bytes of the folder's model; cache: bytes of keys and
    values, 0 if the engine allocates them per batch; tokens: capacity of the cache.
    """
    from rlhf_core.engines.rollout.requests import SamplingSettings, request_seeds
    from rlhf_core.models.build import kv_cache_bytes
    from rlhf_core.models.weights import read_state_dict

    folder = model_folder(case["shape"], Path(case["models"]))
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False)
    encoded = [
        encode_prompt(tokenizer, row["messages"])
        for row in prompts(case["samples"], Lengths(tuple(case["prompt"]), tuple(case["response"])))
    ]
    engine = open_here(case["backend"], str(folder), sequences=max(64, case["samples"]))
    started = now()
    settings = SamplingSettings(case["response"][1], 1.0, min_new_tokens=case["response"][0])
    engine.generate(encoded, request_seeds(0, 0, len(encoded)), settings, stop_ids=(tokenizer.eos_token_id,), group_size=1)
    synchronize()
    tokens = cache_tokens(engine)
    from transformers import AutoConfig

    cache = tokens * kv_cache_bytes(AutoConfig.from_pretrained(folder), element_bytes=2)
    weights = sum(tensor.nbytes for tensor in read_state_dict(folder).values())
    return {"started": started, "held": now(), "bytes": peak_bytes(), "weights": float(weights), "cache": float(cache), "tokens": tokens}


def open_here(backend: str, folder: str, *, sequences: int) -> Any:
    """Open an engine in this process, so that its memory can be measured."""
    settings: dict[str, Any] = {
        "max_length": MAX_LENGTH,
        "dtype": "bfloat16",
        "kv_cache_gib": 1,
        "max_concurrent_sequences": sequences,
        "threads": torch.get_num_threads(),
        "trust_remote_code": False,
        "gpu_memory_fraction": 0.5,
    }
    if backend == "pytorch":
        from rlhf_core.engines.rollout.pytorch_engine import PytorchEngine

        return PytorchEngine(folder, **settings)
    from rlhf_core.engines.vllm.engine import VllmEngine

    return VllmEngine(folder, **settings, seed=0)


def cache_tokens(engine: Any) -> int:
    """Capacity of vLLM's cache from its profiled configuration; 0 for an engine without one."""
    llm = getattr(engine, "_llm", None)
    if llm is None:
        return 0
    config = llm.llm_engine.vllm_config.cache_config
    return int(config.num_gpu_blocks or 0) * int(config.block_size)
