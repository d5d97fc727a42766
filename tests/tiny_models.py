"""Real models and batches small enough for unit tests: a Llama of width 16 whose outputs differ clearly from token to token."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from clerk_params import CLERK_PARAMS
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.config import Params, parse_params, read_yaml, set_key
from rlhf_core.data.batching import microbatches
from rlhf_core.engines.deepspeed.engine import EngineSettings, TrainEngine, equal_count
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model, load_scalar_model, new_language_model, new_scalar_model, save_model, scalar_head
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.models.lora import weight_units
from rlhf_core.models.tokenizer import build_tokenizer
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.minibatch import Minibatch
from rlhf_core.trainers.supervised.demonstrations import Demonstration
from rlhf_core.types import Sequences, TrainBatch

torch.set_num_threads(1)

PAD = 0
MAX_LENGTH = 64
TEXTS = ["Please sort 4172.", "Certainly: 1247.", "Quick, give the largest of 309.", "Sorry, I can't help with that."] * 20
DEFAULTS = CLERK_PARAMS


def tiny_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    return build_tokenizer(TEXTS, vocab_size=vocab_size)


def tiny_params(**overrides: Any) -> Params:
    """The default params.yaml with a tiny model; keys are dotted, with __ for the dots."""
    tree = read_yaml(DEFAULTS)
    shape = {"hidden_size": 16, "intermediate_size": 32, "layers": 2, "heads": 2, "vocab_size": 300}
    for key, value in {"model.max_length": MAX_LENGTH, "model.architecture": shape, **overrides}.items():
        set_key(tree, key.replace("__", "."), value)
    return parse_params(tree)


def save_tiny_models(folder: Path, tokenizer: PreTrainedTokenizerFast, *, seed: int = 1, hidden_size: int = 16) -> tuple[Path, Path]:
    """Folders of a language model with two heads and of a reward model on the same trunk. vLLM's CPU build needs heads of 32."""
    shape = tiny_params(model__architecture__hidden_size=hidden_size).model
    return _save_with_reward_model(lively(new_language_model(shape, tokenizer, seed=seed)), tokenizer, folder)


def _save_with_reward_model(language_model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> tuple[Path, Path]:
    save_model(language_model, language_model.state_dict(), tokenizer, folder / "sft")
    reward_model = new_scalar_model(folder / "sft", tokenizer, trust_remote_code=False)
    torch.manual_seed(2)
    torch.nn.init.normal_(scalar_head(reward_model).weight, std=0.5)
    save_model(reward_model, reward_model.state_dict(), tokenizer, folder / "reward")
    return folder / "sft", folder / "reward"


def save_tiny_experts(folder: Path, tokenizer: PreTrainedTokenizerFast, family: str = "mixtral") -> Path:
    """Folder of a language model with two of four experts per token: of the family mixtral or qwen3_moe."""
    shape = {
        "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": MAX_LENGTH, "dtype": "float32",
    }  # fmt: skip
    torch.manual_seed(3)
    if family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(num_local_experts=4, **shape))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, moe_intermediate_size=16, head_dim=8, **shape))
    save_model(lively(model), model.state_dict(), tokenizer, folder)
    return folder


def save_tiny_dropout(folder: Path, tokenizer: PreTrainedTokenizerFast, family: str) -> tuple[Path, Path]:
    """Folders of a language model with dropout and of a reward model on its trunk: gpt2, with dropout everywhere, or llama, whose attention
    takes its rate as a number.
    """
    torch.manual_seed(4)
    if family == "gpt2":
        shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": MAX_LENGTH}
        rates = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, **shape, **rates))
    else:
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=MAX_LENGTH, attention_dropout=0.3, **shape))
    return _save_with_reward_model(lively(model), tokenizer, folder)


def lively(model: PreTrainedModel) -> PreTrainedModel:
    """Larger weights: fresh ones give nearly the same probability to every token, and hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10.0)
    return model


def settings(**changes: Any) -> EngineSettings:
    base: dict[str, Any] = {
        "learning_rate": 3e-3,
        "schedule": lambda step: 1.0 / (1 + step),
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "zero_stage": 0,
        "offload_optimizer": False,
        "offload_parameters": False,
        "gradient_checkpointing": False,
        "dtype": "float32",
        "seed": 0,
        "disable_dropout": False,
    }
    return EngineSettings(**{**base, **changes})


def policy_engine(folder: Path, **changes: Any) -> TrainEngine:
    return TrainEngine(PolicyModule(load_language_model(folder)), settings(**changes))


def scalar_engine(folder: Path, **changes: Any) -> TrainEngine:
    return TrainEngine(ScalarModule(load_scalar_model(folder)), settings(**changes))


def sequences(count: int, *, seed: int, shortest: int = 4, longest: int = 14) -> list[list[int]]:
    """Random token ids; no pad and no end token among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(5, 261, (n,), generator=generator).tolist() for n in lengths]


def negative_logprob_step(
    engine: TrainEngine, ids: list[list[int]], *, num_loss_tokens: int, microbatch_tokens: int
) -> tuple[float, float]:
    """One optimizer step on this rank's sequences, trained from their second token on. Returns the loss share and the gradient norm."""
    loss = 0.0
    for part in equal_count(microbatches([len(s) for s in ids], max_tokens=microbatch_tokens)):
        output = engine(collate_tokens([ids[i] for i in part], [1] * len(part), pad_id=PAD))
        share = -output.logprobs.sum() / num_loss_tokens
        engine.backward(share)
        loss += float(share.detach())
    return loss, engine.step()


def train_batch(rows: int = 8, *, seed: int = 0, unscored: tuple[int, ...] = ()) -> TrainBatch:
    """Random prompts (1 to 5 tokens) and responses (1 to 7 tokens) with made-up advantages; the mask of unscored rows is empty."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.tensor([1 + (3 * i) % 5 for i in range(rows)])
    responses = torch.tensor([1 + (4 * i) % 7 for i in range(rows)])
    prompt_mask = torch.arange(5) >= 5 - prompts[:, None]
    sampled = torch.arange(7) < responses[:, None]
    mask = sampled.clone()
    mask[list(unscored)] = False

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, 7, generator=generator)

    prompt_ids, response_ids = (torch.randint(5, 261, (rows, width), generator=generator) for width in (5, 7))
    ids = [[*p[of].tolist(), *r[kept].tolist()] for p, of, r, kept in zip(prompt_ids, prompt_mask, response_ids, sampled, strict=True)]
    return TrainBatch(
        sequences=Sequences.of(ids, prompts.tolist()),
        response_mask=mask,
        old_logprobs=-5.5 + noise(0.3),
        ref_logprobs=-5.5 + noise(0.3),
        old_values=noise(0.5),
        advantages=noise(1.0).where(mask, 0.0),
        returns=noise(1.0).where(mask, 0.0),
        importance_weights=(1 + noise(0.3)).abs().where(mask, 1.0),
    )


def whole(batch: TrainBatch, ptx: Sequence[Demonstration] = ()) -> Minibatch:
    """A batch, and demonstrations, as the only rank's share of an optimizer step."""
    return share(batch, list(ptx), rank=0, ranks=1)


def share(batch: TrainBatch, ptx: list[Demonstration], *, rank: int, ranks: int) -> Minibatch:
    """What one of several ranks gets of an optimizer step."""
    mask = batch.response_mask
    tokens = sum(d.num_trained for d in ptx)
    rows = list(range(len(batch)))[rank::ranks]
    return Minibatch(batch.select(rows), rows, int(mask.sum()), int(mask.any(1).sum()), ptx[rank::ranks], tokens)


def demonstrations(count: int, *, seed: int) -> list[Demonstration]:
    """Of every other one a token in the middle isn't trained on."""
    return [Demonstration(ids, 1 + k % 3, ((3, 4),) if k % 2 else ()) for k, ids in enumerate(sequences(count, seed=seed))]


def rl_job(sft: Path, reward: Path, **overrides: Any) -> RlJob:
    params = tiny_params(**{"rl.rollout.max_new_tokens": 8, "rl.weight_decay": 0.1, "rl.warmup_steps": 3, "rl.steps": 60, **overrides})
    scorers = {s.name: s.path or str(reward) for s in params.rl.reward.scorers if s.kind == "reward_model"}
    teachers = [*params.teachers.values()]
    return RlJob(
        seed=0, model=params.model, train_on=params.sft.train_on, train_on_thoughts=params.sft.train_on_thoughts, rl=params.rl,
        threads=1, prepared="", sft_model=str(sft),
        reward_model=str(reward), scorer_models=scorers, teacher_models=teachers, source_judges={}, work="", checkpoints=StoreSettings(),
        output="", timings="",
    )  # fmt: skip


def merged_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """All of `weight_units`."""
    return {name: tensor for unit in weight_units(module) for name, tensor in unit.weights().items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Over all weights; the names must be the same."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a) if a else math.nan


def assert_weights_agree(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *, step: float = 3e-3) -> None:
    """But for rounding: 999 of 1,000 numbers to a hundredth of an optimizer step.

    Adam and Lion divide a gradient by its own size, so that one near 0, whose sign rounding decides, moves its weight by a whole step.
    """
    assert a.keys() == b.keys() and a
    apart = torch.cat([(a[name].double() - b[name].double()).abs().flatten() for name in a])
    beyond = int((apart > step / 100).sum())
    assert beyond <= len(apart) / 1000, (
        f"{beyond} of {len(apart)} numbers differ by more than {step / 100}, at most by {float(apart.max())}"
    )


def tensor_bytes() -> int:
    """Of all tensors' storages."""
    gc.collect()
    storages = [o.untyped_storage() for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
