"""Models of many families on two ranks that share each sequence, over gloo: what they compute whole, and in parts."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model_families import FAMILIES, VOCABULARY
from rank_processes import run_processes
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel

from rlhf_core.engines.deepspeed.engine import join_world
from rlhf_core.engines.deepspeed.sequence_parallel import share_sequences, split_sequences
from rlhf_core.engines.ports import free_ports
from rlhf_core.models.batch import Branches, TokenBatch, collate_branches, collate_tokens
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.models.probe import can_share_prefixes

DEADLINE = 500  # seconds
LENGTHS = (41, 30, 5)  # two longer than every window; the last one ends in rank 0's part


def plain_batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    return collate_tokens(rows, [1, 25, 2], pad_id=0)


def shared_batch() -> TokenBatch:
    """Rows with a prefix and branches, of 45 and 9 tokens."""
    ids = torch.randint(2, VOCABULARY, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    return collate_branches([Branches(ids[:20], [ids[20:32], ids[32:45]]), Branches(ids[:4], [ids[50:55]])], pad_id=0, every_token=True)


def passed(module: PolicyModule, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [N] and this rank's gradient, flat, of a loss in which each of them has a weight of its own."""
    module.zero_grad()
    logprobs = module(batch).logprobs
    (logprobs * torch.linspace(-1.0, 2.0, len(logprobs))).sum().backward()
    return logprobs.detach(), torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in module.parameters()])


def compared(model: PreTrainedModel) -> dict[str, Any]:
    """refused: the refusal's words; or the largest difference of log-probabilities and the relative one of gradients for each batch."""
    batches = {"plain": plain_batch()} | ({"shared": shared_batch()} if can_share_prefixes(model) else {})
    share_sequences(1)
    module = PolicyModule(model).eval()
    whole = {name: passed(module, batch) for name, batch in batches.items()}
    share_sequences(2)
    try:
        split_sequences(module)
    except ValueError as error:
        return {"refused": str(error)}
    found = {}
    for name, batch in batches.items():
        logprobs, gradient = passed(module, batch)
        dist.all_reduce(gradient)
        expected = whole[name][1]
        found[name] = [float((logprobs - whole[name][0]).abs().max()), float((gradient - expected).norm() / expected.norm())]
    return found


def new_scores() -> ScalarModule:
    """A reward model with eager attention that scores everything 0."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    model = LlamaForSequenceClassification(LlamaConfig(num_labels=1, pad_token_id=0, attn_implementation="eager", **shape)).eval()
    torch.nn.init.zeros_(model.score.weight)
    return ScalarModule(model)


def refusal(module: ScalarModule) -> dict[str, str]:
    try:
        split_sequences(module)
    except ValueError as error:
        return {"refused": str(error)}
    return {}


def _rank_main(rank: int, port: int, out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=DEADLINE))
    join_world(rank=rank, world_size=2, store=store)
    results = {name: compared(FAMILIES[name]()) for name in names}
    eager = FAMILIES["llama"]()
    eager.set_attn_implementation("eager")
    torch.save(results | {"eager": compared(eager), "eager, new head": refusal(new_scores())}, out / f"families-{rank}.pt")


def run_families(out: Path, names: list[str]) -> list[dict[str, dict[str, Any]]]:
    """`compared` of these families, on each rank.

    Raises:
        RuntimeError: a rank failed, or exceeded DEADLINE seconds.
    """
    (port,) = free_ports(1)
    run_processes(_rank_main, [(rank, port, out, names) for rank in range(2)], deadline=DEADLINE)
    return [torch.load(out / f"families-{rank}.pt", weights_only=True) for rank in range(2)]
