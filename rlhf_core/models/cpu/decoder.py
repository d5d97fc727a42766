"""Samples from a small Llama on a CPU with few and large operations for each token, and a cache in reading order.

With bfloat16 weights the matrices are multiplied in bfloat16; hidden states, cache and logits are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from rlhf_core.models.build import trunk
from rlhf_core.models.cpu.layers import normalize
from rlhf_core.models.cpu.packed import interleaved
from rlhf_core.models.decoding import left_padded

POSITIONS = 32  # of keys and values that are multiplied at once, so that the products stay in the processor's cache


class _Layer(NamedTuple):
    """A layer's weights for multiplication from the right, [in, out], with the norms' weights multiplied in."""

    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class LlamaDecoder:
    """A decoder (models/decoding.py) for a plain Llama on a CPU (`can_pack`), with the weights that the model has at construction.

    The cache holds a prompt's keys and values once for all of its responses, [2, prompts, key heads, tokens, D], until the first response
    is dropped; and each response's own, by position, [2, positions, B, key heads, D].
    """

    @torch.inference_mode()
    def __init__(self, model: LlamaForCausalLM):
        inner, config = trunk(model), model.config
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._parts = [self._heads, self._kv_heads, self._kv_heads]  # queries, keys, values
        self._size = inner.layers[0].self_attn.head_dim
        self._scale, self._eps = inner.layers[0].self_attn.scaling, config.rms_norm_eps
        self._embedding = inner.embed_tokens.weight
        self._layers = [self._layer(layer) for layer in inner.layers]
        self._head = (model.get_output_embeddings().weight * inner.norm.weight).t().contiguous()
        self._frequencies = inner.rotary_emb.inv_freq

    def _layer(self, layer: torch.nn.Module) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        query, key = (interleaved(projection.weight, self._size) for projection in (attention.q_proj, attention.k_proj))
        qkv = torch.cat([query * self._scale, key, attention.v_proj.weight]) * layer.input_layernorm.weight
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * layer.post_attention_layernorm.weight
        return _Layer(*(w.t().contiguous() for w in (qkv, attention.o_proj.weight, gate_up, mlp.down_proj.weight)))

    @torch.inference_mode()
    def begin(self, prompts: list[list[int]], *, copies: int | list[int], max_new_tokens: int, max_length: int) -> torch.Tensor:
        ids, real = left_padded(prompts, self._embedding.device)
        count, width = ids.shape
        angles = torch.arange(width + max_new_tokens)[:, None] * self._frequencies
        self._rotations = torch.polar(torch.ones_like(angles), angles)[:, None]  # [position, 1, D / 2]
        self._prompts = [torch.zeros(2, count, self._kv_heads, width, self._size) for _ in self._layers]
        # A padding token sees itself: a softmax over nothing is NaN.
        visible = (real[:, None] & torch.ones(width, width, dtype=torch.bool).tril()) | torch.eye(width, dtype=torch.bool)
        logits = self._forward(ids, (real.cumsum(1) - 1).clamp(min=0), partial(self._attend_prompts, _added(visible)[:, None]))
        self._of_prompt = torch.arange(count).repeat_interleave(torch.tensor(copies))
        self._copies, self._prompt_mask = copies, _added(real)
        self._next, rows = real.sum(1)[self._of_prompt], len(self._of_prompt)
        self._own = [torch.empty(2, max_new_tokens, rows, self._kv_heads, self._size) for _ in self._layers]
        self._filled = 0
        if copies == 1 or isinstance(copies, list):  # prompts are multiplied together if each has as many copies
            self._copy_prompts(torch.arange(rows))
        return logits[self._of_prompt]

    @torch.inference_mode()
    def step(self, ids: torch.Tensor) -> torch.Tensor:
        self._filled += 1
        logits = self._forward(ids[:, None], self._next[:, None], self._attend_token)
        self._next = self._next + 1
        return logits

    @torch.inference_mode()
    def keep(self, rows: torch.Tensor) -> None:
        if self._prompts:
            self._copy_prompts(rows)
        else:
            for number, cache in enumerate(self._own):  # one after the other, so that not all are there twice
                self._own[number] = cache[:, :, rows]
            self._own_mask = self._own_mask[:, rows]
        self._next = self._next[rows]

    def end(self) -> None:
        self._prompts, self._own = [], []

    def _copy_prompts(self, rows: torch.Tensor) -> None:
        """Keep these sequences only, each with a copy of its prompt before its own tokens."""
        prompts = self._of_prompt[rows]
        for number, own in enumerate(self._own):
            self._own[number] = torch.cat([self._prompts[number][:, prompts].permute(0, 3, 1, 2, 4), own[:, :, rows]], dim=1)
        mask = self._prompt_mask[prompts].t()
        self._own_mask = F.pad(mask, (0, 0, 0, self._own[0].shape[1] - len(mask)))[..., None, None]
        self._filled += len(mask)
        self._prompts = []

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        """Return logits [B, V] after the last of the next tokens [B, T].

        Args:
            attend: attention's output [B * T, heads * D], given queries, keys and values [B, T, heads, D] and the layer's number. It also
                stores keys and values in the cache.
        """
        rotation = self._rotations[positions.flatten()]
        hidden = F.embedding(ids.flatten(), self._embedding).float()
        for number, layer in enumerate(self._layers):
            qkv = _product(normalize(hidden, self._eps), layer.qkv)
            turned = qkv[:, : (self._heads + self._kv_heads) * self._size]
            torch.view_as_complex(turned.view(len(qkv), self._heads + self._kv_heads, -1, 2)).mul_(rotation)
            attended = attend(qkv.view(*ids.shape, -1, self._size), number)
            hidden = _product(attended, layer.output, added=hidden)
            gate, up = _product(normalize(hidden, self._eps), layer.gate_up).chunk(2, dim=-1)
            hidden = _product(F.silu(gate).mul_(up), layer.down, added=hidden)
        return _product(normalize(hidden.view(*ids.shape, -1)[:, -1], self._eps), self._head)

    def _attend_prompts(self, mask: torch.Tensor, qkv: torch.Tensor, number: int) -> torch.Tensor:
        """Compute the attention of whole prompts. `mask` [B, 1, T, T] is 0 or -inf."""
        query, key, value = qkv.transpose(1, 2).split(self._parts, dim=1)
        self._prompts[number][0], self._prompts[number][1] = key, value
        grouped = self._heads > self._kv_heads
        attended = F.scaled_dot_product_attention(query, key, value, mask, scale=1.0, enable_gqa=grouped)
        return attended.transpose(1, 2).flatten(0, 1).flatten(1)

    def _attend_token(self, qkv: torch.Tensor, number: int) -> torch.Tensor:
        """Compute the attention of one token of each sequence.

        Products with a sequence's own keys aren't batched, because batched products are slower here.
        """
        own, last = self._own[number], self._filled - 1
        query, own[0, last], own[1, last] = qkv.squeeze(1).split(self._parts, dim=1)
        queries = query.unflatten(1, (self._kv_heads, -1))  # [B, key heads, G, D]: the heads that share a key
        keys, values = own[:, : self._filled, :, :, None]
        logits = torch.cat([torch.linalg.vecdot(some, queries) for some in keys.split(POSITIONS)])  # [positions, B, key heads, G]
        if not self._prompts:
            weights = logits.add_(self._own_mask[: self._filled]).softmax(0)
            return _weighted_sum(weights, values).flatten(1)
        prompt_keys, prompt_values = self._prompts[number]
        copies = (-1, self._copies)
        by_prompt = queries.unflatten(0, copies).transpose(1, 2).flatten(2, 3)  # [prompts, key heads, copies x G, D]
        prompt_logits = by_prompt @ prompt_keys.transpose(2, 3) + self._prompt_mask[:, None, None]
        prompt_logits = prompt_logits.unflatten(2, (self._copies, -1)).permute(4, 0, 2, 1, 3).flatten(1, 2)
        weights = torch.cat([prompt_logits, logits]).softmax(0)
        width = len(prompt_logits)
        prompt_weights = weights[:width].unflatten(1, copies).permute(1, 3, 2, 4, 0).flatten(2, 3)
        attended = (prompt_weights @ prompt_values).unflatten(2, (self._copies, -1)).transpose(1, 2).flatten(0, 1)
        return attended.add_(_weighted_sum(weights[width:], values)).flatten(1)


def _product(rows: torch.Tensor, weight: torch.Tensor, *, added: torch.Tensor | None = None) -> torch.Tensor:
    """Return the product rows @ weight in float32, plus `added`; multiplied in the weight's dtype."""
    if weight.dtype == rows.dtype:
        return rows @ weight if added is None else torch.addmm(added, rows, weight)
    product = rows.to(weight.dtype) @ weight
    return product.to(rows.dtype) if added is None else added + product


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of values [positions, B, key heads, 1, D] weighted by [positions, B, key heads, G], as [B, key heads, G, D]."""
    return sum((w * v).sum(0) for w, v in zip(weights.unsqueeze(-1).split(POSITIONS), values.split(POSITIONS), strict=True))


def _added(visible: torch.Tensor) -> torch.Tensor:
    """Return a mask to be added to attention's logits: 0 where visible and -inf elsewhere."""
    return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
