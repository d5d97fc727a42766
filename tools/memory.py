"""Peak memory of training processes beside the planner's prediction: python -m tools.memory --out docs/tables/memory.csv [--only NAME].

Each case runs real training processes on the CPU: a model with random weights is loaded from its folder, an engine trains two optimizer
steps of two micro-batches each, and its weights are gathered. The figure is the peak of the resident set, less that of the same process
after its imports and a step of a tiny model. Tensors are mapped one by one (MALLOC_MMAP_THRESHOLD_), so that freed memory doesn't count.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlhf_core.config import load_params
from rlhf_core.planning.models import read_model
from rlhf_core.planning.preflight import changed
from rlhf_core.planning.shape import ModelShape
from rlhf_core.planning.stages import PLANS, Models
from rlhf_core.process import configure_process

ROOT = Path(__file__).parents[1]
MIB = 2**20
SECONDS = 600.0  # for a case
LENGTH = 128  # tokens of a sequence
SHAPES = {
    "2M": ModelShape(2, 128, 352, 4, 4, 32, 4000),
    "20M": ModelShape(6, 384, 1024, 6, 6, 64, 12000),
    "60M": ModelShape(8, 512, 1408, 8, 4, 64, 32000),
    "200M": ModelShape(12, 1024, 2816, 16, 8, 64, 32000),
}
COLUMNS = ("case", "shape", "dtype", "zero_stage", "ranks", "tokens", "checkpointing", "lora", "predicted_mib", "measured_mib", "ratio")


@dataclass(frozen=True)
class Case:
    """stage: sft | reward | dpo (with a live reference). rows: sequences of LENGTH tokens in a micro-batch. lora: rank; 0: none."""

    stage: str
    shape: str
    dtype: str
    zero_stage: int = 0
    ranks: int = 1
    rows: int = 4
    checkpointing: bool = False
    lora: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * LENGTH


def cases() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16"):
        for stage in range(4):
            for ranks in (1, 2):
                yield Case("sft", "20M", dtype, stage, ranks)
    for dtype, stage in (("float32", 0), ("bfloat16", 0), ("bfloat16", 2), ("bfloat16", 3)):
        yield Case("sft", "60M", dtype, stage, rows=16)
    yield Case("sft", "60M", "bfloat16", 3, 2, rows=16)
    yield Case("sft", "60M", "bfloat16", 0, rows=16, checkpointing=True)
    yield Case("sft", "60M", "float32", 0, rows=16, checkpointing=True)
    yield Case("sft", "60M", "bfloat16", 0, rows=16, lora=16)
    yield Case("sft", "200M", "bfloat16", 2)
    yield Case("sft", "200M", "float32", 0)
    for dtype in ("float32", "bfloat16"):
        yield Case("reward", "60M", dtype, rows=16)
        yield Case("dpo", "60M", dtype, rows=16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file for the table, continued where it has rows")
    parser.add_argument("--only", help="cases whose text holds this")
    parser.add_argument("--child", nargs=4, metavar=("CASE", "FOLDER", "RANK", "PORT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        case, folder, rank, port = given.child
        print(json.dumps(run(Case(**json.loads(case)), Path(folder), int(rank), int(port))))
        return 0
    done = read_rows(given.out)
    for case in cases():
        if name(case) in done or (given.only and given.only not in name(case)):
            continue
        row = measure(case)
        print(*row.values())
        if given.out is not None:
            write_row(given.out, row)
    return 0


def name(case: Case) -> str:
    options = [f"ZeRO {case.zero_stage}", f"{case.ranks} ranks"] + ["checkpointing"] * case.checkpointing + ["LoRA"] * bool(case.lora)
    return f"{case.stage} {case.shape} {case.dtype} {' '.join(options)} {case.tokens} tokens"


def measure(case: Case) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        write_model(case, folder)
        write_model(tiny(case), folder.with_name("tiny"))
        predicted, measured = predict(case, folder) / MIB, max(peaks(case, folder)) / MIB
    facts = {"case": name(case), "shape": case.shape, "dtype": case.dtype, "zero_stage": case.zero_stage, "ranks": case.ranks}
    facts |= {"tokens": case.tokens, "checkpointing": case.checkpointing, "lora": case.lora}
    return facts | {"predicted_mib": round(predicted), "measured_mib": round(measured), "ratio": f"{predicted / measured:.3f}"}


def tiny(case: Case) -> Case:
    """A case of a small model, which takes the same imports and buffers."""
    return replace(case, shape="2M", rows=2)


def predict(case: Case, folder: Path) -> float:
    """Bytes that the preflight expects a rank to need."""
    key = case.stage
    sequences = 2 * case.rows * case.ranks
    settings = {
        "model.dtype": case.dtype,
        "model.max_length": LENGTH,
        f"{key}.zero_stage": case.zero_stage,
        f"{key}.ranks": case.ranks,
        f"{key}.microbatch_tokens": case.tokens,
        f"{key}.batch_size": sequences,
        f"{key}.gradient_checkpointing": case.checkpointing,
    }
    settings |= {f"{key}.reference": "live"} if key == "dpo" else {}
    settings |= {f"{key}.lora": lora(case)} if case.lora else {}
    params = changed(load_params(ROOT / "params.yaml"), settings)
    model = read_model(folder)
    plan = PLANS["train_" + key if key in ("sft", "reward") else key]
    ((process,),) = plan(params, Models(model, model), on_gpu=False)
    return process.needed


def lora(case: Case) -> dict[str, object]:
    return {"rank": case.lora, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear"}


def peaks(case: Case, folder: Path) -> list[float]:
    """Of each rank, from processes that train.

    Raises:
        RuntimeError: a process fails.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
    command = [sys.executable, "-m", "tools.memory", "--child", json.dumps(asdict(case)), str(folder)]
    how = {"cwd": ROOT, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = [subprocess.Popen([*command, str(rank), str(port)], **how) for rank in range(case.ranks)]
    try:
        with ThreadPoolExecutor(len(children)) as pool:
            answers = list(pool.map(lambda child: child.communicate(timeout=SECONDS), children))
    finally:
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, answers, strict=True):
        if child.returncode:
            raise RuntimeError(f"{name(case)}: expected a peak, got exit code {child.returncode}: {errors[-2000:]}")
    return [json.loads(out.splitlines()[-1])["peak"] for out, _ in answers]


def read_rows(path: Path | None) -> set[str]:
    if path is None or not path.exists():
        return set()
    with path.open(newline="", encoding="utf-8") as file:
        return {row["case"] for row in csv.DictReader(file)}


def write_row(path: Path, row: dict[str, object]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


# In a child


def run(case: Case, folder: Path, rank: int, port: int) -> dict[str, float]:
    """Train as the stage does. Returns the peak of the resident set beyond that after a step of a tiny model."""
    configure_process()
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from rlhf_core.engines.deepspeed_engine import join_world

    torch.set_num_threads(1)
    store = None
    if case.ranks > 1:
        store = dist.TCPStore("127.0.0.1", port, case.ranks, is_master=rank == 0, timeout=timedelta(seconds=SECONDS))
    join_world(rank=rank, world_size=case.ranks, store=store)
    train(tiny(case), folder.with_name("tiny"))
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    train(case, folder)
    return {"peak": status("VmHWM") - before}


def status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith(f"{key}:"))


def train(case: Case, folder: Path) -> None:
    """Two optimizer steps of two micro-batches, and the weights."""
    import gc

    import torch

    from rlhf_core.config import LoraConfig
    from rlhf_core.engines.deepspeed_engine import TrainEngine, device
    from rlhf_core.models.build import frozen, load_language_model, load_scalar_model
    from rlhf_core.models.forward import PolicyModule, ScalarModule
    from rlhf_core.models.lora import add_adapters
    from rlhf_core.trainers.supervised import engine_settings

    params = load_params(ROOT / "params.yaml")
    section = changed(params, {"sft.zero_stage": case.zero_stage, "sft.gradient_checkpointing": case.checkpointing}).sft
    settings = engine_settings(section, steps=2, learning_rate=1e-4, dtype=case.dtype, seed=0)
    scalar = case.stage == "reward"
    load, wrap = (load_scalar_model, ScalarModule) if scalar else (load_language_model, PolicyModule)
    reference = None
    model = load(folder, training_dtype=case.dtype)
    if case.stage == "dpo":
        reference = frozen(wrap(load(folder, training_dtype=case.dtype)), device=device(), dtype=getattr(torch, case.dtype))
    if case.lora:
        add_adapters(model, LoraConfig(**lora(case)), seed=0)
    engine = TrainEngine(wrap(model), settings)
    for _ in range(2):
        for part in range(2):
            tokens = batch(case, part)
            if reference is not None:
                with torch.no_grad():
                    reference(tokens)
            output = engine(tokens)
            engine.backward((output if scalar else output.logprobs).float().sum() / 1000)
        engine.step()
    engine.state_dict()
    del engine, model
    gc.collect()


def batch(case: Case, seed: int):
    """Random tokens, all selected; for a reward model the last of each row."""
    import torch

    from rlhf_core.models.batch import TokenBatch

    ids = torch.randint(SHAPES[case.shape].vocab, (case.rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    selected = torch.ones_like(ids, dtype=torch.bool)
    if case.stage == "reward":
        selected[:, :-1] = False
    return TokenBatch(ids, selected)


def write_model(case: Case, folder: Path) -> None:
    """A Llama with random weights in the case's dtype."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    shape = SHAPES[case.shape]
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=LENGTH,
        num_labels=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    kind = LlamaForSequenceClassification if case.stage == "reward" else LlamaForCausalLM
    kind(config).to(getattr(torch, case.dtype)).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
