"""Settings that wreck a pretrained model are logged and kept in the run's record."""

from __future__ import annotations

import logging

from clerk_params import ROOT
from tiny_models import save_tiny_models, tiny_tokenizer

from flows.chain.settings import warn_of_settings
from flows.runs.record import read_record
from rlhf_core.config import overridden, read_text

SOURCE = {"name": "mine", "kind": "file", "path": "mine.jsonl", "format": "preference", "uses": ["sft", "preference", "prompt"]}


def params(model: str, rate: float):
    given = {"model.path": model, "data.sources": [SOURCE], "sft.learning_rate": rate}
    return overridden(read_text(ROOT / "params.yaml"), given, subject="params.yaml")[1]


def test_a_model_of_unknown_or_known_large_size_is_warned_of(tmp_path, caplog):
    told = "sft.learning_rate: full training at 0.002; usual 5e-6 to 2e-5 (docs/training.md)"
    for model in ("nobody/unknown", "Qwen/Qwen2.5-0.5B"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rlhf.flows"):
            warn_of_settings(tmp_path, params(model, 2e-3))
        assert caplog.messages == [told] and read_record(tmp_path)["warnings"] == [told]
    warn_of_settings(tmp_path, params("nobody/unknown", 2e-5))
    assert read_record(tmp_path)["warnings"] == []


def test_a_small_model_is_not_warned_of(tmp_path, caplog):
    folder, _ = save_tiny_models(tmp_path / "models", tiny_tokenizer())
    warn_of_settings(tmp_path, params(str(folder), 1e-3))
    assert caplog.messages == [] and read_record(tmp_path)["warnings"] == []
