"""A rollout engine without vLLM: for models so small that vLLM's bookkeeping costs more than the model, and for machines without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_core.algorithms.logprobs import left_logits
from rlhf_core.data.pictures import Picture
from rlhf_core.engines.memory.gpu_memory import memory_in_use
from rlhf_core.engines.memory.offload import Offloaded, storages_of
from rlhf_core.engines.memory.sleep import Awake
from rlhf_core.engines.rollout.requests import Request, Sample, SamplingSettings, end_with_due, stop_finder
from rlhf_core.models.build import kv_cache_bytes, load_language_model
from rlhf_core.models.decoding import Decoder
from rlhf_core.models.forward import backend_of
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.models.vision import Sight, sight, undrawn_ids
from rlhf_core.models.weights import frozen, read_state_dict, with_weights
from rlhf_core.progress import drawn

PROMPT_TOKENS = 32_768  # of a batch's prompts, which are one forward pass
COMPACTED = 0.8  # once this fraction of a batch's sequences or fewer still grow, the finished ones are dropped from the batch


@dataclass(frozen=True)
class Batch:
    """B responses that are sampled at the same time.

    prompts: of so many responses each, in order; with the tokens that these have already.    given: those tokens of each response.
    pictures: of all prompts, in order.
    limits: of the tokens that may follow.    numbers: [B, tokens] float64 in [0, 1), which decide the tokens.
    due: sampling stops once the first so many responses have ended, but not before `least` tokens, nor while `more` says so.
    """

    prompts: list[list[int]]
    copies: int | list[int]
    given: list[list[int]]
    limits: list[int]
    numbers: np.ndarray
    due: int
    least: int = 0
    more: Callable[[bool], bool] = end_with_due
    pictures: list[Picture] = field(default_factory=list)

    @classmethod
    def of_prompts(
        cls,
        prompts: list[list[int]],
        seeds: list[int],
        settings: SamplingSettings,
        *,
        group_size: int,
        max_length: int,
        pictures: list[Picture],
    ) -> Batch:
        """Return a batch of `group_size` whole responses to each prompt."""
        limits = [min(settings.max_new_tokens, max_length - len(p)) for p in prompts for _ in range(group_size)]
        numbers = [np.random.default_rng(seed).random((group_size, settings.max_new_tokens)) for seed in seeds]
        return cls(prompts, group_size, [[]] * len(limits), limits, np.concatenate(numbers), len(limits), pictures=pictures)

    @classmethod
    def of_requests(
        cls, requests: list[Request], settings: SamplingSettings, *, due: int, least: int, more: Callable[[bool], bool]
    ) -> Batch:
        """Return a batch of requests. Prompts of requests in a row that have the same tokens and pictures are computed once."""
        runs = [list(group) for _, group in groupby(requests, key=lambda request: (request.ids, request.pictures))]
        copies = len(runs[0]) if len({*map(len, runs)}) == 1 else list(map(len, runs))
        numbers = np.stack([np.random.default_rng(request.seed).random(settings.max_new_tokens) for request in requests])
        given, limits = [request.given for request in requests], [request.limit for request in requests]
        pictures = [picture for run in runs for picture in run[0].pictures]
        return cls([run[0].ids for run in runs], copies, given, limits, numbers, due, least, more, pictures)


class PytorchEngine:
    """A model in this process with a vLLM engine's interface and distributions, but other random streams.

    A batch of prompts is sampled until its last response ends, so vLLM is faster with responses of very different lengths, or with models
    that fill a device.

    Args:
        model_path: Hugging Face folder to start from.
        max_length: tokens of prompt and response together.
        kv_cache_gib: upper limit of a batch's keys and values on a CPU.
        gpu_memory_fraction: the same limit on a GPU, as a fraction of its free memory.
        shares_gpu: another process uses the GPU too, so cached memory is freed after sampling.
        max_concurrent_sequences: upper limit of the responses in a batch, except that a prompt's responses are always together.
        threads: CPU cores; ignored on a GPU.
        reads_text: responses may end with a stop string, for which every token is decoded.
        prepared: of a model that sees, the folder with the pictures of prompts; None: it gets text alone.

    folder: that it started from.
    """

    def __init__(
        self,
        model_path: str,
        *,
        max_length: int,
        dtype: str,
        kv_cache_gib: int,
        max_concurrent_sequences: int,
        threads: int,
        trust_remote_code: bool,
        gpu_memory_fraction: float,
        shares_gpu: bool = False,
        reads_text: bool = False,
        prepared: str | None = None,
    ):
        torch.set_num_threads(threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        load_options = {"trust_remote_code": trust_remote_code, "vision": None if prepared is None else "frozen"}
        model = load_language_model(model_path, training_dtype=dtype, **load_options)
        self._model = frozen(model, device=device, dtype=getattr(torch, dtype))
        self._decoder = backend_of(self._model).decoder(self._model)
        self._max_length, self._max_sequences = max_length, max_concurrent_sequences
        self._kv_cache_gib, self._gpu_memory_fraction = kv_cache_gib, gpu_memory_fraction
        self._shares_gpu = shares_gpu and device.type == "cuda"
        self._tokenizer = load_tokenizer(model_path, **load_options) if reads_text or prepared is not None else None
        self._sight = None if prepared is None else sight(self._tokenizer, Path(prepared))
        self.folder, self.version = model_path, 0
        self._awake, self._offloaded = Awake(), Offloaded()

    def memory_in_use(self) -> dict[str, int]:
        """See `gpu_memory.memory_in_use`."""
        return memory_in_use()

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory: of the weights, which level 1 copies to the host and level 2 forgets."""
        if self._awake.is_half_awake:
            self.wake_up()
        if not self._awake.falls_asleep(level):
            return
        self._decoder = None  # it may have joined weights
        weights = storages_of((p.data for p in self._model.parameters()), device=self._model.device).values()
        if level == 1:
            self._offloaded.offload(weights)
        else:
            self._offloaded.discard(weights)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory for weights and for keys and values, or for these tags; the latter is allocated by each call anyway."""
        if "weights" in self._awake.wakes_up(tags):
            self._offloaded.reload()
            if self._awake.has_weights:
                self._decoder = backend_of(self._model).decoder(self._model, probed=True)

    def generate(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        settings: SamplingSettings,
        pictures: Sequence[tuple[Picture, ...]] = (),
        *,
        stop_ids: tuple[int, ...],
        group_size: int,
    ) -> list[list[Sample]]:
        """Sample `group_size` responses for each prompt, in order. `seeds[i]` is the random seed of prompt i.

        Args:
            stop_ids: tokens of which each ends a response.
            pictures: of each prompt; empty: none has any.
        Raises:
            ValueError: a prompt leaves no room for a response.
            RuntimeError: the engine is asleep.
        """
        self._awake.need("generate")
        longest = max(map(len, prompts), default=0)
        if longest >= self._max_length:
            raise ValueError(f"prompts: expected fewer tokens than model.max_length={self._max_length}, got {longest}; leave them out")
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        size = self._batch_size(longest, settings.max_new_tokens, group_size)
        found: dict[int, list[Sample]] = {}
        for start in range(0, len(prompts), size):
            chosen = by_length[start : start + size]
            batch = Batch.of_prompts(
                [prompts[i] for i in chosen],
                [seeds[i] for i in chosen],
                settings,
                group_size=group_size,
                max_length=self._max_length,
                pictures=[picture for i in chosen if pictures for picture in pictures[i]],
            )
            samples = self._generate(batch, settings, stop_ids)
            found.update({i: samples[k * group_size : (k + 1) * group_size] for k, i in enumerate(chosen)})
            drawn(len(chosen) * group_size)
        self._free_cached()
        return [found[i] for i in range(len(prompts))]

    def serve(self, numbers: list[int], *args: Any, leave: int, **kwargs: Any) -> dict[int, list[Sample]]:
        """Call `generate`, with the prompts' numbers as keys. Responses can't join a running batch, so none is left."""
        return dict(zip(numbers, self.generate(*args, **kwargs), strict=True))

    def advance(
        self,
        requests: list[Request],
        settings: SamplingSettings,
        due: int,
        *,
        stop_ids: tuple[int, ...],
        least: int,
        more: Callable[[bool], bool] = end_with_due,
    ) -> list[Sample]:
        """Sample the next tokens of each response. Sampling stops once the first `due` responses have ended, but not before `least` tokens
        were sampled one after the other; what hasn't ended then is cut there, and may have no token.

        Args:
            more: asked after each token, and told whether one of the first `due` responses still grows: whether sampling goes on.
        Raises:
            RuntimeError: the engine is asleep.
        """
        self._awake.need("advance")
        if not requests:  # there may be fewer than engines
            return []
        sizes = [len(request.ids) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: (i >= due, sizes[i]))
        size = self._batch_size(max(sizes), max(request.limit for request in requests), 1)
        found = [Sample([], [], False, self.version)] * len(requests)
        for start in range(0, len(requests), size):
            if start >= due and least <= 0 and not more(False):
                break
            chosen = order[start : start + size]
            in_time = partial(_or_later, more, start + size < due)
            batch = Batch.of_requests([requests[i] for i in chosen], settings, due=max(0, due - start), least=least, more=in_time)
            samples = self._generate(batch, settings, stop_ids)
            least -= max(len(sample.response_ids) for sample in samples)
            for i, sample in zip(chosen, samples, strict=True):
                found[i] = sample
        self._free_cached()
        return found

    def _free_cached(self) -> None:
        if self._shares_gpu:
            torch.cuda.empty_cache()

    def _generate(self, batch: Batch, settings: SamplingSettings, stop_ids: Sequence[int]) -> list[Sample]:
        return generate(
            self._decoder,
            batch,
            settings,
            stop_ids=stop_ids,
            max_length=self._max_length,
            stops=stop_finder(self._tokenizer, settings.stop) if settings.stop else None,
            device=self._model.device,
            version=self.version,
            sight=self._sight,
            undrawn=() if self._sight is None else undrawn_ids(self._model.config),
        )

    @torch.inference_mode()
    def probe(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability [len(ids) - 1] of each token but the first, given those before it, at temperature 1."""
        self._awake.need("probe")
        given = torch.tensor([list(ids)], device=self._model.device)
        logprobs = self._model(input_ids=given, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, given[0, 1:, None]).squeeze(-1).tolist()

    def load_folder(self, folder: str | Path, version: int) -> int:
        """Load the weights of a Hugging Face folder as `load_weights` does."""
        return self.load_weights(read_state_dict(Path(folder)), version)

    def load_weights(self, state_dict: dict[str, torch.Tensor], version: int) -> int:
        """Replace the weights. Returns `version`."""
        self._awake.loads_weights()
        self._model = with_weights(self._model, state_dict)
        return self.renew(version)

    def start_weight_update(self) -> None:
        """Prepare for new weights.

        Raises:
            RuntimeError: the engine is asleep.
        """
        self._awake.loads_weights()

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Return the model's weights under its own names, to be written to before a call of `renew`."""
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in self._model.all_tied_weights_keys}

    def renew(self, version: int) -> int:
        """Note that the weights are those of a version now. Returns it."""
        self._decoder = backend_of(self._model).decoder(self._model, probed=True)
        self.version = version
        return version

    def close(self) -> None:
        """Free the weights; the engine can't be used afterwards."""
        del self._model, self._decoder

    def _batch_size(self, prompt: int, response: int, group_size: int) -> int:
        """Return the number of prompts in a batch, given the tokens of a prompt and of a response."""
        element_bytes = 4 if self._model.device.type == "cpu" else self._model.dtype.itemsize  # `LlamaDecoder` keeps float32
        each = kv_cache_bytes(self._model.config, element_bytes=element_bytes) * min(prompt + response, self._max_length)
        sequences = min(self._max_sequences, int(self._cache_bytes() // each))
        return max(1, min(sequences // group_size, PROMPT_TOKENS // max(prompt, 1)))

    def _cache_bytes(self) -> float:
        if self._model.device.type == "cpu":
            return self._kv_cache_gib << 30
        return self._gpu_memory_fraction * torch.cuda.mem_get_info(self._model.device)[0]


@torch.inference_mode()
def generate(
    decoder: Decoder,
    batch: Batch,
    settings: SamplingSettings,
    *,
    stop_ids: Sequence[int],
    max_length: int,
    stops: Callable[[list[int], int], bool] | None,
    device: torch.device,
    version: int = 0,
    sight: Sight | None = None,
    undrawn: Sequence[int] = (),
) -> list[Sample]:
    """Sample the batch's responses, in order; what hasn't ended when sampling stops is cut there.

    Rounding depends on the other responses of the batch.

    Args:
        stop_ids: tokens of which each ends a response. None is sampled before `settings.min_new_tokens`, as with vLLM.
        max_length: tokens of prompt and response together.
        stops: whether a stop string ends in a response's ids after the first so many; None: there are no stop strings.
        version: of the decoder's weights.
        sight: of a model that sees.
        undrawn: tokens that are never sampled.
    """
    limits, given, had = torch.tensor(batch.limits), batch.given, torch.tensor([len(ids) for ids in batch.given])
    max_new_tokens, uniforms = int(limits.max()), torch.from_numpy(batch.numbers).to(device)
    count = len(limits)
    all_ids, all_logprobs = torch.zeros(count, max_new_tokens, dtype=torch.long), torch.zeros(count, max_new_tokens)
    lengths, finished = limits.clone(), torch.zeros(count, dtype=torch.bool)
    ends = torch.tensor(stop_ids)
    rows, growing = torch.arange(count), torch.ones(count, dtype=torch.bool)  # of the current batch
    awaited = rows < batch.due
    seen = {} if sight is None else {"pictures": {name: tensor.to(device) for name, tensor in sight(batch.pictures).items()}}
    logits = decoder.begin(batch.prompts, copies=batch.copies, max_new_tokens=max_new_tokens, max_length=max_length, **seen)
    for position in range(max_new_tokens):
        early = torch.zeros_like(growing)
        if undrawn:
            logits = without_tokens(logits, undrawn, torch.ones_like(growing, device=device))
        if position < settings.min_new_tokens:
            early = had[rows] + position < settings.min_new_tokens
            logits = without_tokens(logits, stop_ids, early.to(device))
        ids, logprobs = sample_tokens(logits, uniforms[rows.to(device), position], settings)
        all_ids[rows, position], all_logprobs[rows, position] = ids.cpu(), logprobs.cpu()
        ended = torch.isin(ids.cpu(), ends)
        if stops is not None and not early.all():
            so_far = [[*given[row], *all_ids[row, : position + 1].tolist()] for row in rows.tolist()]
            may_stop = (growing & ~early).tolist()
            ended |= torch.tensor([may and stops(ids_, settings.min_new_tokens) for may, ids_ in zip(may_stop, so_far, strict=True)])
        lengths[rows[growing & ended]] = position + 1
        finished[rows[growing & ended]] = True
        growing = growing & ~ended & (limits[rows] > position + 1)
        goes_on = batch.more(bool((growing & awaited).any())) or position + 1 < batch.least
        if not (goes_on and growing.any()):
            lengths[rows[growing]] = position + 1
            break
        if int(growing.sum()) <= COMPACTED * len(rows):
            chosen = growing.nonzero().squeeze(-1)
            decoder.keep(chosen.to(device))
            rows, growing, awaited, ids = rows[chosen], growing[chosen], awaited[chosen], ids[chosen.to(device)]
        logits = decoder.step(ids)
    decoder.end()
    found = zip(all_ids.tolist(), all_logprobs.tolist(), lengths.tolist(), finished.tolist(), strict=True)
    return [Sample(i[:n], p[:n], f, version) for i, p, n, f in found]


def _or_later(more: Callable[[bool], bool], due_later: bool, awaited: bool) -> bool:
    """`more`, for one of several batches. due_later: a later one has responses that are due."""
    return more(awaited or due_later)


def without_tokens(logits: torch.Tensor, forbidden: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Return logits [B, V] that give these ids no probability in these rows, [B] bool."""
    filled = logits.index_fill(-1, torch.tensor(tuple(forbidden), device=logits.device), -torch.inf)
    return torch.where(rows[:, None], filled, logits)


def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, settings: SamplingSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token of each row, by the inverse of the cumulative distribution, and its log-probability in the distribution sampled from.

    Args:
        logits: [B, V].
        uniforms: [B] float64, in [0, 1).
    Returns:
        [B] int64; [B] float32.
    """
    left = left_logits(logits, temperature=settings.temperature or 1.0, top_k=settings.top_k, top_p=settings.top_p)
    logprobs = left.log_softmax(-1)
    if settings.temperature == 0:
        ids = logprobs.argmax(-1, keepdim=True)
    else:
        cumulative = logprobs.exp().double().cumsum(-1)
        ids = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
        # With logits that aren't finite the log-probability is NaN, which the trainer refuses.
        ids = ids.clamp(max=logits.shape[-1] - 1)
    return ids.squeeze(-1), logprobs.gather(-1, ids).squeeze(-1)
