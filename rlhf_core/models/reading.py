"""How a sequence classifier makes a score of a sequence: found by asking it, since architectures differ and a wrong score looks like any.

A decoder's score is mostly a linear layer's output at the last token. Encoders have a pooler and read the first token, the mean of all, or
whatever their forward does; then the score is the model's own forward's, of a whole sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.func import functional_call
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.config import shown
from rlhf_core.models.build import find_scalar_head, trunk
from rlhf_core.models.rotary import longest_alike
from rlhf_core.models.trying import TRIAL_ERRORS, agree, on_trial

LENGTHS = (5, 9)  # tokens of the sequences that it is tried on
TOLERANCE = 1e-3  # in float32, relative to the largest score, which is of random weights and may be small


@dataclass(frozen=True)
class Reading:
    """What a model's score is made of.

    of_tokens: a linear layer's output at the last token, which has seen what is before it: every token has a score.
    together: else, the model's own forward scores a padded sequence as it does the same alone.
    labels: how many scores it gives a sequence.
    skipped: the id that it takes for padding, also where it ends a sequence: the score is that of the last other token.
    longest: tokens of the longest sequence that it has positions for, all with the same frequencies; None: no limit.
    """

    of_tokens: bool
    together: bool
    labels: int
    skipped: int | None
    longest: int | None

    def last(self, ids: list[int]) -> int:
        """The position whose score is the sequence's, where tokens have scores."""
        return _last_other(ids, self.skipped)


@torch.no_grad()
def find_reading(model: PreTrainedModel) -> Reading:
    """Try the model on random sequences of different lengths, with random weights in the place of its head's, which may be zero.

    Raises:
        ValueError: its own forward gives a sequence no score.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"reward model: expected one that scores any sequence, got {type(model).__name__}, an encoder-decoder that "
            "reads its score at the end token, which a cut-off response has none of; use another model"
        )
    skipped, weights = _padding(model), _random_head(model)
    sequences = _sequences(model, skipped)
    with on_trial(model):
        alone = _alone(model, weights, sequences)
        of_tokens = bool(weights) and _agrees(alone, lambda: _by_token(model, weights, sequences, skipped))
        together = of_tokens or _agrees(alone, lambda: functional_call(model, weights, (), _inputs(model, sequences)).logits)
    return Reading(of_tokens, together, alone.shape[1], skipped if of_tokens else None, _longest(model))


def label_index(config: PretrainedConfig, labels: int, chosen: str | int | None) -> int:
    """Which of a model's scores is the one that counts.

    Raises:
        ValueError: there are several and none is chosen, or the chosen one isn't there.
    """
    names = [str(config.id2label.get(i, i)) for i in range(labels)]
    if chosen is None and labels == 1:
        return 0
    found = names.index(chosen) if chosen in names else chosen
    if isinstance(found, int) and 0 <= found < labels:
        return found
    got = f"{labels} ({', '.join(names)})" if chosen is None else f"{chosen!r} and a model with {', '.join(names)}"
    raise ValueError(
        f"reward model: expected one score or the choice of a label, got {got}; set `label` of its scorer to a name or a number"
    )


def filler_id(model: PreTrainedModel) -> int:
    """An id to pad batches with: the model's own, or, as nothing looks at it, any."""
    padding = _padding(model)
    return 0 if padding is None else padding


def own_scores(model: PreTrainedModel, sequences: list[list[int]], *, together: bool) -> torch.Tensor:
    """[len(sequences), labels], by the model's own forward."""
    parts = [sequences] if together else [[ids] for ids in sequences]
    return torch.cat([model(**_inputs(model, part)).logits.reshape(len(part), -1) for part in parts])


def _inputs(model: PreTrainedModel, sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    """Right-padded sequences and their mask. It is left out for a model that takes none; padded together, that one's scores differ."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    if _padding(model) is None and not bool(mask.all()):
        raise ValueError("this model has no id for padding")
    ids = torch.full(mask.shape, filler_id(model)).masked_scatter(mask, torch.tensor([i for s in sequences for i in s]))
    found = {"input_ids": ids.to(model.device)}
    known = inspect.signature(model.forward).parameters
    found |= {"attention_mask": mask.long().to(model.device)} if "attention_mask" in known else {}
    return found | ({"use_cache": False} if "use_cache" in known else {})


def _alone(model: PreTrainedModel, weights: dict[str, torch.Tensor], sequences: list[list[int]]) -> torch.Tensor:
    """[len(sequences), labels], by the model's own forward of each."""
    try:
        found = [functional_call(model, weights, (), _inputs(model, [ids])).logits for ids in sequences]
    except TRIAL_ERRORS as error:
        got = f"{type(error).__name__}: {shown(str(error))}"
        raise ValueError(f"reward model: expected scores of {type(model).__name__}, got {got}; use another model") from error
    if wrong := [tuple(logits.shape) for logits in found if logits.ndim > 2 or logits.shape[0] != 1]:
        raise ValueError(
            f"reward model: expected scores of a sequence, got an output of shape {wrong[0]} by {type(model).__name__}; "
            "use a sequence classifier"
        )
    return torch.cat([logits.reshape(1, -1) for logits in found])


def _by_token(model: PreTrainedModel, weights: dict[str, torch.Tensor], sequences: list[list[int]], skipped: int | None) -> torch.Tensor:
    """What the linear layer says at the last tokens [N, labels], padding unmasked behind them."""
    width = max(map(len, sequences))
    ids = torch.tensor([[*s, *[0] * (width - len(s))] for s in sequences], device=model.device)
    last = [_last_other(s, skipped) for s in sequences]
    hidden = trunk(model)(input_ids=ids, use_cache=False).last_hidden_state[range(len(sequences)), last]
    return functional_call(find_scalar_head(model), {name.rpartition(".")[2]: w for name, w in weights.items()}, hidden)


def _agrees(alone: torch.Tensor, other: Callable[[], torch.Tensor]) -> bool:
    """Whether another way gives the scores of sequences alone, if the model can go it."""
    try:
        found = other()
    except TRIAL_ERRORS:
        return False
    return agree(found.reshape(len(alone), -1), alone, tolerance=TOLERANCE)


def _last_other(ids: list[int], skipped: int | None) -> int:
    """The position of the last token that isn't skipped; 0 where all are."""
    return next((i for i in reversed(range(len(ids))) if ids[i] != skipped), 0)


def _random_head(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weights for the model's linear layer, by their names in the model; empty: there is no such layer."""
    head = find_scalar_head(model)
    if head is None:
        return {}
    (place,) = (name for name, part in model.named_modules() if part is head)
    weight = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0)).to(head.weight)
    return {f"{place}.weight": weight} | ({} if head.bias is None else {f"{place}.bias": torch.zeros_like(head.bias)})


def _sequences(model: PreTrainedModel, skipped: int | None) -> list[list[int]]:
    """Random ids; where there is one for padding, also a sequence that ends with it."""
    config, generator = model.config.get_text_config(), torch.Generator().manual_seed(1)
    usual = torch.tensor([i for i in range(config.vocab_size) if i != skipped])
    found = [usual[torch.randint(len(usual), (n,), generator=generator)].tolist() for n in LENGTHS]
    return found if skipped is None else [*found, [*found[0][::-1], skipped]]


def _padding(model: PreTrainedModel) -> int | None:
    return model.config.get_text_config().pad_token_id


def _longest(model: PreTrainedModel) -> int | None:
    """Some number positions from behind that of padding, which takes the first ones of a table of embeddings. Where frequencies change
    with the length, a batch can't hold sequences on both sides of the border: those beyond it are left out.
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
