"""CORRECTNESS, token-mean loss and resume: two data-parallel ranks do what one does, with and without ZeRO."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from tiny_models import assert_weights_agree, largest_difference, policy_engine, save_tiny_experts, save_tiny_models
from transfers import same_bits
from two_ranks import (
    BATCHES,
    CASES,
    QUICK,
    QUICK_SHARED,
    QUICK_STAGES,
    SHARED,
    STAGES,
    load_of_other_ranks,
    rl_case,
    run_two_ranks,
    save_large,
    saved_by_one_rank,
    sft_steps,
)
from whole_matrix import cells, is_chosen

from rlhf_core.checkpoint.digest import DIGEST_FILE, differences, read_digest, write_digest
from rlhf_core.engines.deepspeed.universal import convert_to_universal, is_sharded
from rlhf_core.trainers.rl.minibatch import EXTREMES

pytestmark = pytest.mark.usefixtures("world")
# Width 16, intermediate 32, 2 layers: q, k, v, o are 16 x 16, gate, up and down 16 x 32; rank 2.
ADAPTED = 2 * 2 * (4 * 32 + 3 * 48)
at_every_stage = pytest.mark.parametrize("stage", cells(STAGES, QUICK_STAGES))


@pytest.fixture(scope="module")
def folders(model_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, tokenizer) -> tuple[Path, Path, Path]:
    """Language model, two reward models, and a language model with experts."""
    members = tmp_path_factory.mktemp("reward")
    shutil.copytree(model_folders[1], members, dirs_exist_ok=True)
    shutil.copytree(save_tiny_models(tmp_path_factory.mktemp("other"), tokenizer, seed=5)[1], members / "member_1")
    return model_folders[0], members, save_tiny_experts(tmp_path_factory.mktemp("experts"), tokenizer)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folders: tuple[Path, Path, Path], out: Path, request: pytest.FixtureRequest) -> list[dict]:
    whole = is_chosen(request)
    saved_by_one_rank(folders[0], out / "one", whole=whole)
    save_large(out / "large")
    return run_two_ranks(folders, out, whole=whole)


@pytest.fixture(scope="module")
def alone(folders: tuple[Path, Path, Path]) -> dict:
    """What a single rank gets, without ZeRO."""
    engine = policy_engine(folders[0])
    return {
        "rl": {case: rl_case(case, folders, stage=0, rank=0, ranks=1) for case in CASES},
        "sft": (sft_steps(engine, BATCHES, rank=0, ranks=1), engine.state_dict()),
    }


@at_every_stage
def test_token_mean_loss_and_weights_of_two_ranks_equal_those_of_one(ranks: list[dict], alone: dict, stage: int):
    expected, weights = alone["sft"]
    (first, first_weights), (second, second_weights) = (rank["sft"][stage] for rank in ranks)
    for step, (loss, norm) in enumerate(expected):
        assert first[step][0] + second[step][0] == pytest.approx(loss, rel=1e-5)
        assert first[step][1] == pytest.approx(norm, rel=1e-4)
        assert second[step][1] == first[step][1]
    assert_weights_agree(first_weights, weights)
    assert largest_difference(first_weights, second_weights) == 0


@pytest.mark.parametrize(("stage", "case"), cells(product(STAGES, CASES), QUICK))
def test_rl_updates_on_two_ranks_equal_those_on_one(ranks: list[dict], alone: dict, stage: int, case: str):
    """Also where one rank has nothing but unscored rows."""
    first, second = (rank["rl"][stage][case] for rank in ranks)
    expected = alone["rl"][case]
    for name, values in expected["forward"].items():
        torch.testing.assert_close(torch.cat([first["forward"][name], second["forward"][name]]), values, rtol=0, atol=3e-6)
    torch.testing.assert_close(first["scores"][:3], expected["scores"][:3], rtol=0, atol=3e-6)
    assert bool(first["scores"][3].isnan().all()) and len(second["scores"]) == 0  # rank 1 has nothing to score
    for mine, others, both in zip(first["totals"], second["totals"], expected["totals"], strict=True):
        assert mine.keys() == others.keys() == both.keys()
        for name, value in both.items():
            if name in ("optimizer_steps", "stopped_early", "skipped_steps") or name.endswith("grad_norm"):
                assert mine[name] == others[name] == pytest.approx(value, rel=1e-4)
            elif name in EXTREMES:
                assert EXTREMES[name](mine[name], others[name]) == pytest.approx(value, rel=1e-4)
            else:
                assert mine[name] + others[name] == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert_weights_agree(first["weights"], expected["weights"])
    assert second["weights"] is None


@pytest.mark.parametrize("stage", cells(STAGES, [stage for stage, case in QUICK if case == "adapters"]))
def test_engines_make_the_weights_of_two_ranks_from_adapters_alone(ranks: list[dict], stage: int):
    """Both ranks gather the same; the first one sends."""
    for rank in ranks:
        found = rank["rl"][stage]["adapters"]
        assert same_bits(found["engine"], ranks[0]["rl"][stage]["adapters"]["weights"])
        assert found["sent"] == 4 * ADAPTED


@pytest.mark.parametrize("case", cells(SHARED, QUICK_SHARED))
def test_rl_updates_on_two_ranks_that_share_sequences_equal_those_on_one(ranks: list[dict], alone: dict, case: str):
    """Each rank has the outputs, scores and sums of all tokens, of which it computed its own."""
    expected = alone["rl"][case]
    for found in (rank["shared"][case] for rank in ranks):
        assert found["forward"].keys() == expected["forward"].keys()
        for name, values in expected["forward"].items():
            torch.testing.assert_close(found["forward"][name], values, rtol=0, atol=3e-6)
        torch.testing.assert_close(found["scores"], expected["scores"], rtol=0, atol=3e-6, equal_nan=True)
        for totals, both in zip(found["totals"], expected["totals"], strict=True):
            assert totals == pytest.approx(both, rel=1e-4, abs=1e-5)
    assert_weights_agree(ranks[0]["shared"][case]["weights"], expected["weights"])


def test_both_ranks_end_a_step_by_the_mean_of_all_their_tokens(ranks: list[dict]):
    """Rank 1's own tokens are near enough to the sampling policy to go on."""
    found = [of["ppo"]["totals"] for of in ranks[1]["rl"].values() if "ppo" in of]
    assert found
    for step, after in found:
        assert (step["optimizer_steps"], step["stopped_early"]) == (1, 1)
        assert step["approx_kl_sum"] < 1.0 * step["tokens"]
        assert (after["optimizer_steps"], after["stopped_early"]) == (2, 0)


def test_both_ranks_skip_a_minibatch_whose_responses_are_masked_on_both_and_no_other(ranks: list[dict]):
    """In the last but one all that rank 1 has is masked."""
    for rank in ranks:
        found = [of["totals"] for at_stage in rank["rl"].values() for of in at_stage.values()]
        assert len(found) >= len(CASES)
        for step, after in found:
            assert (step["skipped_steps"], after["skipped_steps"], after["optimizer_steps"]) == (0, 1, 2)


@at_every_stage
def test_resume_on_two_ranks_equals_an_uninterrupted_run_bit_for_bit(ranks: list[dict], stage: int):
    for rank in ranks:
        steps, weights = rank["sft"][stage]
        resumed_steps, resumed_weights = rank["resumed"][stage]
        assert resumed_steps == steps[2:]
        assert largest_difference(resumed_weights, weights) == 0


@at_every_stage
def test_two_ranks_whose_states_go_to_the_host_and_back_take_the_same_steps_bit_for_bit(ranks: list[dict], stage: int):
    for rank in ranks:
        assert rank["turns"][stage] == rank["sft"][stage][0][:2]


def test_the_state_digests_of_what_two_ranks_saved_and_saved_again_are_equal_and_name_the_ranks(ranks: list[dict], out: Path):
    found = []
    for name in ("engines", "again"):
        write_digest(out / name, 2)
        found.append(read_digest(out / name / DIGEST_FILE))
    assert differences(*found) == []
    for part, kind in (("optimizer", "exp_avg"), ("weights", "master weights")):
        last = f"{kind} of model.model.norm.weight of stage-3 on rank 1"
        assert last in found[0]["parts"][part] and last.replace("rank 1", "rank 0") in found[0]["parts"][part]


@at_every_stage
def test_one_rank_resumes_a_checkpoint_of_two_within_rounding(ranks, folders, out: Path, alone: dict, stage: int):
    assert is_sharded(out / "engines" / f"stage-{stage}") == (stage > 0)
    if stage:
        convert_to_universal(out / "engines" / f"stage-{stage}", out / "engines" / "universal" / f"stage-{stage}")
    engine = policy_engine(folders[0], zero_stage=stage)
    load_of_other_ranks(engine, out / "engines", f"stage-{stage}")
    steps = sft_steps(engine, BATCHES[2:], rank=0, ranks=1)
    expected, weights = alone["sft"]
    for (loss, norm), (expected_loss, expected_norm) in zip(steps, expected[2:], strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5) and norm == pytest.approx(expected_norm, rel=1e-4)
    assert_weights_agree(engine.state_dict(), weights)


@at_every_stage
def test_two_ranks_resume_from_a_checkpoint_of_one_within_rounding(ranks: list[dict], alone: dict, stage: int):
    expected, weights = alone["sft"]
    (first, first_weights), (second, second_weights) = (rank["grown"][stage] for rank in ranks)
    for mine, others, (loss, norm) in zip(first, second, expected[2:], strict=True):
        assert mine[0] + others[0] == pytest.approx(loss, rel=1e-5) and mine[1] == others[1] == pytest.approx(norm, rel=1e-4)
    assert_weights_agree(first_weights, weights)
    assert largest_difference(first_weights, second_weights) == 0


def test_gradients_are_reduced_once_a_step_unless_zero_partitions_them(ranks: list[dict]):
    for rank in ranks:
        (first, in_step), (sharded, in_sharded_step), (partitioned, _) = rank["reductions"]
        assert first == sharded == 0 < min(in_step, in_sharded_step)
        assert partitioned == 3  # stage 2: in each micro-batch


def test_a_rank_loads_its_share_and_gathers_a_layer_at_a_time(ranks: list[dict]):
    """Weights in memory are the files themselves until they are dealt out; the embedding, a sixth of the model, is the largest weight."""
    for rank in ranks:
        loading = rank["loading"]
        assert loading["loaded"] < 0.4
        assert 0.4 < loading["sharded"] < 0.8
        assert 0.1 < loading["gathered"] < 0.2


def test_every_rank_gets_as_many_microbatches(ranks: list[dict]):
    first, second = (rank["equal_count"] for rank in ranks)
    assert len(first) == len(second) == 3
    assert sorted(i for part in first for i in part) == [0, 1, 2, 3, 4]
    assert "expected at least 2 examples on each rank" in ranks[0]["too few"]
    assert "too few" not in ranks[1]


def test_sums_over_ranks_are_the_same_on_each(ranks: list[dict]):
    assert ranks[0]["sum"].tolist() == ranks[1]["sum"].tolist() == [3.0, 30.0]
