"""`python -m tools.params` prints effective values, those at their default included."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rlhf_core.config import load_params
from tools.params import main

ROOT = Path(__file__).parents[3]


def printed(monkeypatch, capsys, *arguments: str):
    monkeypatch.setattr(sys, "argv", ["tools.params", *arguments])
    monkeypatch.chdir(ROOT)
    main()
    return YAML(typ="safe", pure=True).load(capsys.readouterr().out)


def test_the_printed_params_are_the_effective_ones(monkeypatch, capsys):
    assert printed(monkeypatch, capsys) == load_params(ROOT / "params.yaml", complete=False).model_dump(mode="json")
    assert printed(monkeypatch, capsys, "sft.learning_rate") == 2e-5  # null in params.yaml


def test_overrides_and_a_key_select_what_is_printed(monkeypatch, capsys):
    changed = ["--set", "training.zero_stage=2", *(f"--params={ROOT}/recipes/{name}.yaml" for name in ("clerk", "hacking"))]
    assert printed(monkeypatch, capsys, "kto.zero_stage", *changed) == 2
    assert printed(monkeypatch, capsys, "data.sources.0.clerk.garbled_fraction", *changed) == 0.0


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(f"{sys.executable} -m tools.params | true", shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [["sft.stepz"], ["--set", "sft.stepz=1"]])
def test_an_unknown_key_is_refused(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["tools.params", *arguments])
    monkeypatch.chdir(ROOT)
    assert main() == 2 and re.search(r"sft\.stepz.*: expected a key of params.yaml", capsys.readouterr().err)
