"""Sampling and scoring with tiny models on any number of ranks: processes of this machine with gloo between them."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_processes import run_processes
from tiny_models import tiny_params

from rlhf_core.config import Params
from rlhf_core.engines.deepspeed.engine import join_world
from rlhf_core.engines.deepspeed.ranks import in_shares, is_first, rank, wait_for_all, world_size
from rlhf_core.engines.ports import free_ports
from rlhf_core.evaluation.answers import EvaluatedModel, Samples, load_policy, response_logprobs, sample_answers
from rlhf_core.evaluation.figures import Answer
from rlhf_core.gate.scoring import LoadedModel
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.process import Interrupted
from rlhf_core.rounds.comparison import compare
from rlhf_core.sampling.prompts import choose_prompts
from rlhf_core.stage.training import TrainRun
from rlhf_core.trainers.sft.conditional import RatedResponse, score_splits
from rlhf_core.trainers.sft.rejection_sampling import sample_and_score
from rlhf_core.types import Prompt

DEADLINE = 240  # seconds
QUESTIONS = ["Please sort 41.", "Quick, the largest of 309.", "Please sort 7.", "Quick, 9.", "Sort 5528, will you?"]
ROWS = [
    {"id": str(i), "source": "tiny", "messages": [{"role": "user", "content": text}], "label": None} for i, text in enumerate(QUESTIONS)
]


def settings() -> Params:
    """PyTorch's rollouts, and responses of which some end and some are truncated."""
    scorers = [{"name": "reward_model", "kind": "reward_model"}, {"name": "regex", "kind": "regex", "pattern": "4", "weight": 0.5}]
    sampling = {"backend": "pytorch", "prompts": None, "samples_per_prompt": 3, "max_new_tokens": 9, "temperature": 1.0}
    return tiny_params(
        **{
            "rejection_sampling.sampling": sampling,
            "rejection_sampling.scorers": scorers,
            "iterative.sampling": sampling,
            "iterative.scorers": scorers,
            "iterative.promotion.prompts": len(ROWS),
            "evaluation.max_new_tokens": 9,
        }
    )


def run_everything(policy: Path, reward: Path, scratch: Path) -> dict[str, Any]:
    """On every rank: the results of each kind of sampling and scoring."""
    params = settings()
    run = TrainRun(SimpleNamespace(params=params, work=scratch), lambda: False)
    tokenizer = load_tokenizer(str(policy), trust_remote_code=False)
    prompts = choose_prompts(ROWS, tokenizer, longest=40, count=None, seed=0)
    found: dict[str, Any] = {"shares": in_shares(list("abcde"), lambda own: [(item, rank(), len(own)) for item in own])}

    together = {"ranks_per_model": world_size()}
    found["shares of all"] = in_shares(list("abcde"), lambda own: [(item, rank(), len(own)) for item in own], ranks_per_share=world_size())
    sampled = _answers(params, policy, prompts, together)
    found["answers"] = [[s.response_ids for (s,) in drawn] for by_model in sampled.values() for drawn in by_model.values()]
    found["logprobs"] = _logprobs(params, policy, [s.response_ids for (s,) in sampled["sampled"]["again"]], prompts, together)

    config = params.rejection_sampling
    for name, some in (("one", prompts[:1]), ("all", prompts)):
        folder = scratch / name
        if is_first():
            folder.mkdir(parents=True)
        wait_for_all()
        own_run = TrainRun(SimpleNamespace(params=params, work=folder), lambda: False)
        sample_and_score(own_run, some, tokenizer, config, policy, reward, {})
        found[f"rejection {name}"] = json.loads((folder / "scored.json").read_text())
    sample_and_score(own_run, [], tokenizer, config, Path("nowhere"), Path("nowhere"), {})  # reads what is saved

    entry = SimpleNamespace(policy=SimpleNamespace(path=str(policy)), origin=SimpleNamespace(path=str(policy)))
    found["comparison"] = compare(run, entry, 1, policy, ROWS, reward, {})
    rated = [RatedResponse(row["messages"], f"{i}4" * (1 if i < 4 else 60), 1, 0) for i, row in enumerate(ROWS)]
    found["rated"] = score_splits(run, {"train": rated, "validation": rated[:1]}, reward)
    model = LoadedModel.load(reward, max_length=params.model.max_length, trust_remote_code=False)
    texts = [(row["messages"], answer) for row in ROWS for answer in ("14", "no", "14")]
    found["gate"] = np.asarray(model.score_texts(texts)).tolist()
    found["nothing"] = np.asarray(model.score_texts([])).tolist()
    found["stopped"] = _stops(params)
    return found


def _answers(params: Params, policy: Path, prompts: list[Prompt], together: dict[str, int]) -> Samples:
    """By an engine of all ranks, which loads the weights once more."""
    tokenizer = load_tokenizer(str(policy), trust_remote_code=False)
    models = {name: EvaluatedModel(policy, tokenizer, prompts) for name in ("once", "again")}
    how = {"backend": "pytorch", "model": params.model, "max_concurrent_sequences": 8, "threads": 1, "seed": 0}
    return sample_answers(models, params.evaluation, seeds=list(range(len(prompts))), **how, **together)


def _logprobs(params: Params, policy: Path, responses: list[list[int]], prompts: list[Prompt], together: dict[str, int]) -> list[float]:
    """By a policy of which each rank has a part, and in micro-batches of which ranks have different numbers."""
    module = load_policy(policy, params.model, **together)
    assert all(p.ds_tensor.numel() < p.ds_numel for p in module.parameters()) if world_size() > 1 else True
    answers = [Answer(p, ids, "", True, 0.0, {}, None) for p, ids in zip(prompts, responses, strict=True)]
    return response_logprobs(module, answers, pad_id=0, temperature=0.7, microbatch_tokens=60, **together).tolist()


def _stops(params: Params) -> bool:
    """Whether this rank stops, where only rank 0 was told to."""
    try:
        TrainRun(SimpleNamespace(params=params), is_first).check_stop()
    except Interrupted:
        return True
    return False


def _rank_main(own: int, ranks: int, port: int, policy: Path, reward: Path, out: Path) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=own == 0, timeout=timedelta(seconds=DEADLINE))
    join_world(rank=own, world_size=ranks, store=store)
    (out / f"rank-{own}.json").write_text(json.dumps(run_everything(policy, reward, out / "work")), encoding="utf-8")
    dist.destroy_process_group()


def run_ranks(ranks: int, policy: Path, reward: Path, out: Path) -> list[dict[str, Any]]:
    """What `run_everything` returns on each rank.

    Raises:
        RuntimeError: a rank failed, or exceeded DEADLINE seconds.
    """
    out.mkdir(parents=True)
    (port,) = free_ports(1)
    run_processes(_rank_main, [(own, ranks, port, policy, reward, out) for own in range(ranks)], deadline=DEADLINE)
    return [json.loads((out / f"rank-{own}.json").read_text(encoding="utf-8")) for own in range(ranks)]
