"""Chat and the reward service with pictures, and the files of an exported model that sees."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from score_service import running
from seeing_models import picture, save_seeing_model
from test_use_rewards import ask
from test_use_serve import settings
from tiny_models import save_tiny_models, tiny_tokenizer
from transformers import AutoModelForImageTextToText

from rlhf_core.data.pictures import with_pictures
from rlhf_core.engines.rollout.requests import SamplingSettings
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.build import new_scalar_model, save_model, scalar_head
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.models.vision import picture_arguments, sees
from rlhf_core.preparation.pictures import PictureStore
from rlhf_core.scorers.reward.loaded import LoadedModel
from rlhf_core.use.chat import Partner, chat, introduction
from rlhf_core.use.choice import choose
from rlhf_core.use.rewards import reward_service

GREEDY = SamplingSettings(6, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    save_seeing_model(folder / "model", "llava")
    for number in (0, 3):
        picture(number).save(folder / f"{number}.png")
    return folder


def partner(model: Path, images: Path, *, max_length: int = 256) -> Partner:
    return Partner(choose(model=model), GREEDY, max_length=max_length, system=None, seed=0, threads=1, trust=False, images=images)


@torch.no_grad()
def by_transformers(model: Path, images: list[Image.Image], text: str) -> str:
    """Greedy tokens, one forward pass of the whole sequence each."""
    tokenizer = load_tokenizer(str(model), trust_remote_code=False, vision="frozen")
    own = AutoModelForImageTextToText.from_pretrained(model)
    content = [*[{"type": "image"}] * len(images), {"type": "text", "text": text}]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
    inputs = tokenizer.vision.processor(text=prompt, images=images, return_tensors="pt", add_special_tokens=False)
    ids, seen = inputs["input_ids"][0].tolist(), {"pixel_values": inputs["pixel_values"]}
    start = len(ids)
    for _ in range(GREEDY.max_new_tokens):
        row = torch.tensor([ids])
        logits = own(input_ids=row, use_cache=False, **picture_arguments(own, TokenBatch(row, row > 0, pictures=seen))).logits[0, -1]
        logits[tokenizer.vision.filler_id] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_chat_shows_pictures_with_the_next_message(folder, tmp_path):
    out, notes = io.StringIO(), io.StringIO()
    lines = [f"/image {folder / '0.png'}", f"/image {folder / '3.png'}", "Which?", "/reset", f"/image {folder / '3.png'}", "Which?"]
    talk = partner(folder / "model", tmp_path)
    chat([talk], lines, out, notes, PictureStore(tmp_path))
    expected = [by_transformers(folder / "model", images, "Which?") for images in ([picture(0), picture(3)], [picture(3)])]
    assert out.getvalue() == "".join(f"{text}\n" for text in expected) and expected[0] != expected[1]
    assert "a picture of 20 x 28 pixels, which goes with the next message" in notes.getvalue()
    assert "/image FILE shows a picture" in introduction([talk], GREEDY)


def test_chat_explains_what_is_no_picture_and_who_doesn_t_see(folder, tmp_path):
    (tmp_path / "no.png").write_bytes(b"no")
    save_tiny_models(tmp_path / "models", tiny_tokenizer())
    out, notes = io.StringIO(), io.StringIO()
    blind = partner(tmp_path / "models" / "sft", tmp_path / "images", max_length=64)
    lines = [f"/image {tmp_path / 'no.png'}", "/image gone.png", f"/image {folder / '0.png'}", "Which?"]
    chat([blind], lines, out, notes, PictureStore(tmp_path / "images"))
    assert "a picture can't be decoded" in notes.getvalue() and "a picture's file is missing" in notes.getvalue()
    assert "need a model that sees" in notes.getvalue() and not out.getvalue() and "/image" not in introduction([blind], GREEDY)


def url_of(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def question(*content: str | dict) -> dict:
    return {"messages": [{"role": "user", "content": list(content)}], "response": "Certainly."}


def test_reward_service_scores_pictures_in_data_urls(folder, tmp_path):
    tokenizer = load_tokenizer(str(folder / "model"), trust_remote_code=False, vision="frozen")
    model = new_scalar_model(folder / "model", tokenizer, trust_remote_code=False)
    torch.nn.init.normal_(scalar_head(model).weight)
    save_model(model, model.state_dict(), tokenizer, tmp_path / "reward")
    contents = [(folder / f"{number}.png").read_bytes() for number in (0, 3)]
    text = {"type": "text", "text": "Which?"}
    shown = [{"type": "image_url", "image_url": {"url": url_of(content)}} for content in contents]
    stolen = json.dumps({"content": [{"type": "picture", "text": "a", "sha256": "../secret", "width": 1, "height": 1}]})
    items = [
        *(question(one, text) for one in shown), question(*shown, text), question(text),
        question({"type": "image_url", "image_url": "http://a.example/b.png"}, text),
        question({"type": "image_url", "image_url": url_of(b"no")}),
        {"messages": [{"role": "user", "content": "a", "extra": stolen}], "response": "Certainly."},
    ]  # fmt: skip
    with running(reward_service(choose(model=tmp_path / "reward"), settings(tmp_path / "reward", max_length=200)).app) as address:
        status, found, _ = ask(address, "score", json.dumps({"version": 1, "items": items}))
        _, texts, _ = ask(address, "get_reward", json.dumps({"query": ["<image>", "a"]}))
    assert status == 200, found
    store = PictureStore(tmp_path / "pictures")
    first, second = (store.add(content) for content in contents)
    loaded = LoadedModel.load(tmp_path / "reward", max_length=200, trust_remote_code=False, vision="frozen", prepared=tmp_path / "pictures")
    asked = {"role": "user", "content": "Which?"}
    talks = [with_pictures(asked, [*some, "Which?"]) if some else asked for some in ([first], [second], [first, second], [])]
    expected = loaded.score_texts([([message], "Certainly.") for message in talks])
    assert found["scores"][:4] == pytest.approx(expected.tolist(), abs=1e-5) and len({*found["scores"][:4]}) == 4
    reasons = ("image_url with a data URL is expected", "can't be decoded", "a picture by its hash")
    assert found["scores"][4:] == [None] * 3 and all(reason in error for reason, error in zip(reasons, found["errors"][4:], strict=True))
    assert texts["scores"][0] is None and texts["scores"][1] is not None


def test_a_text_model_with_a_processor_beside_it_gets_text_alone(sft_folder: Path, tmp_path: Path):
    folder = shutil.copytree(sft_folder, tmp_path / "model")
    (folder / "preprocessor_config.json").write_text("{}")
    assert not sees(folder) and sees(save_seeing_model(tmp_path / "seeing"))
