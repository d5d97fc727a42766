"""Imports go one way: flows, tasks -> rlhf_core.trainers -> {engines, algorithms, scorers, models, data} -> {types, config}."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from imports import OWN, ROOT, closure, foreign_imports, imported_names, own_imports, runtime_imports, sources

VENDORS = {"ray", "vllm", "deepspeed"}
ABOVE_DATA = tuple(f"rlhf_core.{part}" for part in ("trainers", "engines", "scorers", "algorithms"))
CHECK = ROOT / "rlhf_core/stage/reach.py"  # started by flows, in a process of its own
TENSORS = ROOT / "rlhf_core/checkpoint/torch_file.py"  # imports torch where a rank or a driver reads a checkpoint; flows read manifests
# A command line that fetches a version of the registry by starting the command line that does.
STARTED = {ROOT / "rlhf_core/use/choice.py": {"flows.promote"}}


def offenders(folder: str, forbidden: set[str]) -> dict[str, set[str]]:
    return {str(p.relative_to(ROOT)): found for p in sources(folder) if (found := foreign_imports(p) & forbidden)}


@pytest.mark.parametrize("folder", ["tasks", "rlhf_core"])
def test_only_flows_import_prefect(folder):
    assert offenders(folder, {"prefect"}) == {}


def test_flows_need_no_torch_however_far_one_follows_their_imports():
    for path in sources("flows"):
        for needed in closure(path, {CHECK, TENSORS}):
            assert not foreign_imports(needed) & {"torch", "transformers", *VENDORS}, f"{path} -> {needed}"


def test_a_flow_needs_no_bokeh():
    """Half a second of each run's start; stages import it."""
    assert [path for path in closure(ROOT / "flows/chain/flow.py", set()) if "bokeh" in foreign_imports(path)] == []


def test_only_engines_import_ray_vllm_and_deepspeed():
    found = offenders("tasks", VENDORS) | offenders("rlhf_core", VENDORS) | offenders("flows", VENDORS)
    assert {path for path in found if not path.startswith("rlhf_core/engines/")} == set()


def test_an_engine_is_one_vendor():
    for path, vendors in offenders("rlhf_core/engines", VENDORS).items():
        assert len(vendors) == 1, path


def test_algorithms_import_torch_types_and_each_other():
    for path in sources("rlhf_core/algorithms"):
        foreign = foreign_imports(path) - set(sys.stdlib_module_names)
        assert foreign <= {"torch"}, path
        own = {name for name in imported_names(path) if name.startswith(("rlhf_core.", "tasks", "flows"))}
        assert all(name.startswith(("rlhf_core.algorithms", "rlhf_core.types")) for name in own), (path, own)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ("rlhf_core", ("flows", "tasks")),
        ("tasks", ("flows",)),
        *((f"rlhf_core/{part}", ("rlhf_core.trainers",)) for part in ("engines", "algorithms", "scorers", "models", "report")),
        *((f"rlhf_core/{part}", ABOVE_DATA) for part in ("data", "preparation")),
        ("rlhf_core/models", ("rlhf_core.engines", "rlhf_core.scorers")),
        ("rlhf_core/planning", ("rlhf_core.trainers", "rlhf_core.engines", "rlhf_core.stage")),
        ("rlhf_core/types.py", ("rlhf_core.",)),
    ],
)
def test_what_lies_below_does_not_import_what_lies_above(lower, upper):
    files = [ROOT / lower] if lower.endswith(".py") else sources(lower)
    for path in files:
        found = {name for name in imported_names(path) if any(name == u or name.startswith(f"{u.rstrip('.')}.") for u in upper)}
        assert found - STARTED.get(path, set()) == set(), path


def test_the_configuration_knows_nothing_of_the_rest():
    described = "rlhf_core.algorithms.online"  # what each algorithm is, which nothing but the standard library is needed for
    assert foreign_imports(ROOT / "rlhf_core/algorithms/online.py") <= set(sys.stdlib_module_names)
    assert not own_imports(ROOT / "rlhf_core/algorithms/online.py")
    for path in sources("rlhf_core/config"):
        own = {name for name in imported_names(path) if name.startswith(("rlhf_core.", "tasks", "flows"))}
        allowed = ("rlhf_core.config", "rlhf_core.files", described)
        assert all(name.startswith(allowed) for name in own - {"rlhf_core.algorithms"}), (path, own)
        assert foreign_imports(path) - set(sys.stdlib_module_names) <= {"pydantic", "pydantic_core", "ruamel", "detect_secrets"}, path


def test_checking_params_loads_nothing_heavy():
    """The command line refuses wrong params in the first second: before Prefect, torch, pandas and the like are imported."""
    program = "import sys, flows.full_pipeline; print(sorted({'prefect', 'torch', 'pandas', 'ray', 'dvc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_cycle_among_modules_imports_inside_functions_included():
    assert on_cycles({name(path): {name(p) for p in runtime_imports(path)} for folder in OWN for path in sources(folder)}) == {}


def test_no_cycle_among_packages():
    graph: dict[str, set[str]] = {}
    for path in (path for folder in OWN for path in sources(folder)):
        graph.setdefault(package(path), set()).update(package(p) for p in runtime_imports(path))
    assert on_cycles(graph) == {}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package(path: Path) -> str:
    """rlhf_core/<package>, or a module beside the packages, or flows or tasks as a whole."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "rlhf_core" else parts[0]


def on_cycles(graph: dict[str, set[str]]) -> dict[str, list[str]]:
    """What is on a cycle, or on a way from one cycle to another, and what of that it imports."""
    graph = {node: needed - {node} for node, needed in graph.items()}
    while leaves := {node for node, needed in graph.items() if not needed & graph.keys()}:
        graph = {node: needed for node, needed in graph.items() if node not in leaves}
    while unused := graph.keys() - set().union(*graph.values()) if graph else set():
        graph = {node: needed for node, needed in graph.items() if node not in unused}
    return {node: sorted(needed & graph.keys()) for node, needed in graph.items()}
