"""What a stage takes on a machine: refused with the role, the bytes and settings that fit, or let through."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clerk_params import CLERK_PARAMS
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_core.config import Params, RoleGroup, load_params
from rlhf_core.config.model import LoraConfig
from rlhf_core.config.placement import named_placement
from rlhf_core.planning import preflight as module
from rlhf_core.planning.hardware import GIB
from rlhf_core.planning.machine import Gpu, Machine
from rlhf_core.planning.memory import ENGINE_PROCESS
from rlhf_core.planning.models import Model, of_shape, read_model
from rlhf_core.planning.preflight import PATIENCE, preflight, runs_elsewhere, smallest
from rlhf_core.planning.remedy import LORA, changed, remedy
from rlhf_core.planning.shape import SIZES, ModelShape
from rlhf_core.planning.shortages import GPU_HOST, Plan, Shortage, check
from rlhf_core.planning.stages import RAY_HOST, TRAINER_GPU, TRAINER_HOST, Models, Unpredictable

ROOT = Path(__file__).parents[3]
EIGHT = of_shape(SIZES["llama3-8b"])
MODELS = Models(EIGHT, EIGHT, (EIGHT,))
H100 = Gpu(79 * GIB, 79 * GIB)
ONE, NODE = Machine(500 * GIB, (H100,)), Machine(2000 * GIB, (H100,) * 8)
SERVICE = {"url": "http://127.0.0.1:8001/v1", "model": "c"}


def params(**settings) -> Params:
    base = {"model.dtype": "bfloat16", "model.max_length": 2048, "rl.rollout.max_new_tokens": 512}
    return changed(load_params(CLERK_PARAMS), base | {key.replace("__", "."): value for key, value in settings.items()})


def lacks(stage: str, found: Params, machine: Machine, models: Models = MODELS) -> bool:
    return bool(check(stage, found, models, machine).shortages)


@pytest.mark.parametrize("method", ["rl", "dpo", "kto", "rejection_sampling", "conditional_sft"])
def test_the_default_chain_fits_a_laptop(method):
    found = changed(load_params(CLERK_PARAMS), {"alignment.method": method})
    shape = ModelShape(3, 96, 256, 3, 3, 32, 390)
    models = Models(*[of_shape(shape, stored=None, plain_llama=True)] * 2, ())
    for stage in ("train_sft", "train_reward", "gate_reward", "train_policy", "evaluate", "train_round", "sample_round", "evaluate_round"):
        assert check(stage, found, models, Machine(8 * GIB)).shortages == []


def test_full_sft_of_8b_on_one_gpu_lacks_memory_and_the_message_names_role_bytes_and_settings():
    refusal = preflight("train_sft", params(), ONE, MODELS)
    assert refusal.startswith("train_sft: training rank: expected to need at most the 76.6 GiB that its GPU has left, got ")
    # Adam 8 bytes, float32 weights 4, weights and gradients 2 of 8.03 billion parameters
    for part in ("model: optimizer 59.8 GiB", "model: float32 weights 29.9 GiB", "model: weights 15 GiB", "model: gradients 15 GiB"):
        assert part in refusal
    settings = remedy("train_sft", params(), MODELS, ONE)
    assert "; set " + " and ".join(f"{key}=" for key in settings)[:12] in refusal
    assert not lacks("train_sft", changed(params(), settings), ONE)


def test_settings_are_the_fewest_that_fit():
    found = remedy("train_sft", params(), MODELS, NODE)
    assert set(found) == {"sft.ranks", "sft.zero_stage"}
    for dropped in found:
        rest = {key: value for key, value in found.items() if key != dropped}
        assert lacks("train_sft", changed(params(), rest), NODE)


def test_sequence_parallelism_divides_activations_and_logits_but_no_states():
    sharded = {"sft__ranks": 8, "sft__zero_stage": 3, "sft__microbatch_tokens": 16384}
    ((whole,),), ((parts,),) = (check("train_sft", params(**sharded, sft__sequence_parallel=size), MODELS, NODE).moments for size in (1, 4))
    assert whole.parts == parts.parts and "4,096 tokens" in parts.peak
    # 10^9 gathered parameters; the gradient of the head's weight in float32, and a product; 523 rows of logits at a time
    fixed = 2e9 + 6 * 128256 * 4096 + 523 * 128256 * 20
    assert parts.phases[parts.peak] - fixed == pytest.approx((whole.phases[whole.peak] - fixed) / 4)


def test_long_sequences_that_fit_no_rank_are_shared_by_several():
    long = params(model__max_length=131072, sft__batch_size=8)
    found = remedy("train_sft", long, MODELS, NODE)
    assert found["sft.ranks"] == 8 and found["sft.sequence_parallel"] in (2, 4, 8)
    assert not lacks("train_sft", changed(long, found), NODE)
    assert lacks("train_sft", changed(long, found | {"sft.sequence_parallel": 1}), NODE)


def test_heads_that_ranks_cannot_divide_are_refused():
    with pytest.raises(ValueError, match="sequence_parallel: expected a divisor of the model's 32 heads"):
        check("train_sft", params(sft__ranks=6, sft__sequence_parallel=6), MODELS, NODE)


def with_reference(**changes) -> Params:
    """DPO, whose reference is another 15 GiB of weights."""
    how = {"reference": "live", "gradient_checkpointing": True, "microbatch_tokens": 2048, **changes}
    return params(alignment__method="dpo", **{f"dpo__{key}": value for key, value in how.items()})


@pytest.mark.parametrize(("sharding", "share"), [({}, 1), ({"ranks": 2, "zero_stage": 3}, 2)])
def test_an_offloaded_reference_takes_the_hosts_memory_and_the_gpus_while_it_computes(sharding, share):
    there, away = (
        check("train_policy", with_reference(**sharding, offload_frozen=offload), MODELS, NODE).moments[0][0] for offload in (False, True)
    )
    weights = there.parts["reference: weights"]
    assert weights == 2 * EIGHT.parameters / share and there.parts == away.parts | {"reference: weights": weights}
    assert away.host - there.host == weights
    # whole weights come to the GPU; of a share the gathered layers do, wherever it is
    assert away.phases["reference: a pass"] - there.phases["reference: a pass"] == (weights if share == 1 else 0)


def test_a_reference_that_does_not_fit_beside_the_model_is_offloaded():
    long = changed(with_reference(), {"model.max_length": 16384})
    (process,) = check("train_policy", long, MODELS, ONE).moments[0]
    machine = of_one(process.needed / GIB)
    assert lacks("train_policy", long, machine)
    assert remedy("train_policy", long, MODELS, machine) == {"dpo.offload_frozen": True}


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_with_adapters_a_live_reference_takes_no_memory(method):
    how = {"gradient_checkpointing": True, "microbatch_tokens": 2048, "lora": LoraConfig(**LORA)}
    processes = []
    for reference in ("live", "precomputed"):
        settings = {f"{method}__{key}": value for key, value in (how | {"reference": reference}).items()}
        ((process,),) = check("train_policy", params(alignment__method=method, **settings), MODELS, ONE).moments
        processes.append(process)
    live, precomputed = processes
    assert live.parts == precomputed.parts and not any("reference" in name for name in (*live.parts, *live.phases))
    assert not lacks("train_policy", params(alignment__method=method, **settings | {f"{method}__reference": "live"}), of_one(24))


def of_one(size: float) -> Machine:
    return Machine(500 * GIB, (Gpu(size * GIB, size * GIB),))


def test_nothing_fits_says_so():
    tiny = Machine(2 * GIB, (Gpu(GIB, GIB),))
    assert remedy("train_sft", params(), MODELS, tiny) == {}
    assert "no setting that was tried fits" in preflight("train_sft", params(), tiny, MODELS)


def test_more_ranks_than_gpus_are_refused():
    large = Machine(900 * GIB, (Gpu(200 * GIB, 200 * GIB),))
    with pytest.raises(ValueError, match=r"sft\.ranks: expected at most the 1 GPU that is there, got 2"):
        check("train_sft", params(sft__ranks=2, sft__zero_stage=3, sft__gradient_checkpointing=True), MODELS, large)


@pytest.mark.parametrize("stage", ["hash_inputs", "prepare_data", "validate_data", "check_model", "report", "validate_round"])
def test_a_stage_that_is_not_planned_reads_no_model(stage, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, logger="rlhf"):
        assert preflight(stage, params()) is None
        assert caplog.text == ""
        assert preflight("train_reward", params()) is None
        assert "can't predict the memory of train_reward" in caplog.text  # no models/sft


@pytest.mark.parametrize("stage", ["gate_reward", "evaluate", "sample_round", "evaluate_round"])
def test_every_rank_that_samples_or_scores_needs_a_gpu_of_its_own(stage):
    with pytest.raises(ValueError, match=r"cluster\.inference_ranks: expected at most the 8 GPUs that are there, got 9"):
        check(stage, params(cluster__inference_ranks=9), MODELS, NODE)
    for moment in check(stage, params(cluster__inference_ranks=8), MODELS, NODE).moments:
        assert [process.count for process in moment] == [8]


def test_ranks_that_score_on_a_cpu_add_up_with_their_engines_processes_and_ray():
    needed = {}
    for ranks in (1, 3):
        moments = check("evaluate", params(cluster__inference_ranks=ranks), MODELS, Machine(GIB)).moments
        needed[ranks] = [sum(p.count * (p.needed + p.base) for p in moment) for moment in moments]
    (engine, scorer, passes), more = needed[1], needed[3]
    assert more[0] == pytest.approx(3 * (engine + TRAINER_HOST) + RAY_HOST)  # a rank has a process beside its engine's
    assert more[1:] == pytest.approx([3 * scorer + RAY_HOST, 3 * passes + RAY_HOST])


def test_a_ranks_own_process_takes_memory_beside_its_engine():
    models, crowded = Models(EIGHT, EIGHT), Machine(2000 * GIB, (Gpu(79 * GIB, 12 * GIB),) * 2)
    how = {"evaluation.gpu_memory_fraction": 0.9, "model.max_length": 2048}
    here, there = (_of_the_engine(check("evaluate", changed(params(cluster__inference_ranks=n), how), models, crowded)) for n in (1, 2))
    assert here.available - there.available == pytest.approx(0.97 * TRAINER_GPU)


def _of_the_engine(plan: Plan) -> Shortage:
    return next(shortage for shortage in plan.shortages if shortage.name == "evaluate: rollout engine")


@pytest.mark.parametrize("setting", ["warn", "off"])
def test_a_shortage_may_be_allowed(setting, caplog):
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        assert preflight("train_sft", params(flow__preflight=setting), ONE, MODELS) is None
    assert bool(caplog.records) == (setting == "warn")


def test_a_shortage_within_the_predictions_error_is_a_warning(caplog):
    needed = check("train_sft", params(), MODELS, ONE).shortages[0].needed
    near = Gpu(needed, needed / 0.97 / 1.05)
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        assert preflight("train_sft", params(), Machine(500 * GIB, (near,)), MODELS) is None
    assert "expected to need at most" in caplog.text


def test_an_unknown_architecture_is_never_refused(caplog):
    unknown = Model(8_000_000_000, None, "bfloat16")
    with caplog.at_level(logging.INFO, logger="rlhf"):
        assert preflight("train_sft", params(), ONE, Models(unknown)) is None
    assert "can't predict the memory of train_sft: its architecture isn't a decoder with gated MLPs" in caplog.text
    with pytest.raises(Unpredictable, match="the size of the model isn't known yet"):
        check("train_sft", params(), Models(None), ONE)


def test_engines_beside_a_rank_take_their_share_of_its_gpu():
    grpo = {"rl__algorithm": "grpo", "rl__trainer__zero_stage": 3, "rl__trainer__gradient_checkpointing": True}
    grpo |= {"rl__rollout__engines": 8, "rl__trainer__ranks": 8, "rl__rollout__take_turns": False}
    beside = params(**grpo, rl__rollout__gpu_memory_fraction=0.85)
    assert not lacks("train_policy", beside, NODE)  # 16 GiB of states and 0.4 * 0.85 of 79 GiB
    thin = changed(beside, {"rl.rollout.gpus_per_engine": 0.05, "rl.trainer.gpus_per_rank": 0.9})
    shortages = check("train_policy", thin, MODELS, NODE).shortages
    assert [s.name for s in shortages] == ["train_policy: rollout engine"]  # 0.05 * 0.85 of 79 GiB hold no 15 GiB of weights


def by_turns(**changes) -> Params:
    """GRPO on eight GPUs, an engine beside each rank."""
    grpo = {"rl__algorithm": "grpo", "rl__rollout__engines": 8, "rl__trainer__ranks": 8, "rl__trainer__gradient_checkpointing": True}
    return params(**grpo | {"rl__trainer__zero_stage": 3, "rl__rollout__gpu_memory_fraction": 0.85} | changes)


def of_memory(size: float) -> Machine:
    return Machine(2000 * GIB, (Gpu(size * GIB, size * GIB),) * 8)


def test_by_turns_the_largest_turn_counts_and_not_the_sum():
    plan = check("train_policy", by_turns(), MODELS, of_memory(46))
    (rank, engine), turns = plan.moments[0], plan.turns
    assert plan.shortages == [] and list(turns) == ["the engines' turn", "weights on their way", "the turn of train_policy: trainer rank"]
    # 27 GiB of the rank and 18 of the engine, and the contexts of both processes
    assert turns["the turn of train_policy: trainer rank"] == rank.needed + TRAINER_GPU + ENGINE_PROCESS
    assert turns["the engines' turn"] == engine.needed + TRAINER_GPU
    # the embedding is larger than a layer; it is gathered, and in the buffer that the engine reads
    layer = 2 * 128256 * 4096
    sent = rank.parts["policy: weights"] + engine.parts["engine: weights"] + 2 * layer + TRAINER_GPU + ENGINE_PROCESS
    assert turns["weights on their way"] == pytest.approx(sent)
    assert engine.share == 0.85 and rank.needed + engine.needed > 0.97 * 46 * GIB
    together = by_turns(rl__rollout__take_turns=False, rl__rollout__gpus_per_engine=0.5, rl__trainer__gpus_per_rank=0.5)
    assert lacks("train_policy", together, of_memory(46))
    # states on the host: bfloat16 weights and gradients, float32 weights and moments of an eighth, reference and reward model
    assert rank.host > 16 * EIGHT.parameters / 8


@pytest.mark.parametrize(
    ("changes", "size", "where"),
    [
        ({"rl__trainer__microbatch_tokens": 65536}, 46, "its GPU, in the trainer's turn,"),
        ({"rl__rollout__gpu_memory_fraction": 0.3}, 46, "its GPU, in the engines' turn,"),
        ({"rl__trainer__zero_stage": 2, "rl__lora": LoraConfig(**LORA)}, 29, "a GPU of engine and rank"),
    ],
)
def test_a_turn_that_does_not_fit_is_named(changes, size, where):
    found, models = by_turns(**changes), Models(EIGHT)  # without a reward model, which would need the most
    assert {shortage.where for shortage in check("train_policy", found, models, of_memory(size)).shortages} == {where}
    assert f"GiB that {where} has left" in preflight("train_policy", found, of_memory(size), models)


SEVENTY = of_shape(SIZES["llama3-70b"])
LARGE = {"rl__trainer__ranks": 4, "rl__trainer__zero_stage": 3, "rl__trainer__gpus_per_rank": 1.0, "rl__algorithm": "grpo"}


def engine_of(size: int, count: int = 1, **settings):
    found = params(rl__rollout__tensor_parallel_size=size, rl__rollout__engines=count, **LARGE, **settings)
    return check("train_policy", found, Models(SEVENTY, SEVENTY, ()), NODE).moments[0][-1]


def test_weights_cache_and_a_pass_of_an_engine_are_divided_over_its_gpus():
    whole, four = engine_of(1), engine_of(4)
    assert four.parts["engine: weights"] == whole.parts["engine: weights"] / 4 == 2 * SEVENTY.parameters / 4
    assert four.parts["engine: one sequence"] == whole.parts["engine: one sequence"] / 4
    # of 8 hidden sizes and 3 MLP widths the latter
    assert whole.phases["engine: a pass"] - four.phases["engine: a pass"] == 8192 * 2 * 3 * 28672 * 3 / 4
    assert [whole.gpus, four.gpus, four.count] == [1, 4, 1]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_changes_keep_what_was_last_sent_on_the_hosts_of_both_ends(on_gpu: bool):
    machine, moments = NODE if on_gpu else Machine(2000 * GIB), []
    for changes in (False, True):
        sync = {"rl__rollout__weight_transfer": "gloo", "rl__rollout__send_changes": changes, "rl__rollout__tensor_parallel_size": 2}
        processes = check("train_policy", params(rl__rollout__engines=1, **LARGE, **sync), Models(EIGHT, EIGHT, ()), machine).moments[0]
        moments.append({process.name.partition(": ")[2]: process for process in processes})
    (rank, engine), (rank_of_changes, engine_of_changes) = ((found["trainer rank"], found["rollout engine"]) for found in moments)
    weights = 2 * EIGHT.parameters
    if on_gpu:
        assert (rank_of_changes.once - rank.once, engine_of_changes.host - engine.host) == (weights, 2 * weights)
    else:
        assert (rank_of_changes.once, rank.once, engine_of_changes.needed - engine.needed) == (weights, 0.0, 2 * weights)


def test_on_a_cpu_what_was_last_sent_counts_once_for_all_ranks():
    how = {"rl__rollout__weight_transfer": "gloo", "rl__rollout__engines": 1, "rl__trainer__ranks": 2, **LARGE}
    without, with_changes = (
        check("train_policy", params(**how, rl__rollout__send_changes=sends), Models(EIGHT, EIGHT, ()), Machine(GIB)).shortages[0].needed
        for sends in (False, True)
    )
    assert with_changes - without == pytest.approx(2 * 2 * EIGHT.parameters)  # of rank 0 and of the engine


@pytest.mark.parametrize(("shape", "size", "nearest"), [("llama3-70b", 3, 2), ("llama3-70b", 6, 4), ("qwen3-32b", 7, 8)])
def test_an_engine_that_cannot_be_divided_is_refused_with_the_nearest_size(shape, size, nearest):
    models = Models(of_shape(SIZES[shape]))
    found = params(
        rl__rollout__tensor_parallel_size=size, rl__rollout__engines=1, alignment__method="rl", rl__placement=[RoleGroup(roles=["policy"])]
    )
    with pytest.raises(
        ValueError, match=rf"tensor_parallel_size: expected a divisor of the model's 64 heads .*, got {size}; set it to {nearest}$"
    ):
        preflight("train_policy", found, NODE, models)


def test_a_model_larger_than_a_gpu_gets_engines_on_several():
    settings = {"rl__rollout__engines": 4, "rl__rollout__gpu_memory_fraction": 0.9, "rl__lora": LORA}
    settings["rl__trainer__gradient_checkpointing"] = True
    found, models = params(**LARGE, **settings), Models(SEVENTY, SEVENTY, ())
    lacking = check("train_policy", found, models, NODE).shortages
    assert [s.name for s in lacking] == ["train_policy: rollout engine"]
    # half of the weights, 66 GiB, leaves no room for a pass
    assert remedy("train_policy", found, models, NODE) == {"rl.rollout.tensor_parallel_size": 4, "rl.rollout.engines": 1}


def test_turns_that_were_switched_off_are_the_first_remedy_of_a_shared_gpu():
    switched_off = by_turns(rl__rollout__take_turns=False, rl__rollout__gpus_per_engine=0.5, rl__trainer__gpus_per_rank=0.5)
    machine = of_memory(46)
    assert check("train_policy", switched_off, MODELS, machine).shortages
    assert remedy("train_policy", switched_off, MODELS, machine) == {"rl.rollout.take_turns": "auto"}


def test_the_processes_of_an_engine_take_memory_of_their_host():
    def host(size: int) -> float:
        found = params(rl__rollout__tensor_parallel_size=size, rl__rollout__engines=1, **LARGE)
        (shortage,) = (s for s in check("train_policy", found, MODELS, Machine(GIB, (H100,) * 8)).shortages if s.where.startswith("a host"))
        return shortage.parts["train_policy: rollout engine"]

    assert host(4) - host(1) == 4 * GPU_HOST


def groups(placement: str) -> list[RoleGroup]:
    return [RoleGroup(**group) for group in named_placement(placement)]


@pytest.mark.parametrize(
    ("placement", "roles"),
    [
        ("two_groups", [{"policy", "reference"}, {"critic", "reward model 0"}]),
        ("apart", [{"policy"}, {"critic"}, {"reference"}, {"reward model 0"}]),
    ],
)
def test_a_rank_takes_the_bytes_of_its_roles_only(placement, roles):
    ppo = {"rl__algorithm": "ppo", "rl__trainer__zero_stage": 3, "rl__trainer__gradient_checkpointing": True}
    whole, _ = check("train_policy", params(**ppo), MODELS, NODE).moments[0]
    *ranks, _ = check("train_policy", params(**ppo, rl__placement=groups(placement)), MODELS, NODE).moments[0]
    assert {name: size for rank in ranks for name, size in rank.parts.items()} == pytest.approx(whole.parts)
    assert [{part.partition(":")[0] for part in rank.parts | rank.phases} for rank in ranks] == roles
    assert max(rank.needed for rank in ranks) < whole.needed


@pytest.mark.parametrize("loss", ["sampled", "jsd"])
def test_teachers_take_their_weights_and_while_the_policy_learns_their_states(loss):
    """Two of 8 billion parameters in bfloat16 beside a policy of 8 billion; with a whole distribution, states and a piece's logits."""
    alone = {"rl__algorithm": "grpo", "rl__kl__placement": "loss", "rl__kl__estimator": "k3", "rl__reward__scorers": []}
    taught = alone | {"rl__distillation": {"teachers": [{"path": "a"}, {"path": "b"}], "loss": loss}}
    models = Models(EIGHT, teachers=(EIGHT, EIGHT))
    rank, _ = check("train_policy", params(**taught), models, NODE).moments[0]
    before, _ = check(
        "train_policy", params(**alone, rl__distillation={"teachers": [{"path": "a"}]}), replace(models, teachers=()), NODE
    ).moments[0]
    assert rank.parts == before.parts | {f"teacher {number}: weights": 2.0 * EIGHT.parameters for number in (0, 1)}
    own = next(iter(rank.phases))
    tokens, rows = 4096, 523  # a piece of 2^28 bytes of logits in float32, of a vocabulary of 128,256
    states = 2 * tokens * EIGHT.shape.hidden + rows * EIGHT.shape.vocab * (2 + 8)
    assert rank.phases[own] - before.phases[own] == pytest.approx(2 * states * (loss == "jsd"))


def test_the_likeliest_tokens_of_teachers_count_on_their_way_to_the_policy():
    """By 32 samples of 512 tokens in two epochs; with ZeRO 3 both heads are gathered too."""
    taught = {"rl__algorithm": "grpo", "rl__kl__placement": "loss", "rl__kl__estimator": "k3", "rl__reward__scorers": []}
    taught |= {"rl__samples_per_step": 32, "rl__minibatch_size": 32, "rl__ppo_epochs": 2, "rl__rollout__temperature": 1.0}
    two = [{"path": "a"}, {"path": "b"}]

    def rank(**distillation):
        found = params(**taught, rl__trainer__zero_stage=3, rl__distillation={"loss": "jsd", **distillation})
        return check("train_policy", found, Models(EIGHT, teachers=(EIGHT,) * 2), NODE).moments[0][0]

    none, few, served = (rank(teachers=two), rank(teachers=two, top_k=16), rank(teachers=[*two, {"service": SERVICE}], top_k=16))
    tokens = 32 * 512 * 16  # copies of 12 bytes: one at the driver, and for each epoch in its plan, on their way and at the ranks
    assert few.once - none.once == 2 * 12 * (1 + 2 * 3) * tokens
    assert served.once - few.once == (12 * (1 + 2 * 3) + 68) * tokens
    heads = few.phases["teacher 1: a pass"] - none.phases["teacher 1: a pass"]
    assert heads == pytest.approx(2 * 2.0 * EIGHT.shape.hidden * EIGHT.shape.vocab)


def test_offloaded_teachers_are_on_the_gpu_together_while_they_compute():
    taught = {"rl__algorithm": "grpo", "rl__kl__placement": "loss", "rl__kl__estimator": "k3", "rl__reward__scorers": []}
    taught |= {"rl__distillation": {"teachers": [{"path": "a"}, {"path": "b"}], "loss": "jsd"}}
    models, weights = Models(EIGHT, teachers=(EIGHT, EIGHT)), 2.0 * EIGHT.parameters
    resident, offloaded = (
        check("train_policy", params(**taught, rl__trainer__offload_frozen=offload), models, NODE).moments[0][0]
        for offload in (False, True)
    )
    own = next(iter(resident.phases))
    for phase in (own, "teacher 0: a pass", "teacher 1: a pass"):
        assert offloaded.phases[phase] - resident.phases[phase] == pytest.approx(2 * weights)
    assert "teacher 0: weights" not in offloaded.parts and offloaded.host - resident.host == pytest.approx(3 * weights)  # and the reference


def test_a_teacher_that_is_not_there_yet_makes_no_prediction():
    found = params(rl__distillation={"teachers": [{"path": "some/teacher"}], "loss": "sampled"})
    with pytest.raises(Unpredictable, match="the size of a teacher isn't known yet"):
        check("train_policy", found, replace(MODELS, teachers=(None,)), NODE)


def test_groups_that_share_a_gpu_add_up():
    shares = {"rl__trainer__gpus_per_rank": 0.4, "rl__rollout__gpus_per_engine": 0.2, "rl__rollout__engines": 1}
    shares["rl__rollout__take_turns"] = False
    halves = params(rl__placement=groups("two_groups"), rl__trainer__gradient_checkpointing=True, **shares)
    free = 300 * GIB
    one = Machine(2000 * GIB, (Gpu(free, free),))
    (*ranks, _), (shortage, *_) = (
        check("train_policy", halves, MODELS, one).moments[0],
        check("train_policy", halves, MODELS, one).shortages,
    )
    assert all(rank.needed < 0.7 * free for rank in ranks) and sum(rank.needed for rank in ranks) > 0.7 * free
    assert shortage.where == "its GPU" and shortage.name.startswith("train_policy: rank of ")


def test_processes_of_a_host_add_up():
    small = of_shape(ModelShape(12, 1024, 2816, 16, 8, 64, 32000), stored="float32")
    both = changed(load_params(CLERK_PARAMS), {"sft.ranks": 2})
    alone = check("train_sft", load_params(CLERK_PARAMS), Models(small), Machine(12 * GIB))
    assert alone.shortages == [] and 7 * GIB < alone.moments[0][0].needed < 9 * GIB
    (shortage,) = check("train_sft", both, Models(small), Machine(12 * GIB)).shortages
    assert shortage.needed > 12 * GIB and shortage.where == "this machine"


def test_memory_that_an_earlier_run_still_holds_is_waited_for(monkeypatch):
    looks = iter([Machine(100 * GIB, (Gpu(200 * GIB, GIB),)), Machine(100 * GIB, (Gpu(200 * GIB, 190 * GIB),))])
    monkeypatch.setattr(module, "here", lambda: next(looks))
    began = time.monotonic()
    assert preflight("train_sft", params(), models=MODELS) is None
    assert time.monotonic() - began < PATIENCE / 2


def test_a_cluster_is_as_large_as_its_smallest_gpu_and_host():
    found = smallest([Machine(9, (Gpu(5, 4), Gpu(6, 3))), Machine(8, (Gpu(7, 7),))])
    assert found == Machine(8, (Gpu(5, 3),) * 3, 0.0, 2)


def test_offloaded_states_and_whole_weights_need_a_hosts_memory():
    settings = {"sft__zero_stage": 2, "sft__offload_optimizer": True, "sft__gradient_checkpointing": True}
    plan = check("train_sft", params(**settings), MODELS, Machine(150 * GIB, (H100,)))
    # 20 bytes of 8.03 billion parameters, the weights once more when they are saved, and 3 GiB
    (shortage,) = plan.shortages
    assert shortage.where == "a host of the GPUs" and shortage.needed == pytest.approx(22 * 8.03e9 + 3 * GIB, rel=1e-3)
    assert not lacks("train_sft", params(**settings), Machine(185 * GIB, (H100,)))


def test_each_host_of_a_cluster_holds_its_ranks():
    settings = {"sft__ranks": 8, "sft__zero_stage": 2, "sft__offload_optimizer": True, "sft__gradient_checkpointing": True}
    needed = check("train_sft", params(**settings), MODELS, Machine(1.0, (H100,) * 8)).shortages[0].needed
    halves = check("train_sft", params(**settings), MODELS, Machine(1.0, (H100,) * 8, gpus_per_host=4)).shortages[0].needed
    once = 2 * EIGHT.parameters
    assert needed - once == pytest.approx(2 * (halves - once))


def test_the_driver_checks_what_runs_on_another_cluster():
    away = params(cluster__address="http://head:8265")
    assert runs_elsewhere("train_policy", away) and not runs_elsewhere("train_sft", away) and not runs_elsewhere("evaluate", away)
    divided = changed(away, {"cluster.inference_ranks": 2})
    assert all(runs_elsewhere(stage, divided) for stage in ("gate_reward", "evaluate", "sample_round@1", "evaluate_round@1"))
    for method, elsewhere in (("rejection_sampling", True), ("conditional_sft", True), ("dpo", False)):
        assert runs_elsewhere("train_policy", changed(divided, {"alignment.method": method})) == elsewhere
    assert runs_elsewhere("train_sft", changed(away, {"sft.ranks": 2})) and not runs_elsewhere("train_policy", params())


# Sizes of folders


def write_model(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


DECODER = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 10,
}


def test_a_folder_is_counted_from_its_headers(tmp_path):
    # attention 4 * 16, MLP 96, norms 8, twice; a norm of 4, embedding and head 80
    model = read_model(write_model(tmp_path / "m", DECODER, {"all": torch.zeros(420, dtype=torch.bfloat16)}))
    assert model == Model(420, ModelShape(2, 4, 8, 2, 2, 2, 10), "bfloat16", plain_llama=True)
    scored = read_model(write_model(tmp_path / "r", DECODER, {"all": torch.zeros(384), "more": torch.zeros(0, dtype=torch.float16)}))
    assert scored.shape is not None and scored.stored is None  # 420 - 40 + 4


def test_a_tied_head_that_is_in_the_files_too_counts_once(tmp_path):
    tied = DECODER | {"tie_word_embeddings": True}
    once, twice = (read_model(write_model(tmp_path / str(count), tied, {"all": torch.zeros(count)})) for count in (380, 420))
    assert once == twice and twice.parameters == 380 and twice.shape.tied


def test_a_folder_with_other_parameters_than_its_shape_has_is_unknown(tmp_path):
    found = read_model(write_model(tmp_path / "m", DECODER, {"all": torch.zeros(600)}))
    assert found == Model(600, None, "float32")
    assert read_model(write_model(tmp_path / "g", {"model_type": "gpt2", "n_layer": 2}, {"w": torch.zeros(5)})) == Model(5, None, "float32")


@pytest.mark.parametrize(
    ("family", "predicted"),
    [
        *((family, True) for family in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")),
        *((family, True) for family in ("phi3", "olmo2", "cohere", "glm4", "granite", "smollm3", "seed_oss")),
        *((family, False) for family in ("qwen2_moe", "starcoder2", "gpt2", "deepseek_v3")),
    ],
)
def test_the_families_that_the_page_names_are_predicted(tmp_path, family, predicted):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = AutoConfig.for_model(family, vocab_size=512, pad_token_id=0, **sizes | {"num_hidden_layers": 2, "layer_types": None})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert (read_model(tmp_path).shape is not None) == predicted


def test_the_check_imports_nothing_heavy_and_is_fast():
    program = (
        f"import sys, time; from rlhf_core.config import load_params; params = load_params({str(CLERK_PARAMS)!r});"
        "began = time.process_time();"
        "from rlhf_core.planning.preflight import preflight; print(preflight('train_sft', params));"
        "print(time.process_time() - began, sorted({'torch', 'transformers', 'ray', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    verdict, figures = done.stdout.splitlines()
    seconds, _, heavy = figures.partition(" ")
    assert verdict == "None" and heavy == "[]" and float(seconds) < 0.3
