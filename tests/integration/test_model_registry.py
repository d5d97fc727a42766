"""The registry on real tags, DVC's cache, a DVC remote and a clone."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import warm_python
from collision import FIRST, SECOND
from registry_tags import write_tag

sys.path.insert(0, str(Path(__file__).parent))
from registry_project import add_rounds, candidate, commit, dvc, make_project, without_identity
from small_workspace import environment, git

from flows.chain.pins import check_not_rolled_back, pin_registry, promoted_version, start_from_registry
from flows.chain.prepare import prepare_workspace
from flows.promote import main
from flows.registry import decisions
from flows.registry.decisions import add_version
from flows.registry.state import read_registry
from flows.registry.versions import fetch
from rlhf_core.config import ConfigError, ScorerConfig, apply_overrides, load_params
from rlhf_core.provenance.dvc_cache import sha256_of_files
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.scorers.reward.heldout import copy_ready_made

NAME = "reward-model"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two registered versions, and a remote that has the second."""
    project = make_project(tmp_path_factory.mktemp("registry") / "project")
    dvc(project, "remote", "add", "--default", "shared", str(project.parent / "remote"))
    commit(project, "A remote")
    for number in (1, 2):
        candidate(project, f"run-{number}", seed=number)
        assert promote(project, "register", "--run", f"run-{number}").returncode == 0
    dvc(project / "runs/run-2", "push")
    return project


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    """A copy without worktrees: the tags are those of `made`."""
    git(made.parent, "clone", "--quiet", str(made), str(tmp_path / "copy"))
    shutil.copytree(made / ".dvc/cache", tmp_path / "copy/.dvc/cache")
    return tmp_path / "copy"


def promote(folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, in this process: most of it would be the start of Python."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([command, NAME, *arguments])
    return subprocess.CompletedProcess([command, *arguments], code, out.getvalue(), err.getvalue())


def refused(folder: Path, command: str, *arguments: str) -> str:
    done = promote(folder, command, *arguments)
    assert done.returncode == 2, done.stdout
    return done.stderr


@pytest.mark.long
def test_the_policy_of_an_accepted_round_is_a_version_too(project, capsys):
    worktree = candidate(project, "series", seed=7)
    add_rounds(worktree)

    def register(artifact: str, *arguments: str) -> str:
        with contextlib.chdir(project):
            assert main(["register", artifact, "--run", "series", *arguments]) in (0, 2)
        return "".join(capsys.readouterr())

    assert "expected one whose policy was accepted, got one that wasn't: win rate less a half: +0.000" in register("policy", "--round", "2")
    assert "expected rounds/3/metrics/evaluate.json in the last commit, got none" in register("policy", "--round", "3")
    assert "expected the policy with a round, got another model" in register(NAME, "--round", "1")
    forge(worktree, "rounds/2/metrics/evaluate.json", lambda found: found.update(accepted=True))
    assert "expected accepted as computed again from its own counts, false, got true" in register("policy", "--round", "2")
    git(worktree, "reset", "--quiet", "--hard", "HEAD~1")
    reported = register("policy", "--round", "1")
    assert "Registered policy v1.0.0" in reported and "Gate of its reward model: passed" in reported
    version = read_registry(project, "policy").get("v1.0.0")
    assert version.md5 == dvc_md5(worktree / "rounds/1/policy") and version.lineage["path"] == "rounds/1/policy"
    assert version.lineage["decided"]["by"] == "evaluate_round@1" and version.lineage["decided"]["comparison"] == 1
    assert version.lineage["parents"].keys() == {"models/sft", "models/reward"} and "train_round@1" in version.lineage["stages"]
    fetched, source = fetch(project, read_registry(project, "policy"), "v1.0.0", project / "fetched")
    assert (fetched, source) == (version, "cache") and (project / "fetched/content").read_text() == "round 1 of seed 7"


def seen_by_others(project: Path) -> tuple[list[str], str]:
    """What GTO and DVC take for promoted: versions, and the commit."""
    program = (
        "import gto.api, dvc.api; found = gto.api.find_versions_in_stage('.', 'reward-model', 'prod', versions_per_stage=-1) or []; "
        "print(*[v.version for v in found], dvc.api.artifacts_show('reward-model', stage='prod')['rev'])"
    )
    done = warm_python.run([sys.executable, "-c", program], cwd=project, env=environment(), check=True)
    *versions, commit_id = done.stdout.split()
    return versions, commit_id


def test_promotion_rollback_and_history_without_a_git_identity(project, monkeypatch):
    """Read alike by GTO and DVC."""
    for name, value in without_identity(project.parent).items():
        monkeypatch.setenv(name, value)
    assert "got no --by and no git identity" in refused(project, "promote", "v1.0.0", "--reason", "first")
    for version in ("v1.0.0", "v2.0.0"):
        assert promote(project, "promote", version, "--reason", f"use {version}", "--by", "Ann").returncode == 0
    assert seen_by_others(project) == (["v2.0.0"], read_registry(project, NAME).versions["v2.0.0"].commit)
    back = promote(project, "rollback", "--reason", "curt answers", "--by", "Ben")
    assert "rolled back v2.0.0, stated by Ben; v1.0.0 is used from now on. Why: curt answers" in back.stdout
    found = read_registry(project, NAME)
    assert [found.state(v) for v in found.versions] == ["promoted", "rolled back"]
    assert seen_by_others(project) == (["v1.0.0"], found.versions["v1.0.0"].commit)

    assert prepare_workspace(project, None, {}) == project
    gate = load_params(project / "params.yaml").gate
    first = found.versions["v1.0.0"]
    assert (gate.incumbent.version, gate.incumbent.md5, gate.incumbent.sha256) == ("v1.0.0", first.md5, first.sha256)
    assert gate.anchor == gate.incumbent  # the second one was rolled back
    (entry,) = gate.rolled_back
    assert (entry.version, entry.md5, entry.reason) == ("v2.0.0", found.versions["v2.0.0"].md5, "curt answers")
    assert not pin_registry(project, project, chosen={}, fresh=True)  # nothing is new
    later = prepare_workspace(project, "later", {"seed": 5})
    assert git(later, "status", "--porcelain") == "" and load_params(later / "params.yaml").gate == gate
    fetch(project, found, "v2.0.0", later / "models/mine")
    scorer = ScorerConfig(name="mine", kind="reward_model", weight=1.0, normalization="none", path="models/mine")
    with pytest.raises(
        ConfigError, match=r"scorer mine: expected a reward model that was not rolled back, got v2\.0\.0, which was, stated by Ben: curt"
    ):
        check_not_rolled_back(project, later, [scorer])

    assert "got one that was, stated by Ben: curt answers; to promote it anyway" in refused(
        project, "promote", "v2.0.0", "--reason", "again", "--by", "Ann"
    )
    assert "nothing to do" in refused(project, "promote", "v1.0.0", "--reason", "again", "--by", "Ann")
    kept = promote(project, "promote", "v2.0.0", "--reason", "users asked", "--override", "a demonstration", "--by", "Ann")
    assert "Override: a demonstration" in kept.stdout
    prepare_workspace(project, "later", {})
    assert load_params(later / "params.yaml").gate == gate.model_copy(update={"rolled_back": []})  # a run keeps its incumbent
    prepare_workspace(project, None, {})
    gate = load_params(project / "params.yaml").gate
    assert (gate.incumbent.version, gate.anchor.version) == ("v2.0.0", "v1.0.0")  # 0.898 against 0.899
    reported = promote(project, "history").stdout
    assert [line.split()[2] for line in reported.splitlines()[2:]] == [
        "promote",
        "promote",
        "rollback",
        "promote",
    ] and "a demonstration" in reported


@pytest.mark.long
def test_a_run_takes_the_version_that_its_reward_path_names_and_keeps_it(project):
    assert promote(project, "promote", "v1.0.0", "--reason", "first", "--by", "Ann").returncode == 0
    given = {"reward.path": "registry", "rl.ppo.critic_init": "sft"}
    worktree = prepare_workspace(project, "given", given)
    pinned = load_params(worktree / "params.yaml").reward.pinned
    assert pinned == load_params(worktree / "params.yaml").gate.incumbent and pinned.version == "v1.0.0"
    assert promote(project, "promote", "v2.0.0", "--reason", "later", "--by", "Ann").returncode == 0
    prepare_workspace(project, "given", given)
    assert load_params(worktree / "params.yaml").reward.pinned == pinned and git(worktree, "status", "--porcelain") == ""
    named = load_params(prepare_workspace(project, "named", given | {"reward.path": "v1.0.0"}) / "params.yaml").reward
    newer = load_params(prepare_workspace(project, "newer", given) / "params.yaml").reward
    assert (named.pinned.version, newer.pinned.version) == ("v1.0.0", "v2.0.0")
    changed = load_params(prepare_workspace(project, "named", {"reward.path": "registry"}, update=True) / "params.yaml").reward
    assert (changed.path, changed.pinned) == ("registry", newer.pinned)
    assert git(project / "runs/named", "status", "--porcelain") == ""
    with (
        contextlib.chdir(worktree),
        pytest.raises(ValueError, match=r"expected a model_type in config.json, got none"),
    ):
        copy_ready_made(newer, worktree / "taken")
    assert dvc_md5(worktree / "taken") == newer.pinned.md5
    with pytest.raises(ConfigError, match=r"reward-model: expected a registered version, got v9.0.0 \(registered: v1.0.0, v2.0.0\)"):
        prepare_workspace(project, "unknown", given | {"reward.path": "v9.0.0"})
    several = {"reward__ensemble": 3, "rl__reward__scorers__0__members": 3, "rl__ppo__critic_init": "sft"}
    candidate(project, "ensemble", seed=3, **several)
    assert promote(project, "register", "--run", "ensemble").returncode == 0
    with pytest.raises(ConfigError, match=r"reward.path: expected a version with one model, got v3.0.0, an ensemble of 3; name another"):
        prepare_workspace(project, "of-ensemble", given | {"reward.path": "v3.0.0"})


def test_show_tells_which_look_at_its_pairs_a_version_was(made):
    table = promote(made, "show").stdout.splitlines()
    at = table[0].index("look")
    assert [line[at : at + 4].strip() for line in table[2:4]] == ["1", "2"]
    assert "look            2 at its test pairs, judged at a one-sided level of 1.25%" in promote(made, "show", "v2.0.0").stdout


def test_lineage_is_that_of_the_runs_commit(made):
    version = json.loads(promote(made, "show", "v2.0.0", "--json").stdout)
    worktree = made / "runs/run-2"
    assert version["commit"] == git(worktree, "rev-parse", "HEAD") and version["lineage"]["run"] == "run/run-2"
    assert version["lineage"]["md5"] == dvc_md5(worktree / "models/reward")
    assert version["lineage"]["sha256"] == sha256_of_files(worktree / "models/reward") and version["problem"] is None
    assert version["lineage"]["data"] == dvc_md5(worktree / "data/prepared")
    assert version["lineage"]["parents"] == {"models/sft": dvc_md5(worktree / "models/sft")}
    assert version["lineage"]["params"]["seed"] == 2 and version["lineage"]["gate"]["passed"]
    assert version["lineage"]["previous_version"] == "v1.0.0" and version["state"] == "registered"


def forge(worktree: Path, name: str, change) -> None:
    """Edit a metrics file by hand, and its hash in dvc.lock or rounds/dvc.lock, and commit both."""
    path, lock = worktree / name, worktree / ("rounds/dvc.lock" if name.startswith("rounds/") else "dvc.lock")
    before, size = hashlib.md5(path.read_bytes()).hexdigest(), path.stat().st_size
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    text = lock.read_text().replace(before, hashlib.md5(path.read_bytes()).hexdigest())
    assert before not in text
    lock.write_text(text.replace(f"size: {size}", f"size: {path.stat().st_size}"))
    commit(worktree, "Forged")
    assert dvc(worktree, "status", str(lock.relative_to(worktree)).replace(".lock", ".yaml")) == "Data and pipelines are up to date.\n"


def test_a_forged_verdict_is_not_registered(made):
    """gate.json and its hash in dvc.lock edited by hand: DVC finds everything up to date."""
    worktree = made / "runs/run-2"
    true = git(worktree, "rev-parse", "HEAD")
    forge(worktree, "metrics/gate.json", lambda gate: gate.update(accuracy=0.999))
    message = refused(made, "register", "--run", "run-2")
    assert "says of its model, passed True with accuracy 0.898, got passed True with accuracy 0.999; rerun it" in message
    git(worktree, "reset", "--quiet", "--hard", true)


def test_what_can_not_be_registered(made, tmp_path):
    worktree = candidate(made, "another", seed=4, gate__min_accuracy=0.95)
    (worktree / "params.yaml").write_text((worktree / "params.yaml").read_text() + "\n# a note\n")
    assert "expected all committed, got changes in params.yaml" in refused(made, "register", "--run", "another")
    git(worktree, "checkout", "--quiet", "params.yaml")
    git(worktree, "rm", "--quiet", "--cached", "dvc.lock")
    git(worktree, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "Without its lock")
    (worktree / "notes.txt").write_text("no result")
    message = refused(made, "register", "--run", "another")
    assert "expected all committed, got changes in dvc.lock; commit them (`git add dvc.lock`, `git commit`) in its folder" in message
    git(worktree, "reset", "--quiet", "--hard", "HEAD~1")
    apply_overrides(worktree / "params.yaml", {"sft.steps": 7})
    commit(worktree, "Other params, nothing computed")
    message = refused(made, "register", "--run", "another")
    assert "expected a commit whose dvc.lock matches its params, code and data, got other ones (train_sft: sft modified)" in message
    git(worktree, "reset", "--quiet", "--hard", "HEAD~1")
    lost = next(p for p in (made / ".dvc/cache/files/md5").rglob("*") if p.is_file() and p.read_bytes() == bytes([4]) * 1000)
    lost.rename(tmp_path / "lost")
    assert "models/reward: expected all of it in DVC's cache, got nothing for deeper/weights" in refused(
        made, "register", "--run", "another"
    )
    (tmp_path / "lost").rename(lost)
    gate = worktree / "metrics/gate.json"  # of a stage that failed, so that dvc.lock doesn't have it
    gate.write_text(gate.read_text().replace('"passed": false', '"passed": true').replace('"message": "rejected', '"message": "passed'))
    commit(worktree, "Forged")
    assert refused(made, "register", "--run", "another")
    git(worktree, "reset", "--quiet", "--hard", "HEAD~1")
    registered = promote(made, "register", "--run", "another").stdout
    assert "Gate: rejected: expected the lower end of the interval to reach gate.min_accuracy=0.95, got 0.8" in registered
    rejected = refused(made, "promote", "--reason", "newest", "--by", "Ann")
    assert "v3.0.0: expected one that passed its gate, got one that didn't: rejected: expected the lower end" in rejected
    assert "dvc.lock: expected it in commit " in refused(made, "register")
    assert "got this very model as v1.0.0" in refused(made, "register", "--run", "run-1")


def test_a_clone_gets_the_promoted_version_by_its_hash_and_nothing_damaged(project, made, tmp_path):
    assert promote(project, "promote", "v2.0.0", "--reason", "best", "--by", "Ann").returncode == 0
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--no-tags", str(project), str(clone))
    assert "a clone needs its tags: `git fetch --tags`" in refused(clone, "fetch")
    git(clone, "fetch", "--quiet", "--tags")
    shown = promote(clone, "fetch", "--to", "here")
    assert "3 files from DVC's remote in here" in shown.stdout, shown.stderr
    assert dvc_md5(clone / "here") == dvc_md5(made / "runs/run-2/models/reward")
    assert git(clone, "worktree", "list").count("\n") == 0

    weights = next(p for p in (clone / ".dvc/cache/files/md5").rglob("*") if p.is_file() and p.stat().st_size == 1000)
    weights.chmod(0o644)
    weights.write_bytes(b"x" * 1000)
    assert f"deeper/weights: expected md5 {weights.parent.name}{weights.name}, got" in refused(clone, "fetch", "--to", "there")
    assert not (clone / "there").exists()
    weights.unlink()
    assert promote(clone, "fetch", "--to", "there").returncode == 0
    assert "v1.0.0" not in shown.stdout
    missing = refused(clone, "fetch", "--version", "v1.0.0")  # never pushed
    assert "models/reward: expected it in DVC's cache or in the remote, got neither" in missing


def test_rounds_start_from_the_promoted_policy(project):
    with pytest.raises(ConfigError, match="policy: expected a promoted version, got none"):
        start_from_registry(project, project, None)
    lineage = {**read_registry(project, NAME).versions["v1.0.0"].lineage, "decided": None}  # any model will do
    add_version(project, "policy", lineage)
    decisions.promote(project, "policy", None, by="Ann", reason="best")
    folder = start_from_registry(project, project, None)
    assert folder == Path("models/promoted/policy-v1.0.0") and dvc_md5(project / folder) == lineage["md5"]
    assert promoted_version(str(folder)) == "v1.0.0" and promoted_version("models/sft") is None
    assert start_from_registry(project, project, "v1.0.0") == folder


@pytest.mark.long
def test_a_collision_in_the_cache_is_not_fetched_nor_started_from(project):
    """Its md5 is right, and so would be that of every file of it."""
    worktree = candidate(project, "collision", seed=200)
    assert (worktree / "models/reward/deeper/weights").read_bytes() == FIRST
    assert promote(project, "register", "--run", "collision").returncode == 0
    version, found = list(read_registry(project, NAME).versions.items())[-1]
    lineage = {**found.lineage, "decided": None}
    add_version(project, "policy", lineage)
    decisions.promote(project, "policy", None, by="Ann", reason="best")
    cached = next(p for p in (project / ".dvc/cache/files/md5").rglob("*") if p.is_file() and p.read_bytes() == FIRST)
    cached.chmod(0o644)
    cached.write_bytes(SECOND)
    wanted = f"deeper/weights: expected sha256 {lineage['sha256']['deeper/weights']}, got "
    message = refused(project, "fetch", "--version", version)
    assert wanted in message and "although the md5 matches" in message
    with pytest.raises(ConfigError, match=wanted):
        start_from_registry(project, project, None)
    assert not (project / "models/promoted").exists() or not list((project / "models/promoted").iterdir())


class Listener:
    """A server that has nothing, and notes who asks with which password."""

    def __enter__(self) -> Listener:
        heard = self.heard = []

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                heard.append((self.path, self.headers.get("Authorization")))
                self.send_error(404 if self.headers.get("Authorization") else 401)

            do_HEAD = do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_port}/data"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.long
def test_a_tags_commit_can_not_have_the_password_sent_elsewhere(project, tmp_path):
    """Its .dvc/config gives the remote of the user's password another address."""
    secret = "['remote \"shared\"']\n    auth = basic\n    user = ann\n    password = hunter2\n"
    shutil.rmtree(project / ".dvc/cache")
    with Listener() as own, Listener() as other:
        dvc(project, "remote", "modify", "shared", "url", own.url)
        commit(project, "The remote moved")
        (project / ".dvc/config.local").write_text(secret)
        version = read_registry(project, NAME).versions["v1.0.0"]
        forged = project.parent / "forged"
        git(project, "worktree", "add", "--quiet", "--detach", str(forged), version.commit)
        dvc(forged, "remote", "modify", "shared", "url", other.url)
        commit(forged, "Another address")
        made = git(forged, "rev-parse", "HEAD")
        write_tag(project, f"{NAME}@v1.0.0", {**version.lineage, "commit": made}, made)
        message = refused(project, "fetch", "--version", "v1.0.0")
        assert other.heard == [] and own.heard == []
        assert (
            f".dvc/config of commit {made[:10]}: expected the remotes of this project ({own.url}), got 'shared' at {other.url}" in message
        )
        dvc(forged, "remote", "modify", "shared", "url", own.url)  # as it is in the project
        commit(forged, "The same address")
        made = git(forged, "rev-parse", "HEAD")
        write_tag(project, f"{NAME}@v1.0.0", {**version.lineage, "commit": made}, made)
        assert "expected it in DVC's cache or in the remote, got neither" in refused(project, "fetch", "--version", "v1.0.0")
        assert other.heard == [] and any(password for _, password in own.heard)


@pytest.mark.long
def test_signed_tags_are_read_by_gto_and_dvc(project):
    key = project.parent / "key"
    if shutil.which("ssh-keygen") is None:
        pytest.skip("makes an SSH key, and there is no ssh-keygen")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ann", "-f", str(key)], check=True, stdin=subprocess.DEVNULL)
    (project / "signers").write_text(f"ann@example.org {key.with_suffix('.pub').read_text()}")
    for name in ("v1.0.0", "v2.0.0"):  # as docs/registry.md says of a registry that has no signatures yet
        settings = f"-c gpg.format=ssh -c user.signingKey={key} -c user.name=a -c user.email=a@b"
        command = (
            f"git for-each-ref --format='%(contents)' 'refs/tags/{NAME}@{name}' | "
            f"git {settings} tag --force --sign --cleanup=verbatim --file=- '{NAME}@{name}' '{NAME}@{name}^{{}}'"
        )
        subprocess.run(command, shell=True, cwd=project, check=True, capture_output=True)
    git(project, "config", "user.signingKey", str(key))
    apply_overrides(project / "params.yaml", {"promotion.allowed_signers": "signers"})
    for version in ("v1.0.0", "v2.0.0"):
        done = promote(project, "promote", version, "--reason", "best", "--by", "Ben")
        assert f"promoted {version}, signed by ann@example.org, stated by Ben" in done.stdout, done.stderr
    assert seen_by_others(project) == (["v2.0.0"], read_registry(project, NAME).versions["v2.0.0"].commit)


@pytest.mark.long
def test_two_who_promote_at_once_do_it_one_after_the_other(project):
    commands = [[sys.executable, "-m", "flows.promote", "promote", NAME, v, "--reason", "mine", "--by", v] for v in ("v1.0.0", "v2.0.0")]
    both = [subprocess.Popen(command, cwd=project, env=environment(), stdout=subprocess.DEVNULL) for command in commands]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    found = read_registry(project, NAME)
    first, second = found.events
    assert (first.previous, second.previous) == (None, first.version) and {first.by, second.by} == {"v1.0.0", "v2.0.0"}
    assert seen_by_others(project)[0] == [second.version]
