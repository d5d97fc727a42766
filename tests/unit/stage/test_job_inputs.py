"""What a job takes to nodes that don't see the project's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.config import DistillationConfig, EnvironmentConfig, ScorerConfig, TeacherConfig, load_params
from rlhf_core.stage import job_inputs as module
from rlhf_core.stage.job_inputs import JobInputs, pack_code

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    root = tmp_path / "project"
    for name in (
        "models/sft/weights",
        "rewards/manners.py",
        "mine/__init__.py",
        "mine/score.py",
        "rlhf_core/a.py",
        "tasks/b.py",
        "data/rows",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (tmp_path / "judges").mkdir()
    (tmp_path / "judges/strict.py").write_text("def judge(): ...")
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    monkeypatch.chdir(root)
    return root


def test_paths_below_the_project_stay_and_others_get_a_place_of_their_own(project):
    taken = JobInputs()
    assert taken.add("models/sft") == "models/sft" == taken.add(project / "models/sft")
    there = taken.add("../base")
    assert there.startswith("outside/") and there.endswith("-base") and taken.add(project.parent / "base") == taken.add(Path("../base"))
    assert {name: path.name for name, path in taken.files.items()} == {
        "models/sft/weights": "weights",
        **{name: "config.json" for name in taken.files if name.startswith("outside/")},
    }


def test_params_name_models_scorers_and_functions_as_they_are_on_a_node(project):
    params, taken = load_params(CLERK_PARAMS), JobInputs()
    scorers = [
        ScorerConfig(name="theirs", kind="reward_model", path=str(project.parent / "base")),
        ScorerConfig(name="file", kind="function", path="../judges/strict.py:judge"),
        ScorerConfig(name="own", kind="function", path="mine.score:score"),
        ScorerConfig(name="judge", kind="llm_judge", url="http://a/v1", model="m", template="../judges/strict.py"),
    ]
    reward = params.rl.reward.model_copy(update={"scorers": scorers})
    model = params.model.model_copy(update={"path": "../base"})
    environment = EnvironmentConfig(tools=["../judges/strict.py:ask", "mine.score:find"])
    taught = DistillationConfig(teachers=[TeacherConfig(path=str(project.parent / "base"))])
    rl = params.rl.model_copy(update={"reward": reward, "environment": environment, "distillation": taught})
    there = taken.on_node(params.model_copy(update={"model": model, "rl": rl}))
    assert there.rl.distillation.teachers[0].path == there.model.path
    assert there.rl.environment.tools == [there.rl.reward.scorers[1].path.replace(":judge", ":ask"), "mine.score:find"]
    assert f"{there.rl.reward.scorers[3].template}:judge" == there.rl.reward.scorers[1].path
    paths = [there.model.path, *(scorer.path for scorer in there.rl.reward.scorers[:3])]
    assert [path.startswith("outside/") for path in paths] == [True, True, True, False]
    assert paths[2].endswith("strict.py:judge") and paths[3] == "mine.score:score"
    assert len({path.partition("/")[2].partition("/")[0] for path in paths[:2]}) == 1 and there.sft == params.sft
    assert sorted(path.name for path in taken.files.values()) == ["config.json", "strict.py"]


def test_the_files_of_a_command_are_brought_to_a_node(project):
    Path("agent.py").write_text("")
    taken = JobInputs()
    there = taken.on_node(EnvironmentConfig(command=["python", "agent.py", "../judges/strict.py", "--fast", "missing.py"]))
    assert there.command[:2] == ["python", "agent.py"] and there.command[3:] == ["--fast", "missing.py"]
    assert there.command[2].startswith("outside/") and there.command[2].endswith("strict.py")
    assert sorted(path.name for path in taken.files.values()) == ["agent.py", "strict.py"]


def test_rows_that_look_like_paths_stay_as_they_are(project):
    rows = [{"prompt": "../judges/strict.py:judge"}]
    taken = JobInputs()
    assert taken.on_node(rows) is rows and taken.files == {}
    assert taken.on_node({"sft": Path("models/sft")}) == {"sft": Path("models/sft")} and list(taken.files) == ["models/sft/weights"]


def test_code_is_the_projects_own_with_the_modules_that_params_name(project, tmp_path):
    params = load_params(CLERK_PARAMS)
    scorer = ScorerConfig(name="own", kind="function", path="mine.score:score")
    reward = params.rl.reward.model_copy(update={"scorers": [scorer]})
    params = params.model_copy(update={"rl": params.rl.model_copy(update={"reward": reward})})
    (tmp_path / "code").mkdir()
    pack_code(tmp_path / "code", params, project)
    names = sorted(path.relative_to(tmp_path / "code").as_posix() for path in (tmp_path / "code").rglob("*") if path.is_file())
    assert names == ["mine/__init__.py", "mine/score.py", "params.yaml", "rewards/manners.py", "rlhf_core/a.py", "tasks/b.py"]
    assert load_params(tmp_path / "code/params.yaml") == params


def test_code_that_is_too_large_is_refused_with_its_largest_folder(project, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_CODE", 100)
    (project / "rewards/data").write_bytes(bytes(200))
    (tmp_path / "code").mkdir()
    with pytest.raises(ValueError, match=r"expected at most 100 bytes .* got \d+ bytes, of which rewards/ has 218 bytes"):
        pack_code(tmp_path / "code", load_params(CLERK_PARAMS), project)
