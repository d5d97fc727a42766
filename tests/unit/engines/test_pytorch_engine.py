"""PyTorch's rollouts against the trainer's own modules on the same weights: both decoders, every setting of the sampler."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from rlhf_core.engines.rollout.pytorch_engine import PROMPT_TOKENS, PytorchEngine, sample_tokens
from rlhf_core.engines.rollout.requests import Sample, SamplingSettings, request_seeds
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model, save_model
from rlhf_core.models.cpu.decoder import LlamaDecoder
from rlhf_core.models.decoding import HuggingFaceDecoder
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.weights import checkpoint_names, read_state_dict, with_weights
from tests.model_families import OTHERS
from tests.tiny_models import save_tiny_experts, tiny_tokenizer

EOS, NEW, LONGEST = 1, 12, 48
PROMPTS = [[5, 9, 33, 60], [7] * 11, [90, 3], [12, 13, 14, 15, 16, 17, 18], *([40 + i, 8, 22 + i] for i in range(12))]
SEEDS = request_seeds(3, 0, len(PROMPTS))
PLAIN = SamplingSettings(NEW, 1.0)


def llama(folder: Path, seed: int = 0, *, tied: bool = False, key_heads: int = 4) -> Path:
    """Random, with logits wide enough that wrong weights show, and an end token that comes up."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=key_heads,
        max_position_embeddings=LONGEST, tie_word_embeddings=tied, eos_token_id=EOS, pad_token_id=0, initializer_range=0.3, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # the norms' weights count too
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    if not tied:
        model.lm_head.weight.data[EOS] *= 2
    save_model(model, model.state_dict(), tiny_tokenizer(), folder)
    return folder


def engine(folder: Path, **changes) -> PytorchEngine:
    settings = {"max_length": LONGEST, "dtype": "float32", "kv_cache_gib": 1, "max_concurrent_sequences": 64, "threads": 1}
    settings["gpu_memory_fraction"] = 0.5
    return PytorchEngine(str(folder), trust_remote_code=False, **settings | changes)


def sliding_windows(folder: Path) -> Path:
    """Attention that sees eight tokens, so that a cache of all of them would show."""
    torch.manual_seed(6)
    config = MistralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=LONGEST, sliding_window=8, eos_token_id=EOS, pad_token_id=0, initializer_range=0.3, dtype="float32",
    )  # fmt: skip
    model = MistralForCausalLM(config)
    save_model(model, model.state_dict(), tiny_tokenizer(), folder)
    return folder


def convolutions(folder: Path) -> Path:
    """A cache of other states than keys and values."""
    torch.manual_seed(6)
    config = Lfm2Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["conv", "full_attention"], eos_token_id=EOS, pad_token_id=0, initializer_range=0.3, dtype="float32",
    )  # fmt: skip
    model = Lfm2ForCausalLM(config)
    save_model(model, model.state_dict(), tiny_tokenizer(), folder)
    return folder


MODELS = {
    "convolutions": convolutions,
    "sliding_windows": sliding_windows,
    "own_head": llama,
    "tied_head": lambda folder: llama(folder, tied=True),
    "shared_keys": lambda folder: llama(folder, key_heads=2),
    "mixtral": lambda folder: save_tiny_experts(folder, tiny_tokenizer()),
    "qwen3_moe": lambda folder: save_tiny_experts(folder, tiny_tokenizer(), "qwen3_moe"),
}


@pytest.fixture(scope="module", params=[*MODELS, "huggingface"])
def drawing(request, tmp_path_factory) -> tuple[PytorchEngine, PreTrainedModel]:
    """An engine and the trainer's model; "huggingface": a plain Llama without the decoder that is made for it."""
    folder = MODELS.get(request.param, llama)(tmp_path_factory.mktemp(request.param))
    made = engine(folder)
    if request.param == "huggingface":
        made._decoder = HuggingFaceDecoder(made._model)
    expected = LlamaDecoder if request.param in ("own_head", "tied_head", "shared_keys") else HuggingFaceDecoder
    assert type(made._decoder) is expected
    return made, load_language_model(folder)


def sample(made: PytorchEngine, settings: SamplingSettings = PLAIN, *, group_size: int = 2, rows: slice = slice(None)):
    return made.generate(PROMPTS[rows], SEEDS[rows], settings, stop_ids=(EOS,), group_size=group_size)


def flat(groups: list[list[Sample]]) -> list[tuple[list[int], Sample]]:
    return [(prompt, s) for prompt, group in zip(PROMPTS, groups, strict=True) for s in group]


@torch.no_grad()
def differences(model: PreTrainedModel, groups: list[list[Sample]], settings: SamplingSettings) -> list[torch.Tensor]:
    """Of each response: the engine's minus the trainer's log-probabilities."""
    pairs = flat(groups)
    batch = collate_tokens([[*p, *s.response_ids] for p, s in pairs], [len(p) for p, _ in pairs], pad_id=0)
    output = PolicyModule(model)(batch, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    theirs = output.logprobs if output.sampler_logprobs is None else output.sampler_logprobs
    sizes = [len(s.response_ids) for _, s in pairs]
    return [torch.tensor(s.logprobs) - t for (_, s), t in zip(pairs, theirs.split(sizes), strict=True)]


def largest(found: list[torch.Tensor]) -> float:
    return max(float(d.abs().max()) for d in found if len(d))


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.7}, {"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.8, "top_k": 9, "temperature": 0.7}], ids=str
)
def test_log_probabilities_are_the_trainers(drawing, changes):
    made, model = drawing
    settings = replace(PLAIN, **changes)
    groups = sample(made, settings)
    assert largest(differences(model, groups, settings)) < 1e-4
    assert largest(differences(model, groups, replace(PLAIN, temperature=1.3))) > 0.05  # the comparison can tell


def test_before_the_fewest_tokens_the_end_is_forbidden_and_only_there_log_probabilities_differ(drawing):
    made, model = drawing
    groups = sample(made, replace(PLAIN, min_new_tokens=6))
    assert min(len(s.response_ids) for _, s in flat(groups)) >= 6
    found = differences(model, groups, PLAIN)
    assert largest([d[6:] for d in found]) < 1e-4 < 1e-3 < largest([d[:6] for d in found])


def test_each_of_the_stop_tokens_ends_a_response_and_none_comes_before_the_fewest_tokens(drawing):
    made, _ = drawing
    ((other, _),) = Counter(s.response_ids[2] for _, s in flat(sample(made)) if len(s.response_ids) > 3).most_common(1)
    ends = (EOS, other)
    drawn = [s for group in made.generate(PROMPTS, SEEDS, PLAIN, stop_ids=ends, group_size=2) for s in group]
    assert all(s.finished == (s.response_ids[-1] in ends) and not {*s.response_ids[:-1]} & {*ends} for s in drawn)
    assert any(s.response_ids[-1] == other for s in drawn)
    late = made.generate(PROMPTS, SEEDS, replace(PLAIN, min_new_tokens=6), stop_ids=ends, group_size=2)
    assert not any({*s.response_ids[:6]} & {*ends} for group in late for s in group)


@torch.no_grad()
def part_at_a_border(model: PreTrainedModel, prompt: list[int], numbers: torch.Tensor, drawn: Sample, other: Sample) -> bool:
    """Whether two responses are the same up to one of the numbers [tokens] that lies, within rounding, on the border of two tokens."""
    pairs = zip(drawn.response_ids, other.response_ids, strict=False)
    position, (low, high) = next((i, sorted(pair)) for i, pair in enumerate(pairs) if len(set(pair)) > 1)
    logits = model(torch.tensor([[*prompt, *drawn.response_ids[:position]]])).logits[0, -1]
    borders = logits.double().softmax(-1).cumsum(-1)[low:high]
    return float((borders - numbers[position]).abs().max()) < 1e-5


def test_the_seed_alone_decides_what_is_drawn(drawing):
    """But for rounding, which depends on what is drawn beside it."""
    made, model = drawing
    together = sample(made)
    assert sample(made) == together
    apart = 0
    for i, prompt in enumerate(PROMPTS):
        (alone,) = sample(made, rows=slice(i, i + 1))
        numbers = np.random.default_rng(SEEDS[i]).random((len(alone), NEW))
        for drawn, other, of_response in zip(alone, together[i], numbers, strict=True):
            if drawn.response_ids != other.response_ids:
                assert part_at_a_border(model, prompt, of_response, drawn, other)
                apart += 1
    assert apart <= 3  # of 32
    assert sum(a.response_ids != b.response_ids for a, b in together) >= len(PROMPTS) - 1


def test_temperature_zero_takes_the_most_likely_token(drawing):
    made, model = drawing
    for prompt, answer in flat(sample(made, PLAIN.greedy, group_size=1)):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.response_ids]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.response_ids
        assert logits.log_softmax(-1).amax(-1).tolist() == pytest.approx(answer.logprobs, abs=1e-4)


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, {"top_k": 5}], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_of_logits_that_are_not_finite_the_log_probability_is_not_a_number(value, changes):
    logits = torch.zeros(2, 7)
    logits[0, 3] = value
    ids, logprobs = sample_tokens(logits, torch.tensor([0.5, 0.5]).double(), replace(PLAIN, **changes))
    assert logprobs[0].isnan() and logprobs[1].isfinite() and (ids < 7).all()


def test_a_model_whose_states_are_not_in_its_cache_is_refused(tmp_path):
    model = OTHERS["recurrent_gemma"]()
    save_model(model, model.state_dict(), tiny_tokenizer(), tmp_path)
    with pytest.raises(ValueError, match=r"rollout\.backend: expected vllm with RecurrentGemmaForCausalLM, got pytorch"):
        engine(tmp_path)


def test_a_response_ends_with_the_end_token_or_is_truncated(tmp_path):
    groups = sample(engine(llama(tmp_path)), group_size=8)
    for _, s in flat(groups):
        assert len(s.logprobs) == len(s.response_ids) <= NEW
        assert s.finished == (s.response_ids[-1] == EOS)
        assert s.finished or len(s.response_ids) == NEW
        assert EOS not in s.response_ids[:-1]
    assert {s.finished for _, s in flat(groups)} == {True, False}


def test_prompt_and_response_are_no_longer_than_the_model(tmp_path):
    made = engine(llama(tmp_path), max_length=14)
    for prompt, s in flat(sample(made, replace(PLAIN, min_new_tokens=NEW))):
        assert len(s.response_ids) == min(NEW, 14 - len(prompt))


@pytest.mark.parametrize("limit", [1, 6, 10])
def test_batches_change_nothing(tmp_path, limit):
    folder = llama(tmp_path)
    whole, parts = sample(engine(folder)), sample(engine(folder, max_concurrent_sequences=limit))
    assert [[s.response_ids for s in group] for group in parts] == [[s.response_ids for s in group] for group in whole]


def test_the_cache_bounds_a_batch(tmp_path):
    made = engine(llama(tmp_path))
    made._cache_bytes = lambda: 2 * 2 * 4 * 8 * 4 * 20 * 7  # keys and values, layers, heads, width, bytes, tokens, sequences
    assert made._batch_size(12, 8, 2) == 3
    assert made._batch_size(PROMPT_TOKENS, 8, 1) == 1


def test_prompts_of_one_token(drawing):
    made, model = drawing
    groups = made.generate([[9], [23]], SEEDS[:2], PLAIN, stop_ids=(EOS,), group_size=2)
    with torch.no_grad():
        first = [model(torch.tensor([[prompt]])).logits[0, -1].log_softmax(-1) for prompt in (9, 23)]
    for logprobs, group in zip(first, groups, strict=True):
        assert [s.logprobs[0] for s in group] == pytest.approx([float(logprobs[s.response_ids[0]]) for s in group], abs=1e-5)


@pytest.mark.parametrize("prompts", [[[5, 6], [7] * LONGEST], [[7] * (LONGEST + 3)]])
def test_a_prompt_without_room_for_a_response_is_refused(tmp_path, prompts):
    with pytest.raises(ValueError, match=r"prompts: expected fewer tokens than model.max_length=48, got (48|51)"):
        engine(llama(tmp_path)).generate(prompts, [1] * len(prompts), PLAIN, stop_ids=(EOS,), group_size=2)


def test_nothing_is_kept_between_calls(tmp_path):
    made = engine(llama(tmp_path))
    sample(made)
    assert made._decoder._prompts == [] and made._decoder._own == []


def test_in_bfloat16_positions_are_as_exact_as_the_trainers(tmp_path):
    """Rounded rotary frequencies would be 0.1 apart here after some hundred tokens."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=1024, eos_token_id=EOS, pad_token_id=0, initializer_range=0.3, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    save_model(model, model.state_dict(), tiny_tokenizer(), tmp_path)
    made = engine(tmp_path, dtype="bfloat16", max_length=1024)
    made.load_weights(model.bfloat16().state_dict(), 1)
    assert made._model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {p.dtype for p in made._model.parameters()} == {torch.bfloat16}


def test_a_renewed_model_shares_no_memory_with_what_it_was_given(tmp_path):
    model = load_language_model(save_tiny_experts(tmp_path, tiny_tokenizer()))
    given = checkpoint_names(model, model.state_dict())
    renewed = with_weights(model, given)
    assert renewed is not model
    assert not {p.data_ptr() for p in renewed.parameters()} & {t.data_ptr() for t in given.values()}


def test_no_prompt_no_sample(tmp_path):
    assert engine(llama(tmp_path)).generate([], [], PLAIN, stop_ids=(EOS,), group_size=2) == []


def test_a_stop_string_ends_a_response_and_stays_in_it(tmp_path):
    made, tokenizer = engine(llama(tmp_path), reads_text=True), tiny_tokenizer()

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    settings = replace(PLAIN, max_new_tokens=24)
    free = [s.response_ids for _, s in flat(sample(made, settings))]
    letters = Counter(letter for ids in free for letter in set(text(ids[:3])) if letter.isalnum())
    ((letter, _),) = letters.most_common(1)
    stopped = [s for _, s in flat(sample(made, replace(settings, stop=(letter,))))]
    late = [s for _, s in flat(sample(made, replace(settings, stop=(letter,), min_new_tokens=4)))]
    for before, s in zip(free, stopped, strict=True):
        assert before[: len(s.response_ids)] == s.response_ids
        assert letter not in text(s.response_ids[:-1])
        assert s.finished == (letter in text(s.response_ids) or s.response_ids[-1] == EOS)
    assert any(letter in text(s.response_ids) and len(s.response_ids) < 4 for s in stopped)
    assert min(len(s.response_ids) for s in late) >= 4
    assert any(letter in text(s.response_ids[:4]) for s in late)
    for s in late:  # what came before doesn't count afterwards either
        message = text(s.response_ids)[len(text(s.response_ids[:4])) :]
        assert letter not in message[:-1] and s.finished == (message.endswith(letter) or s.response_ids[-1] == EOS)


@pytest.mark.parametrize("name", MODELS)
def test_new_weights_replace_the_old_ones(tmp_path, name):
    folder = MODELS[name](tmp_path / "model")
    made, model = engine(folder), load_language_model(folder)
    before = sample(made)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert made.load_weights(checkpoint_names(model, model.state_dict()), 7) == made.version == 7
    after = sample(made)
    assert largest(differences(model, after, PLAIN)) < 1e-4
    assert largest(differences(model, before, PLAIN)) > 0.05
    made.load_weights(read_state_dict(folder), 8)
    again = sample(made)
    assert [[s.response_ids for s in group] for group in again] == [[s.response_ids for s in group] for group in before]
    assert largest(differences(load_language_model(folder), again, PLAIN)) < 1e-4


@pytest.mark.parametrize("change", ["one less", "one more", "turned"])
def test_weights_of_another_model_are_refused(tmp_path, change):
    made = engine(llama(tmp_path))
    name = "model.layers.1.mlp.down_proj.weight"
    weights = read_state_dict(tmp_path)
    changed = {
        "one less": {n: t for n, t in weights.items() if n != name},
        "one more": weights | {"model.layers.1.mlp.down_proj.bias": torch.zeros(32)},
        "turned": weights | {name: weights[name].T.contiguous()},
    }
    with pytest.raises(ValueError, match=r"weights: expected those of LlamaForCausalLM, got others, or none, for .*down_proj"):
        made.load_weights(changed[change], 1)


def test_the_decoder_is_probed_once_and_not_at_each_sync(tmp_path, monkeypatch):
    probes, probe = [], HuggingFaceDecoder._probe
    monkeypatch.setattr(HuggingFaceDecoder, "_probe", lambda decoder: probes.append(probe(decoder)))
    made = engine(sliding_windows(tmp_path))
    before = sample(made)
    for version in (1, 2):
        made.load_weights({name: 2 * w for name, w in read_state_dict(tmp_path).items()}, version)
    assert len(probes) == 1 and sample(made) != before


def test_frequencies_are_the_probabilities(tmp_path):
    """400 responses' first tokens against the model's distribution: within five standard deviations for each of the likeliest."""
    folder = llama(tmp_path)
    made, model = engine(folder), load_language_model(folder)
    (group,) = made.generate([PROMPTS[0]], [11], replace(PLAIN, max_new_tokens=1), stop_ids=(EOS,), group_size=400)
    with torch.no_grad():
        probabilities = model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([s.response_ids[0] for s in group]), minlength=300)
    spread = (400 * probabilities * (1 - probabilities)).sqrt()
    likely = probabilities.topk(5).indices
    assert ((counts - 400 * probabilities).abs() <= 5 * spread + 1)[likely].all()


def test_an_engine_that_wakes_up_samples_as_before(tmp_path: Path):
    of_model = engine(llama(tmp_path))
    expected = of_model.generate(PROMPTS, SEEDS, PLAIN, stop_ids=(EOS,), group_size=2)
    for tags in (None, ["weights"]):
        of_model.sleep(1)
        of_model.sleep(1)
        of_model.wake_up(tags)
        if tags:
            of_model.wake_up(["kv_cache"])
        assert of_model.generate(PROMPTS, SEEDS, PLAIN, stop_ids=(EOS,), group_size=2) == expected


def test_an_engine_that_forgot_its_weights_gets_them_anew(tmp_path: Path):
    of_model, other = engine(llama(tmp_path / "a")), llama(tmp_path / "b", seed=1)
    fresh = engine(other).generate(PROMPTS, SEEDS, PLAIN, stop_ids=(EOS,), group_size=2)
    of_model.load_weights(read_state_dict(other), 1)  # memory of the process, not of the file
    of_model.sleep(2)
    assert of_model._model.lm_head.weight.untyped_storage().nbytes() in (0, 4 * 300 * 32)
    with pytest.raises(RuntimeError, match="expected it to be awake for new weights, got an engine that sleeps"):
        of_model.load_weights(read_state_dict(other), 2)
    of_model.wake_up(["weights"])
    with pytest.raises(RuntimeError, match="rollout engine: expected it to be awake for generate, got an engine that sleeps; call wake_up"):
        of_model.generate(PROMPTS, SEEDS, PLAIN, stop_ids=(EOS,), group_size=2)
    of_model.wake_up(["kv_cache"])
    with pytest.raises(RuntimeError, match="expected weights for probe, got none since a sleep of level 2; load them first"):
        of_model.probe([5, 6, 7])
    of_model.load_weights(read_state_dict(other), 2)
    assert of_model.generate(PROMPTS, SEEDS, PLAIN, stop_ids=(EOS,), group_size=2) == fresh
