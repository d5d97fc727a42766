"""Models that see: a model's processor turns pictures into tensors, and each place of a picture in a prompt into the tokens that it takes.

The processor of transformers is used with its Pillow backend, on any machine, so that a picture has the same tensors everywhere. Its
settings are kept as they are in the model's folder and saved with every model that is trained from it.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import shown
from rlhf_core.data.pictures import Picture, StoredPictures
from rlhf_core.models.folder import refusals

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from rlhf_core.models.batch import TokenBatch

PROCESSOR = "processor_config.json"
FILES = (PROCESSOR, "preprocessor_config.json", "video_preprocessor_config.json")
SIZES = 4096  # of pictures, whose texts are kept; one has some ten thousand characters
_PARTS = ("image_processor", "video_processor", "feature_extractor", "tokenizer", "processor_class", "auto_map")  # not the processor's own
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_TYPES = ("mm_token_type_ids", "token_type_ids")  # arguments of a forward pass that mark a picture's tokens by 1


class Vision:
    """A model's processor.

    processor: that of transformers.
    token: the text that a chat template writes in a picture's place, which is also that of each token that a picture takes.

    Raises:
        ValueError: the folder has no processor that transformers knows.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase):
        self._files = {name: (folder / name).read_text(encoding="utf-8") for name in FILES if (folder / name).is_file()}
        with refusals(folder):
            self.processor = _load(folder, self._files, tokenizer)
        self.token: str = self.processor.image_token
        self._replacement = lru_cache(SIZES)(self._expanded)

    def save(self, folder: Path) -> None:
        """Write the processor's files, of the name and content that they had."""
        about = {"processor_class": type(self.processor).__name__}
        for name, text in {PROCESSOR: json.dumps(about), **self._files}.items():
            (folder / name).write_text(text, encoding="utf-8")

    def expand(self, text: str, pictures: Sequence[Picture]) -> str | None:
        """Return a rendered conversation with the tokens of each picture in its place; None if there are more or fewer places."""
        pieces = text.split(self.token)
        if len(pieces) != len(pictures) + 1:
            return None
        between = [self._replacement(picture.width, picture.height) for picture in pictures]
        return "".join(piece for pair in zip(pieces, [*between, ""], strict=True) for piece in pair)

    def num_tokens(self, pictures: Sequence[Picture]) -> int:
        """Return how many tokens the pictures take in a prompt, without those that stand around them."""
        return sum(self._replacement(picture.width, picture.height).count(self.token) for picture in pictures)

    def _expanded(self, width: int, height: int) -> str:
        """Return the text that takes the place of a picture of a size."""
        from PIL import Image as pillow

        found = self._process([pillow.new("RGB", (width, height), "white")], return_text_replacement_offsets=True)
        return found["text_replacement_offsets"][0][0]["replacement"]

    def tensors(self, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the arguments of the model's forward pass for pictures, in order."""
        found = self._process(images, return_tensors="pt")
        return {name: value for name, value in found.items() if name not in _OF_TEXT}

    def _process(self, images: Sequence[Any], **options: Any) -> dict[str, Any]:
        """Return the processor's output for a text of nothing but these pictures.

        Raises:
            ValueError: it doesn't take them: some refuse a picture that is far longer than wide.
        """
        return dict(self.processor(text=[self.token * len(images)], images=[list(images)], add_special_tokens=False, **options))


class Sight:
    """Makes the arguments of a forward pass for pictures of the prepared data."""

    def __init__(self, vision: Vision, pictures: StoredPictures | None):
        self.vision, self._pictures = vision, pictures

    def __call__(self, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """Return the arguments, none without pictures."""
        if not pictures:
            return {}
        return self.vision.tensors([self.read(picture) for picture in pictures])

    def read(self, picture: Picture) -> Image:
        """Return a picture in RGB."""
        return self._pictures.read(picture)


def with_sight(batch: TokenBatch, sight: Sight | None, pictures: Sequence[Picture]) -> TokenBatch:
    """Return the batch with the pictures of its rows, in order, for a model that sees."""
    return batch if sight is None else replace(batch, pictures=sight(pictures))


def sight(tokenizer: PreTrainedTokenizerBase, prepared: Path) -> Sight | None:
    """Return what sees the pictures of a folder with prepared data; None for a model that doesn't see."""
    if (vision := vision_of(tokenizer)) is None:
        return None
    from rlhf_core.data.pictures import FILE

    return Sight(vision, StoredPictures(prepared) if (prepared / FILE).exists() else None)


def attach(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Give a tokenizer the processor in its model's folder. Conversations that it renders may then have pictures.

    Raises:
        ValueError: there is none.
    """
    tokenizer.vision = Vision(Path(folder), tokenizer)


def vision_of(tokenizer: PreTrainedTokenizerBase) -> Vision | None:
    return vars(tokenizer).get("vision")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer, and the processor of a model that sees."""
    tokenizer.save_pretrained(folder)
    if (vision := vision_of(tokenizer)) is not None:
        vision.save(Path(folder))


def picture_arguments(module: PreTrainedModel, batch: TokenBatch) -> dict[str, torch.Tensor]:
    """Return the arguments of a model's or its trunk's forward pass for a batch's pictures; none without pictures."""
    if not batch.pictures:
        return {}
    types = (batch.input_ids == module.config.image_token_id).int()
    return {**batch.pictures, **{name: types for name in _TYPES if name in inspect.signature(module.forward).parameters}}


def picture_positions(model: PreTrainedModel, ids: torch.Tensor, real: torch.Tensor, seen: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Return positions [3, B, T] of left-padded prompts whose pictures' tokens have coordinates; None: positions count tokens.

    Args:
        real: [B, T] bool, tokens that aren't padding.
        seen: of `picture_arguments`.
    """
    index = getattr(model.base_model, "get_rope_index", None)
    if index is None or not seen:
        return None
    taken = inspect.signature(index).parameters
    return index(input_ids=ids, attention_mask=real.long(), **{name: value for name, value in seen.items() if name in taken})[0]


def undrawn_ids(config: PretrainedConfig) -> tuple[int, ...]:
    """Return the tokens that a policy that sees must not draw: one that stands for a picture's part would have no picture."""
    return (config.image_token_id,)


def freeze_vision(model: PreTrainedModel) -> None:
    """Freeze everything but the language model and its head: the vision tower and what projects its output."""
    for parameter in _vision_parameters(model):
        parameter.requires_grad_(False)


def with_gradients_of_vision(model: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    """Return equal states, by which every trained parameter of the vision tower gets a gradient, if only of 0.

    Ranks exchange the gradients that they have, in one order. One whose micro-batches have no picture would exchange others than the rest.
    """
    trained = [parameter.flatten()[0] for parameter in _vision_parameters(model) if parameter.requires_grad]
    return states + 0.0 * sum(trained) if trained else states


def _vision_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    language = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    return [parameter for parameter in model.parameters() if parameter not in language]


def _load(folder: Path, files: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    import transformers
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    settings = [json.loads(text) for text in files.values()]
    named = [found["processor_class"] for found in settings if "processor_class" in found]
    if not named and (folder / "config.json").is_file():
        model_type = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
        named = [PROCESSOR_MAPPING_NAMES[model_type]] if model_type in PROCESSOR_MAPPING_NAMES else []
    kind = getattr(transformers, named[0], None) if named and files else None
    if kind is None or not re.fullmatch(r"\w+Processor", named[0]):
        got = shown(named[0]) if named else "none"
        raise ValueError(f"expected the settings of a processor of transformers ({PROCESSOR} or {FILES[1]}), got {got}")
    own = json.loads(files.get(PROCESSOR, "{}"))
    options = {name: value for name, value in own.items() if name not in _PARTS}
    taken = inspect.signature(kind.__init__).parameters
    # transformers looks for a class of videos, which needs torchvision; no video is processed here.
    kind = type(kind.__name__, (kind,), {"__module__": kind.__module__, "check_argument_for_proper_class": lambda *_: None})
    parts = {"image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil"), "tokenizer": tokenizer}
    parts |= {"video_processor": None} if "video_processor" in taken else {}
    return kind(**parts, **{name: value for name, value in options.items() if name in taken})
