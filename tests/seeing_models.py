"""Tiny random models that see, in folders as they are published: model, tokenizer, chat template and processor."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tiny_models import TEXTS
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf_core.data.pictures import Picture, with_pictures, write_pictures
from rlhf_core.models.tokenizer import build_tokenizer, load_tokenizer
from rlhf_core.models.vision import PROCESSOR, Sight, sight

WIDTH, PATCH, SIZE = 32, 4, 16
PINPOINTS = [[SIZE, SIZE], [SIZE, 2 * SIZE], [2 * SIZE, SIZE], [2 * SIZE, 2 * SIZE]]
QUESTION = "Which shape is it?"
TEMPLATE = (
    "{{% for message in messages %}}{{{{ '<|' + message['role'] + '|>' }}}}"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}{{% for part in message['content'] %}}"
    "{{{{ {place} if part['type'] == 'image' else part['text'] }}}}{{% endfor %}}{{% endif %}}{{{{ '<|end|>' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|assistant|>' }}}}{{% endif %}}"
)
# Family -> further tokens, of which the first stands in a picture's place, and what a template writes there.
TOKENS = {
    "qwen2_5_vl": (
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"], "'<|vision_start|><|image_pad|><|vision_end|>'"
    ),
    "llava": (["<image>"], "'<image>\\n'"),
    "idefics3": (
        [
            "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>",
            *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
        ],
        "'<image>'",
    ),
    "gemma3": (["<image_soft_token>", "<start_of_image>", "<end_of_image>"], "'<start_of_image>'"),
    "internvl": (["<IMG_CONTEXT>", "<img>", "</img>", "<video>"], "'<IMG_CONTEXT>\\n'"),
    "llava_onevision": (["<image>", "<video>"], "'<image>\\n'"),
}  # fmt: skip
TOKENS |= {"qwen2_vl": TOKENS["qwen2_5_vl"], "qwen3_vl": TOKENS["qwen2_5_vl"], "smolvlm": TOKENS["idefics3"]}
ONE_PICTURE = ("llava_onevision",)  # families that take one in a conversation
FAMILIES = tuple(name for name in TOKENS if name != "smolvlm" or find_spec("num2words"))
_TEXT = {
    "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 512, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
_SMALL = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": PATCH,
}


def save_seeing_model(folder: Path, family: str = "qwen2_5_vl") -> Path:
    tokenizer = _tokenizer(family)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in TOKENS[family][0]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = MODELS[family](len(tokenizer), ids)
        _enliven(model)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor, options = _processor(family)
    processor.save_pretrained(folder)
    (folder / PROCESSOR).write_text(options, encoding="utf-8")
    return folder


@torch.no_grad()
def _enliven(model: PreTrainedModel) -> None:
    """Give weights that start at zero, such as Gemma 3's projection of pictures, other values, and all vectors some noise."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn(parameter.shape))
        elif not parameter.any():
            parameter.normal_(std=0.2)


def _tokenizer(family: str) -> PreTrainedTokenizerFast:
    tokens, place = TOKENS[family]
    tokenizer = build_tokenizer(TEXTS, vocab_size=300)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    tokenizer.chat_template = TEMPLATE.format(place=place)
    if family == "gemma3":
        tokenizer.init_kwargs |= {"image_token": tokens[0], "boi_token": tokens[1], "eoi_token": tokens[2]}
    if family == "internvl":
        tokenizer.init_kwargs |= dict(
            zip(("context_image_token", "start_image_token", "end_image_token", "video_token"), tokens, strict=True)
        )
    return tokenizer


def _qwen(vocabulary: int, ids: dict[str, int], kind: str = "Qwen2_5_VL") -> PreTrainedModel:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    of_kind = {
        "Qwen2VL": {"embed_dim": WIDTH, "hidden_size": WIDTH},
        "Qwen2_5_VL": {"hidden_size": WIDTH, "out_hidden_size": WIDTH, "window_size": 16, "fullatt_block_indexes": [1]},
        "Qwen3VL": {"hidden_size": WIDTH, "out_hidden_size": WIDTH, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    }[kind]
    vision = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "initializer_range": 0.2, **of_kind}
    vision |= {} if kind == "Qwen2VL" else {"intermediate_size": 64}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**_TEXT, "vocab_size": vocabulary, "rope_parameters": rope, **({"head_dim": 16} if kind == "Qwen3VL" else {})},
        vision_config=vision, image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _llava(vocabulary: int, ids: dict[str, int]) -> PreTrainedModel:
    text = transformers.LlamaConfig(**_TEXT, vocab_size=vocabulary)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_SMALL), text_config=text, image_token_index=ids["<image>"], vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def _idefics3(vocabulary: int, ids: dict[str, int], kind: str = "Idefics3") -> PreTrainedModel:
    text = transformers.LlamaConfig(**_TEXT, vocab_size=vocabulary).to_dict()
    config = getattr(transformers, f"{kind}Config")(
        vision_config=_SMALL, text_config=text, image_token_id=ids["<image>"], scale_factor=2, pad_token_id=0
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _internvl(vocabulary: int, ids: dict[str, int]) -> PreTrainedModel:
    text = {**_TEXT, "model_type": "qwen2", "vocab_size": vocabulary}
    config = transformers.InternVLConfig(vision_config=_SMALL, text_config=text, image_token_id=ids["<IMG_CONTEXT>"], image_seq_length=4)
    return transformers.InternVLForConditionalGeneration(config)


def _onevision(vocabulary: int, ids: dict[str, int]) -> PreTrainedModel:
    config = transformers.LlavaOnevisionConfig(
        vision_config={**_SMALL, "vision_use_head": False}, text_config={**_TEXT, "model_type": "qwen2", "vocab_size": vocabulary},
        image_token_index=ids["<image>"], video_token_index=ids["<video>"], image_grid_pinpoints=PINPOINTS,
    )  # fmt: skip
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def _gemma(vocabulary: int, ids: dict[str, int]) -> PreTrainedModel:
    text = transformers.Gemma3TextConfig(**_TEXT, vocab_size=vocabulary, head_dim=16, query_pre_attn_scalar=16, sliding_window=64)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=transformers.SiglipVisionConfig(**_SMALL), mm_tokens_per_image=4,
        image_token_index=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"], eoi_token_index=ids["<end_of_image>"],
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


MODELS = {
    "qwen2_vl": partial(_qwen, kind="Qwen2VL"), "qwen2_5_vl": _qwen, "qwen3_vl": partial(_qwen, kind="Qwen3VL"), "llava": _llava,
    "idefics3": _idefics3, "smolvlm": partial(_idefics3, kind="SmolVLM"), "gemma3": _gemma, "internvl": _internvl,
    "llava_onevision": _onevision,
}  # fmt: skip


def _processor(family: str) -> tuple[Any, str]:
    square = {"height": SIZE, "width": SIZE}
    if family.startswith("qwen"):
        sizes = {"shortest_edge": 64, "longest_edge": 1024}
        kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
        return transformers.Qwen2VLImageProcessorPil(patch_size=PATCH, size=sizes), json.dumps({"processor_class": f"{kind}Processor"})
    if family == "internvl":
        images = transformers.GotOcr2ImageProcessorPil(size=square, crop_to_patches=True, max_patches=2)
        return images, '{"processor_class": "InternVLProcessor", "image_seq_length": 4}'
    if family == "llava_onevision":
        about = {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16, "vision_feature_select_strategy": "full"}
        return transformers.LlavaOnevisionImageProcessorPil(size=square, image_grid_pinpoints=PINPOINTS), json.dumps(about)
    if family == "llava":
        about = json.dumps(
            {
                "processor_class": "LlavaProcessor",
                "patch_size": PATCH,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
            }
        )
        return transformers.CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=square), about
    if family in ("idefics3", "smolvlm"):
        kind = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[family]
        sizes = {"size": {"longest_edge": 2 * SIZE}, "max_image_size": {"longest_edge": SIZE}}
        about = json.dumps({"processor_class": f"{kind}Processor", "image_seq_len": 4})
        return getattr(transformers, f"{kind}ImageProcessorPil")(**sizes), about
    return transformers.Gemma3ImageProcessorPil(size=square), '{"processor_class": "Gemma3Processor", "image_seq_length": 4}'


def picture(number: int) -> Image.Image:
    """A picture of noise; pictures have several sizes."""
    generator = torch.Generator().manual_seed(number)
    width, height = ((20, 28), (33, 17), (16, 16))[number % 3]
    noise = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def store(folder: Path, count: int) -> list[Picture]:
    """Write a folder's `pictures.arrow` with these pictures, and return them in their order."""
    import hashlib

    folder.mkdir(parents=True, exist_ok=True)
    found, contents = [], {}
    for number in range(count):
        buffer = io.BytesIO()
        (image := picture(number)).save(buffer, "PNG")
        sha = hashlib.sha256(buffer.getvalue()).hexdigest()
        (place := folder / f"{sha}.png").write_bytes(buffer.getvalue())
        contents[sha] = place
        found.append(Picture(sha, image.width, image.height))
    write_pictures(folder, contents, contents)
    return found


def rows(pictures: Sequence[Picture], *, several: bool = True) -> list[dict[str, Any]]:
    """Rows with no, one or, with `several`, two pictures."""
    found = []
    for i, one in enumerate(pictures):
        parts = [[QUESTION], [one, QUESTION], [one, "and", pictures[0], QUESTION]][i % (3 if several else 2)]
        asked = {"role": "user", "content": QUESTION}
        messages = [with_pictures(asked, parts) if len(parts) > 1 else asked]
        answers = {"response": f"Certainly: {i}.", "chosen": f"Certainly: {i}.", "rejected": "Sorry, no"}
        found.append({"id": str(i), "messages": messages, **answers})
    return found


def seeing(folder: Path, prepared: Path) -> tuple[PreTrainedTokenizerFast, Sight]:
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False, vision="frozen")
    return tokenizer, sight(tokenizer, prepared)
