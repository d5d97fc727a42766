"""A version's tag held against the files of its own commit."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from registry_tags import GATE, git, sound_commit, write_tag

from flows import promote
from flows.chain.pins import registry_params
from flows.registry import decisions, evidence, state
from flows.registry.evidence import check_version, gates, read_files
from flows.registry.flow import question
from flows.registry.state import read_promoted, read_registry
from flows.registry.versions import fetch
from rlhf_core.config import ConfigError

NAME = "reward-model"
REJECTED = {"needed": True, "passed": False, "message": "rejected: accuracy 0.4 against 0.75.", "override": None}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    return tmp_path


def promoted(root: Path, lineage: dict, *, name: str = "v1.0.0") -> None:
    write_tag(root, f"{NAME}@{name}", lineage, lineage["commit"])
    event = {"action": "promote", "version": name, "previous": None, "by": "Ann", "reason": "good", "override": None}
    write_tag(root, f"{NAME}#prod#1", event, lineage["commit"])


def lie(lineage: dict, key: str, value: object) -> dict:
    """A lineage in which one key, dotted, is another value."""
    changed = copy.deepcopy(lineage)
    *above, last = key.split(".")
    node = changed
    for part in above:
        node = node[part]
    node[last] = value
    return changed


def test_a_tag_that_says_what_its_commit_says_is_believed(root):
    promoted(root, sound_commit(root))
    assert read_promoted(root, NAME).version == "v1.0.0"


def test_a_verdict_that_the_commit_does_not_have_decides_nothing(root):
    """Whoever may push tags could promote: the tag says "passed", gate.json of its commit says "rejected"."""
    lineage = sound_commit(root, gate=REJECTED)
    promoted(root, {**lineage, "gate": GATE})
    message = (
        rf"tag {NAME}@v1\.0\.0: expected what metrics/gate\.json of its commit {lineage['commit'][:10]} says, gate\.passed: false, got "
        "true; don't use it"
    )
    found = read_registry(root, NAME)
    acts = (
        *(lambda: read_promoted(root, NAME), lambda: registry_params(root), lambda: fetch(root, found, None, root / "there")),
        lambda: fetch(root, found, "v1.0.0", root / "there"),
    )
    for act in acts:
        with pytest.raises(ConfigError, match=message):
            act()
    git(root, "tag", "-d", f"{NAME}#prod#1")
    with pytest.raises(ConfigError, match=message):
        decisions.promote(root, NAME, "v1.0.0", by="Ann", reason="good")
    with pytest.raises(ConfigError, match=message):
        decisions.promote(root, NAME, "v1.0.0", by="Ann", reason="good", override="it is fine")
    assert read_registry(root, NAME).events == []


def test_a_rollback_to_a_version_whose_tag_lies_is_refused(root):
    first, second = sound_commit(root), sound_commit(root, md5="2" * 32 + ".dir")
    for name, lineage in (("v1.0.0", first), ("v2.0.0", second)):
        write_tag(root, f"{NAME}@{name}", lineage, lineage["commit"])
        decisions.promote(root, NAME, name, by="Ann", reason="good")
    write_tag(root, f"{NAME}@v1.0.0", lie(first, "params.seed", 2), first["commit"])
    with pytest.raises(
        ConfigError, match=rf"tag {NAME}@v1\.0\.0: expected what params\.yaml of its commit \w+ says, params\.seed: 1, got 2"
    ):
        decisions.rollback(root, NAME, None, by="Ann", reason="bad")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("md5", "f" * 32 + ".dir", r"dvc\.lock of its commit \w+ says, md5: \"0{32}\.dir\", got \"f{32}\.dir\""),
        ("size", 5, r"dvc\.lock of its commit \w+ says, size: 1, got 5"),
        ("parents", {"models/sft": "x"}, r"parents\.models/sft: null, got \"x\""),
        ("stages.train_reward.outs", {}, r"stages\.train_reward\.outs\.models/reward: "),
        ("params.alignment.method", "dpo", r"params\.yaml of its commit \w+ says, params\.alignment\.method: \"rl\", got \"dpo\""),
        ("gate.message", "passed: brilliantly", r"gate\.message: \"passed: it did\", got \"passed: brilliantly\""),
        ("decided.split", "train", r"the chain or the round of its commit \w+ says, decided\.split: \"test\", got \"train\""),
        ("services", {"tone": {}}, r"metrics/check_model\.json of its commit \w+ says, services: null, got {\"tone\": {}}"),
        ("gate", None, r"metrics/gate\.json of its commit \w+ says, gate: "),
        ("path", "metrics/gate.json", r"the model that dvc\.yaml of its commit names, 'models/reward', got 'metrics/gate\.json'"),
        ("path", "rounds/1/policy", r"the model that dvc\.yaml of its commit names"),
    ],
)
def test_each_part_of_a_lineage_is_held_against_the_commit(root, key, value, message):
    lineage = sound_commit(root)
    write_tag(root, f"{NAME}@v1.0.0", lie(lineage, key, value), lineage["commit"])
    with pytest.raises(ConfigError, match=rf"tag {NAME}@v1\.0\.0: expected .*{message}.*don't use it"):
        check_version(root, read_registry(root, NAME).versions["v1.0.0"])


def test_a_verdict_on_another_model_is_refused(root):
    """gate.json was changed by hand, or is of another run of the gate than dvc.lock."""
    lineage = sound_commit(root)
    (root / "metrics/gate.json").write_text(json.dumps({**GATE, "message": "passed: by hand"}))
    git(root, "commit", "--quiet", "--all", "-m", "by hand")
    commit = git(root, "rev-parse", "HEAD")
    write_tag(root, f"{NAME}@v1.0.0", {**lie(lineage, "gate.message", "passed: by hand"), "commit": commit}, commit)
    with pytest.raises(
        ConfigError, match=r"expected dvc\.lock of its commit to name metrics/gate\.json with md5 \w+, got \w+; don't use it"
    ):
        check_version(root, read_registry(root, NAME).versions["v1.0.0"])


def test_the_policy_of_a_round_needs_the_rounds_verdict(root):
    md5 = "7" * 32 + ".dir"
    lock = {"stages": {"train_round@1": {"outs": [{"path": "rounds/1/policy", "md5": md5, "size": 1, "nfiles": 2}]}}}
    for accepted in (True, False):
        lineage = sound_commit(
            root, rounds__dvc_lock=json.dumps(lock), rounds__1__metrics__evaluate_json=json.dumps({"accepted": accepted})
        )
        lineage |= {
            "path": "rounds/1/policy",
            "md5": md5,
            "decided": {"by": "evaluate_round@1"},
            "stages": {"train_round@1": {"deps": {}, "outs": {"rounds/1/policy": md5}}},
        }
        write_tag(root, "policy@v1.0.0", lineage, lineage["commit"])
        version = read_registry(root, "policy").versions["v1.0.0"]
        if accepted:
            check_version(root, version)
        else:
            with pytest.raises(
                ConfigError, match=r"expected the policy of an accepted round, got one that rounds/1/metrics/evaluate\.json"
            ):
                check_version(root, version)


NESTED = "[" * 600 + "]" * 600


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"dvc_lock": NESTED}, r"dvc\.lock of commit \w+: expected YAML, got more than 200 nested brackets"),
        ({"dvc_lock": "stages: [1]"}, r"dvc\.lock of commit \w+: expected what DVC writes, got another value of stages"),
        ({"dvc_lock": "stages: {a: {outs: [{path: p}]}}"}, r"dvc\.lock of commit \w+: .* got another value of stages\.a\.outs\.0\.md5"),
        ({"dvc_lock": "x" * (1 << 20) + "xx"}, r"dvc\.lock of commit \w+: expected at most 1048576 bytes, got 1048578"),
        ({"params_yaml": NESTED}, r"params\.yaml of commit \w+: expected YAML, got more than 200 nested brackets"),
        ({"params_yaml": "a: 2026-01-01"}, r"expected what its commit \w+ says, got Object of type date is not JSON"),
        ({"metrics__gate_json": NESTED}, r"metrics/gate\.json of commit \w+: expected JSON, got more than 200 nested brackets"),
        ({"metrics__gate_json": "{"}, r"metrics/gate\.json of commit \w+: expected JSON, got "),
        ({"dvc_yaml": NESTED}, r"dvc\.yaml of commit \w+: expected YAML, got more than 200 nested brackets"),
    ],
)
def test_files_of_a_commit_are_read_within_limits(root, files, message):
    lineage = sound_commit(root, **files)
    write_tag(root, f"{NAME}@v1.0.0", lineage, lineage["commit"])
    with pytest.raises(ConfigError, match=rf"^tag {NAME}@v1\.0\.0: {message}"):
        check_version(root, read_registry(root, NAME).versions["v1.0.0"])


def test_a_commit_that_is_not_here_is_named(root):
    sound_commit(root)
    with pytest.raises(ConfigError, match=r"commit ffffffffff: expected it in this repository, got nothing; `git fetch --tags`"):
        read_files(root, "f" * 40, ("dvc.lock",))


def test_show_names_a_false_verdict_and_a_bad_tag(root, monkeypatch, capsys):
    lineage = sound_commit(root, gate=REJECTED)
    promoted(root, {**lineage, "gate": GATE})
    write_tag(root, f"{NAME}@v2.0.0", b"garbage", lineage["commit"])
    monkeypatch.chdir(root)
    assert promote.main(["show", NAME]) == 0
    table, warnings = capsys.readouterr()
    assert "says passed, commit says rejected" in table and "stated by A" in table
    assert f"warning: tag {NAME}@v2.0.0: expected one made by" in warnings
    assert f"warning: tag {NAME}@v1.0.0: expected what metrics/gate.json of commit" in warnings
    assert promote.main(["show", NAME, "v1.0.0"]) == 0
    assert re.search(r"its commit +tag reward-model@v1\.0\.0: expected what metrics/gate\.json", capsys.readouterr().out)
    assert promote.main(["history", NAME]) == 0
    assert "stated by Ann" in capsys.readouterr().out
    assert promote.main(["fetch", NAME]) == 2


def test_show_says_of_a_sound_verdict_with_another_message_that_the_commit_differs(root, monkeypatch, capsys):
    lineage = sound_commit(root)
    write_tag(root, f"{NAME}@v1.0.0", lie(lineage, "gate.message", "passed: by far"), lineage["commit"])
    monkeypatch.chdir(root)
    assert promote.main(["show", NAME]) == 0
    assert "says passed, commit differs" in capsys.readouterr().out


def test_the_gate_of_a_policy_is_that_of_its_reward_model(root, monkeypatch, capsys):
    lineage = sound_commit(root)
    write_tag(root, "policy@v1.0.0", {**lineage, "path": "models/policy"}, lineage["commit"])
    version = read_registry(root, "policy").get("v1.0.0")
    monkeypatch.chdir(root)
    for command in (["show", "policy", "v1.0.0"], ["show", "policy"]):
        assert promote.main(command) == 0
        reported = capsys.readouterr().out
        assert "gate of its reward model" in reported.lower() and "\nGate: " not in reported and "\ngate  " not in reported
    assert "the gate of its reward model: passed" in question(version)


def test_a_table_of_two_hundred_tags_needs_few_calls_of_git(root, tmp_path, monkeypatch):
    lineage = sound_commit(root)
    for number in range(1, 101):
        write_tag(root, f"{NAME}@v{number}.0.0", {**lineage, "md5": f"{number:032}.dir"}, lineage["commit"])
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "git").write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/calls\nexec {shutil.which("git")} "$@"\n')
    (tools / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    started = time.process_time()
    found = read_registry(root, NAME)
    assert gates(root, list(found.versions.values())) == dict.fromkeys(found.versions) and len(found.versions) == 100
    assert time.process_time() - started < 5
    assert len((tmp_path / "calls").read_text().split()) <= 8


def test_a_real_git_is_what_the_limits_hold_for(root):
    """An object over the limit is never read as a whole."""
    (root / "large").write_bytes(b"x" * (3 << 20))
    blob = subprocess.run(["git", "hash-object", "-w", "large"], cwd=root, capture_output=True, check=True, text=True).stdout.strip()
    (found,) = evidence.read_objects(root, [blob])
    assert found.content is None and found.size == 3 << 20


def test_a_terminal_takes_no_orders_from_a_tag(root, monkeypatch, capsys):
    lineage = sound_commit(root)
    write_tag(root, f"{NAME}@v1.0.0", {**lineage, "run": "main\x1b[2J"}, lineage["commit"])
    event = {"action": "promote", "version": "v1.0.0", "previous": None, "by": "\x1b]0;Ann", "reason": "good\r", "override": None}
    write_tag(root, f"{NAME}#prod#1", event, lineage["commit"])
    monkeypatch.chdir(root)
    for command in (["show", NAME], ["show", NAME, "v1.0.0"], ["history", NAME]):
        assert promote.main(command) == 0
        reported = "".join(capsys.readouterr())
        assert "\\x1b" in reported and reported.replace("\n", "").isprintable()


def test_a_terminal_takes_no_orders_from_a_refusal(root, monkeypatch, capsys):
    lineage = sound_commit(root)
    promoted(root, lineage)
    event = {"action": "rollback", "version": None, "previous": "v1.0.0", "by": "\x1b]0;Ann", "reason": "bad\x1b[2J", "override": None}
    write_tag(root, f"{NAME}#prod!#2", event, lineage["commit"])
    monkeypatch.chdir(root)
    assert promote.main(["promote", NAME, "v1.0.0", "--by", "Ann", "--reason", "again"]) == 2
    reported = "".join(capsys.readouterr())
    assert "got one that was, stated by \\x1b]0;Ann: bad\\x1b[2J" in reported and reported.replace("\n", "").isprintable()


def test_a_reason_with_a_credential_is_refused_before_it_is_shared(root):
    """The params of the next run repeat it, and would be refused."""
    promoted(root, sound_commit(root))
    with pytest.raises(
        ConfigError, match="reason: expected words, got a password in an address; remove it, since the tag is shared"
    ) as refusal:
        decisions.rollback(root, NAME, None, by="Ann", reason="see https://ann:hunter2@host/issue/1")
    assert "hunter2" not in str(refusal.value)
    decisions.rollback(root, NAME, None, by="Ann <ann@example.org>", reason="see https://host/issue/1")
    assert registry_params(root)["gate.rolled_back"][0]["reason"] == "see https://host/issue/1"


def test_a_left_out_tag_is_named_when_something_is_decided(root, caplog):
    lineage = sound_commit(root)
    promoted(root, lineage)
    write_tag(root, f"{NAME}@v2.0.0", f"garbage of {root.name}".encode(), lineage["commit"])
    state._warn.cache_clear()  # which remembers what another test was told
    with caplog.at_level("WARNING", logger="rlhf.flows"):
        assert registry_params(root)["gate.incumbent"]["version"] == "v1.0.0"
    assert f"tag {NAME}@v2.0.0: expected one made by" in caplog.text
