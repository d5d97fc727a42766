"""dvc.yaml, rounds/dvc.yaml, params.yaml, the code and the flows say the same about the chain and about a round of iterative DPO."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

import pytest
from clerk_params import CLERK_PARAMS
from ruamel.yaml import YAML

from flows.chain import stages as chain
from flows.chain.execute import is_gate
from flows.chain.stages import HASH_INPUTS, _paths
from flows.chain.summary import KEY_FIGURES, REPORT
from flows.rounds import series
from rlhf_core.config import (
    INPUT_SECTIONS,
    ROUND_STAGE_SECTIONS,
    STAGE_SECTIONS,
    UNTRACKED_SECTIONS,
    Method,
    Params,
    fill_in,
    load_params,
    read_stages,
)
from rlhf_core.data.places import DATA_ENDINGS
from rlhf_core.paths import ROUNDS_FILE, ROUNDS_PIPELINE
from rlhf_core.preparation import files
from rlhf_core.provenance.inputs import INPUTS, read_inputs
from rlhf_core.rounds.pins import read_rounds

sys.path.insert(0, str(Path(__file__).parent))
from imports import ROOT, closure

METHODS = get_args(Method)
CHAINS = {method: read_stages(ROOT / "dvc.yaml", {"alignment": {"method": method}}) for method in METHODS}  # method -> stages
STAGES = CHAINS["rl"]
ENTRY = {"key": "1", "item": {"policy": {"path": "models/sft"}}, "rounds": "rounds"}  # what of series.yaml the pipeline asks for
_PIPELINE = YAML(typ="safe", pure=True).load(fill_in((ROOT / ROUNDS_PIPELINE).read_text(), ENTRY))
ROUND_STAGES = {stage: definition["do"] for stage, definition in _PIPELINE["stages"].items()}
ALL = [(method, stage) for method in METHODS for stage in STAGES if method == "rl" or stage == "train_policy"]

# Code that runs in a stage and yet is no dependency of it, because it doesn't decide what comes out. A change of it that does
# (rlhf_core/config deriving a value in another way, say) is one to run `dvc repro --force` after.
FRAME = {
    "rlhf_core/stage": "the frame around a stage: locks, signals, messages, scratch folders",
    "rlhf_core/paths.py": "where files lie, which the stage's outs and deps say too",
    "rlhf_core/config": "reads params.yaml, whose sections are dependencies themselves",
    "rlhf_core/environment.py": "which environment variables a stage sees",
    "rlhf_core/progress.py": "what is told while a stage works",
    "rlhf_core/files.py": "files that are replaced as a whole, and locks",
    "rlhf_core/ledger.py": "records that all worktrees of a repository share",
    "rlhf_core/process.py": "environment variables that silence libraries",
    "rlhf_core/curves.py": "where curves are written to",
    "rlhf_core/planning": "what memory a stage takes, checked before it starts",
    "rlhf_core/storage": "brings files to nodes and back, verified by their hashes",
    "rlhf_core/checkpoint": "where unfinished work is kept, and its state digests",
}
# Code in the frame that some stages depend on all the same.
FURTHER = {
    "rlhf_core/config/usual.py": ("train_sft", "train_reward", "train_policy", "report", "train_round"),  # `learning_rate: null`'s number
    "rlhf_core/planning": ("check_model",),  # refuses placements
}


def test_sft_and_reward_model_are_computed_once_for_all_methods():
    """What a stage writes that reads `alignment` differs from method to method, but for its consent."""
    differ = {path for name in STAGES if "alignment" in STAGE_SECTIONS[name] for path in _paths(STAGES[name], "outs", "metrics", "plots")}
    assert {"metrics/validation.json", "metrics/check_model.json"} <= differ
    for stage in ("train_sft", "train_reward", "gate_reward"):
        assert {path for path in STAGES[stage]["deps"] if path in differ} <= {"checks/data.json", "checks/model.json"}


def test_the_flow_runs_the_stages_of_dvc_yaml_in_the_order_of_the_design():
    order = [*chain.read_stages(ROOT)]
    assert sorted(order) == sorted(STAGES)
    assert order == [
        "hash_inputs",
        "prepare_data",
        "validate_data",
        "check_model",
        "train_sft",
        "train_reward",
        "gate_reward",
        "train_policy",
        "evaluate",
        "report",
    ]
    assert [s for s in order if is_gate(s)] == ["gate_reward"]


def test_every_stage_has_a_module_and_every_module_a_stage():
    modules = {p.stem for p in (ROOT / "tasks").rglob("*.py")} - {"__init__"}
    assert modules == {module(method, stage) for method, stage in ALL} | set(ROUND_STAGES)
    for method, stage in ALL:
        assert CHAINS[method][stage]["cmd"] == f"exec python -m tasks.{module(method, stage)}"
    for stage, definition in ROUND_STAGES.items():
        assert definition["cmd"] == f"exec python -m tasks.rounds.{stage} 1"


def module(method: str, stage: str) -> str:
    return f"train_{method}" if stage == "train_policy" else stage


def test_sections_of_params_are_those_of_the_stages():
    for method, stage in ALL:
        assert sections(CHAINS[method][stage]) == [s.replace("${alignment.method}", method) for s in STAGE_SECTIONS[stage]]
    tracked = {entry.partition(".")[0] for method, stage in ALL for entry in sections(CHAINS[method][stage])}
    for stage, definition in ROUND_STAGES.items():
        assert sections(definition) == list(ROUND_STAGE_SECTIONS[stage])
        tracked |= {entry.partition(".")[0] for entry in sections(definition)}
    assert tracked | set(UNTRACKED_SECTIONS) == set(Params.model_fields) and not tracked & set(UNTRACKED_SECTIONS)
    assert set(YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text())) == set(Params.model_fields)
    load_params(ROOT / "params.yaml", complete=False)


def test_single_keys_that_a_stage_lists_have_no_default():
    """DVC refuses a listed key that params.yaml lacks."""
    listed = {s.replace("${alignment.method}", m) for m, stage in ALL for s in STAGE_SECTIONS[stage]}
    listed |= {section for sections in ROUND_STAGE_SECTIONS.values() for section in sections}
    for key in sorted(key for key in listed if "." in key):
        *parents, last = key.split(".")
        section = Params
        for part in parents:
            section = section.model_fields[part].annotation
        assert section.model_fields[last].is_required(), key


def sections(definition: dict) -> list[str]:
    """Of params.yaml."""
    return [entry for entry in definition["params"] if isinstance(entry, str)]


def test_stages_depend_on_the_hashes_of_what_they_read_and_all_hashes_have_a_reader(tmp_path):
    for name, definition in {**STAGES, **ROUND_STAGES}.items():
        named = next((e[str(INPUTS)] for e in definition["params"] if isinstance(e, dict) and str(INPUTS) in e), [])
        assert tuple(named) == INPUT_SECTIONS.get(name, ()), name
    assert {section for names in INPUT_SECTIONS.values() for section in names} == set(read_inputs(load_params(CLERK_PARAMS), tmp_path))
    assert next(iter(chain.read_stages(ROOT))) == HASH_INPUTS and STAGES[HASH_INPUTS]["always_changed"]


def test_data_files_end_as_their_readers_know_them():
    assert set(DATA_ENDINGS) == set(files._READERS)


@pytest.mark.parametrize(("method", "stage"), ALL)
def test_a_stage_depends_on_the_packages_that_its_way_to_the_policy_or_another_imports(method, stage):
    ways = {other: ROOT / f"tasks/{module(other, stage)}.py" for other, s in ALL if s == stage}
    wanted = {p for way in ways.values() for p in code_needed(stage, way) if ROOT / p == ways[method] or ROOT / p not in ways.values()}
    assert code(CHAINS[method][stage]) == wanted, f"deps of {stage} in dvc.yaml"


@pytest.mark.parametrize("stage", ROUND_STAGES)
def test_a_stage_of_a_round_depends_on_the_packages_that_it_imports(stage):
    assert code(ROUND_STAGES[stage]) == code_needed(stage, ROOT / f"tasks/rounds/{stage}.py"), f"deps of {stage} in {ROUNDS_PIPELINE}"


def code(definition: dict) -> set[str]:
    """A stage's dependencies on code."""
    assert len(definition["deps"]) == len(set(definition["deps"])), "a dependency is listed twice"
    return {path for path in definition["deps"] if path.startswith(("tasks/", "rlhf_core/"))}


def code_needed(stage: str, task: Path) -> set[str]:
    """The modules of tasks/ and the packages of rlhf_core that a stage imports, without the frame.

    A package is rlhf_core/<name>, or rlhf_core/<name>/<name> if nothing else of the outer one is imported. rlhf_core's own modules are by
    themselves.
    """
    found = {package_of(path.relative_to(ROOT)) for path in closure(task, {ROOT / path for path in FRAME})}
    found |= {Path(path) for path, stages in FURTHER.items() if stage in stages}
    return {str(path) for path in found if not found & {*path.parents}}


def package_of(path: Path) -> Path:
    return path if path.parts[0] == "tasks" or len(path.parts) == 2 else Path(*path.parent.parts[:3])


def test_stages_that_write_a_models_card_depend_on_the_sources_that_it_names():
    """The card reads data/prepared/sources.json (Stage.card), which no import shows."""
    stages = [(module(method, stage), CHAINS[method][stage]) for method, stage in ALL]
    stages += [(f"rounds/{stage}", definition) for stage, definition in ROUND_STAGES.items()]
    writers = {name: definition["deps"] for name, definition in stages if re.search(r"\bpublish_", (ROOT / f"tasks/{name}.py").read_text())}
    assert {"train_sft", "train_reward", "train_rl", "train_dpo", "rounds/train_round"} <= set(writers)
    assert [name for name, deps in writers.items() if "data/prepared" not in deps] == []


def test_outs_keep_the_run_cache():
    """`persist`, or a plain out with `cache: false`, turns DVC's run cache off; metrics and plots stay in git."""
    assert STAGES[HASH_INPUTS]["outs"] == [{str(INPUTS): {"cache": False, "persist": True}}]  # which is to run each time
    for name, stage in {**STAGES, **ROUND_STAGES}.items():
        if name == HASH_INPUTS:
            continue
        assert all(isinstance(out, str) for out in stage.get("outs", [])), name
        for entry in [*stage.get("metrics", []), *stage.get("plots", [])]:
            (options,) = entry.values()
            assert options["cache"] is False, name


def test_the_pipeline_of_rounds_is_the_flows_and_starts_empty():
    """All stages of a round come from its entry, and work in the project's folder."""
    assert tuple(ROUND_STAGES) == series.STAGES
    for definition in _PIPELINE["stages"].values():
        assert definition["foreach"] == "rounds" and definition["do"]["wdir"] == ".."
    assert _PIPELINE["vars"] == [ROUNDS_FILE.name] and read_rounds(ROOT) == {}


def test_the_table_knows_the_stages():
    assert set(KEY_FIGURES) | {"report", HASH_INPUTS} == set(STAGES)
    assert str(REPORT) in STAGES["report"]["outs"]


def test_a_changed_rule_in_rewards_is_read_anew():
    """One elsewhere is an input (data/inputs.json)."""
    assert all("rewards" in CHAINS[method][stage]["deps"] for method, stage in ALL if stage == "prepare_data")
