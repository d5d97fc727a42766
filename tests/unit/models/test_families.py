"""Every family of models against transformers' plain forward of each sequence alone: what our wrappers, adapters, folders and decoders say.

Sequences are longer than every window and chunk. Log-probabilities may differ by 1e-4, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from whole_matrix import cells

from rlhf_core.config import LoraConfig
from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.models.batch import Branches, TokenBatch, collate_branches, collate_tokens
from rlhf_core.models.build import load_language_model, load_scalar_model, new_scalar_model, save_model, scalar_head
from rlhf_core.models.decoding import HuggingFaceDecoder
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.probe import can_share_prefixes
from tests.model_families import FAMILIES, OTHERS
from tests.tiny_models import merged_state_dict, settings

LENGTHS = (60, 37, 52, 20)
LIMITED = {"phi3_longrope": 32, "llama_dynamic": 32}  # tokens, with one set of frequencies
# They have layers whose state sees all before it.
STATEFUL = {"falcon_h1", "jamba", "bamba", "recurrent_gemma", "mamba2", "qwen3_next", "qwen3_5"}
UNSHARED = STATEFUL | {"falcon_rw", "gpt_neo"}  # ALiBi takes positions from the mask; GPT-Neo has masks of its own
IN_DETAIL = ("llama_tied", "qwen3", "gemma3", "mixtral", "gpt_oss", "falcon_h1", "qwen3_next", "qwen3_5")
FALCONS = ("falcon_7b", "falcon_40b", "falcon_rw")  # whose linear layers are of a class of their own
QUICK = ("llama_tied", "qwen3", "gemma3", "gpt2", "mixtral", "deepseek_v3", "falcon_7b", "jamba")  # every kind of layer
ADAPTERS = LoraConfig(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear")


def made(name: str) -> tuple[PreTrainedModel, list[list[int]]]:
    """A model and random sequences for it."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(5, 261, (n,), generator=generator).tolist() for n in LENGTHS]
    return (FAMILIES | OTHERS)[name](), [ids[: LIMITED.get(name)] for ids in sequences]


def logprobs_alone(model: PreTrainedModel, ids: list[int], start: int = 1) -> torch.Tensor:
    """Of the tokens from `start` on, by the model's own forward."""
    logprobs = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return logprobs[torch.arange(start - 1, len(ids) - 1), torch.tensor(ids[start:])]


def logprobs_of(model: PreTrainedModel, sequences: list[list[int]], **how) -> torch.Tensor:
    """Of all tokens but the first, by the wrapper on one padded batch."""
    return PolicyModule(model)(collate_tokens(sequences, [1] * len(sequences), pad_id=0), **how).logprobs


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert float(expected.detach().std()) > 0.3  # they differ enough for a mix-up to show


@pytest.fixture
def folder(tmp_path: Path, tokenizer) -> Iterator:
    def saved(model: PreTrainedModel, state_dict: dict | None = None) -> Path:
        save_model(model, model.state_dict() if state_dict is None else state_dict, tokenizer, tmp_path / "model")
        return tmp_path / "model"

    return saved


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
@torch.no_grad()
def test_log_probabilities_are_those_of_each_sequence_alone(name: str):
    model, sequences = made(name)
    output = PolicyModule(model)(collate_tokens(sequences, [1] * len(sequences), pad_id=0), with_entropy=True, top_k=300)
    expected = torch.cat([logprobs_alone(model, ids) for ids in sequences])
    assert_close(output.logprobs, expected)
    assert_close(output.sampler_logprobs, expected)
    entropy = [torch.distributions.Categorical(logits=model(torch.tensor([ids])).logits[0, :-1]).entropy() for ids in sequences]
    torch.testing.assert_close(output.entropy, torch.cat(entropy), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
@torch.no_grad()
def test_shared_rows_say_what_whole_sequences_do_wherever_sharing_is_on(name: str):
    model, (longest, *others) = made(name)
    assert can_share_prefixes(model, max_length=len(longest)) == (name not in UNSHARED)
    if name in UNSHARED:
        return
    half = len(longest) // 2
    prefix, ends = longest[:half], [ids[: len(longest) - half] for ids in others]
    batch = collate_branches([Branches(prefix, ends), Branches(prefix, ends[:1])], pad_id=0, every_token=True)
    expected = [logprobs_alone(model, [*prefix, *end], half) for end in (*ends, ends[0])]
    assert_close(PolicyModule(model)(batch).logprobs, torch.cat(expected))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss", "phi3_window", "qwen2_window", "cohere2", "llama4"])
@pytest.mark.parametrize("wrong", [10**6, 15, 17], ids=["none", "one less", "one more"])
def test_sharing_with_another_window_is_found_out(name: str, wrong: int, monkeypatch: pytest.MonkeyPatch):
    model, _ = made(name)
    assert can_share_prefixes(model)
    monkeypatch.setattr("rlhf_core.models.attention.window_size", lambda config, kind: wrong)
    monkeypatch.setattr("rlhf_core.models.probe.longest_reach", lambda config: 16)
    assert not can_share_prefixes(model)


@pytest.mark.parametrize("name", IN_DETAIL)
def test_gradients_are_those_of_each_sequence_alone(name: str):
    model, sequences = made(name)
    weights = torch.linspace(0.1, 1.0, sum(len(ids) - 1 for ids in sequences))
    (torch.cat([logprobs_alone(model, ids) for ids in sequences]) * weights).sum().backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    (logprobs_of(model, sequences) * weights).sum().backward()
    for key, parameter in model.named_parameters():
        if key in expected:
            limit = 1e-4 * float(expected[key].abs().max())
            torch.testing.assert_close(parameter.grad, expected[key], rtol=0, atol=limit, msg=lambda message, key=key: f"{key}: {message}")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "falcon_h1", "modernbert_decoder"])
def test_sharded_weights_give_the_same_numbers(world, name: str):
    model, sequences = made(name)
    with torch.no_grad():
        expected = logprobs_of(model, sequences)
    engine = TrainEngine(PolicyModule(made(name)[0]), settings(zero_stage=3))
    engine.eval()
    found = engine(collate_tokens(sequences, [1] * len(sequences), pad_id=0)).logprobs
    assert_close(found.detach(), expected)


def test_masks_that_count_columns_are_never_shared_even_below_their_window():
    model, _ = made("gpt_neo")
    assert not can_share_prefixes(model, max_length=8)


@pytest.mark.parametrize("name", cells([*FAMILIES, *FALCONS, "jamba"], QUICK))
@torch.no_grad()
def test_a_folder_holds_the_model_and_what_adapters_made_of_it(name: str, folder):
    model, sequences = made(name)
    before = logprobs_of(model, sequences)
    assert torch.equal(logprobs_of(load_language_model(folder(model)), sequences), before)
    add_adapters(model, ADAPTERS, seed=0)
    assert_close(logprobs_of(model, sequences), before)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            parameter.normal_(std=0.05)
    adapted = logprobs_of(model, sequences)
    assert float((adapted - before).abs().max()) > 0.1
    plain, _ = made(name)
    assert_close(logprobs_of(load_language_model(folder(plain, merged_state_dict(model))), sequences), adapted)


@pytest.mark.parametrize("name", cells([*FAMILIES, "jamba", "cohere2"], QUICK))
@torch.no_grad()
def test_a_scalar_head_on_the_trunk_reads_the_chosen_tokens(name: str, folder, tokenizer):
    model, sequences = made(name)
    scalar = new_scalar_model(folder(model), tokenizer, trust_remote_code=False)
    batch = collate_tokens(sequences, [len(ids) - 1 for ids in sequences], pad_id=0)
    assert not ScalarModule(scalar)(batch).any()
    torch.nn.init.normal_(scalar_head(scalar).weight, std=0.5)
    found = ScalarModule(scalar)(batch)
    assert_close(found, torch.cat([scalar(input_ids=torch.tensor([ids])).logits[0] for ids in sequences]))
    assert torch.equal(ScalarModule(load_scalar_model(folder(scalar)))(batch), found)


@pytest.mark.parametrize("name", [*FAMILIES, "jamba", "bamba", "qwen2_window", "cohere2", "llama4", "phi3_longrope"])
@torch.inference_mode()
def test_token_by_token_the_model_says_what_it_says_of_whole_sequences(name: str):
    model, sequences = made(name)
    decoder, new = HuggingFaceDecoder(model), 8
    grown = [ids[:cut] for ids, cut in zip(sequences, (24, 20, 13, 3), strict=True) for _ in range(2)]
    logits = decoder.begin(grown[::2], copies=2, max_new_tokens=new, max_length=32)
    generator = torch.Generator().manual_seed(1)
    for position in range(new):
        if position == 4:
            kept = [0, 3, 4, 7]
            decoder.keep(torch.tensor(kept))
            grown, logits = [grown[row] for row in kept], logits[kept]
        ids = torch.randint(5, 261, (len(grown),), generator=generator)
        logits = decoder.step(ids)
        grown = [[*so_far, token] for so_far, token in zip(grown, ids.tolist(), strict=True)]
    expected = torch.stack([model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in grown])
    assert_close(logits.log_softmax(-1), expected)


@torch.no_grad()
def test_left_padded_rows_keep_their_windows():
    from rlhf_core.gate.probes import left_padded

    model, sequences = made("gemma3")
    batch = left_padded(sequences, pad_id=0, width=70)
    last = TokenBatch(batch.input_ids, batch.selected, batch.position_ids, batch.visible)
    expected = torch.cat([logprobs_alone(model, ids, len(ids) - 1) for ids in sequences])
    assert_close(PolicyModule(model)(last).logprobs, expected)
