"""Evaluation of models that see: answers to pictures, their log-probabilities, scores, and previews for the report."""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from seeing_models import rows, save_seeing_model, seeing, store
from tiny_models import tiny_params
from transformers import AutoModelForImageTextToText

from rlhf_core.data.pictures import pictures_of
from rlhf_core.evaluation import answers as answers_module
from rlhf_core.evaluation import policy as policy_module
from rlhf_core.evaluation.answers import load_policy, response_logprobs
from rlhf_core.evaluation.policy import answer_prompts, measure, sample_table
from rlhf_core.model_check.trial import plain_logprobs
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.build import load_language_model, save_model
from rlhf_core.models.vision import picture_arguments, sight
from rlhf_core.report.tables import samples as cards
from rlhf_core.sampling import scoring

pytestmark = pytest.mark.usefixtures("world")
LIMIT = 1e-4  # nats of a whole response


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch) -> tuple:
    """Params, prompts with pictures, and the folders of two models."""
    prepared = tmp_path / "prepared"
    first, pictures = save_seeing_model(tmp_path / "sft", "llava"), store(prepared, 6)
    model = load_language_model(first, vision="frozen")
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(0.05 * torch.randn(model.get_output_embeddings().weight.shape))
    tokenizer, _ = seeing(first, prepared)
    save_model(model, model.state_dict(), tokenizer, tmp_path / "policy")
    for module in (answers_module, policy_module, scoring):
        monkeypatch.setattr(module, "PREPARED", prepared)
    params = tiny_params(**{
        "model.path": str(first), "model.architecture": None, "model.vision": "frozen", "model.max_length": 256, "alignment.method": "dpo",
        "data.sources": [{"name": "a", "kind": "file", "path": "a", "format": "preference", "uses": ["sft", "prompt"], "weight": 1.0}],
        "reward.enabled": False, "rl.reward.scorers": [], "evaluation.scorers": [{"name": "exact", "kind": "exact_match"}],
        "evaluation.backend": "pytorch", "evaluation.prompts": 6, "evaluation.max_new_tokens": 6, "evaluation.temperature": 1.0,
    })  # fmt: skip
    prompts = [{"id": row["id"], "source": "a", "messages": row["messages"], "label": "Red."} for row in rows(pictures)]
    return params, prompts, {"sft": first, "policy": tmp_path / "policy"}, prepared


def test_answers_to_pictures_have_the_plain_forward_s_probabilities(evaluated):
    params, prompts, folders, prepared = evaluated
    answers = answer_prompts(params, prompts, folders, reward_model=Path("none"), source_judges={}, gate_texts=())
    tokenizer, seen = seeing(folders["sft"], prepared)
    own = answers["sampled"]["policy"]
    module = load_policy(folders["policy"], params.model)
    found = response_logprobs(module, own, pad_id=0, temperature=1.0, sight=sight(tokenizer, prepared))
    ids = [[*a.prompt.prompt_ids, *a.response_ids] for a in own]
    pictures = {row["id"]: row for row in prompts}
    shown = [pictures_of(pictures[a.prompt.id]["messages"]) for a in own]
    plain = plain_logprobs(folders["policy"], ids, pictures=[seen(one) for one in shown])
    never = never_drawn(folders["policy"], ids, [seen(one) for one in shown], tokenizer.vision.filler_id)
    for answer, logprob, theirs, without in zip(own, found.tolist(), plain, never, strict=True):
        at = len(answer.prompt.prompt_ids) - 1
        assert tokenizer.vision.filler_id not in answer.response_ids
        assert abs(logprob - float((theirs - without)[at:].sum())) < LIMIT
    assert any(map(len, shown)) and max(map(len, shown)) == 2

    figures = measure(params, answers, folders, gate_texts=())
    assert math.isfinite(figures["kl"]["greedy"]) and figures["greedy"]["policy"]["n"] == 5


@torch.no_grad()
def never_drawn(folder: Path, sequences: list, pictures: list, token: int) -> list[torch.Tensor]:
    """The log of the probability of all other tokens than this one, before each token but the first."""
    model, found = AutoModelForImageTextToText.from_pretrained(folder).eval(), []
    for ids, seen in zip(sequences, pictures, strict=True):
        row = torch.tensor([ids])
        logits = model(input_ids=row, use_cache=False, **picture_arguments(model, TokenBatch(row, row > 0, pictures=seen))).logits[0, :-1]
        found.append(torch.log1p(-logits.softmax(-1)[:, token]))
    return found


def test_samples_have_previews_that_the_report_shows(evaluated):
    params, prompts, folders, prepared = evaluated
    answers = answer_prompts(params, prompts, folders, reward_model=Path("none"), source_judges={}, gate_texts=())
    table = pd.DataFrame(sample_table(answers, 6, prepared))
    assert sorted(table["pictures"].map(len)) == sorted([0, 1, 1, 2, 2] * 2)
    url = next(urls[0] for urls in table["pictures"] if urls)
    image = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))
    assert image.format == "JPEG" and max(image.size) <= 128
    shown = cards(table)
    assert sum(len(card["pictures"]) for card in shown) == 12
    table.at[0, "pictures"] = ["data:text/html;base64,PHNjcmlwdD4=", 'data:image/jpeg;base64,"><script>']
    assert [card["pictures"] for card in cards(table.head(1))] == [[]]
    assert not cards(table.drop(columns="pictures"))[0]["pictures"]
