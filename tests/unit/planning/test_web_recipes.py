"""The recipes of recipes/web: checked as params.yaml, held against one GPU, and their predictions against those of docs/web_recipes.md.

The data sets and models aren't on this machine. Records are written as their cards show them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rlhf_core.config import Params, overridden, read_recipe, read_text
from rlhf_core.planning.chain import Rows, stage_times, supervised_time
from rlhf_core.planning.hardware import GIB, GPUS
from rlhf_core.planning.machine import Gpu, Machine
from rlhf_core.planning.models import of_shape
from rlhf_core.planning.preflight import plan_stages
from rlhf_core.planning.shape import named_shape
from rlhf_core.planning.speed import of_gpus
from rlhf_core.preparation.sources import load_source

ROOT = Path(__file__).parents[3]
RECIPES = {path.stem: path for path in sorted((ROOT / "recipes/web").glob("*.yaml"))}
PAGE = (ROOT / "docs/web_recipes.md").read_text()
# Training and held-out rows of the sources' splits, and mean lengths in tokens, as docs/web_recipes.md says.
PROBLEMS = {"prompt": Rows(6576, 747, 105.0, 105.0, 0.0)}
PAIRS = Rows(59650, 620, 1000.0, 500.0, 330.0)
CHATS = {"sft": Rows(59650, 620, 500.0, 500.0, 330.0), "preference": PAIRS, "prompt": Rows(59650, 1860, 170.0, 170.0, 0.0)}
RECORDS = {
    "openai/gsm8k": {"question": "Ann has 2 pens and buys 3. How many has she?", "answer": "2 + 3 = <<2+3=5>>5 pens.\n#### 5"},
    "trl-lib/ultrafeedback_binarized": {
        "chosen": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "rejected": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"}],
        "score_chosen": 8.0,
        "score_rejected": 3.0,
    },
}


def params_of(recipe: Path, **more: object) -> Params:
    return overridden(read_text(ROOT / "params.yaml"), read_recipe(recipe) | more, subject=recipe.name, complete=False)[1]


def machine_of(gpu: str) -> Machine:
    return Machine(128 * GIB, (Gpu(GPUS[gpu].memory, GPUS[gpu].memory),), gpus_per_host=1)


def row_of(name: str) -> list[str]:
    """The cells of the page's table of predictions behind the recipe's name."""
    (line,) = re.findall(rf"^\| \[`{re.escape(name)}`\].*\|$", PAGE, re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_three_recipes_name_open_models_and_data_by_their_revisions():
    assert len(RECIPES) == 3
    methods = set()
    for recipe in RECIPES.values():
        params = params_of(recipe)
        assert re.fullmatch("[0-9a-f]{40}", params.model.revision) and 4e8 < named_shape(params.model.path).parameters < 1.6e9
        methods |= {params.alignment.method if params.alignment.method != "rl" else params.rl.algorithm}
        methods |= {stage for stage in ("sft", "reward") if getattr(params, stage).enabled}
        text = recipe.read_text()
        assert "Has not run." in text and f"recipes/web/{recipe.name}" in text and f"recipes/web/{recipe.name}" in PAGE
    assert methods == {"ppo", "grpo", "dpo", "sft", "reward"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_local_folders_in_place_of_the_names(name):
    text = read_recipe(RECIPES[name])
    sources = [
        {k: v for k, v in source.items() if k not in ("revision", "subset")} | {"path": "a/folder"} for source in text["data.sources"]
    ]
    params = params_of(RECIPES[name], **{"model.path": "a/model", "model.revision": None, "data.sources": sources})
    assert params.model.path == "a/model" and params.data.sources[0].path == "a/folder"


@pytest.mark.parametrize("name", RECIPES)
def test_a_record_of_the_data_set_becomes_a_row_for_each_use(name, tmp_path):
    (source,) = params_of(RECIPES[name]).data.sources
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(RECORDS[source.path]) + "\n" for _ in range(2)))
    local = {"kind": "file", "path": str(tmp_path / "data.jsonl"), "revision": None, "subset": None}
    rows = load_source(source.model_copy(update=local), seed=0).rows
    assert set(rows) == set(source.uses) and all(len(rows[use]) for use in rows)


@pytest.mark.parametrize("name", RECIPES)
def test_every_stage_fits_one_gpu_with_the_memory_of_the_page(name):
    params = params_of(RECIPES[name])
    start = of_shape(named_shape(params.model.path))
    plans, problems = plan_stages(params, machine_of("h100"), start, [start])
    assert problems == {} and [plan.stage for plan in plans if plan.shortages] == []
    small, _ = plan_stages(params, machine_of("rtx4090"), start, [start])
    fits = "yes" if not any(plan.shortages for plan in small) else "no"
    largest = max(size for plan in plans for size in (*plan.turns.values(), *(p.needed for moment in plan.moments for p in moment)))
    assert row_of(name)[:2] == [f"{largest / GIB:.3g}", fits]


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_the_predicted_hours_of_an_h100(name):
    params = params_of(RECIPES[name])
    shape, speed = named_shape(params.model.path), of_gpus(GPUS["h100"], 1)
    rows = CHATS if params.reward.enabled else PROBLEMS
    times = stage_times(params, shape, rows, speed)
    if params.reward.enabled:
        times["train_reward"] = supervised_time("reward", params, shape, PAIRS, speed)
    hours = sum(stage.seconds for stage in times.values()) / 3600
    steps = times["train_policy"].steps
    assert row_of(name)[2:4] == [f"{steps:,}", f"{hours:.1f}"]


def test_the_recipes_are_whole_yaml_without_a_machines_path():
    for recipe in RECIPES.values():
        text = recipe.read_text()
        assert YAML(typ="safe", pure=True).load(text)["data"]["sources"] and not re.search(r"(/home|/root|/work)\b", text)
