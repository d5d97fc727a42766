"""How conditional SFT turns preference data into responses with a level, for either kind of label."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import MAX_LENGTH, tiny_params

from rlhf_core.trainers.sft.conditional import encode_with_levels, quality_levels, rated_responses, with_quality
from rlhf_core.trainers.sft.rejection_sampling import heldout_demonstrations
from rlhf_core.trainers.supervised.demonstrations import encode_demonstrations

MESSAGES = [{"role": "user", "content": "Sort 41."}]


def rows(*pairs: tuple[str, str]) -> list[dict]:
    return [{"messages": MESSAGES, "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]


def levels_of(responses: dict, **changes):
    params = tiny_params(**{f"conditional_sft.{name}": value for name, value in changes.items()})

    def infer(function, *arguments):
        return function(SimpleNamespace(params=params, stop_requested=lambda: False), *arguments)

    return quality_levels(responses, params.conditional_sft, Path("models/reward"), infer=infer)


def encode(tokenizer, responses: list, levels: list[int | None], *, train_on_thoughts: bool = True):
    return encode_with_levels(tokenizer, responses, levels, max_length=MAX_LENGTH, train_on_thoughts=train_on_thoughts)


def test_levels_by_preference_need_no_reward_model(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    responses = {"train": rated_responses(rows(("14", "41"), ("14", "no"), ("41", "no"))), "validation": rated_responses(rows(("x", "y")))}
    levels, borders = levels_of(responses, label_by="preference", levels=2, wanted=1)
    assert levels == {"train": [1, None, 0], "validation": [1, 0]} and borders == []  # 41: one win, one loss


def test_borders_of_scores_are_those_of_the_training_split(tmp_path: Path, monkeypatch, reward_folder: Path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/reward").symlink_to(reward_folder)
    texts = ["14", "41", "Certainly: 14.", "Sorry, I can't help with that.", "no", "4", "1", "Please"]
    train = rated_responses(rows(*zip(texts[::2], texts[1::2], strict=True)))
    levels, borders = levels_of({"train": train, "validation": train[3:4]}, levels=4, wanted=3)
    assert sorted(levels["train"]) == [0, 0, 1, 1, 2, 2, 3, 3] and len(borders) == 3
    assert levels["validation"] == levels["train"][3:4]  # the only one of its split, and still where the training split has it


def test_responses_without_a_level_are_left_out_and_long_ones_counted(tokenizer):
    responses = rated_responses(rows(("14", "41"), ("no" * MAX_LENGTH, "0")))
    examples, too_long = encode(tokenizer, responses, [3, None, 2, 0])
    requested = [{"messages": with_quality(MESSAGES, level), "response": text} for level, text in ((3, "14"), (0, "0"))]
    assert (examples, too_long) == (encode_demonstrations(requested, tokenizer, max_length=MAX_LENGTH)[0], 1)


def test_thoughts_are_trained_on_where_sft_trains_on_them(tokenizer):
    thoughtful = "<think>\n1 first\n</think>\n\n14."
    (example,), _ = encode(tokenizer, rated_responses(rows((thoughtful, "41")))[:1], [3], train_on_thoughts=False)
    sft = tiny_params(**{"sft.train_on_thoughts": False}).sft
    (other,) = heldout_demonstrations([{"messages": MESSAGES, "response": thoughtful}], tokenizer, sft, max_length=MAX_LENGTH)
    for found in (example, other):
        assert tokenizer.decode(found.ids[found.skipped[0][1] : -1]) == "14."


@pytest.mark.parametrize(("changes", "message"), [({"wanted": 8}, "wanted: expected a level from 0 to 7, got 8")])
def test_a_level_that_does_not_exist_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        tiny_params(**{"alignment.method": "conditional_sft"} | {f"conditional_sft.{k}": v for k, v in changes.items()})
