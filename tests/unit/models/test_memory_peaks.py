"""The peak memory of a process: what gradient checkpointing and the vocabulary in pieces save. Each check has a process of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_processes import run_processes
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.algorithms.logprobs import token_logprobs
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.head import head_logprobs, rows_at_a_time
from rlhf_core.models.recompute import recompute_layers

M_MMAP_THRESHOLD = -3  # malloc.h


def peak_growth(work: Callable[[], object]) -> int:
    """Bytes of resident memory that the work takes at its peak, above what there is before it."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the current memory
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def memory(kind: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return 1024 * int(line.split()[1])


def gradient_checkpointing_takes_a_third_of_the_memory_or_less():
    """1,024 tokens of 128 numbers of 8 bytes are 1 MiB; the inputs of 12 layers are 12 MiB. A layer's activations are at least 16 such
    tensors: norms (4), attention (6), and the MLP's three of four times that width. Recomputed, one layer of 12 has them.
    """
    layers, unit = 12, 1 << 20
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": layers, "num_attention_heads": 4}
    batch = collate_tokens([torch.randint(1, 60, (64,)).tolist() for _ in range(16)], [60] * 16, pad_id=0)
    peaks = []
    for recompute in (True, True, False):  # the first one loads libraries too
        torch.manual_seed(0)
        module = PolicyModule(LlamaForCausalLM(LlamaConfig(vocab_size=60, max_position_embeddings=64, **shape)).double())
        if recompute:
            recompute_layers(module, "gradient_checkpointing")
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        peaks.append(peak_growth(lambda module=module: module(batch).logprobs.sum().backward()))
    _, recomputed, plain = peaks
    assert plain > 16 * layers * unit
    assert recomputed < plain / 3


def the_vocabulary_in_pieces_takes_the_memory_of_a_piece():
    """Of 6,144 rows the logits are 187.5 MiB, of a piece of 1,024 rows 31 MiB; up to five tensors of a piece exist at once."""
    rows, width, vocabulary = 6144, 64, 8000
    torch.manual_seed(0)
    head, hidden = nn.Linear(width, vocabulary, bias=False), torch.randn(rows, width, requires_grad=True)
    ids = torch.randint(vocabulary, (rows,))
    assert rows_at_a_time(vocabulary) == 1024
    token_logprobs(head(hidden[:8]), ids[:8], temperature=1.0).sum().backward()  # loads libraries
    pieces = peak_growth(
        lambda: head_logprobs(head.weight, hidden, ids, temperature=1.0, with_entropy=False, keep=False)[0].sum().backward()
    )
    whole = peak_growth(lambda: token_logprobs(head(hidden), ids, temperature=1.0).sum().backward())
    assert whole > 1.9 * 4 * rows * vocabulary
    assert pieces < 5 * 4 * 1024 * vocabulary + 16 * (1 << 20)
    assert pieces < whole / 2


CHECKS = {
    f.__name__: f
    for f in (gradient_checkpointing_takes_a_third_of_the_memory_or_less, the_vocabulary_in_pieces_takes_the_memory_of_a_piece)
}


def run_check(name: str) -> None:
    torch.set_num_threads(1)
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000) == 1  # freed tensors are returned at once
    CHECKS[name]()


@pytest.mark.parametrize("check", CHECKS)
def test_peak_memory(check):
    run_processes(run_check, [(check,)], deadline=120)
