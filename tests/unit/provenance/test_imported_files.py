"""Which files of the user's own a Python file imports, found without running it, and what a change of one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.config import parse_params, read_yaml
from rlhf_core.provenance.imported_files import imported_files
from rlhf_core.provenance.inputs import changes_since, read_inputs

ROOT = Path(__file__).parents[3]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "project/.dvc").mkdir(parents=True)
    return tmp_path / "project"


def names(project: Path, file: str, **how) -> list[str]:
    return [os.path.relpath(path, project) for path in imported_files(project / file, project, **how)]


def test_imports_are_followed_into_modules_packages_and_functions(project):
    write(project / "mine.py", "import helper\nfrom words import lists, count as c\ndef f():\n    from deep.er.still import thing\n")
    write(
        project / "helper.py",
        "import importlib\nlater = importlib.import_module('later')\n__import__('latest')\nimport helper, json, torch\n",
    )
    for name in ("later.py", "latest.py", "unused.py", "words/__init__.py", "words/unused.py", "deep/__init__.py"):
        write(project / name, "")
    write(project / "words/lists.py", "from . import common\nfrom .more.all import *\nfrom ..outside import x\n")
    write(project / "words/common.py", "syntax error(")
    write(project / "words/more/all.py", "x = 1")  # a package without __init__.py
    write(project / "deep/er/still.py", "import rlhf_core.config, tasks, words.lists")
    assert names(project, "mine.py") == [
        *("deep/__init__.py", "deep/er/still.py", "helper.py", "later.py", "latest.py"),
        *("words/__init__.py", "words/common.py", "words/lists.py", "words/more/all.py"),
    ]


def test_the_static_walk_finds_what_python_imports(project):
    """In a process that imports the same file, as stages do: from the project's folder."""
    write(project / "pack/judge.py", "from pack.sub import a\nfrom pack import sub\nimport beside")
    write(project / "pack/__init__.py", "from . import base")
    write(project / "pack/base.py", "")
    write(project / "pack/sub/__init__.py", "from ..base import *\nfrom .b import value")
    write(project / "pack/sub/a.py", "")
    write(project / "pack/sub/b.py", "value = 1")
    write(project / "beside.py", "")
    program = "import pack.judge, sys; print('\\n'.join(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=project, check=True, capture_output=True, text=True)
    loaded = {os.path.relpath(line, project.resolve()) for line in done.stdout.splitlines() if line.startswith(str(project.resolve()))}
    assert set(names(project, "pack/judge.py", module="pack.judge")) == loaded - {"pack/judge.py"} and len(loaded) == 7


def test_modules_beside_the_file_and_on_pythonpath_count_and_installed_ones_do_not(project, monkeypatch):
    elsewhere = project.parent / "elsewhere"
    write(elsewhere / "mine.py", "import beside, listed, torch, both")
    write(elsewhere / "beside.py", "")
    write(elsewhere / "both.py", "")
    write(project.parent / "path/listed.py", "")
    write(project.parent / "path/site-packages/torch.py", "")
    write(project / "both.py", "")
    monkeypatch.setenv("PYTHONPATH", f"{project.parent}/path{os.pathsep}{project.parent}/path/site-packages")
    assert names(project, "../elsewhere/mine.py") == ["../elsewhere/beside.py", "../path/listed.py", "both.py"]


@pytest.mark.parametrize(("method", "own", "trained", "evaluated"), [
    ("rl", False, ["rl.reward.scorers.a"], ["rl.reward.scorers.a"]),
    ("rl", True, ["rl.reward.scorers.a"], ["evaluation.scorers.b"]),
    ("dpo", False, [], ["rl.reward.scorers.a"]),
    ("dpo", True, [], ["evaluation.scorers.b"]),
])  # fmt: skip
def test_functions_that_only_evaluate_are_no_input_of_the_training(project, method, own, trained, evaluated):
    tree = read_yaml(CLERK_PARAMS)
    for name, section in (("a", tree["rl"]["reward"]), ("b", tree["evaluation"])):
        write(project / f"{name}.py", "")
        scorers = [{"name": name, "kind": "function", "path": f"{name}.py:score"}]
        section["scorers"] = scorers if name == "a" or own else None
    tree["alignment"]["method"] = method
    found = read_inputs(parse_params(tree), project)
    assert ([*found["scorers"]], [*found["evaluation_scorers"]]) == (trained, evaluated)


def test_a_changed_helper_of_a_reward_function_is_a_changed_input(project):
    write(project / "scores/polite.py", "from scores.words import KIND\ndef polite(p, r, l, m): ...")
    helper = write(project / "scores/words.py", "KIND = {'please'}")
    write(project / "rewards/kept.py", "import lists")
    write(project / "rewards/other.py", "")
    lists = write(project / "lists.py", "import rewards.other")
    tree = read_yaml(CLERK_PARAMS)
    functions = [("polite", "scores/polite.py:polite"), ("kept", "rewards/kept.py:kept"), ("packed", "scores.polite:polite")]
    tree["rl"]["reward"]["scorers"] += [{"name": name, "kind": "function", "path": path} for name, path in functions]
    params = parse_params(tree)
    before = read_inputs(params, project)
    assert {key.removeprefix("rl.reward.scorers."): entry["path"] for key, entry in before["scorers"].items()} == {
        "polite": "scores/polite.py",
        "polite imports scores/words.py": "scores/words.py",
        "kept imports lists.py": "lists.py",  # rewards/ itself is a dependency already
        "packed": "scores/polite.py",
        "packed imports scores/words.py": "scores/words.py",
    }
    lock = write(
        project / "dvc.lock", json.dumps({"stages": {"train_policy": {"params": {"data/inputs.json": {"scorers": before["scorers"]}}}}})
    )
    assert changes_since(lock, read_inputs(params, project), project) == []
    helper.write_text("KIND = {'please', 'thanks'}")
    lists.write_text("import rewards.other, json")
    changed = changes_since(lock, read_inputs(params, project), project)
    assert [line.partition(" changed:")[0] for line in changed] == [
        "rl.reward.scorers.polite imports scores/words.py: scores/words.py",
        "rl.reward.scorers.kept imports lists.py: lists.py",
        "rl.reward.scorers.packed imports scores/words.py: scores/words.py",
    ]
