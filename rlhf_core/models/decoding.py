"""Decodes a causal language model token by token, for sampling: a prompt is computed once for all of its responses."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from rlhf_core.models.attention import check_length
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.probe import PROBE_ERRORS, agree, probing
from rlhf_core.models.vision import picture_arguments, picture_positions


class Decoder(Protocol):
    """B sequences that grow by one token at a time, with a cache of their keys and values."""

    def begin(self, prompts: list[list[int]], *, copies: int | list[int], max_new_tokens: int, max_length: int) -> torch.Tensor:
        """Return the logits [B, V] of the first new token; B: each prompt's copies, next to each other.

        Args:
            copies: of every prompt, or of each.
            max_length: tokens of a sequence; the logits of a longer one aren't used.
        """

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] of the token after these [B]."""

    def keep(self, rows: torch.Tensor) -> None:
        """Continue with only these sequences [K]."""

    def end(self) -> None:
        """Free the cache."""


class HuggingFaceDecoder:
    """Decodes by the model's own forward and cache: any architecture whose cache can be reordered, on any device.

    Args:
        probed: the decoder is known to agree with this architecture.
    Raises:
        ValueError: the decoder's logits of a few tokens aren't those of whole sequences, as with positions that count padding.
    """

    def __init__(self, model: PreTrainedModel, *, probed: bool = False):
        self._model = model
        if not probed:
            self._probe()

    def begin(
        self,
        prompts: list[list[int]],
        *,
        copies: int | list[int],
        max_new_tokens: int,
        max_length: int,
        pictures: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See `Decoder.begin`.

        Args:
            pictures: of a model that sees, as `TokenBatch.pictures`.
        """
        ids, real = left_padded(prompts, self._model.device)
        check_length(self._model.config, min(max_length, ids.shape[1] + max_new_tokens))
        self._cache, self._last = DynamicCache(config=self._model.config), max_length - 1
        seen = picture_arguments(self._model, TokenBatch(ids, real, pictures=pictures))
        positions = picture_positions(self._model, ids, real, seen)
        positions = (real.cumsum(1) - 1).clamp(min=0) if positions is None else positions
        logits = self._forward(ids, real, positions, **seen)
        rows = torch.arange(len(prompts)).repeat_interleave(torch.tensor(copies)).to(ids.device)
        self._cache.reorder_cache(rows)
        self._real, self._next = real[rows], positions[..., -1].reshape(-1, len(prompts)).amax(0)[rows] + 1
        return logits[rows]

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        self._real = torch.cat([self._real, self._real.new_ones(len(ids), 1)], dim=1)
        logits = self._forward(ids[:, None], self._real, self._next[:, None].clamp(max=self._last))
        self._next = self._next + 1
        return logits

    def keep(self, rows: torch.Tensor) -> None:
        self._cache.reorder_cache(rows)
        self._real, self._next = self._real[rows], self._next[rows]

    def end(self) -> None:
        self._cache = None

    def _forward(self, ids: torch.Tensor, real: torch.Tensor, positions: torch.Tensor, **seen: torch.Tensor) -> torch.Tensor:
        inputs = {"attention_mask": real.long(), "position_ids": positions, "past_key_values": self._cache, "use_cache": True} | seen
        return self._model(input_ids=ids, logits_to_keep=1, **inputs).logits[:, -1]

    @torch.inference_mode()
    def _probe(self) -> None:
        """Compare two prompts of different lengths, with two copies each of which three are kept, with forward passes of whole sequences.

        Raises:
            ValueError: they differ.
        """
        model = self._model
        ids = torch.randint(model.config.get_text_config().vocab_size, (2, 9), generator=torch.Generator().manual_seed(0)).tolist()
        prompts, grown = [ids[0][:6], ids[1][:3]], ids[0][6:8]
        expected, ours = [], []
        with probing(model):
            try:
                self.begin(prompts, copies=2, max_new_tokens=2, max_length=8)
                ours.append(self.step(torch.tensor(grown[:1] * 4, device=model.device)))
                self.keep(torch.tensor([0, 2, 3], device=model.device))
                ours.append(self.step(torch.tensor(grown[1:] * 3, device=model.device)))
                self.end()
                for count, rows in ((1, (0, 0, 1, 1)), (2, (0, 1, 1))):
                    whole = [torch.tensor([p + grown[:count]], device=model.device) for p in prompts]
                    expected.append(torch.cat([model(input_ids=whole[row], use_cache=False).logits[:, -1] for row in rows]))
                differ = any(not agree(mine, theirs) for mine, theirs in zip(ours, expected, strict=True))
                why = "whose logits with a cache and prompts of different lengths aren't those of whole sequences" if differ else None
            except PROBE_ERRORS as error:
                why = f"whose forward with a cache ends in {type(error).__name__}: {error}"
        if why is not None:
            raise ValueError(f"rollout.backend: expected vllm with {type(model).__name__}, got pytorch, {why}; change it")


def left_padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [B, P] that all end in the last column, and a mask of the real ones."""
    lengths = torch.tensor([len(p) for p in prompts])
    width = int(lengths.max())
    real = torch.arange(width) >= width - lengths[:, None]
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    ids[real] = torch.tensor([token for p in prompts for token in p])
    return ids.to(device), real.to(device)
