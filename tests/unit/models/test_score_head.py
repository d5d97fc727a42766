"""A ready-made reward model's score is what its own forward gives each sequence alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from classifiers import END, OF_SEQUENCES, OF_TOKENS, PAD, POSITIONS, SHAPE, own_scores_alone, save_classifier, tiny_classifier
from tiny_models import sequences
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_core.models.batch import collate_branches, collate_tokens, shared_row
from rlhf_core.models.build import load_language_model, load_scalar_model, new_scalar_model
from rlhf_core.models.forward import ScalarModule
from rlhf_core.scorers.reward.model import load_members, score_sequences

CPU = torch.device("cpu")


def scores(module: ScalarModule, ids: list[list[int] | None], *, microbatch_tokens: int = 1000, pad_id: int = 0) -> torch.Tensor:
    return score_sequences(module, ids, pad_id=pad_id, microbatch_tokens=microbatch_tokens, device=CPU)


@pytest.mark.parametrize("kind", [*OF_TOKENS, *OF_SEQUENCES])
def test_rm_score_is_what_the_models_own_forward_gives_the_sequence_alone(tmp_path: Path, kind: str):
    """CORRECTNESS, reward models from elsewhere, and RM score: the same in any batch, order and padding."""
    (module,) = load_members(save_classifier(tmp_path, kind), device=CPU, trust_remote_code=False)
    ids = [*sequences(5, seed=3, shortest=2), [7, END], [9, 8, END, 11, END]]
    expected = own_scores_alone(module.model, ids)[:, 0]
    assert expected.std() > 0.02
    for microbatch_tokens, pad_id, order in ((1000, 0, range(7)), (30, PAD, [3, 6, 1, 0, 2, 5, 4]), (1, 0, range(7))):
        found = scores(module, [ids[i] for i in order], microbatch_tokens=microbatch_tokens, pad_id=pad_id)
        torch.testing.assert_close(found, expected[list(order)], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [*OF_TOKENS, *OF_SEQUENCES])
def test_rm_reading_is_found_for_each_architecture(kind: str):
    assert ScalarModule(tiny_classifier(kind)).score_head.per_token == (kind in OF_TOKENS)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rm_reading_is_found_where_the_head_is_still_zero(kind: str):
    model = tiny_classifier(kind)
    model.score.weight.data.zero_()
    bert = tiny_classifier("bert")
    bert.classifier.weight.data.zero_()
    assert ScalarModule(model).score_head.per_token and not ScalarModule(bert).score_head.per_token
    assert not model.score.weight.any()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "deberta-v2"])
def test_rm_without_a_padding_id_is_read_in_batches_all_the_same(kind: str):
    """Transformers refuses batches of such decoders, and pads nothing of such encoders."""
    model = tiny_classifier(kind, pad_token_id=None)
    ids = sequences(6, seed=5)
    torch.testing.assert_close(scores(ScalarModule(model), ids), own_scores_alone(model, ids)[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "modernbert-decoder"])
def test_rm_whose_padding_is_the_end_token_is_read_before_it_as_its_forward_does(kind: str):
    model = tiny_classifier(kind, pad_token_id=END)
    ids = [[7, 8, 9, END], [7, 8, 9], [7, END, 11, END, END], [10, 11, 12, 13, 14]]
    found = scores(ScalarModule(model), ids)
    torch.testing.assert_close(found, own_scores_alone(model, ids)[:, 0], rtol=0, atol=1e-5)
    assert found[0] == pytest.approx(float(found[1]), abs=1e-5) and abs(found[2] - found[0]) > 1e-2


@pytest.mark.parametrize(("kind", "longest"), [("bert", POSITIONS), ("roberta", POSITIONS - PAD - 1), ("gpt2", POSITIONS)])
def test_a_sequence_longer_than_the_models_positions_is_unscored_and_not_a_crash(kind: str, longest: int, caplog):
    module = ScalarModule(tiny_classifier(kind))
    fitting, longer = (
        sequences(1, seed=1, shortest=longest, longest=longest)[0],
        sequences(1, seed=1, shortest=longest + 1, longest=longest + 1)[0],
    )
    found = scores(module, [longer, fitting, None, longer])
    assert found.isnan().tolist() == [True, False, True, True]
    torch.testing.assert_close(found[1:2], own_scores_alone(module.model, [fitting])[:, 0], rtol=0, atol=1e-5)
    assert [f"more than {longest} tokens" in r.message for r in caplog.records if "has no score" in r.message] in ([True], [])


@pytest.mark.parametrize("kind", ["llama", "modernbert-decoder"])
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_sequence_whose_frequencies_would_be_others_is_unscored_and_not_a_crash(kind: str, name: str):
    """Read at a token (Llama) and as a whole (ModernBERT's decoder, whose layers of either type have frequencies of their own)."""
    border = POSITIONS if name == "dynamic" else POSITIONS // 2
    rope = {"rope_type": name, "rope_theta": 10000.0, "factor": 2.0}
    if name == "longrope":
        rope |= {"original_max_position_embeddings": border, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    both = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    module = ScalarModule(tiny_classifier(kind, rope_parameters=rope if kind == "llama" else both))
    assert module.score_head.max_tokens == border
    fitting, longer = (sequences(1, seed=1, shortest=n, longest=n)[0] for n in (border, border + 1))
    found = scores(module, [longer, fitting, longer])
    assert found.isnan().tolist() == [True, False, True]
    torch.testing.assert_close(found[1:2], own_scores_alone(module.model, [fitting])[:, 0], rtol=0, atol=1e-5)


def test_several_labels_are_refused_unless_one_is_chosen(tmp_path: Path):
    names = {0: "NEGATIVE", 1: "NEUTRAL", 2: "POSITIVE"}
    for kind in ("llama", "distilbert"):
        folder = save_classifier(tmp_path / kind, kind, num_labels=3, id2label=names)
        model, ids = load_scalar_model(folder).eval(), sequences(4, seed=2)
        expected = own_scores_alone(model, ids)
        for label, column in (("POSITIVE", 2), (1, 1), ("NEGATIVE", 0)):
            (module,) = load_members(folder, device=CPU, trust_remote_code=False, label=label)
            torch.testing.assert_close(scores(module, ids), expected[:, column], rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match=r"expected one score .*, got 3 \(NEGATIVE, NEUTRAL, POSITIVE\); set `label`"):
            load_members(folder, device=CPU, trust_remote_code=False)
        for wrong in ("HAPPY", 3, -1):
            with pytest.raises(ValueError, match="and a model with NEGATIVE, NEUTRAL, POSITIVE"):
                ScalarModule(model, label=wrong)


def test_a_folder_that_does_not_say_how_many_labels_it_has_is_read_as_one_score(tmp_path: Path):
    import json

    folder = save_classifier(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("id2label") and config.pop("label2id")
    (folder / "config.json").write_text(json.dumps(config))
    assert ScalarModule(load_scalar_model(folder)).score_head.num_labels == 1


def test_encoder_decoders_and_language_models_are_refused_in_words(sft_folder: Path):
    with pytest.raises(ValueError, match="got BartForSequenceClassification, an encoder-decoder"):
        ScalarModule(
            tiny_classifier("bart", d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
        )
    with pytest.raises(ValueError, match=r"expected scores of a sequence, got an output of shape .* by LlamaForCausalLM"):
        ScalarModule(load_language_model(sft_folder))


def test_values_of_tokens_are_refused_where_only_sequences_have_scores():
    module = ScalarModule(tiny_classifier("bert"))
    ids = sequences(2, seed=8, shortest=6)
    with pytest.raises(ValueError, match="expected whole sequences for BertForSequenceClassification"):
        module(collate_tokens(ids, [2, 2], pad_id=0))
    with pytest.raises(ValueError, match="expected whole sequences for BertForSequenceClassification"):
        module(collate_branches([shared_row([[5, 6, 7], [5, 6, 8]])], pad_id=0))
    with pytest.raises(ValueError, match=r"a critic: expected .* got BertForSequenceClassification, .*; set it to sft"):
        module.check_scores_tokens("a critic", "set it to sft")


def test_finding_the_reading_leaves_model_and_random_numbers_as_they_were():
    model = tiny_classifier("bert").train()
    model.dropout.eval()
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    ScalarModule(model)
    assert torch.equal(torch.get_rng_state(), state) and model.training and not model.dropout.training
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_gradients_reach_a_model_that_is_read_as_a_whole():
    module = ScalarModule(tiny_classifier("roberta"))
    ids = sequences(2, seed=8)
    module(collate_tokens(ids, [len(s) - 1 for s in ids], pad_id=0)).sum().backward()
    assert float(module.model.classifier.dense.weight.grad.abs().sum()) > 0


def test_an_architecture_whose_score_takes_more_than_a_linear_layer_cannot_become_a_reward_model(tmp_path: Path, tokenizer):
    config = AutoConfig.for_model("modernbert-decoder", **{**SHAPE, "pad_token_id": PAD})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"got ModernBertDecoderForSequenceClassification with .*head.dense.weight.*; set reward.enabled"):
        new_scalar_model(tmp_path, tokenizer, trust_remote_code=False)


def test_a_model_whose_forward_asserts_is_refused_by_name():
    model = tiny_classifier("bert")

    def refuse(*_: object) -> None:
        raise AssertionError("no such input")

    model.bert.register_forward_pre_hook(refuse)
    with pytest.raises(
        ValueError, match=r"expected scores of BertForSequenceClassification, got AssertionError: no such input; use another"
    ):
        ScalarModule(model)
