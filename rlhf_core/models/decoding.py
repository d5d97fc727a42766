"""A causal language model token by token: a prompt is computed once for all responses to it, and what was computed is kept."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from rlhf_core.models.build import trunk
from rlhf_core.models.packed import can_pack, interleaved, normalize


class Decoder(Protocol):
    """B sequences that grow by a token at a time."""

    def begin(self, prompts: list[list[int]], *, copies: int, room: int) -> torch.Tensor:
        """Logits [B, V] of the first new token; B = prompts x copies, a prompt's copies next to each other.

        Args:
            room: new tokens, at most.
        """

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] of the next token, after these [B]."""

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these sequences [K] only."""

    def end(self) -> None:
        """Give back what was kept."""


def decoder(model: PreTrainedModel) -> Decoder:
    """The fastest that there is for a model."""
    return LlamaDecoder(model) if type(model) is LlamaForCausalLM and can_pack(trunk(model)) else HuggingFaceDecoder(model)


class HuggingFaceDecoder:
    """By the model's own forward and cache: any architecture with attention alone, any device.

    Raises:
        ValueError: it has other layers, as LFM2 has.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        if not all(hasattr(layer, "batch_repeat_interleave") for layer in DynamicCache(config=model.config).layers):
            raise ValueError(
                f"rollout.backend: expected vllm with {type(model).__name__}, got pytorch, which keeps keys and values alone; change it"
            )

    def begin(self, prompts: list[list[int]], *, copies: int, room: int) -> torch.Tensor:
        ids, real = _left_padded(prompts, self._model.device)
        self._cache = DynamicCache(config=self._model.config)
        logits = self._see(ids, real, (real.cumsum(1) - 1).clamp(min=0))
        self._cache.batch_repeat_interleave(copies)
        self._real, self._next = (x.repeat_interleave(copies, 0) for x in (real, real.sum(1)))
        return logits.repeat_interleave(copies, 0)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        self._real = torch.cat([self._real, self._real.new_ones(len(ids), 1)], dim=1)
        logits = self._see(ids[:, None], self._real, self._next[:, None])
        self._next = self._next + 1
        return logits

    def keep(self, rows: torch.Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._real, self._next = self._real[rows], self._next[rows]

    def end(self) -> None:
        self._cache = None

    def _see(self, ids: torch.Tensor, real: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        how = {"attention_mask": real.long(), "position_ids": positions, "past_key_values": self._cache, "use_cache": True}
        return self._model(input_ids=ids, logits_to_keep=1, **how).logits[:, -1]


class _Layer(NamedTuple):
    """Weights as they are multiplied from the right, [in, out], those of the norms within them."""

    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class LlamaDecoder:
    """A plain Llama in float32 on a CPU (`can_pack`), without what its own forward costs each token: few and large operations, and a cache
    with room for all tokens that comes before a token's place in memory.

    The weights are those that the model has when this is made.
    """

    @torch.inference_mode()
    def __init__(self, model: LlamaForCausalLM):
        inner, config = trunk(model), model.config
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
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
    def begin(self, prompts: list[list[int]], *, copies: int, room: int) -> torch.Tensor:
        ids, real = _left_padded(prompts, self._embedding.device)
        count, width = ids.shape
        angles = torch.arange(width + room)[:, None] * self._frequencies
        self._rotations = torch.polar(torch.ones_like(angles), angles)[:, None]  # [position, 1, D / 2]
        self._caches = [torch.zeros(2, count, self._kv_heads, width, self._size) for _ in self._layers]
        self._filled = 0
        # A padding token sees itself: a softmax over nothing is NaN.
        visible = (real[:, None] & torch.ones(width, width, dtype=torch.bool).tril()) | torch.eye(width, dtype=torch.bool)
        mask = torch.zeros(count, 1, width, width).masked_fill_(~visible[:, None], -torch.inf)
        logits = self._see(ids, (real.cumsum(1) - 1).clamp(min=0), mask)
        self._next = real.sum(1).repeat_interleave(copies)
        hidden = torch.zeros(count, 1, 1, width + room).masked_fill_(~F.pad(real, (0, room), value=True)[:, None, None], -torch.inf)
        self._mask = hidden.repeat_interleave(copies, 0)
        self._caches = [F.pad(c, (0, 0, 0, room)).repeat_interleave(copies, 1) for c in self._caches]
        return logits.repeat_interleave(copies, 0)

    @torch.inference_mode()
    def step(self, ids: torch.Tensor) -> torch.Tensor:
        mask = self._mask[..., : self._filled + 1].expand(-1, self._kv_heads, -1, -1).flatten(0, 1)
        logits = self._see(ids[:, None], self._next[:, None], mask)
        self._next = self._next + 1
        return logits

    @torch.inference_mode()
    def keep(self, rows: torch.Tensor) -> None:
        for number, cache in enumerate(self._caches):  # one after the other, so that not all are there twice
            self._caches[number] = cache[:, rows]
        self._mask, self._next = self._mask[rows], self._next[rows]

    def end(self) -> None:
        self._caches = []

    def _see(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after the last of the next tokens [B, T].

        Args:
            mask: 0 or -inf, added to attention's logits: [B, 1, T, T], or of one token and all with it [B x key heads, 1, tokens].
        """
        rotation = self._rotations[positions.flatten()]
        hidden = F.embedding(ids.flatten(), self._embedding)
        for layer, cache in zip(self._layers, self._caches, strict=True):
            qkv = normalize(hidden, self._eps)[0] @ layer.qkv
            turned = qkv[:, : (self._heads + self._kv_heads) * self._size]
            torch.view_as_complex(turned.view(len(qkv), self._heads + self._kv_heads, -1, 2)).mul_(rotation)
            attended = self._attend(qkv.view(*ids.shape, -1, self._size), cache, mask)
            hidden = torch.addmm(hidden, attended, layer.output)
            gate, up = (normalize(hidden, self._eps)[0] @ layer.gate_up).chunk(2, dim=-1)
            hidden = torch.addmm(hidden, F.silu(gate).mul_(up), layer.down)
        self._filled += ids.shape[1]
        return normalize(hidden.view(*ids.shape, -1)[:, -1], self._eps)[0] @ self._head

    def _attend(self, qkv: torch.Tensor, cache: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """What the heads [B, T, heads, D] say, [B * T, heads * D]; keys and values go into the cache."""
        count, width, _, size = qkv.shape
        query, key, value = qkv.transpose(1, 2).split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        begin, end = self._filled, self._filled + width
        cache[0, :, :, begin:end], cache[1, :, :, begin:end] = key, value
        keys, values = cache[:, :, :, :end]
        if mask.dim() == 4:
            grouped = self._heads > self._kv_heads
            said = F.scaled_dot_product_attention(query, keys, values, mask, scale=1.0, enable_gqa=grouped)
            return said.transpose(1, 2).reshape(count * width, -1)
        # For a token at a time batched products take less time on two threads (0.7 to 0.85 of a generate), and no more on one.
        pairs = count * self._kv_heads
        queries = query.reshape(pairs, -1, size)  # the heads that share a key
        weights = torch.baddbmm(mask, queries, keys.reshape(pairs, end, size).transpose(1, 2)).softmax(-1)
        return torch.bmm(weights, values.reshape(pairs, end, size)).view(count, -1)


def _left_padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, P] that all end in the last column, and which of them are real."""
    lengths = torch.tensor([len(p) for p in prompts])
    width = int(lengths.max())
    real = torch.arange(width) >= width - lengths[:, None]
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    ids[real] = torch.tensor([token for p in prompts for token in p])
    return ids.to(device), real.to(device)
