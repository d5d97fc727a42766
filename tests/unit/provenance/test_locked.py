"""A model that is replaced in DVC's cache or remote, with DVC's own commands: what DVC takes for up to date is refused by its hash."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import warm_python

from flows.chain.worktree import verify_remotes
from rlhf_core.config import ConfigError
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.provenance.locked import check_locked, locked_hashes
from rlhf_core.stage.scratch import check_dependencies, read_stage_inputs

WEIGHTS = b"the model's own weights"
CHAIN = """
stages:
  train_sft:
    cmd: mkdir -p models/sft && cp weights models/sft/model.safetensors && echo {} > models/sft/config.json
    deps: [weights]
    outs: [models/sft]
  train_policy:
    cmd: "true"
    params: [seed]
    deps: [models/sft]
"""


def dvc(folder: Path, *arguments: str, check: bool = True) -> str:
    environment = {**os.environ, "DVC_NO_ANALYTICS": "1", "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    command = [sys.executable, "-m", "dvc", *arguments]
    done = warm_python.run(command, cwd=folder, env=environment)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A project whose model is in its cache and its remote."""
    root = tmp_path_factory.mktemp("made") / "project"
    root.mkdir()
    dvc(root, "init", "--no-scm", "--quiet")
    (root / "weights").write_bytes(WEIGHTS)
    (root / "params.yaml").write_text("seed: 1\n")
    (root / "dvc.yaml").write_text(CHAIN)
    dvc(root, "remote", "add", "--default", "shared", "../remote")
    dvc(root, "repro", "train_sft")
    dvc(root, "push")
    return root


@pytest.fixture
def project(made, tmp_path) -> Path:
    shutil.copytree(made.parent, tmp_path / "copy")
    return tmp_path / "copy/project"


def poison(store: Path) -> str:
    """Replace the weights in a cache or a remote, and leave their name."""
    md5 = hashlib.md5(WEIGHTS).hexdigest()
    place = store / "files/md5" / md5[:2] / md5[2:]
    place.chmod(0o644)
    place.write_bytes(b"the attacker's weights!")
    place.chmod(0o444)
    return md5


def test_a_model_replaced_in_the_cache_is_refused_by_stages_and_uses(project, monkeypatch):
    assert check_locked("models/sft", root=project) == dvc_md5(project / "models/sft")
    md5 = poison(project / ".dvc/cache")
    shutil.rmtree(project / "models/sft")
    dvc(project, "checkout")
    assert (project / "models/sft/model.safetensors").read_bytes() == b"the attacker's weights!"
    assert "up to date" in dvc(project, "status", "train_sft")
    found = hashlib.md5(b"the attacker's weights!").hexdigest()
    message = (
        rf"^models/sft/model\.safetensors: expected md5 {md5} by dvc\.lock, got {found}; .*remove models/sft and DVC's copy, "
        rf"\S+/{md5[:2]}/{md5[2:]}; then"
    )
    with pytest.raises(ConfigError, match=message):
        check_locked("models/sft", root=project)
    monkeypatch.chdir(project)
    work = read_stage_inputs("train_policy")
    with pytest.raises(ConfigError, match=message):
        check_dependencies(work, "train_policy")
    shutil.rmtree("models/sft")
    (project / ".dvc/cache/files/md5" / md5[:2] / md5[2:]).unlink()
    dvc(project, "pull")  # as the message says
    check_dependencies(read_stage_inputs("train_policy"), "train_policy")


def test_a_model_replaced_in_the_remote_is_not_pulled_once_remotes_are_verified(project):
    poison(project.parent / "remote")
    verify_remotes(project)
    settings = (project / ".dvc/config.local").read_text()
    assert "verify = true" in settings and 'remote "shared"' in settings
    verify_remotes(project)
    assert (project / ".dvc/config.local").read_text() == settings
    shutil.rmtree(project / ".dvc/cache")
    shutil.rmtree(project / "models/sft")
    printed = dvc(project, "pull", check=False)
    model = project / "models/sft/model.safetensors"
    assert not model.exists() or model.read_bytes() == WEIGHTS, printed


def test_a_choice_of_not_verifying_is_left_alone(project):
    dvc(project, "config", "--local", "remote.shared.verify", "false")
    before = (project / ".dvc/config.local").read_text()
    verify_remotes(project)
    assert (project / ".dvc/config.local").read_text() == before


def test_files_missing_added_and_unknown_to_the_lock(project):
    sft = project / "models/sft"
    assert locked_hashes(project) == {"models/sft": dvc_md5(sft)} and locked_hashes(project / "models") == {}
    check_locked("models/of-another", root=project)
    (sft / "more").write_text("more")
    message = r"^models/sft/more: expected md5 of no file by dvc\.lock, got \w+; .* remove models/sft; `dvc checkout models/sft`"
    with pytest.raises(ConfigError, match=message):
        check_locked("models/sft", root=project)
    (sft / "more").unlink()
    (sft / "config.json").write_text("[]")  # as a stage run by hand leaves it; DVC's copy is sound
    with pytest.raises(ConfigError, match=r"`dvc commit` records it; else remove models/sft; `dvc checkout models/sft` restores it$"):
        check_locked("models/sft", root=project)
    shutil.rmtree(sft)
    dvc(project, "checkout", "models/sft")  # as the message says
    check_locked("models/sft", root=project)
    (sft / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"^models/sft/config\.json: expected md5 \w+ by dvc\.lock, got nothing; "):
        check_locked("models/sft", root=project)
    shutil.rmtree(project / ".dvc/cache")
    message = r"^models/sft: expected md5 \w+\.dir by dvc\.lock, got \w+\.dir; .*remove models/sft; then `dvc repro`"
    with pytest.raises(ConfigError, match=message):
        check_locked("models/sft", root=project)
    check_locked("models/sft", locked_hashes(project)["models/sft"], root=project)  # a hash that the stage has computed already
    (project / "rounds").mkdir()
    lock = {"schema": "2.0", "stages": {"train_round@1": {"outs": [{"path": "rounds/1/policy", "md5": "0" * 32 + ".dir"}]}}}
    (project / "rounds/dvc.lock").write_text(json.dumps(lock))
    assert locked_hashes(project).keys() == {"models/sft", "rounds/1/policy"}
