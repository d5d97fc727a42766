"""The look at data with pictures shows their sizes and the tokens that they take, and a recipe that trains on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from seeing_models import save_seeing_model

from rlhf_core.config import overridden, read_recipe
from rlhf_core.look.__main__ import main
from rlhf_core.models.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[3]
PAIRS = [{"prompt": "<image>\nWhich color?", "chosen": "Red.", "rejected": "Blue, it is.", "images": [name]} for name in ("a.png", "b.png")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    save_seeing_model(tmp_path / "model")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in PAIRS * 2), encoding="utf-8")
    Image.new("RGB", (40, 24), "red").save(tmp_path / "a.png")
    Image.new("RGB", (12, 12), "red").save(tmp_path / "b.png")
    return tmp_path


def test_sizes_and_tokens_of_pictures_are_shown_and_the_recipe_has_them(folder, capsys):
    assert main(["pairs.jsonl", "--images", ".", "--model", "model", "--recipe", "mine.yaml"]) == 0
    printed = capsys.readouterr().out
    tokenizer = load_tokenizer("model", trust_remote_code=False, vision="frozen")
    (pad,) = tokenizer("<|image_pad|>", add_special_tokens=False)["input_ids"]
    main(["pairs.jsonl", "--images", ".", "--model", "model", "--json"])
    samples = json.loads(capsys.readouterr().out)["readings"][0]["samples"]
    for sequence, size in ((samples[0]["sequences"][0], (40, 24)), (samples[1]["sequences"][0], (12, 12))):
        ((width, height, tokens),) = sequence["pictures"]
        assert (width, height) == size and tokens == sequence["ids"].count(pad)
        assert f"picture of {width} x {height} pixels, {tokens} tokens" in printed
    assert "<|vision_start|><|image_pad|><|vision_end|>Which color?" in printed and "columns not read" not in printed
    recipe = overridden((folder / "params.yaml").read_text(encoding="utf-8"), read_recipe(Path("mine.yaml")), subject="params.yaml")[1]
    assert recipe.model.vision == "frozen" and recipe.data.sources[0].images == "." and recipe.alignment.method == "dpo"


def test_pictures_without_the_option_are_refused(folder, capsys):
    assert main(["pairs.jsonl", "--model", "model"]) == 2
    assert "expected text alone, got pictures" in capsys.readouterr().out
    assert main(["pairs.jsonl", "--images", "."]) == 2
    assert "--images: expected a model that sees, got none; name one with --model" in capsys.readouterr().err
