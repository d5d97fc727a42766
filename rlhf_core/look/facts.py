"""What a proposal is made from: counts of the data, scaled to all of its records, the model and the machine."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import Params, SourceConfig, number_of
from rlhf_core.look.look import Inspection, TriedReading
from rlhf_core.look.rows import UseCounts
from rlhf_core.models.folder import has_weights, locate_model, read_settings
from rlhf_core.planning.chain import Rows
from rlhf_core.planning.hardware import GIB, GPUS, Gpu
from rlhf_core.planning.machine import Gpu as GpuMemory
from rlhf_core.planning.machine import Machine, here
from rlhf_core.planning.models import Model, of_shape, read_model
from rlhf_core.planning.structure import from_class
from rlhf_core.preparation.drops import DropCounts
from rlhf_core.preparation.sources import read_source, records_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COUNTING_SECONDS = 20.0  # for the number of records
POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length")  # keys of a config.json
SYSTEM_MARK = "(system)"
TEMPLATE_ROWS = 200  # that are looked at for several turns
CHATML = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class DataFacts:
    """Counts by use over the records that were read.

    scale: number of all records divided by the number read. at_least: the data has more records; counting them was cut off.
    """

    uses: Mapping[str, UseCounts]
    scale: float
    at_least: bool

    def rows(self, use: str) -> int:
        """Estimated number of rows of a use in all records."""
        return round(self.uses[use].rows * self.scale) if use in self.uses else 0

    @property
    def pairs(self) -> int:
        """Estimated number of pairs that have both responses."""
        return round(self._preference.found["pairs"] * self.scale)

    @property
    def marked(self) -> int:
        """Estimated number of preference rows that aren't pairs: single responses marked good or bad."""
        return self.rows("preference") - self.pairs

    @property
    def labels(self) -> Counter[str]:
        """Number of prompts by the kind of their expected answer, over the records that were read."""
        return self.uses["prompt"].labels if "prompt" in self.uses else Counter()

    @property
    def _preference(self) -> UseCounts:
        return self.uses.get("preference", UseCounts("preference"))

    def training_rows(self, params: Params) -> dict[str, Rows]:
        """Return each use's rows by split, and their mean lengths."""
        data = params.data
        heldout = data.validation_fraction
        train = 1 - heldout - data.test_fraction - data.promotion_fraction
        responses = self.responses
        mean = sum(n * count for n, count in responses.items()) / max(1, responses.total())
        found = {}
        for use, counts in self.uses.items():
            rows, held = self.rows(use), data.test_fraction if use == "prompt" else heldout
            sequence = counts.tokens / max(1, counts.sequences)
            found[use] = Rows(round(train * rows), round(held * rows), counts.tokens / max(1, counts.rows), sequence, mean)
        return found

    @property
    def responses(self) -> Counter[int]:
        """Number of responses by length in tokens, of demonstrations or else of pairs; empty where the data has neither."""
        of_use = next((self.uses[use] for use in ("sft", "preference") if use in self.uses), None)
        return Counter() if of_use is None else of_use.responses


@dataclass(frozen=True)
class ModelFacts:
    """The model at `path`.

    sizes: None for an architecture that the planner doesn't predict. positions: the longest sequence; None if config.json names none.
    is_chat: the model comes with a chat template. has_weights: it can be trained here. system_prompt: see `own_system_prompt`.
    """

    path: str
    sizes: Model | None
    positions: int | None
    is_chat: bool
    has_weights: bool
    system_prompt: str = ""

    @property
    def parameters(self) -> int | None:
        """Number of parameters; None where the planner doesn't know the architecture."""
        return None if self.sizes is None else self.sizes.parameters


@dataclass(frozen=True)
class MachineFacts:
    """The machine on which the recipe will run.

    memory: of this machine, or of the GPUs that the user named. gpu: kind of these GPUs; None for this machine's CPU, or for GPUs of an
    unknown kind. cores: number of this machine's CPU cores; None for another machine.
    """

    memory: Machine
    gpu: Gpu | None
    cores: int | None

    @property
    def ranks(self) -> int:
        """The largest number of ranks: one for each GPU, or one on a CPU."""
        return max(1, len(self.memory.gpus))

    @property
    def available(self) -> float:
        """Free bytes on a GPU, or in this machine's memory."""
        return min((gpu.free for gpu in self.memory.gpus), default=self.memory.host)

    @property
    def text(self) -> str:
        """The machine in words."""
        free = f"{self.available / GIB:.3g} GiB"
        if not self.memory.gpus:
            return f"{number_of(self.cores or 1, 'core')} with {free} free"
        return f"{number_of(self.ranks, 'GPU')}{'' if self.gpu is None else f' ({self.gpu.name})'} of {free}"


def data_facts(found: Inspection, source: SourceConfig, *, whole: bool) -> DataFacts:
    """Facts about the data from the counts of a reading.

    Args:
        whole: all records were read.
    """
    if whole:
        return DataFacts(found.counts, 1.0, at_least=False)
    read, end = max(1, found.dropped.read), time.monotonic() + COUNTING_SECONDS
    counted = sum(1 for _ in takewhile(lambda _: time.monotonic() < end, records_of(source)))
    return DataFacts(found.counts, max(counted, read) / read, at_least=time.monotonic() >= end)


def model_facts(params: Params, tokenizer: PreTrainedTokenizerBase, *, is_chat: bool) -> ModelFacts:
    """Facts about the model in `model.path` from its folder, without loading its weights.

    Args:
        is_chat: the tokenizer came with a template.
    Raises:
        ValueError: the folder has no config.json.
    """
    path = str(params.model.path)
    folder = locate_model(path, params.model.revision)
    settings = read_settings(Path(folder), "config.json")
    weighty = has_weights(Path(folder))
    return ModelFacts(
        path,
        _sizes(Path(folder), weighty=weighty, trust_remote_code=params.model.trust_remote_code),
        next(_positions(settings), None),
        is_chat,
        weighty,
        own_system_prompt(tokenizer),
    )


def own_system_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """The system prompt that the template writes where a conversation has none; empty if there is none, or if it can't be told apart."""
    from jinja2.exceptions import TemplateError

    question = [{"role": "user", "content": "?"}]
    try:
        bare = str(tokenizer.apply_chat_template(question, tokenize=False))
        given = str(tokenizer.apply_chat_template([{"role": "system", "content": SYSTEM_MARK}, *question], tokenize=False))
    except (TemplateError, TypeError, ValueError):  # a template without system prompts
        return ""
    before, mark, after = given.partition(SYSTEM_MARK)
    return bare[len(before) : -len(after)].strip() if mark and bare.startswith(before) and bare.endswith(after) else ""


def _sizes(folder: Path, *, weighty: bool, trust_remote_code: bool) -> Model | None:
    """The model's sizes from its files, or from config.json alone if its class is known; None if it isn't a decoder with gated MLPs."""
    if weighty:
        found = read_model(folder)
        return None if found.shape is None else found
    try:
        return of_shape(from_class(folder, trust_remote_code=trust_remote_code))
    except ValueError:
        return None


def _positions(settings: dict[str, Any]) -> Iterator[int]:
    """The longest sequence that config.json names, or its part for text."""
    for part in (settings, settings.get("text_config")):
        if isinstance(part, dict):
            yield from (part[key] for key in POSITIONS if isinstance(part.get(key), int))


def with_template(params: Params, tried: TriedReading) -> tuple[Params, PreTrainedTokenizerBase, bool]:
    """Return the tokenizer of model.path, and whether the model is a chat model.

    A model without a template gets a named one in the params: chatml if its tokenizer has ChatML's tokens, continuation if the responses go
    on with prompts of one message, after white space. Otherwise a plain template writes the roles as text.
    """
    from rlhf_core.models.tokenizer import PLAIN_TEMPLATE, pretrained_tokenizer

    tokenizer = pretrained_tokenizer(params.model, weights=False)
    if tokenizer.chat_template != PLAIN_TEMPLATE or params.model.chat_template is not None:
        return params, tokenizer, params.model.chat_template != "continuation"
    words = tokenizer.get_vocab()
    rows = list(islice(read_source(tried.source, seed=params.seed, dropped=DropCounts()), TEMPLATE_ROWS))
    template = "chatml" if all(token in words for token in CHATML) else "continuation" if _continue([row for _, row in rows]) else None
    if template is None:
        return params, tokenizer, False
    chosen = params.model_copy(update={"model": params.model.model_copy(update={"chat_template": template})})
    return chosen, pretrained_tokenizer(chosen.model, weights=False), False


def _continue(rows: list[dict[str, Any]]) -> bool:
    """Return whether responses go on with a text: prompts have one message, and most responses are joined to theirs by white space."""
    if any(len(row["messages"]) > 1 for row in rows if "messages" in row):
        return False
    texts = [(row["messages"][0]["content"], row.get("response") or row.get("chosen")) for row in rows if row.get("messages")]
    joined = [prompt[-1:].isspace() or response[:1].isspace() for prompt, response in texts if response]
    return sum(joined) > len(joined) / 2


def _cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine_facts(kind: str | None, count: int | None) -> MachineFacts:
    """Facts about this machine, or about `count` GPUs of a kind in `GPUS`, in hosts of eight whose host memory isn't checked."""
    if kind is None and count is None:
        memory = here()
        return MachineFacts(memory, None, None if memory.gpus else _cores())
    gpu = GPUS[kind or "h100"]
    gpus = (GpuMemory(gpu.memory, gpu.memory),) * (count or 1)
    return MachineFacts(Machine(float("inf"), gpus, float("inf"), 8), gpu, None)
