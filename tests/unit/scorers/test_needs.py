"""What is told of scorers from their files, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_templates import templated
from classifiers import save_classifier

from rlhf_core.config import ScorerConfig
from rlhf_core.scorers.needs import check_scorers


def check(folder: Path, **options) -> None:
    scorer = ScorerConfig(name="ready", kind="reward_model", weight=1.0, normalization="none", path=str(folder), **options)
    check_scorers([scorer], reward_model=folder, source_judges={}, has_labels=lambda: True)


def test_a_ready_made_reward_model_is_refused_for_what_its_files_say(tmp_path: Path):
    folder = save_classifier(tmp_path / "one", "llama", templated("chatml"), vocab_size=400)
    check(folder)
    several = save_classifier(tmp_path / "several", "llama", templated("chatml"), num_labels=2, id2label={0: "BAD", 1: "GOOD"})
    check(several, label="GOOD")
    with pytest.raises(ValueError, match=r"scorer ready: expected a label of .*, which has BAD, GOOD, got none; set label"):
        check(several)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"scorer ready: expected a chat template at .*, got none; add a chat_template\.jinja"):
        check(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ messages[0].content }}"}))
    check(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": True}))
    with pytest.raises(ValueError, match=r"expected an encoder or a decoder at .*, got an encoder-decoder"):
        check(folder)
