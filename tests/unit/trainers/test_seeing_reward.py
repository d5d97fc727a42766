"""A reward model that sees: its scores beside transformers' own forward pass and the head, resuming, ranks, and scoring of rows."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from seeing_models import FAMILIES, ONE_PICTURE, QUESTION, rows, save_seeing_model, seeing, store
from seeing_runs import plain_values
from tiny_models import tiny_params

from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.config import ModelConfig, ScorerConfig
from rlhf_core.curves import MetricsLog
from rlhf_core.data.pictures import Picture, with_pictures
from rlhf_core.engines.rollout.requests import Sample
from rlhf_core.gate.probes import invariance
from rlhf_core.models.build import save_model
from rlhf_core.models.tokenizer import encode_prompt, encode_scored
from rlhf_core.process import Interrupted
from rlhf_core.sampling import scoring
from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer
from rlhf_core.scorers.reward.loaded import LoadedModel
from rlhf_core.trainers.reward.ensemble import train_ensemble
from rlhf_core.trainers.supervised.loop import TrainLoop
from rlhf_core.types import Prompt

pytestmark = pytest.mark.usefixtures("world")
PAD = "<|image_pad|>"
LIMIT = 1e-5  # of a score, in float32
QUICK = ("qwen2_5_vl", "llava")
COLUMNS = ("step", "phase", "loss", "accuracy", "heldout_loss", "heldout_accuracy", "learning_rate", "grad_norm")


class Case:
    """A family's model, a folder with pictures, and pairs about them."""

    def __init__(self, folder: Path, family: str):
        self.model, self.prepared = save_seeing_model(folder / "model", family), folder / "data"
        self.pictures: list[Picture] = store(self.prepared, 6)
        self.rows = [{**row, "source": "a"} for row in rows(self.pictures, several=family not in ONE_PICTURE)]
        self.tokenizer, self.sight = seeing(self.model, self.prepared)

    @property
    def config(self) -> ModelConfig:
        return tiny_params().model.model_copy(update={"vision": "frozen", "path": str(self.model), "max_length": 256})

    def train(self, scratch: Path, *, stop_after: int | None = None) -> pd.DataFrame:
        """Train for four steps into `scratch / "model"`, and return the held-out scores."""
        seen: list[int] = []
        options = {"batch_size": 4, "learning_rate": 3e-3, "microbatch_tokens": 200, "checkpoint_every": 100, "eval_every": 2}
        config = tiny_params(**{f"reward.{name}": value for name, value in options.items()}, **{"reward.steps": 4}).reward

        def loop(first_step: int, seed: int) -> TrainLoop:
            return TrainLoop(
                seed, 100, 2, first_step, lambda phase: CheckpointStore(scratch / phase),
                lambda step: MetricsLog(scratch / "curves.csv", COLUMNS, timings=None, first_step=step),
                lambda: seen.append(1) or len(seen) == stop_after,
            )  # fmt: skip

        def save(model, weights, tokenizer, *, part: str) -> None:
            save_model(model, weights, tokenizer, scratch / "model" / part)

        found = train_ensemble(
            self.model, lambda split: self.rows, self.tokenizer, config, model=self.config, seed=0, loop=loop, save=save, sight=self.sight
        )
        return found[1]

    def load(self, folder: Path) -> LoadedModel:
        return LoadedModel.load(folder, max_length=256, trust_remote_code=False, vision="frozen", prepared=self.prepared)


@pytest.fixture(scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def case(request, tmp_path_factory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def trained(case, tmp_path_factory) -> SimpleNamespace:
    scratch = tmp_path_factory.mktemp("trained")
    return SimpleNamespace(scores=case.train(scratch), folder=scratch / "model")


def plain_scores(case: Case, folder: Path, texts: list[tuple]) -> np.ndarray:
    """Scores by transformers' language model with the trained trunk; each sequence alone."""
    sequences = [encode_scored(case.tokenizer, messages, response) for messages, response in texts]
    return np.array([float(plain_values(folder, case.prepared, ids, getattr(ids, "pictures", ()))[-1]) for ids in sequences])


def texts_of(case: Case, side: str) -> list[tuple]:
    return [(row["messages"], row[side]) for row in case.rows]


def test_scores_equal_transformers_forward_and_the_head(case, trained):
    chosen, rejected = (plain_scores(case, trained.folder, texts_of(case, side)) for side in ("chosen", "rejected"))
    table = trained.scores[trained.scores["split"] == "test"].set_index("id").loc[[row["id"] for row in case.rows]]
    assert np.abs(table["chosen_score"] - chosen).max() < LIMIT and np.abs(table["rejected_score"] - rejected).max() < LIMIT
    assert min(np.abs(chosen).max(), np.std(chosen)) > 100 * LIMIT  # it has learned something
    assert (table["chosen_score"] > table["rejected_score"]).mean() > 0.5


def test_training_resumes_to_the_same_bits_and_leaves_the_tower(case, trained, tmp_path):
    with pytest.raises(Interrupted):
        case.train(tmp_path, stop_after=2)
    again = case.train(tmp_path)
    pd.testing.assert_frame_equal(again, trained.scores)
    first, second = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", trained.folder))
    given = load_file(case.model / "model.safetensors")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    tower = [name for name in given if "vis" in name]
    assert tower and all(torch.equal(given[name], first[name]) for name in tower)


def test_loaded_model_scores_rows_as_training_did(case, trained):
    loaded, texts = case.load(trained.folder), texts_of(case, "chosen")
    table = trained.scores[trained.scores["split"] == "test"].set_index("id").loc[[row["id"] for row in case.rows]]
    stored = table["chosen_score"].to_numpy()
    assert np.abs(loaded.score_texts(texts) - stored).max() < LIMIT
    probes = invariance(loaded, texts, stored)
    assert probes.pop("padding_side")["value"] is None
    assert all(found["value"] < LIMIT for found in probes.values()), probes


def test_equal_ids_beside_other_pictures_have_other_scores(case, trained):
    loaded = case.load(trained.folder)
    same_size = [p for p in case.pictures if (p.width, p.height) == (case.pictures[0].width, case.pictures[0].height)]
    texts = [([with_pictures({"role": "user", "content": QUESTION}, [one, QUESTION])], "Certainly.") for one in same_size]
    first, second = (loaded.encode(*text) for text in texts)
    assert first == second
    scores = loaded.score_texts([*texts, texts[0]])
    assert abs(scores[0] - scores[1]) > 10 * LIMIT and scores[0] == scores[2]
    with pytest.raises(ValueError, match="expected the 0 tokens that 0 take in a sequence, got"):
        loaded.score([list(first)])
    with pytest.raises(ValueError, match="expected texts alone for a model that doesn't see, got pictures"):
        replace(loaded, sight=None).score([first])


def test_scorer_of_responses_sees(case, trained, monkeypatch):
    monkeypatch.setattr(scoring, "PREPARED", case.prepared)
    configs = [ScorerConfig(name="reward_model", kind="reward_model")]
    scorers = LocalScorers(configs, reward_model=trained.folder, source_judges={}, model=case.config)
    prompts = [Prompt(row["id"], "a", row["messages"], encode_prompt(case.tokenizer, row["messages"]), None) for row in case.rows]
    answer = case.tokenizer("Certainly: 3.<|end|>", add_special_tokens=False)["input_ids"]
    samples = [[Sample(answer, [-1.0] * len(answer), True)] for _ in prompts]
    groups = ResponseScorer(scorers, case.tokenizer, stops=(case.tokenizer.eos_token_id,)).score_groups(prompts, samples)
    expected = case.load(trained.folder).score_texts([(prompt.messages, "Certainly: 3.") for prompt in prompts])
    assert np.abs(np.array([group[0].components["reward_model"] for group in groups]) - expected).max() < LIMIT
    assert len({round(x, 4) for x in expected}) > 3


def test_a_reward_model_with_other_sizes_of_pictures_reads_its_own_tokens(case, trained, tmp_path, monkeypatch):
    if "size" not in (sizes := json.loads((trained.folder / "preprocessor_config.json").read_text())) or case.tokenizer.vision.token != PAD:
        pytest.skip("a processor whose sizes don't decide the number of tokens")
    monkeypatch.setattr(scoring, "PREPARED", case.prepared)
    shutil.copytree(trained.folder, tmp_path / "reward")
    sizes["size"]["longest_edge"] = 256
    (tmp_path / "reward" / "preprocessor_config.json").write_text(json.dumps(sizes))
    configs = [ScorerConfig(name="reward_model", kind="reward_model")]
    scorers = LocalScorers(configs, reward_model=tmp_path / "reward", source_judges={}, model=case.config)
    messages = [with_pictures({"role": "user", "content": QUESTION}, [case.pictures[0], QUESTION])]
    prompt = Prompt("a", "a", messages, encode_prompt(case.tokenizer, messages), None)
    answer = case.tokenizer("Red.<|end|>", add_special_tokens=False)["input_ids"]
    ((found,),) = ResponseScorer(scorers, case.tokenizer).score_groups([prompt], [[Sample(answer, [-1.0] * len(answer), True)]])
    other = case.load(tmp_path / "reward")
    assert len(other.encode(messages, "Red.")) < len(prompt.prompt_ids)
    assert found.components["reward_model"] == pytest.approx(other.score_texts([(messages, "Red.")])[0], abs=LIMIT)
