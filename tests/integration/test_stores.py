"""`rlhf push` and `rlhf pull`: from a project to an empty clone, by a folder, S3 and SSH, also after a kill in the middle."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_servers import damaged, objects, s3_server, ssh_server

sys.path.insert(0, str(Path(__file__).parent))
from registry_project import candidate, commit, dvc, make_project
from small_workspace import environment, git, wait_until

from flows.chain.locks import only_flow
from rlhf_core.commands import main
from rlhf_core.config import read_yaml
from rlhf_core.provenance.file_hashes import dvc_md5

pytestmark = pytest.mark.timeout(590)
NAME = "reward-model"
BULK = 60  # files of a megabyte, so that a push can be killed in the middle


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run, whose reward model is a promoted version, and data of the user's own that DVC tracks."""
    project = make_project(tmp_path_factory.mktemp("stores") / "project")
    (project / "data").mkdir()
    (project / "data/own.txt").write_text("mine")
    dvc(project, "add", "data/own.txt")
    commit(project, "Own data")
    candidate(project, "first", seed=1)
    assert rlhf(project, "registry", "register", NAME, "--run", "first")[0] == 0
    assert rlhf(project, "registry", "promote", NAME, "--reason", "the first", "--by", "Ann")[0] == 0
    return project


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    """A copy with an empty git repository as origin, and no DVC remote."""
    copy = tmp_path / "project"
    git(made.parent, "clone", "--quiet", "--no-local", str(made), str(copy))
    git(copy, "branch", "run/first", "origin/run/first")
    shutil.copytree(made / ".dvc/cache", copy / ".dvc/cache")
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch", "main", "origin.git")
    git(copy, "remote", "set-url", "origin", str(tmp_path / "origin.git"))
    git(copy, "push", "--quiet", "origin", "main")
    return copy


def rlhf(folder: Path, *arguments: str) -> tuple[int, str]:
    """The command line in this process; code and what it prints."""
    text = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        return main(*arguments), text.getvalue()


def with_remote(project: Path, address: str, **settings: str) -> None:
    dvc(project, "remote", "add", "--default", "store", address)
    for name, value in settings.items():
        dvc(project, "remote", "modify", "store", name, value)
    commit(project, "A store")
    git(project, "push", "--quiet", "origin", "main")


def clone(project: Path) -> Path:
    folder = project.parent / "clone"
    shutil.rmtree(folder, ignore_errors=True)
    git(project.parent, "clone", "--quiet", str(project.parent / "origin.git"), str(folder))
    return folder


def assert_whole(folder: Path, origin: Path) -> None:
    """The pulled run is the one that was made: commit, files by their hashes, nothing to do for DVC."""
    run = folder / "runs/first"
    assert git(run, "rev-parse", "HEAD") == git(origin, "rev-parse", "run/first")
    for path in ("models/reward", "models/sft", "data/prepared"):
        assert dvc_md5(run / path) in (run / "dvc.lock").read_text()
    assert json.loads(dvc(run, "status", "--json")) == {} and git(run, "status", "--porcelain") == ""


def test_a_promoted_version_and_its_run_reach_an_empty_clone(project, tmp_path):
    with_remote(project, str(tmp_path / "store"))
    code, said = rlhf(project, "push", NAME)
    assert code == 0 and f"tags of {NAME} at origin\nElsewhere: rlhf pull {NAME}@v1.0.0" in said, said
    assert damaged(tmp_path / "store") == []

    other = clone(project)
    code, said = rlhf(other, "pull", NAME)
    assert code == 0 and "from DVC's remote in models/promoted/reward-model-v1.0.0" in said and "rlhf serve --version" in said, said
    pulled = other / "models/promoted/reward-model-v1.0.0"
    assert (pulled / "deeper/weights").read_bytes() == b"\x01" * 1000
    shown = rlhf(other, "registry", "show")[1]
    assert shown.startswith(f"{NAME}\n") and " promoted " in shown and "policy: registered versions: none" in shown
    both = json.loads(rlhf(other, "registry", "show", "--json")[1])
    assert both["policy"] == [] and both[NAME] == json.loads(rlhf(other, "registry", "show", NAME, "--json")[1])

    code, said = rlhf(other, "pull", "first")
    assert code == 2 and "run/first at origin: expected the run's branch, got none (runs there: none)" in said, said
    code, said = rlhf(project, "push", "first")
    assert code == 0 and "0 of them new; branch run/first at origin" in said, said
    code, said = rlhf(other, "pull", "first")
    assert code == 0 and "Look at it: rlhf runs show first" in said, said
    assert_whole(other, project)
    assert rlhf(other, "pull", "first")[0] == 0  # nothing is new
    assert "outcome" in rlhf(other, "runs", "show", "first")[1]


def test_a_run_that_hasnt_ended_is_pulled(project, tmp_path):
    with_remote(project, str(tmp_path / "store"))
    worktree = project / "runs/first"
    git(project, "worktree", "add", "--quiet", str(worktree), "run/first")
    lock = json.loads(json.dumps(read_yaml(worktree / "dvc.lock")))
    lock["stages"] = {name: stage for name, stage in lock["stages"].items() if "models/reward" not in str(stage)}
    (worktree / "dvc.lock").write_text(json.dumps(lock))
    commit(worktree, "Not ended")
    assert rlhf(project, "push", "first")[0] == 0
    other = clone(project)
    code, said = rlhf(other, "pull", "first")
    assert code == 0 and (other / "runs/first/models/sft").is_dir() and not (other / "runs/first/models/reward").exists(), said


@pytest.mark.long
def test_each_side_learns_of_the_others_commits_and_decisions(project, tmp_path):
    with_remote(project, str(tmp_path / "store"))
    assert rlhf(project, "push", "first")[0] == 0 and rlhf(project, "push", NAME)[0] == 0
    other = clone(project)
    assert rlhf(other, "pull", "first")[0] == 0
    run = other / "runs/first"
    (run / "notes.txt").write_text("tried")
    commit(run, "A note")
    code, said = rlhf(other, "push", "first")
    assert code == 0, said
    worktree = project / "runs/first"
    git(project, "worktree", "add", "--quiet", str(worktree), "run/first")
    with only_flow(project, "first"):
        code, said = rlhf(project, "pull", "first")
    assert code == 2 and f"process {os.getpid()}; wait for it" in said and not (worktree / "notes.txt").exists(), said
    code, said = rlhf(project, "pull", "first")
    assert code == 0 and (worktree / "notes.txt").read_text() == "tried", said

    (worktree / "mine.txt").write_text("mine")
    commit(worktree, "Mine")
    (run / "theirs.txt").write_text("theirs")
    commit(run, "Theirs")
    assert rlhf(other, "push", "first")[0] == 0
    code, said = rlhf(project, "push", "first")
    assert code == 2 and "expected a branch that this one continues, got another" in said, said
    code, said = rlhf(project, "pull", "first")
    assert code == 2 and "run/first: expected no commits that the remote lacks, got some" in said, said

    for folder, reason in ((project, "too curt"), (other, "too long")):
        assert rlhf(folder, "registry", "rollback", NAME, "--reason", reason, "--by", "Ann")[0] == 0
    assert rlhf(other, "push", f"{NAME}@v1.0.0")[0] == 0
    for command in ("push", "pull"):
        code, said = rlhf(project, command, f"{NAME}@v1.0.0")
        assert code == 2 and f"tags of {NAME} at origin: expected the same as here, got another" in said, said


@pytest.mark.long
def test_what_is_missing_is_named_with_what_to_do(project, tmp_path):
    code, said = rlhf(project, "push", "first")
    assert code == 2 and "DVC remote: expected a remote for files, got none; `dvc remote add --default store ADDRESS`" in said, said
    assert rlhf(project, "push", "second") == (2, "second: expected a run, got none of that name; there are first\n")
    assert "expected a run, or a version of reward-model or policy" in rlhf(project, "pull", "value-model@v1.0.0")[1]
    with_remote(project, str(tmp_path / "store"))
    assert "DVC remote elsewhere: expected to succeed, got: " in rlhf(project, "push", "first", "--remote", "elsewhere")[1]
    assert "git remote mirror: expected where to share commits and tags, got none" in rlhf(project, "pull", "first", "--git", "mirror")[1]

    assert rlhf(project, "push", "first")[0] == 0 and rlhf(project, "push", NAME)[0] == 0
    content = b"train_reward of seed 1"
    stored = next(path for path in objects(tmp_path / "store").values() if path.read_bytes() == content)
    stored.unlink()
    other = clone(project)
    code, said = rlhf(other, "pull", "first")
    missing = "expected all files in the remote, got none for models/reward (stage train_reward); `rlhf push` it where it was made"
    assert code == 2 and missing in said, said
    assert not (other / "runs").exists()
    code, said = rlhf(other, "pull", NAME)
    assert code == 2 and "models/reward: expected it in DVC's cache or in the remote, got neither" in said, said

    stored.write_bytes(content[::-1])  # other bytes under its name
    stored.chmod(0o444)
    code, said = rlhf(other, "pull", "first")
    assert code == 2 and missing in said, said
    stored.unlink()
    code, said = rlhf(project, "push", "first")  # DVC has noted that the remote has it
    assert code == 0 and stored.read_bytes() == content, said
    assert rlhf(other, "pull", "first")[0] == 0
    assert_whole(other, project)

    (project / ".dvc/cache/files/md5" / stored.parent.name / stored.name).unlink()
    code, said = rlhf(project, "push", "first")
    wanted = "expected all files in DVC's cache, got none for models/reward (stage train_reward); `dvc repro` makes it again"
    assert code == 2 and wanted in said, said


def bulk(project: Path) -> None:
    """Give the run data of its own, many megabytes."""
    worktree = project / "runs/first"
    git(project, "worktree", "add", "--quiet", str(worktree), "run/first")
    (worktree / ".dvc/config.local").write_text(f"[cache]\n    dir = {project / '.dvc/cache'}\n")
    (worktree / "data/bulk").mkdir(parents=True)
    for number in range(BULK):
        (worktree / f"data/bulk/{number}").write_bytes(os.urandom(1 << 20))
    dvc(worktree, "add", "data/bulk")
    commit(worktree, "Much data")


def killed(folder: Path, begun, *arguments: str, **extra: str) -> None:
    """Start the command, and kill all its processes once `begun` is true."""
    program = f"import sys; from rlhf_core.commands import main; sys.exit(main(*{arguments!r}))"
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=folder, env=environment(**extra), **options)
    try:
        wait_until(begun, 60, "the first objects", every=0.005)
        assert process.poll() is None, "the command ended before it could be killed"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
    time.sleep(1)  # until a server has noticed


def assert_survives_kills(project: Path, store: Path, **extra: str) -> None:
    """A push and a pull killed in the middle leave nothing half done that the next ones take for whole."""
    bulk(project)
    killed(project, lambda: len(objects(store)) > 5, "push", "first", **extra)
    sent = len(objects(store))
    assert sent < BULK and damaged(store) == [] and git(project, "ls-remote", "origin", "run/first") == ""
    code, said = rlhf(project, "push", "first")
    assert code == 0 and damaged(store) == [] and f"{len(objects(store)) - sent} of them new" in said, said
    assert rlhf(project, "push", NAME)[0] == 0

    other = clone(project)
    killed(other, lambda: len(objects(other / ".dvc/cache")) > 5, "pull", "first", **extra)
    assert not (other / "runs/first").exists() and len(objects(other / ".dvc/cache")) < BULK
    code, said = rlhf(other, "pull", "first")
    assert code == 0, said
    assert_whole(other, project)
    assert dvc_md5(other / "runs/first/data/bulk") == dvc_md5(project / "runs/first/data/bulk")
    code, said = rlhf(other, "pull", NAME)
    assert code == 0 and "all checked" in said, said


@pytest.mark.long
def test_a_folder(project, tmp_path):
    with_remote(project, str(tmp_path / "store"))
    assert_survives_kills(project, tmp_path / "store")


@pytest.mark.long
def test_s3(project, tmp_path, monkeypatch):
    (tmp_path / "s3/models").mkdir(parents=True)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with s3_server(tmp_path / "s3") as (endpoint, credentials):
        with_remote(project, "s3://models/rlhf", endpointurl=endpoint)
        code, said = rlhf(project, "push", "first")
        assert code == 2 and "expected to be let in; S3: set AWS_ACCESS_KEY_ID" in said, said
        for name, value in (credentials | {"AWS_SECRET_ACCESS_KEY": "wrong"}).items():
            monkeypatch.setenv(name, value)
        code, said = rlhf(project, "push", "first")
        assert code == 2 and "expected to be let in" in said and "wrong" not in said, said
        for name, value in credentials.items():
            monkeypatch.setenv(name, value)
        assert_survives_kills(project, tmp_path / "s3/models/rlhf", **credentials)
        dvc(project, "remote", "modify", "store", "url", "s3://nothing/rlhf")
        code, said = rlhf(project, "push", "first")
        assert code == 2 and "bucket" in said, said
    dvc(project, "remote", "modify", "store", "url", "s3://models/rlhf")
    code, said = rlhf(project, "push", "first")
    assert code == 2 and "expected an answer; check address and network" in said, said


@pytest.mark.long
def test_ssh(project, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # without keys of this user
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with ssh_server(tmp_path / "ssh") as (address, key):
        with_remote(project, f"ssh://{address}{tmp_path}/store")
        code, said = rlhf(project, "push", "first")
        assert code == 2 and "expected to be let in" in said and "ssh-add" in said, said
        dvc(project, "remote", "modify", "store", "keyfile", str(key))
        commit(project, "The key's place")
        git(project, "push", "--quiet", "origin", "main")
        assert_survives_kills(project, tmp_path / "store")
    code, said = rlhf(project, "push", "first")
    assert code == 2 and "expected an answer; check address and network" in said, said
