"""The modules against Hugging Face's own full forward passes, one sequence at a time and without padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_experts, sequences, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.models.batch import TokenBatch, collate_tokens
from rlhf_core.models.build import load_language_model, load_scalar_model, new_scalar_model, save_model, scalar_head, trunk
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.models.weights import checkpoint_names, read_state_dict
from rlhf_core.scorers.reward.model import score_sequences

IDS = sequences(7, seed=3)
STARTS = [1, 3, 2, 1, 2, 3, 1]


@pytest.fixture(scope="module")
def language_model(sft_folder: Path):
    return load_language_model(sft_folder)


@pytest.fixture(scope="module")
def reward_model(reward_folder: Path):
    return load_scalar_model(reward_folder)


def naive_logprobs(model, ids: list[int], start: int, temperature: float = 1.0) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([ids])).logits[0] / temperature
    return logits.log_softmax(-1)[torch.arange(start - 1, len(ids) - 1), torch.tensor(ids[start:])]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@torch.no_grad()
def test_log_probabilities_equal_a_full_forward_pass(language_model, temperature: float):
    expected = torch.cat([naive_logprobs(language_model, ids, start, temperature) for ids, start in zip(IDS, STARTS, strict=True)])
    output = PolicyModule(language_model)(collate_tokens(IDS, STARTS, pad_id=0), temperature=temperature)
    assert output.entropy is output.sampler_logprobs is output.router_logits is None
    torch.testing.assert_close(output.logprobs, expected, rtol=0, atol=2e-6)
    assert expected.std() > 0.3  # the tokens differ enough for a mix-up to show


@torch.no_grad()
def test_entropy_is_that_of_the_distribution_the_token_was_drawn_from(language_model):
    output = PolicyModule(language_model)(collate_tokens(IDS[:2], STARTS[:2], pad_id=0), temperature=2.0, with_entropy=True)
    expected = []
    for ids, start in zip(IDS[:2], STARTS[:2], strict=True):
        logits = language_model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
        expected.append(torch.distributions.Categorical(logits=logits / 2.0).entropy())
    torch.testing.assert_close(output.entropy, torch.cat(expected), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("learned", [True, False])
def test_entropy_has_a_gradient_only_if_requested(language_model, learned: bool):
    batch = collate_tokens(IDS[:2], STARTS[:2], pad_id=0)
    assert PolicyModule(language_model)(batch, with_entropy=True, learn_entropy=learned).entropy.requires_grad == learned


@torch.no_grad()
def test_sampler_logprobs_are_those_within_top_k_and_top_p_at_the_temperature(language_model):
    """One token at a time: of the 20 most likely those that make up 0.9 of them, renormalised; a token outside of them stays too."""
    module = PolicyModule(language_model)
    output = module(collate_tokens(IDS, STARTS, pad_id=0), temperature=2.0, top_k=20, top_p=0.9)
    expected = []
    for ids, start in zip(IDS, STARTS, strict=True):
        for at in range(start, len(ids)):
            logits = language_model(input_ids=torch.tensor([ids])).logits[0, at - 1] / 2.0
            ranked = logits.softmax(-1).sort(descending=True)
            probabilities = ranked.values[:20] / ranked.values[:20].sum()
            count = 1 + int((probabilities.cumsum(0) < 0.9).sum())
            kept = {*ranked.indices[:count].tolist(), ids[at]}
            expected.append(logits[ids[at]] - logits[list(kept)].logsumexp(-1))
    torch.testing.assert_close(output.sampler_logprobs, torch.stack(expected), rtol=0, atol=3e-6)
    torch.testing.assert_close(output.logprobs, module(collate_tokens(IDS, STARTS, pad_id=0), temperature=2.0).logprobs, rtol=0, atol=0)


@torch.no_grad()
def test_log_probabilities_do_not_depend_on_batch_order_width_or_pad_id(language_model):
    module = PolicyModule(language_model)
    together = module(collate_tokens(IDS, STARTS, pad_id=0)).logprobs.split([len(s) - k for s, k in zip(IDS, STARTS, strict=True)])
    order = [4, 0, 6, 2, 1, 5, 3]
    shuffled = collate_tokens([IDS[i] for i in order], [STARTS[i] for i in order], pad_id=77)
    wider = TokenBatch(
        torch.nn.functional.pad(shuffled.input_ids, (0, 9), value=77), torch.nn.functional.pad(shuffled.selected, (0, 9), value=False)
    )
    for batch in (shuffled, wider):
        torch.testing.assert_close(module(batch).logprobs, torch.cat([together[i] for i in order]), rtol=0, atol=2e-6)


@torch.no_grad()
def test_nothing_predicts_the_first_token_so_selecting_it_changes_nothing(language_model):
    module = PolicyModule(language_model)
    from_first, from_second = (module(collate_tokens(IDS[:3], [start] * 3, pad_id=0)).logprobs for start in (0, 1))
    assert torch.equal(from_first, from_second)


@torch.no_grad()
def test_a_stretch_in_the_middle_can_be_selected(language_model):
    batch = collate_tokens(IDS[:2], [1, 2], pad_id=0, ends=[3, 4])
    expected = torch.cat([naive_logprobs(language_model, IDS[0], 1)[:2], naive_logprobs(language_model, IDS[1], 2)[:2]])
    torch.testing.assert_close(PolicyModule(language_model)(batch).logprobs, expected, rtol=0, atol=2e-6)


def test_no_selected_token_gives_no_numbers_and_no_gradient(language_model):
    module = PolicyModule(language_model)
    output = module(collate_tokens([[5, 6, 7]], [3], pad_id=0), with_entropy=True, top_k=3)
    assert output.logprobs.shape == output.entropy.shape == output.sampler_logprobs.shape == (0,)
    output.logprobs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())
    module.zero_grad(set_to_none=True)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@torch.no_grad()
def test_router_logits_are_those_of_the_routed_tokens_in_every_layer(tmp_path: Path, tokenizer, family: str):
    """A token's routing doesn't depend on what comes after it, so each sequence alone and unpadded says the same."""
    model = load_language_model(save_tiny_experts(tmp_path, tokenizer, family))
    batch = collate_tokens(IDS[:3], STARTS[:3], pad_id=0)
    lengths = torch.tensor([len(ids) - k for k, ids in enumerate(IDS[:3])])  # the last tokens of the second and the third aren't asked for
    routed = torch.arange(batch.input_ids.shape[1]) < lengths[:, None]
    found = PolicyModule(model)(batch, routed=routed).router_logits.view(2, int(lengths.sum()), 4)
    alone = [model.base_model(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits for ids in IDS[:3]]
    for layer in range(2):
        expected = torch.cat([logits[layer][:n] for logits, n in zip(alone, lengths.tolist(), strict=True)])
        torch.testing.assert_close(found[layer], expected, rtol=0, atol=3e-6)
    assert found.std() > 0.1


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_checkpoint_names_are_those_of_the_models_folder(tmp_path: Path, tokenizer, family: str):
    """vLLM loads experts one by one; in memory they are one tensor."""
    model = load_language_model(save_tiny_experts(tmp_path, tokenizer, family))
    written, named = read_state_dict(tmp_path), checkpoint_names(model, model.state_dict())
    assert len(written) > len(model.state_dict())
    assert written.keys() == named.keys()
    assert all(torch.equal(written[name], named[name]) for name in written)


def test_checkpoint_names_without_experts_are_those_in_memory(language_model):
    state = language_model.state_dict()
    named = checkpoint_names(language_model, state)
    assert named.keys() == state.keys()
    assert all(torch.equal(named[name], state[name]) for name in state)


def naive_score(model, ids: list[int]) -> torch.Tensor:
    hidden = trunk(model)(input_ids=torch.tensor([ids])).last_hidden_state
    return scalar_head(model)(hidden)[0, -1, 0]


@pytest.mark.parametrize("pad", ["pad token", "end token"])
@torch.no_grad()
def test_rm_score_is_read_at_the_last_token_by_position_in_any_batch(reward_model, tokenizer, pad: str):
    """CORRECTNESS, RM last token and RM score: an end token in the middle, and one that pads, move nothing."""
    end = tokenizer.eos_token_id
    pad_id = end if pad == "end token" else tokenizer.pad_token_id
    ids = [[*IDS[0], end], [*IDS[1][:2], end, *IDS[1][2:], end], IDS[2], [*IDS[3], end, end], [9]]
    module = ScalarModule(reward_model)
    expected = torch.stack([naive_score(reward_model, s) for s in ids])
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1], [4, 1]):
        scores = module(collate_tokens([ids[i] for i in order], [len(ids[i]) - 1 for i in order], pad_id=pad_id))
        torch.testing.assert_close(scores, expected[order], rtol=0, atol=2e-6)
    assert expected.unique().numel() == len(ids)
    assert expected.std() > 0.1


@torch.no_grad()
def test_rm_score_equals_hugging_faces_where_that_finds_the_last_token(reward_model, tokenizer):
    ids = torch.tensor([[*IDS[0], tokenizer.eos_token_id]])
    scores = ScalarModule(reward_model)(collate_tokens(ids.tolist(), [ids.shape[1] - 1], pad_id=0))
    torch.testing.assert_close(scores, reward_model(input_ids=ids).logits[0], rtol=0, atol=2e-6)


def test_a_fresh_scalar_model_scores_nothing_yet_and_shares_the_trunk(sft_folder: Path, language_model, tokenizer):
    model = new_scalar_model(sft_folder, tokenizer, trust_remote_code=False)
    assert not scalar_head(model).weight.any()
    assert torch.equal(trunk(model).layers[1].mlp.up_proj.weight, trunk(language_model).layers[1].mlp.up_proj.weight)


@torch.no_grad()
def test_a_reward_model_of_ours_is_read_at_an_end_token_that_also_pads_by_transformers_too(sft_folder: Path, tmp_path: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model = new_scalar_model(sft_folder, tokenizer, trust_remote_code=False)
    torch.nn.init.normal_(scalar_head(model).weight, generator=torch.Generator().manual_seed(3))
    save_model(model, model.state_dict(), tokenizer, tmp_path)
    loaded = load_scalar_model(tmp_path)
    finished, cut_off = [*IDS[0], tokenizer.eos_token_id], IDS[0]
    scores = score_sequences(ScalarModule(loaded), [finished, cut_off], pad_id=0, microbatch_tokens=99, device=torch.device("cpu"))
    expected = torch.cat([loaded(input_ids=torch.tensor([s])).logits[0] for s in (finished, cut_off)])
    torch.testing.assert_close(scores, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(scores, torch.stack([naive_score(loaded, s) for s in (finished, cut_off)]), rtol=0, atol=2e-6)
    assert (scores[0] - scores[1]).abs() > 0.01


def test_a_saved_model_comes_back_with_its_tokenizer_and_template(tmp_path: Path, reward_model, tokenizer):
    from rlhf_core.models.tokenizer import load_tokenizer

    state = {name: tensor + 1 for name, tensor in reward_model.state_dict().items()}
    save_model(reward_model, state, tokenizer, tmp_path)
    back = load_scalar_model(tmp_path).state_dict()
    written = read_state_dict(tmp_path)
    assert back.keys() == state.keys() == written.keys()
    assert all(torch.equal(back[name], state[name]) and torch.equal(written[name], state[name]) for name in state)
    assert load_tokenizer(str(tmp_path), trust_remote_code=False).chat_template == tokenizer.chat_template


def test_copies_of_a_tied_head_are_written_once_and_come_back_tied(tmp_path: Path, tokenizer):
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # as a training engine returns them
    assert "lm_head.weight" in state
    save_model(model, state, tokenizer, tmp_path)
    assert read_state_dict(tmp_path).keys() == state.keys() - {"lm_head.weight"}
    back = load_language_model(tmp_path)
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.state_dict().items())


def test_initial_weights_follow_from_the_seed(tokenizer):
    from tiny_models import tiny_params

    from rlhf_core.models.build import new_language_model

    first, again, other = (new_language_model(tiny_params().model, tokenizer, seed=s).lm_head.weight for s in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
