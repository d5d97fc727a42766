"""The tokenizer that the data is prepared with: the one of `model.path`, or a new one from the data's texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rlhf_core.config import ModelConfig
from rlhf_core.data.schema import TEXTS
from rlhf_core.models.folder import check_model_folder, locate_model
from rlhf_core.models.template import named_template
from rlhf_core.models.tokenizer import build_tokenizer, load_tokenizer, use_all_cores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def given_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the model at `config.path`, which is looked at before any data is; None: there is no such model."""
    use_all_cores()
    if config.path is None:
        return None
    path, wanted = locate_model(config.path, config.revision), config.chat_template
    check_model_folder(path)
    return load_tokenizer(
        path,
        trust_remote_code=config.trust_remote_code,
        chat_template=None if wanted is None else named_template(wanted),
        template_date=config.template_date,
        template_options=config.template_options,
    )


def new_tokenizer(config: ModelConfig, rows: Iterable[dict]) -> PreTrainedTokenizerBase:
    """One that is trained on the texts of the rows of the training split, in the order of the rows."""
    texts = (text for row in rows if row["split"] == "train" for text in _texts(row))
    return build_tokenizer(texts, vocab_size=config.architecture.vocab_size)


def _texts(row: dict) -> Iterator[str]:
    yield from (message["content"] for message in row.get("messages", []))
    yield from (row[column] for column in TEXTS if row.get(column))
