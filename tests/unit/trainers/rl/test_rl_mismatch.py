"""The probe tells stale weights from different arithmetic."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import rl_job

from rlhf_core.trainers.rl.mismatch import PROBE_TOKENS, LogprobMismatch, WeightSyncCheck, probe_ids
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.trainers.rl.workers import Workers

BEFORE, AFTER = [-1.0, -2.0, -3.0], [-1.5, -1.0, -3.25]


def sync_check(folders: tuple[Path, Path], **changes) -> WeightSyncCheck:
    check = WeightSyncCheck(rl_job(*folders, **changes), vocabulary=300)
    check.start([BEFORE, [x + 1e-5 for x in BEFORE]], BEFORE)
    return check


def test_ids_follow_from_the_vocabulary_and_fit():
    ids = probe_ids(300, longest=64)
    assert len(ids) == PROBE_TOKENS and ids == probe_ids(300, longest=64) != probe_ids(301, longest=64)
    assert min(ids) >= 0 and max(ids) < 300 and len(probe_ids(300, longest=10)) == 9


def test_ids_are_known_to_the_model_where_its_tokenizer_knows_more(model_folders: tuple[Path, Path], tmp_path: Path):
    shutil.copytree(model_folders[0], tmp_path / "small")
    config = json.loads((tmp_path / "small/config.json").read_text())
    (tmp_path / "small/config.json").write_text(json.dumps(config | {"vocab_size": 40}))
    nobody = SimpleNamespace(trainers=SimpleNamespace(policy=None), rollouts=None, take_turns=False, ways=["gloo"])
    job = rl_job(tmp_path / "small", model_folders[1])
    made = Workers(job.model_copy(update={"work": str(tmp_path / "work")}), nobody)
    assert made.rollouts.sync_check.probe_ids == probe_ids(40, longest=job.model.max_length)


def test_weights_that_arrived_pass_and_the_largest_difference_is_kept(model_folders: tuple[Path, Path]):
    check = sync_check(model_folders)
    check.check([AFTER, [x - 2e-5 for x in AFTER]], AFTER, version=1)
    assert check.difference == pytest.approx(2e-5, rel=0.1)
    check.check([BEFORE, BEFORE], BEFORE, version=2)
    assert check.difference == 0.0


STALE = r"policy version 1: expected rollout engine 1 .*largest difference of 1, above rl\.rollout\.max_logprob_difference=0\.001; "


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ([x + 1e-5 for x in BEFORE], "its log-probabilities are unchanged: the weights of version 1 didn't arrive"),
        ([x - 1e-5 for x in BEFORE], "it still has the weights of version 0: those of version 1 didn't arrive"),
        ([-1.5, -2.0, -4.0], "its weights have changed, so the arithmetic differs"),
    ],
)
def test_the_message_tells_stale_weights_from_arithmetic(model_folders: tuple[Path, Path], message: list[float], cause: str):
    with pytest.raises(LogprobMismatch, match=STALE + cause):
        sync_check(model_folders).check([AFTER, message], AFTER, version=1)


@pytest.mark.parametrize("moved", [5e-6, 5e-5, 9e-4])
@pytest.mark.parametrize("drift", [0.0, 1e-7], ids=["same_bits", "nearly"])
def test_stale_weights_are_detected_at_the_first_small_update(model_folders: tuple[Path, Path], drift: float, moved: float):
    check = sync_check(model_folders)
    nearly = [x + moved for x in BEFORE]  # within the budget
    with pytest.raises(LogprobMismatch, match=r"engine 0 to follow .*changed by .*: the weights of version 1 didn't arrive"):
        check.check([[x + drift for x in BEFORE], nearly], nearly, version=1)


def test_same_bits_are_stale_even_where_the_arithmetic_differs_by_more_than_the_update(model_folders: tuple[Path, Path]):
    check = sync_check(model_folders)  # engine 1 is off by 1e-5
    with pytest.raises(LogprobMismatch, match="engine 1 to follow"):
        check.check([[x + 8e-6 for x in BEFORE], [x + 1e-5 for x in BEFORE]], [x + 8e-6 for x in BEFORE], version=1)


@pytest.mark.parametrize("moved", [0.0, 1e-6], ids=["skipped", "tiny"])
def test_a_step_that_moves_nothing_passes(model_folders: tuple[Path, Path], moved: float):
    sync_check(model_folders).check([BEFORE, [x + 1e-5 for x in BEFORE]], [x + moved for x in BEFORE], version=1)


def test_a_small_update_that_arrived_passes(model_folders: tuple[Path, Path]):
    check, moved = sync_check(model_folders), [5e-5, -3e-5, 2e-5]
    after = [x + m for x, m in zip(BEFORE, moved, strict=True)]
    check.check([after, [x + 1e-5 + noise for x, noise in zip(after, [3e-6, -2e-6, 4e-6], strict=True)]], after, version=1)


def spread(scale: float, *, seed: int) -> torch.Tensor:
    return scale * torch.randn(31, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("update", [0.0, 0.01, 0.1])
def test_noise_of_bfloat16_passes(model_folders: tuple[Path, Path], update: float, seed: int):
    """Each says log-probabilities with noise of its own, after an update that arrived; for a token the trainer chose another expert."""
    check = WeightSyncCheck(rl_job(*model_folders, **BFLOAT16), vocabulary=300)
    before, after = spread(1.0, seed=seed), spread(1.0, seed=seed) + spread(update, seed=100 + seed)
    engine, trainer, engine_after, trainer_after = (spread(0.008, seed=200 + 4 * seed + i) for i in range(4))
    trainer_after[3] += 0.5
    check.start([(before + engine).tolist()], (before + trainer).tolist())
    check.check([(after + engine_after).tolist()], (after + trainer_after).tolist(), version=1)


BFLOAT16 = {"model.dtype": "bfloat16", "rl.rollout.bfloat16_p999_difference": 1.0, "rl.rollout.bfloat16_mean_difference": 0.2}
ADAPTERS = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}


@pytest.mark.parametrize("drift", [0.0, 0.008], ids=["same_bits", "noise"])
def test_stale_weights_are_detected_in_bfloat16(model_folders: tuple[Path, Path], drift: float):
    check = WeightSyncCheck(rl_job(*model_folders, **BFLOAT16), vocabulary=300)
    before, after = spread(1.0, seed=0), spread(1.0, seed=0) + spread(0.1, seed=1)
    check.start([before.tolist()], before.tolist())
    with pytest.raises(LogprobMismatch, match=r"engine 0 to follow .*: the weights of version 1 didn't arrive"):
        check.check([(before + spread(drift, seed=2)).tolist()], after.tolist(), version=1)


def test_adapters_may_round_away_in_bfloat16_but_not_altogether(model_folders: tuple[Path, Path]):
    before, after = spread(1.0, seed=0), spread(1.0, seed=0) + spread(0.1, seed=1)
    check = WeightSyncCheck(rl_job(*model_folders, **BFLOAT16, **{"rl.lora": ADAPTERS}), vocabulary=300)
    check.start([before.tolist()], before.tolist())
    with pytest.raises(LogprobMismatch, match="engine 0 to follow"):
        check.check([before.tolist()], after.tolist(), version=1)
    check.check([(before + spread(0.01, seed=2)).tolist()], after.tolist(), version=1)


def test_every_token_of_the_probe_counts_whatever_is_sampled_from(model_folders: tuple[Path, Path]):
    check = sync_check(model_folders, **{"rl.rollout.top_p": 0.9})
    with pytest.raises(LogprobMismatch, match=r"a largest difference of 0\.5"):
        check.check([[*BEFORE[:2], BEFORE[2] + 0.5], BEFORE], BEFORE, version=1)


def test_engines_that_start_with_other_numbers_are_refused_unless_the_trainer_has_rounded(model_folders: tuple[Path, Path]):
    with pytest.raises(LogprobMismatch, match=r"policy version 0: .*both have loaded the same model, so the arithmetic differs"):
        WeightSyncCheck(rl_job(*model_folders), vocabulary=300).start([AFTER], BEFORE)
    rounded = rl_job(
        *model_folders, **{"rl.lora": {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear", "quantize": "nf4"}}
    )
    WeightSyncCheck(rounded, vocabulary=300).start([AFTER], BEFORE)


@pytest.mark.parametrize(("dtype", "passes"), [("float32", False), ("bfloat16", True)])
def test_the_budget_is_the_precisions(model_folders: tuple[Path, Path], dtype: str, passes: bool):
    check = WeightSyncCheck(rl_job(*model_folders, **{"model.dtype": dtype}), vocabulary=300)
    message = [x + 0.03 for x in BEFORE]
    if passes:
        check.start([message], BEFORE)
        assert check.disagreement(message) is None and check.difference == pytest.approx(0.03)
        message = [math.nan, *message[1:]]
    with pytest.raises(LogprobMismatch):
        check.check([message], BEFORE, version=0)


def test_unlikely_tokens_of_the_probe_may_be_further_apart_in_bfloat16(model_folders: tuple[Path, Path]):
    """A random Llama of 512 channels was 0.06 apart in the mean, near the limit for sampled tokens; wrong weights are nats apart."""
    check = WeightSyncCheck(rl_job(*model_folders, **{"model.dtype": "bfloat16"}), vocabulary=300)
    before = spread(3.0, seed=0)
    apart = spread(0.15, seed=1)
    apart[7] = 0.9
    check.start([(before + apart).tolist()], before.tolist())
    assert check.disagreement((before + apart).tolist()) is None
    wrong = spread(3.0, seed=2).tolist()
    with pytest.raises(LogprobMismatch, match=r"a mean difference of .*, above rl\.rollout\.bfloat16_p999_difference=0\.8"):
        check.check([wrong], before.tolist(), version=1)
    assert "bfloat16_p999_difference" in check.disagreement(wrong)


def test_the_trainer_says_what_its_model_computes(model_folders: tuple[Path, Path]):
    rank = TrainerRank(0, 1, rl_job(*model_folders))
    rank.connect(None)
    ids = probe_ids(250, longest=64)
    with torch.no_grad():
        logprobs = rank.roles.language_model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)
    assert rank.probe(ids) == pytest.approx(expected.tolist(), abs=1e-5)
