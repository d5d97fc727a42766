"""Prompts with pictures as vLLM's inputs: the trainer's token ids, and pictures that the trainer's processor has made tensors of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.config import shown
from rlhf_core.models.vision import undrawn_ids

if TYPE_CHECKING:
    from vllm import LLM

    from rlhf_core.data.pictures import Picture
    from rlhf_core.models.vision import Sight

IMAGE = "image"  # vLLM's name of the modality
NEVER = -100.0  # added to a logit: the most that vLLM takes


class _NoVideos:
    class valid_kwargs: ...  # vLLM's name of the options


def use_processor(sight: Sight) -> dict[str, Any]:
    """Let vLLM use the trainer's processor in this process, and return arguments for its `LLM`.

    vLLM would load another one, with another backend, whose tensors differ by rounding.
    """
    from vllm.multimodal.processing import context

    processor = sight.vision.processor
    if getattr(processor, "video_processor", None) is None:  # whose options vLLM asks for, though no prompt has a video
        processor.video_processor = _NoVideos()
    context.cached_processor_from_config = lambda *_, **__: processor
    return {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"video": 0}, "mm_device_do_normalize": False}


class PictureInputs:
    """Makes vLLM's inputs of prompts with pictures. token_id: of each token that stands for a part of a picture."""

    def __init__(self, llm: LLM, sight: Sight):
        self._llm, self._sight = llm, sight
        (self.token_id,) = undrawn_ids(llm.model_config.hf_config)
        self._place: list[int] = llm.get_tokenizer().encode(sight.vision.token, add_special_tokens=False)

    def __call__(self, ids: list[int], pictures: Sequence[Picture]) -> dict[str, Any]:
        """Return the input of a prompt, and of what has been sampled of its response.

        Raises:
            ValueError: vLLM gives the pictures other numbers of tokens than the prompt has.
        """
        import torch
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        if not pictures:
            return tokens_input(ids)
        rendered = [self._rendered(picture) for picture in pictures]
        sizes = [one["mm_placeholders"][IMAGE][0].get_num_embeds() for one in rendered]
        places = [number for number, token in enumerate(ids) if token == self.token_id]
        if len(places) != sum(sizes):
            raise ValueError(
                f"rollout.backend: expected vLLM to give {len(pictures)} pictures the {len(places)} tokens that the model's processor "
                f"gives them, got {shown(str(sizes))}; set rollout.backend to pytorch"
            )
        ranges = []
        for size in sizes:
            own, places = places[:size], places[size:]
            span = torch.tensor(ids[own[0] : own[-1] + 1])
            ranges.append(PlaceholderRange(offset=own[0], length=len(span), is_embed=span == self.token_id))
        items, hashes = ([one[name][IMAGE][0] for one in rendered] for name in ("mm_kwargs", "mm_hashes"))
        return mm_input(ids, MultiModalKwargsItems({IMAGE: items}), {IMAGE: hashes}, {IMAGE: ranges})

    def _rendered(self, picture: Picture) -> dict[str, Any]:
        """Return vLLM's input of a picture alone. vLLM keeps what it has rendered of a picture, and the tower's output, by the hash."""
        prompt = {
            "prompt_token_ids": list(self._place),
            "multi_modal_data": {IMAGE: [self._sight.read(picture)]},
            "multi_modal_uuids": {IMAGE: [picture.sha256]},
        }
        (found,) = self._llm._preprocess_cmpl([prompt])
        return found
