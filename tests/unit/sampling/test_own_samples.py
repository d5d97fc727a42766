"""A tiny model as a writer of data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_models, tiny_params, tiny_tokenizer

from rlhf_core.config import ModelConfig, SamplesConfig
from rlhf_core.data.schema import Message
from rlhf_core.models.build import load_language_model
from rlhf_core.models.tokenizer import encode_prompt, load_tokenizer
from rlhf_core.preparation.samples import Written
from rlhf_core.sampling.own_samples import ModelWriter

SAMPLES = SamplesConfig(
    openings=["Please"], opening_tokens=6, prompts=9, responses_per_prompt=3, max_new_tokens=7, temperature=1.0, top_p=1.0, label_noise=0.0
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_models(tmp_path_factory.mktemp("models"), tiny_tokenizer())[0]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return tiny_params().model


def writer(folder: Path, config: ModelConfig, seed: int = 0) -> ModelWriter:
    return ModelWriter(str(folder), load_tokenizer(str(folder), trust_remote_code=False), config, seed=seed)


def test_seed_source_draw_and_position_decide_what_is_written(folder, config):
    texts = ["Please", "Quick, give"] * 3
    first = writer(folder, config).extend(texts, SAMPLES, source="own", draw=0)
    assert first == writer(folder, config).extend(texts, SAMPLES, source="own", draw=0)
    assert len(set(first)) == 6 and all(w.text.startswith(t) for w, t in zip(first, texts, strict=True))
    assert first != writer(folder, config).extend(texts, SAMPLES, source="own", draw=1)
    assert first != writer(folder, config).extend(texts, SAMPLES, source="other", draw=0)
    assert first != writer(folder, config, seed=1).extend(texts, SAMPLES, source="own", draw=0)


def asked(prompts: Iterable[str]) -> list[list[Message]]:
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def test_responses_follow_the_template_and_are_the_likely_ones(folder, config):
    """Nearly greedy, so that transformers' own generation must say the same."""
    cold = SAMPLES.model_copy(update={"temperature": 1e-4})
    tokenizer, model = load_tokenizer(str(folder), trust_remote_code=False), load_language_model(folder)
    prompts = ["Please sort 4172.", "Quick."]
    for prompt, group in zip(prompts, writer(folder, config).respond(asked(prompts), cold, source="own", draw=0), strict=True):
        (messages,) = asked([prompt])
        ids = encode_prompt(tokenizer, messages)
        made = model.generate(torch.tensor([ids]), max_new_tokens=7, do_sample=False, eos_token_id=tokenizer.eos_token_id)[0, len(ids) :]
        special = [i for i, token in enumerate(made.tolist()) if token in tokenizer.all_special_ids]
        kept = made.tolist()[: special[0]] if special else made.tolist()
        assert group == [Written(tokenizer.decode(kept), ended=bool(special))] * 3


def test_a_text_ends_at_the_first_special_token(folder, config):
    """Base models part texts by the token that begins them: what follows it is another text."""
    made = writer(folder, config)
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False)
    found = [written for group in made.respond(asked(f"sort {i}." for i in range(40)), SAMPLES, source="own", draw=0) for written in group]
    assert any(written.ended for written in found)
    assert not any(token in written.text for written in found for token in tokenizer.all_special_tokens)


def test_a_text_ends_at_a_token_that_generation_config_names(folder, config, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "model")
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False)
    prompts = [f"sort {i}." for i in range(20)]
    (end,) = tokenizer("e", add_special_tokens=False)["input_ids"]  # not a special one
    cold = SAMPLES.model_copy(update={"temperature": 5.0, "max_new_tokens": 30})
    before = [w for group in writer(folder, config).respond(asked(prompts), cold, source="own", draw=0) for w in group]
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, end]}))
    after = [w for group in writer(tmp_path / "model", config).respond(asked(prompts), cold, source="own", draw=0) for w in group]
    assert sum(w.ended for w in after) > sum(w.ended for w in before)
    assert all(end not in tokenizer(w.text, add_special_tokens=False)["input_ids"] for w in after if w.ended)
