"""FlashAttention's place on a CPU: an attention function that takes the same arguments, computes each sequence apart, and has a name that
transformers and `takes_lengths` treat alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, PreTrainedModel

from rlhf_core.models import build, probe

BY_LENGTHS = "flash_attention_by_lengths_on_a_cpu"
CALLS: Counter[str] = Counter()  # "packed": with several sequences in a row


def by_lengths(
    module, query, key, value, attention_mask, *, scaling=None, dropout=0.0, sliding_window=None, softcap=None, s_aux=None, **kwargs
):
    """Causal attention [B, N, heads, width]; `cu_seq_lens_q` says where the sequences of a packed row end."""
    assert attention_mask is None
    width, groups = query.shape[-1], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    ends = kwargs.get("cu_seq_lens_q")
    if ends is None:
        ends = torch.tensor([0, query.shape[2]])
    else:
        assert len(query) == 1 and kwargs["max_length_q"] == ends.diff().max()
        CALLS["packed"] += 1
    outputs = []
    for start, end in ends.unfold(0, 2, 1).tolist():
        logits = query[:, :, start:end] @ key[:, :, start:end].transpose(2, 3) * (width**-0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (distance >= 0) & (distance < (sliding_window or end))
        logits = logits.masked_fill(~seen, -torch.inf)
        if s_aux is not None:
            logits = torch.cat([logits, s_aux[:, None, None].expand(len(query), -1, end - start, 1)], -1)
        outputs.append(logits.softmax(-1)[..., : end - start] @ value[:, :, start:end])
    assert end == query.shape[2]
    return torch.cat(outputs, 2).transpose(1, 2), None


@contextmanager
def registered() -> Iterator[None]:
    """Within it models can have this attention."""
    AttentionInterface.register(BY_LENGTHS, by_lengths)
    try:
        yield
    finally:
        del AttentionInterface._global_mapping[BY_LENGTHS]


def attend_by_lengths(model: PreTrainedModel) -> PreTrainedModel:
    model.config.get_text_config()._attn_implementation = BY_LENGTHS  # not set_attn_implementation, which looks for a GPU
    model.config._attn_implementation = BY_LENGTHS
    return model


@contextmanager
def padding_free() -> Iterator[None]:
    """Within it every model is loaded with this attention, as with FlashAttention on a GPU."""
    load, probed = build._load, probe.TAKES_MASKS
    build._load = lambda *args, **how: attend_by_lengths(load(*args, **how))
    probe.TAKES_MASKS = (*probed, BY_LENGTHS)  # a probe runs it; FlashAttention needs a GPU
    try:
        with registered():
            yield
    finally:
        build._load, probe.TAKES_MASKS = load, probed
