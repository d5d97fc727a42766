"""What a stage reads at its start is what is recorded: an edit of params, code or data while it runs is found, for every stage."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS
from ruamel.yaml import YAML

from rlhf_core.config import ConfigError, apply_overrides, load_params, read_yaml
from rlhf_core.paths import INPUTS
from rlhf_core.provenance.inputs import read_inputs
from rlhf_core.rounds.pins import BudgetPin, Pin, PromptsPin, Round, write_rounds
from rlhf_core.stage import reading
from rlhf_core.stage.files import write_json
from rlhf_core.stage.reading import Reading
from rlhf_core.stage.scratch import read_definition

ROOT = Path(__file__).parents[3]
STAGES = [(stage, None) for stage in read_yaml(ROOT / "dvc.yaml")["stages"]]
ROUND_STAGES = [(f"{stage}@1", 1) for stage in read_yaml(ROOT / "rounds/dvc.yaml")["stages"]]
# Sections of data/inputs.json, and the file or folder outside the project's own that each is of here.
OUTSIDE = {"sources": "rows.jsonl", "judges": "judge.py", "model": "base", "chat_template": "chat.jinja"}
OUTSIDE |= {"scorers": "scorer.py", "evaluation_scorers": "evaluation_scorer.py", "round_scorers": "round_scorer.py"}
OUTSIDE |= {"external": "pairs.jsonl"}
SOURCE = {"name": "mine", "kind": "file", "path": "rows.jsonl", "format": "prompt", "uses": ["prompt"], "weight": 1.0}
SCORER = {"name": "own", "kind": "function", "weight": 1.0}
OVERRIDES = {
    "data.sources": [SOURCE | {"judge": "judge.py:judge"}],
    "model.path": "base",
    "model.chat_template": "chat.jinja",
    "rl.reward.scorers": [SCORER | {"path": "scorer.py:score"}],
    "evaluation.scorers": [SCORER | {"path": "evaluation_scorer.py:score"}],
    "iterative.scorers": [SCORER | {"path": "round_scorer.py:score"}],
    "gate.external": [{"name": "others", "path": "pairs.jsonl", "format": "preference"}],
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The project's params and pipelines, with a small file for each dependency and for each file outside."""
    monkeypatch.chdir(tmp_path)
    for name in ("dvc.yaml", "rounds/dvc.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copy(CLERK_PARAMS, tmp_path)
    apply_overrides(tmp_path / "params.yaml", OVERRIDES)
    pin = Pin(path="models/sft", md5="0")
    entry = {"origin": pin, "policy": pin, "reward_models": {}, "gate": pin, "prompts": PromptsPin(first=0, count=1, sha256="0")}
    write_rounds({1: Round(**entry, budget=BudgetPin(comparison=1, level=0.01, spent=0.0))})
    tree = read_yaml(Path("params.yaml"))
    for path in {dep for stage, number in STAGES + ROUND_STAGES for dep in read_definition(stage, number, tree)["deps"]}:
        write(Path(path) if Path(path).suffix else Path(path) / "file")
    for path in OUTSIDE.values():
        write(Path(path) if Path(path).suffix else Path(path) / "config.json")
    write_json(INPUTS, read_inputs(load_params()))
    assert all(read_yaml(INPUTS)[section] for section in OUTSIDE)
    return tmp_path


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


@pytest.mark.parametrize(("stage", "number"), STAGES + ROUND_STAGES)
def test_an_edit_while_a_stage_runs_is_found_and_named(project, stage, number):
    begun = Reading(stage, number)
    assert begun.changes().shown() == ""
    params, inputs = Path("params.yaml").read_text(), INPUTS.read_text()
    edited = YAML(typ="safe", pure=True).load(params)
    keys = [key for key in begun.inputs.params if ":" not in key]
    for key in keys:
        *parents, last = key.split(".")
        section = reduce(getitem, parents, edited)
        section[last] = section[last] | {"edited": 1} if isinstance(section[last], dict) else "edited"
    YAML(typ="safe", pure=True).dump(edited, Path("params.yaml"))
    found = begun.changes().lines
    for key in keys:
        assert any(line.startswith((f"{key}: ", f"{key}.")) for line in found), (key, found)
    Path("params.yaml").write_text(params)
    assert begun.changes().shown() == ""  # values were read once
    files = {path: Path(path).stat() for path in begun.inputs.files}
    for path in files:
        Path(path).write_text("[]")
    assert sorted(line.partition(": ")[2] for line in begun.changes().lines) == sorted(f"{path} changed" for path in files)
    for path in files:
        Path(path).write_text("{}")
    assert sorted(begun.changes().written) == sorted(files) and begun.changes().lines == []
    for path, before in files.items():
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for section in OUTSIDE.keys() & {key.partition(":")[2] for key in begun.inputs.params if key.startswith(str(INPUTS))}:
        place = Path(OUTSIDE[section])
        file = place / "config.json" if place.is_dir() else place
        before = file.stat()
        file.write_text("edited")
        assert any(f"{place} changed" in line for line in begun.changes().lines), section
        with pytest.raises(ConfigError, match=f"data/inputs.json: expected the hashes of what this stage reads, got others for .*{place}"):
            Reading(stage, number)
        file.write_text("{}")
        assert (begun.changes().lines, begun.changes().written) == ([], [str(file)])
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        INPUTS.write_text(inputs.replace('"sha256": "', '"sha256": "0'))
        assert any(line.startswith(f"data/inputs.json:{section}.") for line in begun.changes().lines), section
        INPUTS.write_text(inputs)
    assert begun.changes().shown() == ""


def test_a_new_a_missing_and_an_unreadable_file_are_changes(project):
    begun = Reading("train_sft", None)
    Path("rlhf_core/models/new.py").write_text("")
    assert begun.changes().lines == ["code: rlhf_core/models/new.py new"]
    Path("rlhf_core/models/new.py").unlink()
    Path("checks/data.json").unlink()
    assert "checks/data.json: expected the output of an earlier stage, got nothing" in begun.changes().shown()
    write(Path("checks/data.json"))
    Path("params.yaml").write_text("sft: {steps: ")
    assert "params or dependencies can't be read any more: params.yaml: expected YAML" in begun.changes().shown()


@pytest.mark.parametrize(("file", "words"), [("rlhf_core/models/file", "code: rlhf_core/models/file changed"), ("base/config.json", "")])
def test_a_running_stage_warns_of_an_edit_and_knows_until_when_its_files_were_clean(project, caplog, monkeypatch, file, words):
    """By a look at its files every few seconds; an edit of code or of a model outside, undone before the stage ends, is one too."""
    monkeypatch.setattr(reading, "WATCH_SECONDS", 0.01)
    params, caplog.handler.level = Path("params.yaml").read_text(), logging.WARNING
    begun, done = Reading("train_sft", None), threading.Event()
    watching = threading.Thread(target=begun.watch, args=(done,))
    watching.start()
    seen = time.time_ns()
    until(lambda: begun.clean_until > seen)
    edited = time.time_ns()
    Path("params.yaml").write_text(params.replace("learning_rate: 0.002", "learning_rate: 0.007", 1))
    Path(file).write_text("edited")
    until(lambda: "sft.learning_rate: 0.002 -> 0.007" in caplog.text and (words or "base changed") in caplog.text)
    Path("params.yaml").write_text(params)
    write(Path(file))
    undone = begun.changes()
    assert (undone.lines, undone.written) == ([], [file])
    done.wait(0.3)  # some looks more
    done.set()
    watching.join()
    assert seen < begun.clean_until <= edited + 10**7


def until(condition) -> None:
    end = threading.Event()
    for _ in range(2000):
        if condition():
            return
        end.wait(0.01)
    raise AssertionError("expected within 20 s")
