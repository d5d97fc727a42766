"""Measures what gradient checkpointing, a head in pieces and sharded loading save: bytes kept for the backward pass, and the peak."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_core.engines.ports import free_ports
from tools.memory.cases import LENGTH, SHAPES, Case
from tools.memory.processes import MIB, in_children, join, peak_of, write_models

CASE = Case("sft", "20M", "bfloat16", rows=16)
COLUMNS = ("what", "how", "kept_mib", "peak_mib")


def savings() -> list[dict[str, str]]:
    """Return a row for each way to do the same work."""
    with tempfile.TemporaryDirectory() as work:
        in_children(write_models, [(CASE, Path(work))])
        folder = Path(work) / CASE.shape
        rows = []
        for recomputes in (False, True):
            (found,) = in_children(pass_of_layers, [(folder, recomputes)])
            rows.append(("a pass of all layers", "gradient_checkpointing" if recomputes else "without", *found))
        for how in ("all logits at once", "rows at a time, probabilities kept", "rows at a time, probabilities computed again"):
            (found,) = in_children(pass_of_head, [(how,)])
            rows.append(("a pass of the head", how, *found))
        for dtype in ("float32", "bfloat16"):
            (port,) = free_ports(1)
            peaks = in_children(load_in_shards, [(folder, dtype, rank, port) for rank in range(2)])
            rows.append(("loading a bfloat16 file on 2 ranks for ZeRO 3", f"in {dtype}", 0.0, max(peaks)))
    return [dict(zip(COLUMNS, (what, how, f"{kept / MIB:.0f}", f"{peak / MIB:.0f}"), strict=True)) for what, how, kept, peak in rows]


def pass_of_layers(folder: Path, recomputes: bool) -> tuple[float, float]:
    import torch

    from rlhf_core.models.backend import run_model
    from rlhf_core.models.batch import TokenBatch
    from rlhf_core.models.build import load_language_model, trunk
    from rlhf_core.models.recompute import recompute_layers

    join(0, 1)
    model = load_language_model(folder, training_dtype=CASE.dtype)
    if recomputes:
        recompute_layers(model, "gradient_checkpointing")
    ids = torch.randint(300, (CASE.rows, LENGTH))
    batch = TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool))
    return kept_and_peak(lambda: run_model(trunk(model), batch, None)[0].last_hidden_state, list(model.parameters()))


def pass_of_head(how: str) -> tuple[float, float]:
    import torch

    from rlhf_core.algorithms.logprobs import token_logprobs
    from rlhf_core.models.head import head_logprobs

    join(0, 1)
    shape, tokens = SHAPES[CASE.shape], 8192
    weight = torch.randn(shape.vocab, shape.hidden, dtype=torch.bfloat16).requires_grad_()
    hidden, ids = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16).requires_grad_(), torch.randint(300, (tokens,))
    if how.startswith("all"):
        return kept_and_peak(lambda: token_logprobs(hidden @ weight.t(), ids, temperature=1.0), [weight, hidden])
    arguments = {"temperature": 1.0, "with_entropy": False, "keep": how.endswith("kept")}
    return kept_and_peak(lambda: head_logprobs(weight, hidden, ids, **arguments)[0], [weight, hidden])


def kept_and_peak(forward: Callable[[], Any], given: list[Any]) -> tuple[float, float]:
    """Return the bytes that autograd keeps between a forward and a backward pass, and the peak of both; gradients of `given` exist."""
    import torch

    forward().float().sum().backward()
    gc.collect()
    own, kept = {tensor.untyped_storage().data_ptr() for tensor in given}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def both() -> None:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = forward().float().sum()
        output.backward()

    peak = peak_of(both)
    return float(sum(kept.values())), peak


def load_in_shards(folder: Path, dtype: str, rank: int, port: int) -> float:
    """Return the peak while weights of a dtype are loaded, sharded over ranks in bfloat16."""
    from rlhf_core.engines.deepspeed.frozen import FrozenModel
    from rlhf_core.models.build import load_language_model
    from rlhf_core.models.forward import PolicyModule

    join(rank, 2, port)

    def load() -> FrozenModel:
        module = PolicyModule(load_language_model(folder, training_dtype=dtype))
        return FrozenModel(module, dtype="bfloat16", zero_stage=3, offload=False)

    return peak_of(load)
