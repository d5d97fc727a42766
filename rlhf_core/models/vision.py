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
from rlhf_core.data.pictures import FILE, Picture, PictureFiles, StoredPictures
from rlhf_core.data.tokens import pictures_beside
from rlhf_core.models.folder import refusals

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from rlhf_core.models.batch import TokenBatch

PROCESSOR = "processor_config.json"
FILES = (PROCESSOR, "preprocessor_config.json", "video_preprocessor_config.json")
PROBE = (64, 48)  # pixels
KEPT_BYTES = 2**28  # of pictures' tensors; one of 1,000 x 800 pixels has some 2**24
SIZES = 4096  # of pictures, whose texts are kept; one has some ten thousand characters
_PARTS = ("image_processor", "video_processor", "feature_extractor", "tokenizer", "processor_class", "auto_map")  # not the processor's own
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_TYPES = ("mm_token_type_ids", "token_type_ids")  # arguments of a forward pass that mark a picture's tokens by 1


class Vision:
    """A model's processor.

    processor: that of transformers.    files: its settings, by the names of their files.
    token: the text that a chat template writes in a picture's place.
    filler: the text of each token (filler_id) that a picture takes, mostly the same.

    Raises:
        ValueError: the folder has no processor that transformers knows.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase):
        self.files = {name: (folder / name).read_text(encoding="utf-8") for name in FILES if (folder / name).is_file()}
        with refusals(folder):
            self.processor = _load(folder, self.files, tokenizer)
        self.token: str = self.processor.image_token
        self.filler: str = getattr(tokenizer, "image_token", None) or self.token
        self.filler_id: int = tokenizer.convert_tokens_to_ids(self.filler)
        self._replacement = lru_cache(SIZES)(self._expanded)
        self._alike = self._has_equal_tokens_together()

    def save(self, folder: Path) -> None:
        """Write the processor's files, of the name and content that they had."""
        about = {"processor_class": type(self.processor).__name__}
        for name, text in {PROCESSOR: json.dumps(about), **self.files}.items():
            (folder / name).write_text(text, encoding="utf-8")

    def expand(self, text: str, pictures: Sequence[Picture]) -> str | None:
        """Return a rendered conversation with the tokens of each picture in its place; None if there are more or fewer places, or it has
        such tokens itself.
        """
        pieces = text.split(self.token)
        if len(pieces) != len(pictures) + 1 or (self.filler != self.token and self.filler in text):
            return None
        if len(pictures) > 1 and not self._alike:
            raise ValueError("several in a conversation, whose tokens this processor makes otherwise than those of one")
        between = [self._replacement(picture.width, picture.height) for picture in pictures]
        return "".join(piece for pair in zip(pieces, [*between, ""], strict=True) for piece in pair)

    def num_tokens(self, pictures: Sequence[Picture]) -> int:
        """Return how many tokens the pictures take in a prompt, without those that stand around them."""
        return sum(self._replacement(picture.width, picture.height).count(self.filler) for picture in pictures)

    def _expanded(self, width: int, height: int) -> str:
        """Return the text that takes the place of a picture of a size."""
        return self._replaced([[_white(width, height)]])[0]

    def _has_equal_tokens_together(self) -> bool:
        """Return whether two pictures of a conversation take the tokens that each has alone."""
        both = [_white(*PROBE), _white(*PROBE)]
        return self._replaced([both]) == self._replaced([both[:1]]) * 2

    def _replaced(self, images: list[list[Image]]) -> list[str]:
        found = self._process(images, return_text_replacement_offsets=True)
        return [one["replacement"] for of_text in found["text_replacement_offsets"] for one in of_text]

    def tensors(self, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """Return the arguments of the model's forward pass for pictures, in order."""
        found = self._process([[image] for image in images], return_tensors="pt", padding=True)
        return {name: value for name, value in found.items() if name not in _OF_TEXT}

    def _process(self, images: list[list[Image]], **options: Any) -> dict[str, Any]:
        """Return the processor's output for texts of nothing but these pictures each.

        Raises:
            ValueError: it doesn't take them: some refuse a picture that is far longer than wide.
        """
        texts = [self.token * len(of_text) for of_text in images]
        return dict(self.processor(text=texts, images=images, add_special_tokens=False, **options))


def _white(width: int, height: int) -> Image:
    from PIL import Image as pillow

    return pillow.new("RGB", (width, height), "white")


class Sight:
    """Makes the arguments of a forward pass for pictures of the prepared data. Those of the last pictures are kept.

    The rows of a pair, the samples of a prompt and the passes of a step have the same pictures.
    """

    def __init__(self, vision: Vision, pictures: StoredPictures | PictureFiles | None):
        self.vision, self._pictures = vision, pictures
        self._kept: dict[Picture, dict[str, torch.Tensor]] = {}  # the last used is last

    def __call__(self, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        """Return the arguments, none without pictures."""
        made = [self._made(picture) for picture in pictures]
        return {name: joined([of_one[name] for of_one in made]) for name in made[0]} if made else {}

    def _made(self, picture: Picture) -> dict[str, torch.Tensor]:
        found = self._kept.pop(picture, None) or self.vision.tensors([self.read(picture)])
        self._kept[picture] = found
        while len(self._kept) > 1 and sum(t.nbytes for of_one in self._kept.values() for t in of_one.values()) > KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return found

    def beside(self, sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return the arguments for token ids with their pictures.

        Raises:
            ValueError: ids have places of other pictures than they have with them.
        """
        for ids in sequences:
            if (got := ids.count(self.vision.filler_id)) != (due := self.vision.num_tokens(pictures_beside(ids))):
                raise ValueError(f"pictures: expected the {due} tokens that {len(pictures_beside(ids))} take in a sequence, got {got}")
        return self([picture for ids in sequences for picture in pictures_beside(ids)])

    def read(self, picture: Picture) -> Image:
        """Return a picture in RGB."""
        return self._pictures.read(picture)


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the arguments of single pictures as those of all; a picture in fewer parts than others gets further ones of zeros."""

    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    whole = tensors[0].new_zeros(sum(map(len, tensors)), *shape)
    for part, tensor in zip(whole.split([*map(len, tensors)]), tensors, strict=True):
        part[(slice(None), *map(slice, tensor.shape[1:]))] = tensor
    return whole


def with_sight(batch: TokenBatch, sight: Sight | None, pictures: Sequence[Picture]) -> TokenBatch:
    """Return the batch with the pictures of its rows, in order, for a model that sees."""
    return batch if sight is None else replace(batch, pictures=sight(pictures))


def sees(folder: Path) -> bool:
    """Return whether a folder's model was trained with pictures, or is published as one that sees: a class of its own, and a processor."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if not any((folder / name).is_file() for name in FILES[:2]):
        return False
    return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def sight(tokenizer: PreTrainedTokenizerBase, prepared: Path) -> Sight | None:
    """Return what sees the pictures of a folder, of prepared data or with a file each; None for a model that doesn't see."""
    if (vision := vision_of(tokenizer)) is None:
        return None
    return Sight(vision, StoredPictures(prepared) if (prepared / FILE).exists() else PictureFiles(prepared))


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
    language = {*model.get_decoder().parameters()}
    return [parameter for parameter in model.base_model.parameters() if parameter not in language]


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
