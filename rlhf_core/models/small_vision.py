"""A small model that sees, from nothing: a LLaVA of `model.architecture`, and its processor."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.models.vision import PROCESSOR, attach

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

    from rlhf_core.config import ArchitectureConfig

TOKEN = "<image>"  # of a picture's parts
SIZE, PATCH = 24, 12  # pixels; a picture takes (SIZE / PATCH) ** 2 tokens
# Standard deviation of new weights in the language model and the layers that lead to it. With the usual 0.02, made for wide models, what
# differs between two pictures is lost in what they share, and 800 steps of the recipe don't teach it to look.
INITIAL = 0.1
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def give_sight(tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a new tokenizer the token of pictures, a template that writes it, and a processor."""
    from transformers import CLIPImageProcessorPil

    tokenizer.add_special_tokens({"additional_special_tokens": [TOKEN]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = TEMPLATE
    square = {"height": SIZE, "width": SIZE}
    about = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    with tempfile.TemporaryDirectory() as folder:
        CLIPImageProcessorPil(size=square, crop_size=square).save_pretrained(folder)
        (Path(folder) / PROCESSOR).write_text(json.dumps({"processor_class": "LlavaProcessor", **about}), encoding="utf-8")
        attach(tokenizer, folder)


def new_seeing_model(text: LlamaConfig, shape: ArchitectureConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a model with random weights, whose vision tower has the language model's sizes."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    tower = CLIPVisionConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        image_size=SIZE,
        patch_size=PATCH,
    )
    text.initializer_range = INITIAL
    config = LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(TOKEN),
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return LlavaForConditionalGeneration(config)
