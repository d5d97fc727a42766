"""A real, tiny reward model asked the same in several ways, pairs from a file, and the incumbent."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from classifiers import save_classifier

from rlhf_core.config import ExternalPairsConfig
from rlhf_core.gate.probes import FORMATS, SCORED_AGAIN, format_shifts, invariance, left_padded
from rlhf_core.gate.scoring import LoadedModel, score_external
from rlhf_core.models.cpu import packed

QUESTIONS = ["Please sort 4172.", "Quick, give the largest of 309.", "Sort 12."]
TEXTS = [([{"role": "user", "content": q}], a) for q in QUESTIONS for a in ("Certainly: 1247.", "Sorry, I can't help with that.", "9")]


@pytest.fixture(scope="module")
def model(reward_folder: Path) -> LoadedModel:
    return LoadedModel.load(reward_folder, max_length=64, trust_remote_code=False)


def test_padding_on_the_left():
    batch = left_padded([[7, 8], [9]], pad_id=0, width=3)
    assert batch.input_ids.tolist() == [[0, 7, 8], [0, 0, 9]] and batch.position_ids.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert batch.visible[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert batch.visible[1, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert batch.selected.int().tolist() == [[0, 0, 1], [0, 0, 1]]


def test_a_text_has_one_score_in_every_probe(model):
    scores = model.score_texts(TEXTS)
    assert scores.std() > 0.01
    found = invariance(model, TEXTS, scores)
    assert set(found) == {"padding_side", "batch_size", "truncation", "stored_scores", "identical_responses"}
    assert all(0 <= probe["value"] <= 1e-5 and probe["n"] == len(TEXTS) for probe in found.values())


def test_an_encoder_gets_every_probe_but_left_padding(tmp_path: Path, tokenizer):
    folder = save_classifier(tmp_path, "bert", tokenizer, max_position_embeddings=64)
    encoder = LoadedModel.load(folder, max_length=64, trust_remote_code=False)
    scores = encoder.score_texts(TEXTS)
    found = invariance(encoder, TEXTS, scores)
    assert scores.std() > 0.01 and found.pop("padding_side")["value"] is None
    assert all(0 <= probe["value"] <= 1e-5 and probe["n"] == len(TEXTS) for probe in found.values())


def computed_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of tokens that each forward pass computes."""
    found, layout_of = [], packed.layout_of

    def counted(*args, **kwargs):
        layout = layout_of(*args, **kwargs)
        found.append(len(layout.ids))
        return layout

    monkeypatch.setattr(packed, "layout_of", counted)
    return found


def test_formats_compute_each_text_and_each_common_beginning_once(model, monkeypatch):
    fresh, tokens = replace(model), computed_tokens(monkeypatch)
    format_shifts(fresh, TEXTS, np.array([messages[0]["content"] for messages, _ in TEXTS]), scale=1.0, confidence=0.95)
    texts = [*TEXTS, *((messages, change(text)) for messages, text in TEXTS for change in FORMATS.values())]
    sequences = [tuple(ids) for messages, text in texts if (ids := fresh.encode(messages, text)) is not None]
    beginnings = {ids[:end] for ids in sequences for end in range(1, len(ids) + 1)}
    assert tokens == [len(beginnings)] and len(beginnings) < sum(map(len, sequences)) / 2

    tokens.clear()
    again = fresh.score_texts(TEXTS)
    assert not tokens
    with torch.no_grad():  # transformers' own forward pass, one text at a time
        plain = [fresh.members[0].model(torch.tensor([fresh.encode(*text)])).logits.item() for text in TEXTS]
    assert again == pytest.approx(plain, abs=3e-6)


def test_probes_of_batching_take_few_of_many_texts(model, monkeypatch):
    texts = [([{"role": "user", "content": f"Sort {number}."}], str(number)) for number in range(70)]
    stored, tokens = model.score_texts(texts), computed_tokens(monkeypatch)
    found = invariance(model, texts, stored)
    assert {name: probe["n"] for name, probe in found.items()} == {
        **dict.fromkeys(("padding_side", "batch_size", "truncation", "identical_responses"), SCORED_AGAIN),
        "stored_scores": 70,
    }
    assert sum(tokens) < 5 * SCORED_AGAIN * max(len(model.encode(*text)) for text in texts) + model.max_length


def test_stored_scores_of_another_model_are_seen(model):
    stored = model.score_texts(TEXTS)
    stored[4] += 0.25
    assert invariance(model, TEXTS, stored)["stored_scores"]["value"] == pytest.approx(0.25, abs=1e-5)


def test_a_model_that_looks_at_its_batch_is_seen(model):
    """Dropout left on is such a fault: no two askings give the same."""
    careless = torch.nn.Sequential(torch.nn.Dropout(0.5))
    (member,) = model.members
    handle = member.model.score.register_forward_pre_hook(lambda module, inputs: careless(inputs[0]))
    try:
        found = invariance(replace(model), TEXTS, model.score_texts(TEXTS))
    finally:
        handle.remove()
    assert found["batch_size"]["value"] > 1e-3 and found["identical_responses"]["value"] > 1e-3


def test_text_that_is_too_long_has_no_score(model):
    ids = model.encode(*TEXTS[0])
    assert np.isnan(replace(model, max_length=len(ids) - 1).score_texts(TEXTS[:1]))
    assert replace(model, max_length=len(ids)).score_texts(TEXTS[:1]) == pytest.approx(model.score_texts(TEXTS[:1]), abs=3e-6)


def test_shift_of_a_format_is_in_standard_deviations(model):
    messages, response = TEXTS[0]
    before, after = model.score_texts([(messages, response), (messages, f"**{response}**")])
    found = format_shifts(model, TEXTS[:1], np.array(["a"]), scale=0.5, confidence=0.95)
    assert found["bold"]["value"] == pytest.approx((after - before) / 0.5, abs=1e-5) and found["bold"]["n"] == 1
    assert set(found) == set(FORMATS)
    nothing = format_shifts(model, [(messages, "9")], np.array(["a"]), scale=0.5, confidence=0.95)["doubled spaces"]
    assert (nothing["value"], nothing["n"]) == (None, 0)


def test_what_a_probe_makes_too_long_is_no_response_without_a_score(model, caplog):
    from rlhf_core.progress import Reasons

    tight = replace(model, max_length=max(len(model.encode(*text)) for text in TEXTS), report=Reasons("gate"))
    stored = tight.score_texts(TEXTS)
    assert np.isfinite(stored).all()
    invariance(tight, TEXTS, stored)
    found = format_shifts(tight, TEXTS, np.array(["a"] * len(TEXTS)), scale=0.5, confidence=0.95)
    assert found["bold"]["n"] < len(TEXTS)  # the longest has no room for asterisks
    assert "expected a score for every response" not in caplog.text


def test_external_pairs_by_subset(model, tmp_path):
    """A pair and its mirror image: one of the two is right, whatever the model is."""
    messages, a, b = TEXTS[0][0], TEXTS[0][1], TEXTS[1][1]
    rows = [
        {"question": messages[0]["content"], "good": a, "bad": b, "kind": "x"},
        {"question": messages[0]["content"], "good": b, "bad": a, "kind": "y"},
        {"question": messages[0]["content"], "good": "1 " * 80, "bad": a, "kind": "y"},
        {"question": None, "good": a, "bad": b, "kind": "y"},
    ]
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ExternalPairsConfig(
        name="bench",
        path=str(tmp_path / "bench.jsonl"),
        format="preference",
        columns={"prompt": "question", "chosen": "good", "rejected": "bad"},
        subset="kind",
        min_accuracy=0.9,
    )
    found = score_external(config, model, confidence=0.95)
    assert (found["accuracy"], found["n"], found["prompts"], found["not_scored"], found["threshold"]) == (0.5, 2, 1, 1, 0.9)
    assert found["left_out"] == {"prompt is null": 1}
    first = float(model.score_texts([TEXTS[0]])[0] > model.score_texts([TEXTS[1]])[0])
    assert [(s["subset"], s["accuracy"], s["n"]) for s in found["subsets"]] == [("x", first, 1), ("y", 1 - first, 1)]
    assert found["sha256"] == sha256((tmp_path / "bench.jsonl").read_bytes()).hexdigest()


def test_external_pairs_of_a_folder_are_distinguished_by_content(model, tmp_path):
    config = ExternalPairsConfig(name="bench", path=str(tmp_path), format="preference", columns={}, subset=None, min_accuracy=None)
    hashes = []
    for rejected in ("9", "8", "9"):
        row = {"prompt": "Sort 12.", "chosen": "12", "rejected": rejected}
        (tmp_path / "part.jsonl").write_text(json.dumps(row) + "\n")
        hashes.append(score_external(config, model, confidence=0.95)["sha256"])
    assert hashes[0] == hashes[2] != hashes[1]
