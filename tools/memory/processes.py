"""Runs processes that train as a stage's ranks do, and measures the peak of their memory."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.engines.ports import free_ports
from rlhf_core.process import PROCESS_ENVIRONMENT, configure_process
from tools.memory.cases import LENGTH, RL, SHAPES, Case, params_of, predict

if TYPE_CHECKING:
    from rlhf_core.trainers.supervised.loop import TrainLoop

MIB = 2**20
SECONDS = 900.0  # for a case
# Tensors are mapped one by one, so that memory goes back to the system when it is freed.
UNPOOLED = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(128 << 10))
ENVIRONMENT = {**PROCESS_ENVIRONMENT, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **UNPOOLED}
MODULES = (
    "deepspeed",
    "transformers.models.llama.modeling_llama",
    "rlhf_core.trainers.reward.ensemble",
    "rlhf_core.trainers.preference.train",
    "rlhf_core.trainers.rl.rank",
    "rlhf_core.trainers.sft.train",
)
PROMPT = 8  # tokens of a prompt in RL
WORDS = "one two three four five six seven eight nine ten"


def measure(case: Case) -> dict[str, str]:
    """Predicted and measured MiB of the rank that takes most, and their ratio.

    Raises:
        RuntimeError: a process fails, or takes longer than SECONDS.
    """
    with tempfile.TemporaryDirectory() as work:
        for sized in (case, case.tiny):
            in_children(write_models, [(sized, Path(work))])
        (port,) = free_ports(1)
        measured = max(in_children(peak, [(case, Path(work), rank, port) for rank in range(case.ranks)])) / MIB
    return {"predicted_mib": f"{predict(case) / MIB:.0f}", "measured_mib": f"{measured:.0f}"}


def begin_with_imports() -> None:
    """Restart this program with the environment of measured processes, and import what they import: each will be a copy of this one."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [*sys.orig_argv], {**os.environ, **ENVIRONMENT})
    configure_process()
    for name in MODULES:
        importlib.import_module(name)


def in_children(function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
    """The results of calls that run at the same time, each in its own process."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in arguments]
    children = [context.Process(target=_answer, args=(pipe[1], function, given)) for pipe, given in zip(pipes, arguments, strict=True)]
    deadline = time.monotonic() + SECONDS
    try:
        for child in children:
            child.start()
        for _, theirs in pipes:
            theirs.close()
        answers = []
        for ours, _ in pipes:
            if not ours.poll(deadline - time.monotonic()):
                raise RuntimeError(f"{function.__name__}: expected an answer within {SECONDS:.0f} s, got none; look at its output")
            answers.append(ours.recv())
    except EOFError:
        raise RuntimeError(f"{function.__name__} of {arguments[0][0]}: expected an answer, got none; look at its output") from None
    finally:
        for child in children:
            child.kill()
            child.join()
    return answers


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*arguments))
    pipe.close()
    os._exit(0)


# In a child


def peak(case: Case, work: Path, rank: int, port: int) -> float:
    """Train as the stage does, and return the bytes of the peak resident set beyond the set after the training of a tiny model."""
    from rlhf_core.engines.deepspeed.engine import release_memory
    from rlhf_core.engines.deepspeed.ranks import wait_for_all
    from rlhf_core.engines.deepspeed.sequence_parallel import share_sequences

    join(rank, case.ranks, port)
    share_sequences(case.changes.get("sequence_parallel", 1))
    train(case.tiny, work)
    release_memory()
    found = peak_of(lambda: train(case, work))
    wait_for_all()  # the others may still need rank 0's store
    return found


def join(rank: int, ranks: int, port: int = 0) -> None:
    """Make this process one of several ranks, each with one thread.

    Args:
        port: port of rank 0's store, if there are several ranks.
    """
    import torch
    import torch.distributed as dist

    from rlhf_core.engines.deepspeed.engine import join_world

    torch.set_num_threads(1)
    store = None
    if ranks > 1:
        store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=timedelta(seconds=SECONDS))
    join_world(rank=rank, world_size=ranks, store=store)


def peak_of(call: Callable[[], Any]) -> float:
    """Return the bytes by which the peak resident set in a call exceeds the set before it."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    call()
    return status("VmHWM") - before


def status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith(f"{key}:"))


def train(case: Case, work: Path) -> None:
    scratch = work / f"training-{case.shape}"
    scratch.mkdir(exist_ok=True)
    train_case = train_rl if case.stage in RL else train_supervised
    train_case(case, work / case.shape, scratch)


def train_supervised(case: Case, folder: Path, scratch: Path) -> None:
    """Train by the stage's own trainer on texts of LENGTH tokens."""
    from rlhf_core.engines.deepspeed.ranks import is_first
    from rlhf_core.models.build import load_language_model, save_model
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.trainers.preference.train import PreferenceRun, train_on_examples, train_on_pairs
    from rlhf_core.trainers.reward.ensemble import train_ensemble
    from rlhf_core.trainers.sft.train import begin_demonstrations, train_on_demonstrations

    params, tokenizer = params_of(case), load_tokenizer(str(folder), trust_remote_code=False)
    section, rows = getattr(params, case.stage), pairs(2 * case.all_rows, tokenizer)
    rows = rows[: len(rows) // 2] if case.stage in ("reward", "dpo") else rows

    def loop(*, first_step: int = 0, seed: int = 0) -> TrainLoop:
        return training_loop(case, scratch)

    def save(model: Any, weights: dict[str, Any], tokenizer: Any, part: str = "") -> None:
        if is_first():
            save_model(model, weights, tokenizer, scratch / "model")

    if case.stage == "reward":
        splits = {"train": rows, "validation": rows[:2], "test": rows[:2]}
        train_ensemble(folder, splits.__getitem__, tokenizer, section, model=params.model, seed=0, loop=loop, save=save)
    elif case.stage == "sft":
        begun = [begin_demonstrations(part, tokenizer, section, max_length=LENGTH) for part in (rows, [])]
        model = load_language_model(folder, training_dtype=case.dtype)
        engine, _ = train_on_demonstrations(model, tokenizer, begun, section, model_config=params.model, loop=loop())
        save(model, engine.state_dict(), tokenizer)
    else:
        preference = {"dpo": train_on_pairs, "kto": train_on_examples}[case.stage]
        trained = preference(rows, [], section, PreferenceRun(folder, params.model, scratch, loop(), 2))
        save(trained.model, trained.engine.state_dict(), tokenizer)


def training_loop(case: Case, scratch: Path) -> TrainLoop:
    from rlhf_core.checkpoint.settings import StoreSettings
    from rlhf_core.checkpoint.store import CheckpointStore
    from rlhf_core.curves import MetricsLog
    from rlhf_core.engines.deepspeed.ranks import rank
    from rlhf_core.trainers.preference.train import COLUMNS
    from rlhf_core.trainers.supervised.loop import TrainLoop

    settings = StoreSettings(world_size=case.ranks, zero_stage=case.changes.get("zero_stage", 0))
    return TrainLoop(
        seed=0,
        checkpoint_every=100,
        eval_every=100,
        first_step=0,
        checkpoints=lambda phase: CheckpointStore(scratch / phase, settings),
        metrics_log=lambda step: MetricsLog(scratch / f"curves-{rank()}.csv", (*COLUMNS, "accuracy"), timings=None, first_step=step),
        stop_requested=lambda: False,
    )


def pairs(count: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Rows for every supervised stage: each has its own prompt and two responses, with nearly LENGTH tokens each."""
    from rlhf_core.models.tokenizer import encode_conversation

    draw, tokens = random.Random(0), {word: len(tokenizer(f" {word}")["input_ids"]) for word in WORDS.split()}

    def response(left: int) -> str:
        words: list[str] = []
        while (left := left - tokens[word := draw.choice([*tokens])]) >= 0:
            words.append(word)
        return " ".join(words)

    rows = []
    for number in range(count):
        messages = [{"role": "user", "content": str(number)}]
        left = LENGTH - 1 - len(encode_conversation(tokenizer, messages, "one")[0])
        chosen = response(left)
        row = {"id": str(number), "source": "", "messages": messages, "response": chosen, "chosen": chosen}
        rows.append(row | {"rejected": response(left)})
    return rows


def train_rl(case: Case, folder: Path, scratch: Path) -> None:
    """Run a rank of an RL job as its driver does, with random responses."""
    import torch

    from rlhf_core.engines.deepspeed.ranks import rank
    from rlhf_core.trainers.rl.rank import TrainerRank
    from rlhf_core.types import Sequences

    job = rl_job(case, folder)
    trainer, groups = TrainerRank(rank(), case.ranks, job), case.own_rows // job.rl.group_size
    trainer.connect(None)
    generator = torch.Generator().manual_seed(rank())
    for _ in range(2):
        prompts = torch.randint(5, 200, (groups, PROMPT), generator=generator).repeat_interleave(job.rl.group_size, 0)
        responses = torch.randint(5, 200, (case.own_rows, LENGTH - PROMPT), generator=generator)
        ids = torch.cat([prompts, responses], 1).tolist()
        sequences = Sequences.of(ids, [PROMPT] * case.own_rows)
        trainer.score_by_reward_model("reward_model", ids)
        outputs = trainer.forward(sequences, keep_graphs=job.rl.one_optimizer_step)
        trainer.update([minibatch(case, sequences, outputs)], kl_coef=0.1, train_policy=True)
        trainer.send_weights([], version=1, ids=[5, 6, 7])
    (scratch / "checkpoint").mkdir(exist_ok=True)
    trainer.save(str(scratch / "checkpoint"))
    trainer.export(str(scratch / "policy"))


def rl_job(case: Case, folder: Path) -> Any:
    from rlhf_core.checkpoint.settings import StoreSettings
    from rlhf_core.trainers.rl.job import RlJob

    params, reward = params_of(case), f"{folder}-reward"
    return RlJob(
        seed=0,
        model=params.model,
        train_on=params.sft.train_on,
        train_on_thoughts=params.sft.train_on_thoughts,
        rl=params.rl,
        threads=1,
        prepared="",
        sft_model=str(folder),
        reward_model=reward,
        scorer_models={"reward_model": reward},
        source_judges={},
        work="",
        checkpoints=StoreSettings(),
        output="",
        timings="",
    )


def minibatch(case: Case, sequences: Any, outputs: dict[str, Any]) -> Any:
    """Compute an optimizer step on all of a rank's responses."""
    import torch

    from rlhf_core.trainers.rl.minibatch import Minibatch
    from rlhf_core.types import TrainBatch

    everything = torch.ones(case.own_rows, LENGTH - PROMPT, dtype=torch.bool)
    noise = torch.randn(everything.shape, generator=torch.Generator().manual_seed(0))
    of = {name: values.view(everything.shape) for name, values in outputs.items()}
    batch = TrainBatch(
        sequences=sequences,
        response_mask=everything,
        old_logprobs=of["old_logprobs"],
        ref_logprobs=of["ref_logprobs"],
        old_values=of.get("values"),
        advantages=noise,
        returns=noise,
        importance_weights=torch.ones(everything.shape),
    )
    return Minibatch(batch, list(range(len(batch))), case.ranks * everything.numel(), case.all_rows, [], 0)


# Models


def write_models(case: Case, work: Path) -> None:
    """Write Llamas with random weights in the case's dtype: a language model, and in RL also a reward model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from rlhf_core.models.tokenizer import build_tokenizer

    shape, tokenizer = SHAPES[case.shape], build_tokenizer([f"{WORDS} {number}" for number in range(500)], vocab_size=300)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=LENGTH,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    kinds = {case.shape: LlamaForCausalLM} | ({f"{case.shape}-reward": LlamaForSequenceClassification} if case.stage in RL else {})
    for name, kind in kinds.items():
        kind(config).to(getattr(torch, case.dtype)).save_pretrained(work / name)
        tokenizer.save_pretrained(work / name)
