"""Dropout is off where two distributions are compared, however a model applies it, and on where a section wants it."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from preference_runs import TRAIN, config, rows, run_of
from tiny_models import PAD, policy_engine, rl_job, save_tiny_dropout, scalar_engine, sequences, settings, train_batch, whole
from transformers import PreTrainedTokenizerFast

from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.models.batch import TokenBatch, collate_tokens
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.trainers.rl.rank import TrainerRank

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folders(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory):
    """Language model and reward model of a family."""
    return save_tiny_dropout(tmp_path_factory.mktemp(request.param), tokenizer, request.param)


def batch() -> TokenBatch:
    return collate_tokens(sequences(4, seed=3), [1] * 4, pad_id=PAD)


def first_row(curves: Path) -> dict[str, float]:
    with curves.open() as file:
        row = next(csv.DictReader(file))
    return {name: float(value) for name, value in row.items() if name != "phase" and value}


@pytest.mark.parametrize("reference", ["live", "precomputed"])
def test_dpo_starts_at_log_2_where_the_model_has_dropout(folders: tuple[Path, Path], tmp_path: Path, reference: str):
    TRAIN["dpo"](rows(10), rows(3), config("dpo", reference=reference, nll_coef=0.0), run_of(folders[0], tmp_path, steps=1))
    first = first_row(tmp_path / "curves.csv")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5) and first["reward_margin"] == pytest.approx(0, abs=1e-4)


def test_kto_starts_with_a_kl_of_0_where_the_model_has_dropout(folders: tuple[Path, Path], tmp_path: Path):
    TRAIN["kto"](rows(10), rows(3), config("kto"), run_of(folders[0], tmp_path, steps=1))
    first = first_row(tmp_path / "curves.csv")
    assert first["kl"] == pytest.approx(0, abs=1e-5) and first["loss"] == pytest.approx(0.5, abs=1e-5)


def test_dropout_stays_where_a_section_wants_it(folders: tuple[Path, Path], tmp_path: Path):
    how = config("dpo", nll_coef=0.0, disable_dropout=False)
    TRAIN["dpo"](rows(10), rows(3), how, run_of(folders[0], tmp_path, steps=1))
    assert abs(first_row(tmp_path / "curves.csv")["loss"] - math.log(2)) > 1e-3


@pytest.mark.parametrize("make", [policy_engine, scalar_engine])
def test_an_engine_without_dropout_computes_in_training_what_it_does_in_evaluation(folders: tuple[Path, Path], make):
    folder = folders[1] if make is scalar_engine else folders[0]

    def numbers(engine: TrainEngine) -> torch.Tensor:
        output = engine(batch())
        return (output if make is scalar_engine else output.logprobs).detach()

    for disable_dropout in (True, False):
        engine = make(folder, disable_dropout=disable_dropout)
        trained = numbers(engine)
        engine.eval()
        evaluated = numbers(engine)
        engine.train()  # as after a look at held-out data
        again = numbers(engine)
        same = [float((numbers - evaluated).abs().max()) == 0 for numbers in (trained, again)]
        assert same == [disable_dropout] * 2


def test_an_adapters_dropout_is_its_own_setting(sft_folder: Path):
    model = load_language_model(sft_folder)
    section = config("dpo", lora={"rank": 4, "alpha": 8.0, "dropout": 0.5, "target_modules": "all-linear"})
    add_adapters(model, section.lora, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # or the adapters would add nothing
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    engine = TrainEngine(PolicyModule(model), settings(disable_dropout=True))
    one, other = (engine(batch()).logprobs.detach() for _ in range(2))
    assert float((one - other).abs().max()) > 1e-4
    engine.eval()
    assert torch.equal(engine(batch()).logprobs, engine(batch()).logprobs)


def test_in_rl_policy_and_critic_have_no_dropout(folders: tuple[Path, Path]):
    """What the update computes is what was computed before it: no ratio but 1, no loss of the critic against its own values."""
    rank = TrainerRank(0, 1, rl_job(*folders))
    rank.connect(rank.address())
    learned = train_batch()
    for i in range(len(learned)):
        alone = learned.sequences.select([i])
        response, seen = alone.response_ids(), rank.forward(alone)
        learned.old_logprobs[i, : len(response)], learned.returns[i, : len(response)] = seen["old_logprobs"], seen["values"]
        learned.old_values[i, : len(response)] = seen["values"]
    totals = rank.update([whole(learned)], kl_coef=0.0, train_policy=True).totals
    assert (totals["policy_ratio_max"], totals["policy_ratio_min"]) == pytest.approx((1.0, 1.0), abs=1e-5)
    assert totals["value_loss"] == pytest.approx(0, abs=1e-9)


def test_the_saved_models_own_dropout_stays_in_its_configuration(folders: tuple[Path, Path], tmp_path: Path):
    trained = TRAIN["dpo"](rows(10), [], config("dpo"), run_of(folders[0], tmp_path, steps=1))
    kept, before = trained.model.config.to_dict(), load_language_model(folders[0]).config.to_dict()
    rates = {name for name in before if "pdrop" in name or "dropout" in name}
    assert rates and {name: kept[name] for name in rates} == {name: before[name] for name in rates}
    assert any(before[name] == 0.3 for name in rates)
