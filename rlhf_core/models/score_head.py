"""Finds by probing how a sequence classifier computes a sequence's score: architectures differ, and a wrong score looks like any other.

A decoder's score is mostly a linear layer's output at the last token. Encoders have a pooler and read the first token, the mean of all, or
something else. Their score is computed by the model's own forward pass, of a whole sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.func import functional_call
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.config import shown
from rlhf_core.models.attention import longest_alike
from rlhf_core.models.build import find_scalar_head, trunk
from rlhf_core.models.probe import PROBE_ERRORS, agree, probing

LENGTHS = (5, 9)  # tokens of the probe's sequences
TOLERANCE = 1e-3  # in float32, relative to the largest score, which is of random weights and may be small


@dataclass(frozen=True)
class ScoreHead:
    """How a model computes scores.

    per_token: the score is a linear layer's output at the last token, which has seen all tokens before it: every token has a score.
    batchable: if not per_token, the model's own forward gives a padded sequence the score that it has alone.
    num_labels: scores that the model gives a sequence.
    ignored_id: the model takes this id for padding, even at the end of a sequence: the score is read at the last other token.
    max_tokens: longest sequence that the model has positions for, all with the same frequencies; None: no limit.
    """

    per_token: bool
    batchable: bool
    num_labels: int
    ignored_id: int | None
    max_tokens: int | None

    def last_position(self, ids: list[int]) -> int:
        """Return the position whose score is the sequence's, where tokens have scores."""
        return _last_position(ids, self.ignored_id)


@torch.no_grad()
def probe_score_head(model: PreTrainedModel) -> ScoreHead:
    """Find how a model computes scores, by comparing ways with its own forward on random sequences of different lengths.

    Random weights take the place of the head's, which may be zero.

    Raises:
        ValueError: the model's own forward gives a sequence no score.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"reward model: expected one that scores any sequence, got {type(model).__name__}, an encoder-decoder that "
            "reads its score at the end token, which a truncated response has none of; use another model"
        )
    config, generator = model.config.get_text_config(), torch.Generator().manual_seed(1)
    ignored = config.pad_token_id
    unusual = (ignored, getattr(model.config, "image_token_id", None))
    usual = torch.tensor([i for i in range(config.vocab_size) if i not in unusual])
    sequences = [usual[torch.randint(len(usual), (n,), generator=generator)].tolist() for n in LENGTHS]
    if ignored is not None:
        sequences.append([*sequences[0][::-1], ignored])
    weights = _random_head(model)
    with probing(model):
        alone = _scores_alone(model, weights, sequences)
        per_token = bool(weights) and _agrees(alone, lambda: _scores_by_token(model, weights, sequences, ignored))
        batchable = per_token or _agrees(alone, lambda: functional_call(model, weights, (), _inputs(model, sequences)).logits)
    return ScoreHead(per_token, batchable, alone.shape[1], ignored if per_token else None, _max_tokens(model))


def label_index(config: PretrainedConfig, num_labels: int, chosen: str | int | None) -> int:
    """Return the index of the score that counts among those of the model.

    Raises:
        ValueError: there are several and none is chosen, or the chosen one isn't there.
    """
    names = [str(config.id2label.get(i, i)) for i in range(num_labels)]
    if chosen is None and num_labels == 1:
        return 0
    found = names.index(chosen) if chosen in names else chosen
    if isinstance(found, int) and 0 <= found < num_labels:
        return found
    got = f"{num_labels} ({', '.join(names)})" if chosen is None else f"{chosen!r} and a model with {', '.join(names)}"
    raise ValueError(
        f"reward model: expected one score or the choice of a label, got {got}; set `label` of its scorer to a name or a number"
    )


def filler_id(model: PreTrainedModel) -> int:
    """Return an id to pad batches with: the model's own, or any id, since no score depends on it."""
    padding = model.config.get_text_config().pad_token_id
    return 0 if padding is None else padding


def sequence_scores(model: PreTrainedModel, sequences: list[list[int]], *, batchable: bool) -> torch.Tensor:
    """Return scores [len(sequences), num_labels] by the model's own forward."""
    parts = [sequences] if batchable else [[ids] for ids in sequences]
    return torch.cat([model(**_inputs(model, part)).logits.reshape(len(part), -1) for part in parts])


def _inputs(model: PreTrainedModel, sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return right-padded sequences, with their mask unless the model takes none."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    if model.config.get_text_config().pad_token_id is None and not bool(mask.all()):
        raise ValueError("this model has no id for padding")
    ids = torch.full(mask.shape, filler_id(model)).masked_scatter(mask, torch.tensor([i for s in sequences for i in s]))
    found = {"input_ids": ids.to(model.device)}
    known = inspect.signature(model.forward).parameters
    found |= {"attention_mask": mask.long().to(model.device)} if "attention_mask" in known else {}
    return found | ({"use_cache": False} if "use_cache" in known else {})


def _scores_alone(model: PreTrainedModel, weights: dict[str, torch.Tensor], sequences: list[list[int]]) -> torch.Tensor:
    """Return scores [len(sequences), num_labels], each by the model's own forward of the sequence alone."""
    try:
        found = [functional_call(model, weights, (), _inputs(model, [ids])).logits for ids in sequences]
    except PROBE_ERRORS as error:
        got = f"{type(error).__name__}: {shown(str(error))}"
        raise ValueError(f"reward model: expected scores of {type(model).__name__}, got {got}; use another model") from error
    if wrong := [tuple(logits.shape) for logits in found if logits.ndim > 2 or logits.shape[0] != 1]:
        raise ValueError(
            f"reward model: expected scores of a sequence, got an output of shape {wrong[0]} by {type(model).__name__}; "
            "use a sequence classifier"
        )
    return torch.cat([logits.reshape(1, -1) for logits in found])


def _scores_by_token(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], sequences: list[list[int]], ignored: int | None
) -> torch.Tensor:
    """Return the linear layer's output [N, num_labels] at the last tokens, in a batch whose padding isn't masked."""
    width = max(map(len, sequences))
    ids = torch.tensor([[*s, *[0] * (width - len(s))] for s in sequences], device=model.device)
    last = [_last_position(s, ignored) for s in sequences]
    hidden = trunk(model)(input_ids=ids, use_cache=False).last_hidden_state[range(len(sequences)), last]
    return functional_call(find_scalar_head(model), {name.rpartition(".")[2]: w for name, w in weights.items()}, hidden)


def _agrees(alone: torch.Tensor, other: Callable[[], torch.Tensor]) -> bool:
    """Return whether the model can compute scores in another way, with the same result."""
    try:
        found = other()
    except PROBE_ERRORS:
        return False
    return agree(found.reshape(len(alone), -1), alone, tolerance=TOLERANCE)


def _last_position(ids: list[int], ignored: int | None) -> int:
    """Return the position of the last token that isn't ignored; 0 if all are."""
    return next((i for i in reversed(range(len(ids))) if ids[i] != ignored), 0)


def _random_head(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return random weights for the model's linear layer, by their names in the model; empty if the model has no such layer."""
    head = find_scalar_head(model)
    if head is None:
        return {}
    (place,) = (name for name, part in model.named_modules() if part is head)
    weight = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0)).to(head.weight)
    return {f"{place}.weight": weight} | ({} if head.bias is None else {f"{place}.bias": torch.zeros_like(head.bias)})


def _max_tokens(model: PreTrainedModel) -> int | None:
    """Return the longest sequence that the model can score alone and in a batch; None without a limit.

    Some models number positions from the one after padding, which takes the first rows of a table of embeddings. Where frequencies change
    with the length, a batch can't hold sequences on both sides of the border, so those beyond it have no score.
    """
    config = model.config.get_text_config()
    if (border := longest_alike(config)) is not None:
        return border
    positions = getattr(config, "max_position_embeddings", None)
    if (
        not isinstance(positions, int)
        or positions < 1
        or (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    ):
        return None
    tables = (part for name, part in model.named_modules() if name.endswith("position_embeddings"))
    padding = [table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None]
    return positions - max(padding) - 1 if padding else positions
