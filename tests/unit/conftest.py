"""What the tests of models and training share: a tokenizer and two tiny models on disk."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings
from transformers import PreTrainedTokenizerFast

# A loaded machine is no reason to fail. A developer's run draws other examples each time, so that few a run are many over time;
# CI draws the same ones each time, as by Hypothesis' own profile for it, so that its verdict is about the change.
settings.register_profile("quick", deadline=None, max_examples=40, derandomize="CI" in os.environ)
settings.load_profile("quick")


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    """Exclude what earlier files have imported from garbage collection: an engine that is closed collects all that is left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    from tiny_models import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> tuple[Path, Path]:
    """Language model and reward model."""
    from tiny_models import save_tiny_models

    return save_tiny_models(tmp_path_factory.mktemp("models"), tokenizer)


@pytest.fixture(scope="session")
def sft_folder(model_folders: tuple[Path, Path]) -> Path:
    return model_folders[0]


@pytest.fixture(scope="session")
def reward_folder(model_folders: tuple[Path, Path]) -> Path:
    return model_folders[1]
