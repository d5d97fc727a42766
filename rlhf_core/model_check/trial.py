"""Trains and samples from a small model in every way, and compares each with transformers' plain forward pass.

    trial = Trial(folder, tokenizer, settings)
    trial.run("sft")        # Finding: the largest difference of a log-probability, or why there is none

The comparison is of the model after two updates. transformers loads its saved folder and computes each sequence alone, without padding,
packing or shared prefixes.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config import DpoConfig, LoraConfig, RolloutBackend, VisionTraining, shown
from rlhf_core.data.pictures import Picture, write_pictures
from rlhf_core.engines.deepspeed.engine import EngineSettings, TrainEngine, device
from rlhf_core.engines.rollout.open import open_engine
from rlhf_core.engines.rollout.requests import SamplingSettings
from rlhf_core.models.attention import fix_frequencies
from rlhf_core.models.batch import TokenBatch, collate_branches, collate_tokens, shared_row
from rlhf_core.models.build import classifier, load_language_model, load_scalar_model, save_model, trunk
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.probe import PROBE_ERRORS, shares_prefixes
from rlhf_core.models.vision import Sight, Vision, freeze_vision, picture_arguments, undrawn_ids, vision_of
from rlhf_core.models.weights import checkpoint_names
from rlhf_core.trainers.preference.objectives import Continuation, Pair, PairObjective, ResponseForward, no_reference
from rlhf_core.trainers.reward.train import Comparison, reward_phase
from rlhf_core.trainers.sft.train import sft_phase
from rlhf_core.trainers.supervised.demonstrations import Demonstration

UPDATES = 2
LIMIT = 1e-4  # nats, of a log-probability, or of a score, in float32
SHORTEST = 9  # tokens of the shortest sequence
SAMPLED = 6  # tokens that an engine samples, twice, after each sequence
COLUMNS = ("sft", "reward", "dpo", "lora", "shared_prefix", "pytorch", "vllm")  # vLLM last: its shutdown ends the process group
ON = "on"
ROUNDED = "right in float64; in float32 this model amplifies rounding"
OFF = "off: on a GPU, or with a model that computes a shared prefix's continuations differently"

PICTURE = Picture("", 64, 48)
VOCABULARY_LEAST = 256  # ids that every tokenizer has

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class Finding:
    """Result of one column.

    difference: the largest difference, in nats; for rewards, in units of the score. None: it couldn't be computed.
    refusal: why the column can't be computed, or is wrong; None: it is right.
    note: a remark for the reader.
    """

    column: str
    difference: float | None = None
    refusal: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class TrialSettings:
    """How the model would be trained and sampled from.

    max_length: tokens of the longest sequence in the trial.
    dpo: section whose loss is used.
    """

    max_length: int
    dpo: DpoConfig
    loras: tuple[LoraConfig, ...]
    threads: int
    seed: int = 0
    trust_remote_code: bool = False
    zero_stage: int = 0
    vision: VisionTraining | None = None
    gpu_memory_fraction: float = 0.3


class TrialSight(Sight):
    """Sees the same picture of noise for each picture."""

    def __init__(self, vision: Vision):
        super().__init__(vision, None)
        noise = torch.randint(256, (PICTURE.height, PICTURE.width, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        self._image = Image.fromarray(noise.numpy())

    def read(self, picture: Picture) -> Image.Image:
        return self._image


class Trial:
    """Trains and samples from one small model in the ways that a run uses.

    Args:
        language_model: a small model in float32 on the CPU (miniature.py).
        scalar_model: function that makes a small model with a scalar head.
        scratch: a folder for saved models.
    """

    def __init__(
        self,
        language_model: PreTrainedModel,
        scalar_model: Callable[[], PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        settings: TrialSettings,
        scratch: Path,
    ):
        self._settings, self._tokenizer, self._scratch = settings, tokenizer, scratch
        self._start, self._scalar_model = scratch / "start", scalar_model
        fix_frequencies(language_model.config, settings.max_length)
        given = scratch / "given"
        save_model(language_model, language_model.state_dict(), tokenizer, given)
        # SFT loads the given model, and saves the one that all later stages load.
        load_options = {"trust_remote_code": settings.trust_remote_code, "vision": settings.vision}
        loaded = load_language_model(given, max_length=settings.max_length, **load_options)
        save_model(loaded, loaded.state_dict(), tokenizer, self._start)
        self.sequences = random_sequences(language_model.config.get_text_config().vocab_size, settings.max_length, seed=settings.seed)
        self.pictures: list[tuple[Picture, ...]] = [()] * len(self.sequences)
        self._sight, self._seen = None, 0
        if (vision := vision_of(tokenizer)) is not None:
            self._sight, self._seen = TrialSight(vision), vision.num_tokens([PICTURE])
            self._show_pictures(language_model.config.image_token_id)

    def run(self, column: str) -> Finding:
        """Return the finding of one of COLUMNS. Any exception of a library about the model is a refusal."""
        shutil.rmtree(self._scratch / column, ignore_errors=True)
        try:
            return getattr(self, f"_{column}")()
        except Exception as error:  # libraries raise anything on a model that they can't compute
            return refused(column, error)

    # Columns

    def _sft(self) -> Finding:
        return self._trained("sft", self._sft_step, lora=None)

    def _lora(self) -> Finding:
        """Return the finding with the largest difference over all adapters."""
        found = [self._trained("lora", self._sft_step, lora=lora) for lora in self._settings.loras]
        return max(found, key=lambda finding: finding.difference)

    def _dpo(self) -> Finding:
        return self._trained("dpo", self._dpo_step, lora=None)

    def _trained(self, column: str, step: Callable[[TrainEngine], None], *, lora: LoraConfig | None) -> Finding:
        model = self._load()
        add_adapters(model, lora, seed=self._settings.seed)
        module = PolicyModule(model)
        engine = self._engine(module)
        for _ in range(UPDATES):
            step(engine)
        engine.eval()
        with torch.no_grad():
            ours = engine(self._batch()).logprobs.float().cpu()
        folder = self._saved(column, model, engine)
        found = judged(column, largest(ours, self._plain(folder)))
        if found.refusal is not None and self._difference_in_double(module, folder) <= LIMIT:
            return Finding(column, found.difference, note=ROUNDED)
        return found

    def _reward(self) -> Finding:
        start = self._scratch / "scalar"
        scalar_model = self._scalar_model()
        fix_frequencies(scalar_model.config, self._settings.max_length)
        save_model(scalar_model, scalar_model.state_dict(), self._tokenizer, start)
        model = load_scalar_model(start, trust_remote_code=self._settings.trust_remote_code)
        if self._settings.vision == "frozen":
            freeze_vision(model)
        module = ScalarModule(model)
        engine = self._engine(module)
        tokens = 4 * self._settings.max_length
        shares = self._sight is None and shares_prefixes(model, device=device(), max_length=self._settings.max_length)
        comparisons = self._comparisons(tokens if shares else 0)
        sizes = {"steps": UPDATES, "batch_size": len(comparisons), "pad_id": 0, "microbatch_tokens": tokens}
        phase = reward_phase(comparisons, [], **sizes, margin=0.0, centering_coef=0.01, sight=self._sight)
        for _ in range(UPDATES):
            phase.train_batch(engine, list(range(len(comparisons))))
            engine.step()
        engine.eval()
        batch = collate_tokens(self.sequences, [len(ids) - 1 for ids in self.sequences], pad_id=0)
        with torch.no_grad():
            ours = engine(self._with_pictures(batch)).float().cpu()
        seen = None if self._sight is None else [self._sight(seen) for seen in self.pictures]
        folder = self._saved("reward", model, engine)
        plain = _scores(folder, self.sequences, trust_remote_code=self._settings.trust_remote_code, pictures=seen)
        return judged("reward", largest(ours, plain))

    def _comparisons(self, shared: int) -> list[Comparison]:
        """Return pairs of all sequences; in one conversation those with the same pictures."""
        if self._sight is None:
            return [Comparison(shared, self.sequences, [(0, 1), (2, 3)], ["a", "b"])]
        return [Comparison(0, [self.sequences[i], self.sequences[i + 2]], [(0, 1)], [str(i)], self.pictures[i]) for i in (0, 1)]

    def _shared_prefix(self) -> Finding:
        """Find whether prefixes are shared, and the difference that sharing makes. Without sharing, training is only slower."""
        if not self._shares_prefix:
            return Finding("shared_prefix", note=OFF)
        beginning = self.sequences[0][: self._settings.max_length // 2]
        responses = [ids[: self._settings.max_length - len(beginning)] for ids in self.sequences]
        together = collate_branches([shared_row([[*beginning, *r] for r in responses])], pad_id=0, every_token=True).to(device())
        module = PolicyModule(self._load()).to(device()).eval()
        with torch.no_grad():
            shared = module(together).logprobs.float().cpu()
            alone = [module(collate_tokens([[*beginning, *r]], [len(beginning)], pad_id=0).to(device())) for r in responses]
        return judged("shared_prefix", largest(shared, torch.cat([output.logprobs.float().cpu() for output in alone])), note=ON)

    def _vllm(self) -> Finding:
        return self._sampled("vllm")

    def _pytorch(self) -> Finding:
        return self._sampled("pytorch")

    def _sampled(self, backend: RolloutBackend) -> Finding:
        """Return the largest difference of a rollout engine's log-probabilities, for its first model and after each update."""
        settings = self._settings
        rollouts = open_engine(
            backend,
            str(self._start),
            max_length=settings.max_length,
            dtype="float32",
            max_concurrent_sequences=8,
            threads=settings.threads,
            seed=settings.seed,
            trust_remote_code=settings.trust_remote_code,
            gpu_memory_fraction=settings.gpu_memory_fraction,
            prepared=None if self._sight is None else self._stored_picture(),
        )
        try:
            model = self._load()
            engine, differences = self._engine(PolicyModule(model)), [self._engine_difference(rollouts, self._start)]
            for version in range(1, UPDATES + 1):
                self._sft_step(engine)
                rollouts.load_weights(checkpoint_names(model, engine.state_dict()), version)
                differences.append(self._engine_difference(rollouts, self._saved(backend, model, engine)))
        finally:
            rollouts.close()
        return judged(backend, max(differences))

    def _stored_picture(self) -> str:
        """Write the picture that the trial sees as prepared data have it, and return the folder."""
        folder, file = self._scratch / "prepared", self._scratch / "picture.png"
        folder.mkdir(exist_ok=True)
        self._sight.read(PICTURE).save(file)
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        write_pictures(folder, [sha256], {sha256: file})
        self._stored = PICTURE._replace(sha256=sha256)
        return str(folder)

    def _show_pictures(self, token_id: int) -> None:
        """Begin every second sequence with a picture.

        Raises:
            ValueError: a picture alone is longer than the longest sequence.
        """
        longest = self._settings.max_length
        if self._seen + SHORTEST > longest:
            raise ValueError(
                f"model.max_length: expected room for a picture of {PICTURE.width} x {PICTURE.height} pixels, which takes {self._seen} "
                f"tokens, and a text, got {longest}; raise it, or lower the sizes in the processor's settings"
            )
        other = (token_id + 1) % VOCABULARY_LEAST
        texts = [[other if i == token_id else i for i in ids] for ids in self.sequences]
        self.pictures = [(PICTURE,) if number % 2 == 0 else () for number in range(len(texts))]
        seen = [[token_id] * (self._seen * len(shown)) for shown in self.pictures]
        self.sequences = [[*tokens, *ids][: max(longest, len(tokens) + SHORTEST)] for tokens, ids in zip(seen, texts, strict=True)]

    # Steps

    def _sft_step(self, engine: TrainEngine) -> None:
        starts = [max(len(ids) // 3, len(seen) * self._seen) for ids, seen in zip(self.sequences, self.pictures, strict=True)]
        examples = [Demonstration(i, s, pictures=p) for i, s, p in zip(self.sequences, starts, self.pictures, strict=True)]
        tokens = 4 * self._settings.max_length
        sizes = {"steps": UPDATES, "batch_size": len(examples), "pad_id": 0, "microbatch_tokens": tokens}
        phase = sft_phase("sft", examples, [], sight=self._sight, **sizes)
        phase.train_batch(engine, list(range(len(examples))))
        engine.step()

    def _dpo_step(self, engine: TrainEngine) -> None:
        beginning = tuple(self.sequences[0][: max(self._settings.max_length // 2, self._seen + 1)])
        room = self._settings.max_length - len(beginning)
        texts = [ids[len(seen) * self._seen :] for ids, seen in zip(self.sequences, self.pictures, strict=True)]
        sides = [Continuation(beginning, tuple(ids[-room:]), self.pictures[0]) for ids in texts]
        forward = ResponseForward(0, self._shares_prefix, 4 * self._settings.max_length, self._sight)
        objective = PairObjective(self._settings.dpo, forward, no_reference)
        objective.train_batch(engine, [Pair(sides[0], sides[1]), Pair(sides[2], sides[3])])
        engine.step()

    @cached_property
    def _shares_prefix(self) -> bool:
        """Whether the model shares prefixes. It is probed before training, since an engine leaves hooks on the model."""
        if self._settings.vision is not None:
            return False
        return shares_prefixes(self._load(), device=device(), max_length=self._settings.max_length)

    # Helpers

    def _load(self) -> PreTrainedModel:
        return load_language_model(self._start, trust_remote_code=self._settings.trust_remote_code, vision=self._settings.vision)

    def _engine(self, module: nn.Module) -> TrainEngine:
        width = module.model.config.get_text_config().hidden_size
        return TrainEngine(
            module,
            EngineSettings(
                learning_rate=0.1 / width**0.5 / 3,
                schedule=_constant,
                weight_decay=0.0,
                max_grad_norm=1.0,
                zero_stage=self._settings.zero_stage,
                offload_optimizer=False,
                offload_parameters=False,
                gradient_checkpointing=False,
                disable_dropout=True,
                dtype="float32",
                seed=self._settings.seed,
            ),
        )

    def _batch(self) -> TokenBatch:
        return self._with_pictures(collate_tokens(self.sequences, [1] * len(self.sequences), pad_id=0))

    def _with_pictures(self, batch: TokenBatch) -> TokenBatch:
        """Return a batch of all sequences on the device, with their pictures."""
        if self._sight is not None:
            batch = replace(batch, pictures=self._sight([picture for seen in self.pictures for picture in seen]))
        return batch.to(device())

    def _saved(self, column: str, model: PreTrainedModel, engine: TrainEngine) -> Path:
        folder = self._scratch / column
        save_model(model, engine.state_dict(), self._tokenizer, folder)
        return folder

    def _plain(self, folder: Path, **options: Any) -> torch.Tensor:
        if self._sight is not None:
            options |= {"pictures": [self._sight(seen) for seen in self.pictures]}
        return torch.cat(plain_logprobs(folder, self.sequences, trust_remote_code=self._settings.trust_remote_code, **options))

    def _difference_in_double(self, module: PolicyModule, folder: Path) -> float:
        """The largest difference in float64, which tells a mistake from rounding; infinite if the model can't be computed in float64.

        The engine of the module can't be used afterwards.
        """
        try:
            with torch.no_grad():
                ours = module.double()(self._batch()).logprobs.cpu()
            return largest(ours, self._plain(folder, dtype=torch.float64))
        except PROBE_ERRORS:
            return float("inf")

    def _engine_difference(self, rollouts: Any, folder: Path) -> float:
        """Return the largest difference on given and on sampled tokens. An engine reserves room for one more token than it is given."""
        given = [ids[: self._settings.max_length - 1] for ids in self.sequences]
        prompts = [ids[: max(1, len(ids) - SAMPLED)] for ids in given]
        sampling, options = SamplingSettings(SAMPLED, temperature=1.0), {"trust_remote_code": self._settings.trust_remote_code}
        asked: dict[str, Any] = {"stop_ids": (), "group_size": 2}
        if self._sight is not None:
            given = [ids for ids, seen in zip(given, self.pictures, strict=True) if not seen]  # the probe is of text
            asked["pictures"] = [(self._stored,) * len(seen) for seen in self.pictures]
        scored = torch.tensor([x for ids in given for x in rollouts.probe(ids)])
        text = None if self._sight is None else [{}] * len(given)
        plain = torch.cat(plain_logprobs(folder, given, pictures=text, **options))
        sampled = rollouts.generate(prompts, list(range(len(prompts))), sampling, **asked)
        pairs = [(number, sample) for number, samples in enumerate(sampled) for sample in samples]
        whole = [[*prompts[number], *sample.response_ids] for number, sample in pairs]
        seen = None if self._sight is None else [self._sight(self.pictures[number]) for number, _ in pairs]
        found = plain_logprobs(folder, whole, pictures=seen, leaves_undrawn=True, **options)
        of_sampled = torch.cat([one[len(prompts[number]) - 1 :] for (number, _), one in zip(pairs, found, strict=True)])
        own = torch.tensor([x for _, sample in pairs for x in sample.logprobs])
        return max(largest(scored, plain), largest(own, of_sampled))


def judged(column: str, difference: float, *, note: str | None = None) -> Finding:
    wrong = None if difference <= LIMIT else f"differs by {difference:.2g} from transformers' own, where at most {LIMIT:g} is right"
    return Finding(column, difference, wrong, note)


def refused(column: str, error: Exception) -> Finding:
    """Return a finding whose refusal is an exception's first line."""
    log.debug("%s", column, exc_info=error)
    reason = (str(error).strip() or "no reason given").splitlines()[0]
    return Finding(column, refusal=shown(reason if isinstance(error, ValueError) else f"{type(error).__name__}: {reason}", 600))


def largest(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """Return the largest difference; infinite if a number is missing."""
    difference = (ours - plain).abs().max()
    return float(difference) if bool(difference.isfinite()) else float("inf")


@torch.no_grad()
def plain_logprobs(
    folder: Path,
    sequences: list[list[int]],
    *,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    pictures: list[dict[str, torch.Tensor]] | None = None,
    leaves_undrawn: bool = False,
) -> list[torch.Tensor]:
    """Return the log-probability of each token but the first, by transformers alone: whole logits, one sequence at a time.

    Args:
        pictures: of a model that sees, the arguments of its forward pass for each sequence's pictures.
        leaves_undrawn: tokens that a model that sees never draws have no probability.
    """
    load_options = {"trust_remote_code": trust_remote_code, "dtype": dtype}
    kind = AutoModelForCausalLM if pictures is None else AutoModelForImageTextToText
    model = kind.from_pretrained(folder, **load_options).to(device()).eval()
    found = []
    for number, ids in enumerate(sequences):
        row = torch.tensor([ids], device=device())
        batch = TokenBatch(row, row > 0, pictures=pictures and pictures[number]).to(device())
        logits = model(input_ids=row, use_cache=False, **picture_arguments(model, batch)).logits[0, :-1].to(dtype)
        if leaves_undrawn and pictures is not None:
            logits[:, undrawn_ids(model.config)] = -torch.inf
        logprobs = logits.log_softmax(-1)
        found.append(logprobs.gather(-1, row[0, 1:, None]).squeeze(-1).cpu())
    return found


@torch.no_grad()
def _scores(
    folder: Path, sequences: list[list[int]], *, trust_remote_code: bool, pictures: list[dict[str, torch.Tensor]] | None = None
) -> torch.Tensor:
    """Return each sequence's score by transformers' own forward pass of it alone, with its pictures."""
    load_options = {"trust_remote_code": trust_remote_code, "dtype": torch.float32}
    kind = classifier(type(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)))
    model = kind.from_pretrained(folder, **load_options).to(device()).eval()
    found = []
    for number, ids in enumerate(sequences):
        row = torch.tensor([ids], device=device())
        batch = TokenBatch(row, row > 0, pictures=pictures and pictures[number]).to(device())
        found.append(model(input_ids=row, **picture_arguments(trunk(model), batch)).logits[0].float().cpu())
    return torch.cat(found)


def random_sequences(vocabulary: int, longest: int, *, seed: int) -> list[list[int]]:
    """Return four sequences of random ids, from the longest allowed to a short one. The lowest ids, often special tokens, are left out."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [longest, max(2, 2 * longest // 3), max(2, longest // 2), min(SHORTEST, longest)]
    return [torch.randint(min(8, vocabulary - 1), vocabulary, (n,), generator=generator).tolist() for n in lengths]


def _constant(_: int) -> float:
    return 1.0
