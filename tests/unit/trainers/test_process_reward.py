"""Process reward models: the loss over ends of steps is that of a token classifier, and doesn't depend on micro-batches."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from supervised_ranks import Case, run_case
from tiny_models import PAD, TEXTS, scalar_engine, tiny_params, tiny_tokenizer

from rlhf_core.algorithms.step_losses import step_cross_entropy
from rlhf_core.data.schema import write_rows
from rlhf_core.models.batch import collate_steps, padded_ends
from rlhf_core.models.build import load_scalar_model, scalar_head, trunk
from rlhf_core.models.steps import step_ends
from rlhf_core.models.tokenizer import build_tokenizer, encode_prompt
from rlhf_core.scorers.reward import heldout
from rlhf_core.stage.training import TrainRun
from rlhf_core.trainers.reward.steps import begin_solutions, score_heldout_steps, step_phase

pytestmark = pytest.mark.usefixtures("world")
ASKED = [{"role": "user", "content": "Please sort 4172."}]
ROWS = [
    {"id": str(k), "source": "s", "messages": ASKED, "response": "\n\n".join(steps), "labels": labels}
    for k, (steps, labels) in enumerate(
        [
            (["1247.", "Sorry"], [1, -1]),
            (["Certainly:", "give", "309."], [1, 0, -1]),
            (["help"], [1]),
            (["a", "b", "c", "d"], [1, 1, 1, -1]),
        ]
    )
]


def solutions(rows=ROWS, separator: str = "\n\n"):
    return begin_solutions(rows, tiny_tokenizer(), separator, max_length=64)(0)


def phase(train, *, microbatch_tokens: int = 40):
    return step_phase(train, [], steps=3, batch_size=4, pad_id=PAD, microbatch_tokens=microbatch_tokens)


class TestStepEnds:
    @pytest.mark.parametrize(
        ("text", "steps"),
        [
            ("a b", ["a b"]),
            ("a\n\nb", ["a\n\n", "b"]),
            ("a\n\n\n\nb\n\n", ["a\n\n", "\n\nb\n\n"]),
            ("\n\na\n\nb c\n", ["\n\na\n\n", "b c\n"]),
            ("\n\n", ["\n\n"]),
        ],
    )
    def test_steps_end_where_their_separator_is_complete(self, text, steps):
        tokenizer = tiny_tokenizer()
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ends = step_ends(tokenizer, encode_prompt(tokenizer, ASKED), ids, "\n\n")
        borders = [0, *(end + 1 for end in ends)]
        assert [tokenizer.decode(ids[a:b]) for a, b in itertools.pairwise(borders)] == steps

    def test_a_token_with_the_separator_and_more_ends_the_step(self):
        tokenizer = build_tokenizer(TEXTS, vocab_size=300)
        tokenizer.add_tokens([".\n\nThen", ".\n\nS"])
        ids = tokenizer("So.\n\nThen it is 4.\n\nStep", add_special_tokens=False)["input_ids"]
        pieces = [tokenizer.decode([token]) for token in ids]
        assert any("\n\n" in piece and piece != "\n\n" for piece in pieces)
        ends = step_ends(tokenizer, [], ids, "\n\n")
        assert [pieces[end] for end in ends] == [".\n\nThen", ".\n\nS", pieces[-1]]

    def test_the_end_of_the_turn_is_the_end_of_the_last_step(self):
        (first, *_), _ = solutions()
        tokenizer = tiny_tokenizer()
        assert first.ends[-1] == len(first.ids) - 1 and first.ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(first.ids[: first.ends[0] + 1]).endswith("1247.\n\n")

    def test_tokens_sampled_otherwise_have_the_same_steps(self):
        tokenizer = tiny_tokenizer()
        alone = [i for c in "ab\n\ncd\n\ne" for i in tokenizer(c, add_special_tokens=False)["input_ids"]]
        assert step_ends(tokenizer, [], alone, "\n\n") == [3, 7, 8]


class TestLoss:
    def test_three_steps_by_hand(self):
        # log(1 + e^-2) = 0.126928, log(1 + e^-1) = 0.313262 (score -1, wrong), log(2) = 0.693147
        found = step_cross_entropy(torch.tensor([2.0, -1.0, 0.0]), torch.tensor([True, False, False]))
        torch.testing.assert_close(found, torch.tensor([0.126928, 0.313262, 0.693147]), rtol=0, atol=1e-6)

    def test_gradient_is_the_probability_less_the_label(self):
        # d/ds = sigmoid(s) - y: sigmoid(2) - 1 = -0.119203, sigmoid(-1) = 0.268941
        scores = torch.tensor([2.0, -1.0], requires_grad=True)
        step_cross_entropy(scores, torch.tensor([True, False])).sum().backward()
        torch.testing.assert_close(scores.grad, torch.tensor([-0.119203, 0.268941]), rtol=0, atol=1e-6)

    def test_is_that_of_a_token_classifier_with_two_labels(self, reward_folder: Path):
        """As TRL's PRMTrainer computes it: cross-entropy over the tokens with a label, the others -100, of logits (0, score)."""
        train, _ = solutions()
        model = load_scalar_model(reward_folder)
        weight = scalar_head(model).weight
        head = torch.cat([torch.zeros_like(weight), weight])
        width = max(len(s.ids) for s in train)
        ids = torch.tensor([[*s.ids, *[PAD] * (width - len(s.ids))] for s in train])
        labels = torch.full(ids.shape, -100)
        for row, s in enumerate(train):
            labels[row, s.ends] = torch.tensor(s.right).long()
        hidden = trunk(model)(input_ids=ids, attention_mask=(ids != PAD).long(), use_cache=False).last_hidden_state
        logits = hidden @ head.T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1e9)
        engine = scalar_engine(reward_folder)
        metrics = phase(train).train_batch(engine, list(range(4)))
        assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
        assert engine.step() == pytest.approx(float(norm), rel=1e-4)
        right = (logits.argmax(-1) == labels)[labels != -100].float().mean()
        assert metrics["accuracy"] == pytest.approx(float(right))

    def test_micro_batches_change_nothing(self, reward_folder: Path):
        train, _ = solutions()
        losses = [phase(train, microbatch_tokens=n).train_batch(scalar_engine(reward_folder), [0, 1, 2, 3])["loss"] for n in (20, 1000)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)

    def test_heldout_scores_are_those_of_each_prefix_alone(self, reward_folder: Path):
        train, _ = solutions()
        engine = scalar_engine(reward_folder)
        (scores,) = score_heldout_steps(engine, train, pad_id=PAD, microbatch_tokens=60)
        model = load_scalar_model(reward_folder)
        alone = [float(model(torch.tensor([s.ids[: end + 1]])).logits) for s in train for end in s.ends]
        torch.testing.assert_close(scores, torch.tensor(alone), rtol=0, atol=1e-5)


def test_two_steps_that_end_at_one_token_both_have_its_score():
    batch, places = collate_steps([[5, 6, 7], [8, 9]], padded_ends([[1, 1, 2], [1]]), pad_id=PAD)
    assert batch.selected.tolist() == [[False, True, True], [False, True, False]]
    assert places.tolist() == [[0, 0, 1], [2, -1, -1]]


def test_labels_of_neutral_steps_count_as_right():
    train, _ = solutions()
    assert [s.right for s in train][1] == [True, True, False]


def test_a_response_that_is_too_long_is_dropped_and_counted():
    train, dropped = begin_solutions(ROWS, tiny_tokenizer(), "\n\n", max_length=max(len(s.ids) for s in solutions()[0]) - 1)(0)
    assert dropped >= 1 and len(train) == 4 - dropped


def test_a_template_that_writes_the_separator_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content'] +", "'So:\n\n' + message['content'] +")
    with pytest.raises(ValueError, match="expected the chat template to keep the steps of responses"):
        begin_solutions(ROWS, tokenizer, "\n\n", max_length=64)(0)


def test_a_template_of_a_ready_made_model_that_writes_the_separator_is_refused(reward_folder: Path, tmp_path: Path):
    shutil.copytree(reward_folder, tmp_path / "model")
    settings = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(settings | {"step_separator": "\n\n"}))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content'] +", "'So:\n\n' + message['content'] +")
    tokenizer.save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "prepared", "stepwise", [{**row, "split": "test"} for row in ROWS])
    run = TrainRun(SimpleNamespace(params=tiny_params(model__max_length=64)), lambda: False)
    with pytest.raises(ValueError, match="expected the chat template to keep the steps of responses, got others in 4 of 4"):
        heldout.score_heldout_steps(run, tmp_path / "model", tmp_path / "prepared")


def test_a_training_that_is_stopped_and_resumed_has_the_bits_of_an_undisturbed_one(sft_folder: Path, tmp_path: Path):
    whole = run_case(Case("steps", str(tmp_path / "whole")), sft_folder)
    stopped = run_case(Case("steps", str(tmp_path / "stopped"), stop_after=3), sft_folder)
    resumed = run_case(Case("steps", str(tmp_path / "stopped")), sft_folder)
    assert len(stopped["curves"]) == 3 and stopped["curves"] + resumed["curves"] == whole["curves"]
    assert whole["metrics"] == resumed["metrics"]
    assert all(torch.equal(resumed["weights"][name], tensor) for name, tensor in whole["weights"].items())
