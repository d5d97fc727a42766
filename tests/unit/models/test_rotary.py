"""Rotary embeddings whose frequencies follow the longest sequence of a batch: a sequence's numbers don't depend on what is beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf_core.config import parse_params, read_yaml, set_key
from rlhf_core.models.attention import fix_frequencies
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model, new_language_model, save_model
from rlhf_core.models.decoding import HuggingFaceDecoder
from rlhf_core.models.forward import PolicyModule
from tests.model_families import OTHERS
from tests.tiny_models import DEFAULTS

BORDER, LONGEST = 32, 60
GENERATOR = torch.Generator().manual_seed(0)
SHORT, LONG = (torch.randint(5, 261, (n,), generator=GENERATOR).tolist() for n in (20, LONGEST))
SWITCHING = pytest.mark.parametrize("name", ["phi3_longrope", "llama_dynamic"])


def saved(name: str, tokenizer, folder: Path) -> Path:
    model = OTHERS[name]()
    save_model(model, model.state_dict(), tokenizer, folder)
    return folder


def logprobs(model, *sequences: list[int]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        found = PolicyModule(model)(collate_tokens(list(sequences), [1] * len(sequences), pad_id=0)).logprobs
    return found.split([len(ids) - 1 for ids in sequences])


@SWITCHING
@torch.no_grad()
def test_with_a_long_limit_all_sequences_have_the_frequencies_of_the_longest(name: str, tokenizer, tmp_path: Path):
    tree = read_yaml(DEFAULTS)
    for key, value in {"model.path": str(saved(name, tokenizer, tmp_path / "base")), "model.max_length": LONGEST}.items():
        set_key(tree, key, value)
    model = new_language_model(parse_params(tree).model, tokenizer, seed=0)
    short, long = logprobs(model, SHORT, LONG)
    torch.testing.assert_close(short, logprobs(model, SHORT)[0], rtol=0, atol=1e-5)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = own(torch.tensor([LONG])).logits[0].log_softmax(-1)[torch.arange(LONGEST - 1), torch.tensor(LONG[1:])]
    torch.testing.assert_close(long, expected, rtol=0, atol=1e-4)
    save_model(model, model.state_dict(), tokenizer, tmp_path / "trained")
    torch.testing.assert_close(logprobs(load_language_model(tmp_path / "trained"), SHORT)[0], short, rtol=0, atol=1e-5)


@SWITCHING
@torch.no_grad()
def test_with_a_limit_below_the_border_the_model_is_as_it_was(name: str, tokenizer, tmp_path: Path):
    own = OTHERS[name]()
    model = load_language_model(saved(name, tokenizer, tmp_path), max_length=BORDER)
    assert model.config.rope_parameters == own.config.rope_parameters
    expected = own(torch.tensor([SHORT])).logits[0].log_softmax(-1)[torch.arange(len(SHORT) - 1), torch.tensor(SHORT[1:])]
    for found in (logprobs(model, SHORT), logprobs(model, SHORT, LONG[:BORDER])):
        torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5)


@SWITCHING
def test_a_sequence_beyond_the_border_is_refused_where_frequencies_change_there(name: str):
    model = OTHERS[name]()
    with pytest.raises(ValueError, match=f"sequences of at most {BORDER} tokens.*got {LONGEST}; set model.max_length to {BORDER}"):
        logprobs(model, SHORT, LONG)
    with pytest.raises(ValueError, match=f"sequences of at most {BORDER} tokens"):
        HuggingFaceDecoder(model).begin([SHORT], copies=1, max_new_tokens=20, max_length=LONGEST)


def test_sequences_that_have_ended_do_not_push_others_over_the_border():
    """A row at its limit may stay in the batch, and go on, while others grow."""
    model, decoder = OTHERS["phi3_longrope"](), HuggingFaceDecoder(OTHERS["phi3_longrope"]())
    prompts, added = [LONG[: BORDER - 1], LONG[:4]], LONG[40:46]
    with torch.inference_mode():
        decoder.begin(prompts, copies=1, max_new_tokens=6, max_length=BORDER)
        for token in added:
            logits = decoder.step(torch.tensor([token, token]))
        expected = model(torch.tensor([prompts[1] + added])).logits[0, -1]
    torch.testing.assert_close(logits[1], expected, rtol=0, atol=1e-4)


def test_a_variant_that_can_not_be_fixed_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}
    config = LlamaConfig(max_position_embeddings=BORDER, rope_parameters=rope)
    fix_frequencies(config, BORDER)
    with pytest.raises(ValueError, match=rf"model\.max_length: expected at most {BORDER} with a dynamic rotary embedding .*; lower it"):
        fix_frequencies(config, LONGEST)
