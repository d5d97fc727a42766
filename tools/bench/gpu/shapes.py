"""Makes inputs of the GPU check without a network: models with random weights, a tokenizer, rows of text.

python -m tools.bench.gpu.shapes FOLDER SHAPE:KIND ... writes models.
"""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_core.files import lock_file
from rlhf_core.planning.shape import ModelShape

Kind = Literal["language", "reward"]
TINY = "tiny"
# Architectures from Qwen2.5's config.json files (https://huggingface.co/Qwen), and a tiny one for CPUs.
SHAPES: dict[str, ModelShape] = {
    TINY: ModelShape(2, 64, 128, 2, 1, 32, 2048, tied=True),
    "0.5B": ModelShape(24, 896, 4864, 14, 2, 64, 151936, tied=True),
    "1.5B": ModelShape(28, 1536, 8960, 12, 2, 128, 151936, tied=True),
}
MAX_LENGTH = 4096
TOKENS = 1536  # vocabulary of the tokenizer: bytes, syllables and WORDS
WRITE_SECONDS = 240.0
# A fresh model gives all tokens similar probabilities, so that any two computations agree; another weight of its last norm spreads logits.
LOGITS_STD = 3.0  # standard deviation of logits over the vocabulary, as in trained models
INITIAL_STD = 0.02  # standard deviation of a fresh head's weights
MOST_NORM = 5.0  # the last state of a narrow model is mostly its token's embedding, and a tied head would repeat the token
_SYLLABLES = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
WORDS = sorted({" " + "".join(random.Random(i).choices(_SYLLABLES, k=2 + i % 2)) for i in range(600)})


@dataclass(frozen=True)
class Lengths:
    """The number of tokens in prompts and responses as (least, most), evenly spread, without the template's tokens."""

    prompt: tuple[int, int]
    response: tuple[int, int]


def shape_name(name: str) -> str:
    """The name of a shape in the figures."""
    return "a tiny shape" if name == TINY else f"Qwen2.5-{name} shape"


@contextmanager
def models_folder(given: Path | None, *, within: Path | None = None) -> Iterator[Path]:
    """The folder of --models, or a temporary one, within `within` if that is given."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=within) as folder:
        yield Path(folder)


def model_folder(name: str, models: Path, kind: Kind = "language") -> Path:
    """Return a Hugging Face folder with bfloat16 weights and a tokenizer; it is written if missing.

    Another process writes it, so that nothing stays in this one or on the GPU.

    Args:
        kind: language, or reward for the same trunk with a scalar head.
    Raises:
        RuntimeError: it could not be written in time.
    """
    folder = models / f"{name}-{kind}"
    if folder.exists():
        return folder
    command = [sys.executable, "-m", "tools.bench.gpu.shapes", str(models), f"{name}:{kind}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WRITE_SECONDS)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"model {name}: expected its folder within {WRITE_SECONDS:.0f} s, got none; look at the disk") from late
    if done.returncode:
        raise RuntimeError(f"model {name}: expected its folder, got exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return folder


def tokenizer():
    """A tokenizer for all shapes with about one token per word. Models have more rows than tokens, like Qwen's."""
    from rlhf_core.models.tokenizer import build_tokenizer

    return build_tokenizer((word * 3 for word in WORDS), vocab_size=TOKENS)


def demonstrations(count: int, lengths: Lengths, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with messages and response."""
    return [{"messages": ask(draw, lengths), "response": say(draw, lengths.response)} for draw in _draws(count, seed)]


def pairs(count: int, lengths: Lengths, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with id, messages, chosen and rejected; each conversation once."""
    return [
        {"id": str(i), "messages": ask(draw, lengths), "chosen": say(draw, lengths.response), "rejected": say(draw, lengths.response)}
        for i, draw in enumerate(_draws(count, seed))
    ]


def prompts(count: int, lengths: Lengths, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with messages only."""
    return [{"messages": ask(draw, lengths)} for draw in _draws(count, seed)]


def _draws(count: int, seed: int) -> Iterator[random.Random]:
    return (random.Random(f"{seed} {i}") for i in range(count))


def ask(draw: random.Random, lengths: Lengths) -> list[dict[str, str]]:
    return [{"role": "user", "content": say(draw, lengths.prompt)}]


def say(draw: random.Random, tokens: tuple[int, int]) -> str:
    return "".join(draw.choices(WORDS, k=draw.randint(*tokens)))


def configuration(name: str, tokenizer: Any) -> Any:
    """The shape's transformers configuration."""
    from transformers import Qwen2Config

    shape = SHAPES[name]
    return Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=shape.tied,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    )


def norm_weight(hidden: int) -> float:
    """The weight of the last norm with which a fresh head with `hidden` inputs gives logits of LOGITS_STD."""
    return min(MOST_NORM, LOGITS_STD / (INITIAL_STD * math.sqrt(hidden)))


def write(name: str, kind: Kind, models: Path) -> None:
    """Create a model on the fastest device, write it, and rename it when complete. If another process is writing it, wait."""
    folder, aside = models / f"{name}-{kind}", models / f"{name}-{kind}.part"
    if kind == "reward":
        write(name, "language", models)
    with (models / f"{name}-{kind}.lock").open("w") as lock:
        lock_file(lock, math.inf)
        if folder.exists():
            return
        _write(name, kind, models, aside)
        aside.rename(folder)


def _write(name: str, kind: Kind, models: Path, aside: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from rlhf_core.engines.deepspeed.engine import device
    from rlhf_core.models.build import new_scalar_model, save_model

    torch.manual_seed(0)
    own = tokenizer()
    if kind == "reward":
        model = new_scalar_model(models / f"{name}-language", own, trust_remote_code=False).to(torch.bfloat16)
    else:
        with device():
            model = AutoModelForCausalLM.from_config(configuration(name, own), dtype=torch.bfloat16)
        model.to("cpu")
        torch.nn.init.constant_(model.model.norm.weight, norm_weight(SHAPES[name].hidden))
    shutil.rmtree(aside, ignore_errors=True)
    save_model(model, model.state_dict(), own, aside)


if __name__ == "__main__":
    from rlhf_core.process import configure_process

    configure_process()
    for named in sys.argv[2:]:
        write(*named.split(":"), Path(sys.argv[1]))
