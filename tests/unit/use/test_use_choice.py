"""Which model is meant, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config import ConfigError
from rlhf_core.use.__main__ import main
from rlhf_core.use.choice import beside, check_language_model, choose, context_length, head_width, saved_dtype


@pytest.fixture
def project(tmp_path, monkeypatch, sft_folder) -> Path:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/one/models", "runs/two/models"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("policy", "sft"):
        (tmp_path / "runs/one/models" / name).symlink_to(sft_folder)
    for name in ("dvc.yaml", "params.yaml"):
        (tmp_path / "runs/one" / name).write_text("{}")
    return tmp_path


def test_a_run_a_folder_and_this_folders_policy_are_found(project, sft_folder):
    assert choose(run="one").folder == Path("runs/one/models/policy") and choose(run="one").name == "one"
    found = choose(model=Path("runs/one/models/policy"))
    assert found.project is not None and found.project.resolve() == project / "runs/one"
    assert beside(choose(run="one"), "sft").folder == Path("runs/one/models/sft")
    assert beside(choose(run="one"), str(sft_folder)).folder == sft_folder
    (project / "models").mkdir()
    (project / "models/policy").symlink_to(sft_folder)
    assert (choose().name, choose().folder) == ("policy", Path("models/policy"))


def test_missing_names_are_reported_with_known_ones(project, sft_folder):
    with pytest.raises(ConfigError, match=r"--run: expected a run with a policy, got two, and nothing at .*; runs with one: one"):
        choose(run="two")
    with pytest.raises(ConfigError, match=r"--run: expected a run with a policy, got ../runs/one"):
        choose(run="../runs/one")
    with pytest.raises(ConfigError, match=r"models/policy: expected this folder's policy, got nothing; .*: one"):
        choose()
    with pytest.raises(ConfigError, match="expected a folder, got nothing there"):
        choose(model=Path("elsewhere"))
    with pytest.raises(ConfigError, match="--beside sft: expected models/sft beside sft, got none; give the folder"):
        beside(choose(model=sft_folder), "sft")


def test_a_version_that_is_none_and_one_that_no_registry_has_are_refused(project):
    with pytest.raises(ConfigError, match=r"such as policy@v1.0.0, got policy; correct it"):
        choose(version="policy")
    with pytest.raises(ConfigError, match=r"--version policy@v1.0.0: expected files of that version, got: "):
        choose(version="policy@v1.0.0")


def test_a_reward_model_is_no_partner(reward_folder, capsys):
    with pytest.raises(ConfigError, match="expected a language model, got LlamaForSequenceClassification, a reward model; choose a policy"):
        check_language_model(choose(model=reward_folder))
    assert main(["chat", "--model", str(reward_folder)]) == 2 and "choose a policy" in capsys.readouterr().err


def test_context_precision_and_heads_are_the_models(sft_folder):
    found, how = choose(model=sft_folder), {"trust_remote_code": False}
    assert context_length(found, 20, **how) == 20 and context_length(found, None, **how) == 64
    with pytest.raises(ConfigError, match="--max-length: expected at most 64, the positions of sft, got 65; lower it"):
        context_length(found, 65, **how)
    assert saved_dtype(found, **how) == "float32" and head_width(found, **how) == 8


@pytest.mark.parametrize(
    "wrong", [["--temperature", "-1"], ["--top-p", "0"], ["--max-new-tokens", "0"], ["--run", "a", "--model", "b"], ["--temp", "1"]]
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(SystemExit) as refusal:
        main(["chat", *wrong])
    assert refusal.value.code == 2


def test_a_model_that_no_sft_has_trained_is_called_the_given_model(project):
    assert beside(choose(run="one"), "sft").name == "sft"
    (project / "runs/one/metrics").mkdir()
    (project / "runs/one/metrics/train_sft.json").write_text('{"trained": false}')
    assert beside(choose(run="one"), "sft").name == "given model"
