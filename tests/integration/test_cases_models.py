"""Odd models as strangers bring them: each is trained and saved with transformers' own numbers, or refused in one sentence before training.

The models are made by ../shared/cases/models, beside the checkout.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from hostile import is_clear
from small_workspace import ROOT
from tiny_models import settings, tiny_params

from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.model_check.check import run_trials
from rlhf_core.model_check.trial import plain_logprobs
from rlhf_core.models.build import new_language_model, save_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.tokenizer import encode_conversation, load_tokenizer, pretrained_tokenizer
from rlhf_core.trainers.sft.train import sft_phase
from rlhf_core.trainers.supervised.demonstrations import Demonstration

CASES = ROOT.parent / "shared/cases/models"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not CASES.is_dir(), reason="the makers of odd models are not here: ../shared/cases/models, beside the checkout"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("world"),
]
MESSAGES = [{"role": "user", "content": "What is the capital of France? " * 8}]
ANSWER = "It is Paris. The sky is blue."
TOLERANCE = 1e-4  # nats

# Models that are trained as transformers reads them.
RIGHT = [
    *("chatml", "gpt2base", "zephyr", "mistral", "no_metadata", "padded_vocab", "gen_config", "truncation_baked", "cleanup", "sharded"),
    *("rope_v4", "quantized_fp8", "negative_pad", "generation_in_config", "old_buffers", "further_tokens", "tied_twice"),
]
# Part of the sentence by which the others are refused.
REFUSED = {
    "unresized_template": "rows of its embedding, got <|im_start|> (600), <|im_end|> (601); resize it (resize_token_embeddings(602), then",
    "unresized_pad": "rows of its embedding, got [PAD] (600); resize it",
    "more_layers": "got 18 others, such as model.layers.2.input_layernorm.weight",
    "biases": "got 8 others, such as model.layers.0.self_attn.k_proj.bias",
    "tied_conflict": "expected lm_head.weight to equal model.embed_tokens.weight",
    "quantized_bnb": "expected weights in full precision, which can be trained, got some quantized by bitsandbytes; choose",
    "quantized_gptq": "got some quantized by gptq; choose",
    "quantized_text_part": "got some quantized by awq; choose",
    "module_prefix": "got none for lm_head.weight",
    "fewer_layers": "got none for model.layers.2.",
    "several_sequences": "expected one that can be loaded, got ValueError: Greedy methods",
    "wider_head": "of shape (900, 64), as config.json says, got",
}


def _made(folder: Path) -> None:
    for program in ("make_models.py", "bad_models.py"):
        command = [sys.executable, str(CASES / program), str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    for name, change in FURTHER.items():
        shutil.copytree(folder / "chatml", folder / name)
        change(folder / name)


def _write(folder: Path, name: str, **changes: object) -> None:
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | changes))


def _add_weights(folder: Path, **more: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | more, path, metadata={"format": "pt"})


def _tie_twice(folder: Path) -> None:
    _write(folder, "config.json", tie_word_embeddings=True)
    _add_weights(folder, **{"lm_head.weight": load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()})


FURTHER = {
    "negative_pad": lambda folder: _write(folder, "generation_config.json", pad_token_id=-1),
    "generation_in_config": lambda folder: _write(folder, "config.json", temperature=0.7, do_sample=False, repetition_penalty=1.1),
    "old_buffers": lambda folder: _add_weights(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}),
    "further_tokens": lambda folder: _add_weights(folder, **{"mtp.layers.0.proj.weight": torch.ones(4, 4)}),
    "tied_twice": _tie_twice,
    "quantized_text_part": lambda folder: _write(folder, "config.json", text_config={"quantization_config": {"quant_method": "awq"}}),
    "fewer_layers": lambda folder: _write(folder, "config.json", num_hidden_layers=3),
    "several_sequences": lambda folder: _write(folder, "generation_config.json", num_return_sequences=3),
    "wider_head": lambda folder: _write(folder, "config.json", vocab_size=900),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    _made(folder)
    return folder


def first_minute(folder: Path, scratch: Path) -> tuple[list[str], torch.Tensor, Path]:
    """What a run does first: the tokenizer, the model's check, two steps of SFT, saving.

    Returns:
        Refusals of the check's trials, log-probabilities after training, and the saved folder.
    """
    params = tiny_params(model__path=str(folder), rl__rollout__backend="pytorch")
    tokenizer = pretrained_tokenizer(params.model)
    tokenizer.save_pretrained(scratch / "tokenizer")
    _, findings = run_trials(params, scratch / "tokenizer", scratch / "trial")
    tokenizer = load_tokenizer(str(scratch / "tokenizer"), trust_remote_code=False)
    model = new_language_model(params.model, tokenizer, seed=0)
    ids, start = encode_conversation(tokenizer, MESSAGES, ANSWER)
    examples = [Demonstration(ids, start), Demonstration(ids[: len(ids) // 2], 1)]
    engine = TrainEngine(PolicyModule(model), settings(disable_dropout=True))
    phase = sft_phase("sft", examples, [], steps=2, batch_size=2, pad_id=tokenizer.pad_token_id, microbatch_tokens=1024)
    for _ in range(2):
        phase.train_batch(engine, [0, 1])
        engine.step()
    save_model(model, engine.state_dict(), tokenizer, scratch / "saved")
    engine.eval()
    with torch.no_grad():
        trained = torch.cat([PolicyModule(model)(batch).logprobs for batch in _batches(examples)])
    return [f"{f.column}: {f.refusal}" for f in findings if f.refusal], trained, scratch / "saved"


def _batches(examples: list[Demonstration]):
    from rlhf_core.models.batch import collate_tokens

    return [collate_tokens([e.ids], [1], pad_id=0) for e in examples]


@pytest.mark.parametrize("name", RIGHT)
def test_an_odd_model_is_checked_trained_and_saved_as_transformers_reads_it(name: str, models: Path, tmp_path: Path):
    refusals, trained, saved = first_minute(models / name, tmp_path)
    assert not refusals
    tokenizer = load_tokenizer(str(models / name), trust_remote_code=False)
    ids, _ = encode_conversation(tokenizer, MESSAGES, ANSWER)
    sequences = [ids, ids[: len(ids) // 2]]
    of_saved, of_given = (torch.cat(plain_logprobs(folder, sequences)) for folder in (saved, models / name))
    assert float((trained - of_saved).abs().max()) < TOLERANCE
    assert 1e-3 < float((trained - of_given).abs().max()) < 5.0  # two small steps away from the given model
    GenerationConfig.from_pretrained(saved).validate(strict=True)


@pytest.mark.parametrize("name", REFUSED)
def test_an_odd_model_is_refused_in_one_sentence_before_training(name: str, models: Path, tmp_path: Path):
    with pytest.raises(ValueError) as raised:
        first_minute(models / name, tmp_path)
    message = str(raised.value)
    assert is_clear(message) and "\n" not in message and REFUSED[name] in message and str(models / name) in message, message
    assert not (tmp_path / "saved").exists()


def test_every_case_is_expected_to_be_right_or_refused(models: Path):
    assert {folder.name for folder in models.iterdir()} == {*RIGHT, *REFUSED}


@pytest.mark.parametrize("name", ["truncation_baked", "cleanup"])
def test_a_tokenizer_with_settings_of_its_own_writes_the_same_tokens_and_text(name: str, models: Path):
    odd, plain = (load_tokenizer(str(models / folder), trust_remote_code=False) for folder in (name, "chatml"))
    ids, start = encode_conversation(odd, MESSAGES, text := "Well , I do n't know . Do you ?")
    assert (ids, start) == encode_conversation(plain, MESSAGES, text) and start > 60
    assert odd.decode(ids[start:], skip_special_tokens=True) == text
