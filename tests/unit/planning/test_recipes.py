"""The settings of recipes/cluster: checked as params.yaml, and judged by the preflight for the GPUs that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config import Params, overridden, read_recipe, read_text
from rlhf_core.planning.hardware import GIB, GPUS, Cluster, Efficiency
from rlhf_core.planning.machine import Gpu, Machine
from rlhf_core.planning.models import of_shape
from rlhf_core.planning.phases import predict
from rlhf_core.planning.plan import Placement, Workload
from rlhf_core.planning.preflight import plan_stages
from rlhf_core.planning.remedy import changed
from rlhf_core.planning.search import apart, colocated
from rlhf_core.planning.shape import SIZES

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes/cluster").glob("*.yaml"))
EIGHT, SEVENTY = of_shape(SIZES["llama3-8b"]), of_shape(SIZES["llama3-70b"])
NODE = Machine(512 * GIB, (Gpu(GPUS["h100"].memory, GPUS["h100"].memory),) * 8, gpus_per_host=8)
B200 = Machine(1000 * GIB, (Gpu(GPUS["b200"].memory, GPUS["b200"].memory),) * 32, gpus_per_host=8)
H100 = Machine(1000 * GIB, NODE.gpus * 4, gpus_per_host=8)


BY_TURNS = ("grpo_8b", "ppo_8b")


def params_of(recipe: Path) -> Params:
    return overridden(read_text(ROOT / "params.yaml"), read_recipe(recipe), subject=recipe.name, complete=False)[1]


def machine_of(name: str) -> Machine:
    if not name.endswith("80gb"):
        return B200
    return Machine((2000 if name.startswith("ppo") else 1000) * GIB, H100.gpus, gpus_per_host=8)


def test_there_is_one_for_each_size_algorithm_and_way_of_training():
    names = {f"{algorithm}_{size}{lora}" for algorithm in ("ppo", "grpo") for size in ("8b", "70b") for lora in ("", "_lora")}
    names |= {"ppo_70b_80gb", "grpo_70b_80gb"}
    assert {path.stem for path in RECIPES} == names
    for path in RECIPES:
        params = params_of(path)
        algorithm, size, *kind = path.stem.split("_")
        assert (params.rl.algorithm, params.rl.lora is not None) == (algorithm, kind == ["lora"])
        assert params.model.path.lower().endswith(f"{size}-instruct")
        text = path.read_text()
        assert "Has not run." in text and f"recipes/cluster/{path.name}" in text


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_every_stage_fits_the_gpus_that_the_recipe_names(recipe):
    start, machine = (SEVENTY, machine_of(recipe.stem)) if "70b" in recipe.stem else (EIGHT, NODE)
    params = params_of(recipe)
    plans, problems = plan_stages(params, machine, start, [EIGHT])
    assert problems == {} and [plan.stage for plan in plans if plan.shortages] == []
    rollout, ranks, gpus = params.rl.rollout, params.rl.trainer.ranks, len(machine.gpus)
    engines = rollout.engines * rollout.tensor_parallel_size
    by_turns = recipe.stem in BY_TURNS
    assert (ranks, engines) == (gpus, gpus) if by_turns else ranks + engines == gpus
    assert any(plan.turns for plan in plans) == by_turns


@pytest.mark.parametrize("recipe", BY_TURNS)
def test_turns_are_taken_where_a_step_is_predicted_to_be_faster_by_them(recipe):
    rl, gpus = params_of(ROOT / f"recipes/cluster/{recipe}.yaml").rl, len(NODE.gpus)
    work = Workload(
        policy=SIZES["llama3-8b"],
        critic=SIZES["llama3-8b"] if rl.algorithm == "ppo" else None,
        reference=True,
        reward_models=(SIZES["llama3-8b"],),
        samples=rl.samples_per_step,
        group_size=rl.group_size,
        minibatch=rl.minibatch_size,
        ppo_epochs=rl.ppo_epochs,
        prompt_length=512,
        response_length=700,
        longest=rl.rollout.max_new_tokens,
        microbatch_tokens=rl.trainer.microbatch_tokens,
    )
    how = {"zero_stage": rl.trainer.zero_stage, "checkpointing": rl.trainer.gradient_checkpointing}
    placements = [Placement(groups, **how) for groups in (colocated(work, gpus), *(apart(work, gpus, n) for n in (2, 4)))]
    turns, *others = (predict(work, placement, Cluster(GPUS["h100"], gpus), Efficiency()) for placement in placements)
    assert turns.fits and 1.2 * turns.step < min(other.step for other in others)


@pytest.mark.parametrize("recipe", [path for path in RECIPES if "70b" in path.stem and "80gb" not in path.stem], ids=lambda p: p.stem)
def test_70b_is_refused_on_gpus_that_no_rollout_engine_fits(recipe):
    plans, _ = plan_stages(params_of(recipe), H100, SEVENTY, [EIGHT])
    lacking = {plan.stage: {s.name for s in plan.shortages} for plan in plans if plan.shortages}
    assert "train_policy: rollout engine" in lacking["train_policy"] and "train_sft" not in lacking


@pytest.mark.parametrize("stage", ["train_policy", "evaluate"])
def test_70b_fits_gpus_of_80_gb_only_with_several_to_an_engine(stage):
    params = params_of(ROOT / "recipes/cluster/grpo_70b_80gb.yaml")
    whole = {"rl.rollout.tensor_parallel_size": 1, "cluster.inference_ranks_per_model": 1}
    plans, _ = plan_stages(changed(params, whole), H100, SEVENTY, [EIGHT])
    (plan,) = (plan for plan in plans if plan.stage == stage)
    lacking = {"train_policy": {"rollout engine"}, "evaluate": {"rollout engine", "log-probabilities"}}[stage]
    assert {s.name.removeprefix(f"{stage}: ") for s in plan.shortages} == lacking


def test_8b_in_full_on_one_gpu_is_refused():
    one = Machine(512 * GIB, NODE.gpus[:1])
    _, problems = plan_stages(params_of(ROOT / "recipes/cluster/ppo_8b.yaml"), one, EIGHT, [EIGHT])
    assert isinstance(problems["train_sft"], ValueError) and str(problems["train_sft"]) == (
        "sft.ranks: expected at most the 1 GPU that is there, got 8; lower it, because two ranks can't share a GPU"
    )
