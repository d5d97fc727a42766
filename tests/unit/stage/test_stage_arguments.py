"""A stage's module answers --help and refuses what it doesn't take, and runs nothing then."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = sorted(path for path in (ROOT / "tasks").rglob("*.py") if "__main__" in path.read_text())


@pytest.mark.parametrize(("module", "further"), [("prepare_data", []), ("hash_inputs", []), ("rounds.validate_round", ["1"])])
def test_help_is_answered_and_an_unknown_argument_refused(module, further, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"tasks.{module}", *arguments]
        return subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False)

    helped = run("--help")
    assert helped.returncode == 0 and helped.stdout.startswith(f"usage: python -m tasks.{module} ")
    assert f"Stage {module.rpartition('.')[2]}" in helped.stdout
    refused = run(*further, "--froce")
    assert refused.returncode == 2 and "unrecognized arguments: --froce" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_round_is_a_number_from_one(tmp_path):
    command = [sys.executable, "-m", "tasks.rounds.train_round", "0"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "round: expected a number from 1, got 0" in done.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_stage_reads_its_command_line_before_it_does_anything(path):
    tree = ast.parse(path.read_text())
    guard = tree.body[-1]
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    reads = {"no_arguments", "stage_arguments", "round_argument"}
    first = [ast.walk(node) for node in (guard.body[0], main.body[0])]
    assert any(isinstance(node, ast.Name) and node.id in reads for walk in first for node in walk)
