"""Tags that must be signed: whose signature counts, and what is done with the others. With git's and ssh-keygen's own programs."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from registry_tags import PARAMS, git, sound_commit, write_tag

from flows import promote
from flows.registry import decisions
from flows.registry.decisions import add_version
from flows.registry.state import read_for_decision, read_promoted, read_registry
from flows.registry.tags import who
from rlhf_core.config import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="makes SSH keys, and there is no ssh-keygen")
NAME = "reward-model"
DOCS = Path(__file__).parents[3] / "docs/registry.md"
UMA = {"GIT_COMMITTER_NAME": "uma", "GIT_COMMITTER_EMAIL": "uma@example.org"}  # who signs again
EVENT = {"action": "promote", "version": "v1.0.0", "previous": None, "by": "Ann", "reason": "good", "override": None}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project that wants signatures of Ann, who works in it."""
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "--quiet")
    for name in ("ann", "eve"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(tmp_path / name)]
        subprocess.run(key, check=True, stdin=subprocess.DEVNULL)
    (tmp_path / "signers").write_text(f"ann@example.org {(tmp_path / 'ann.pub').read_text()}")
    git(root, "config", "user.signingKey", str(tmp_path / "ann"))
    return root


def demand_signatures(root: Path, path: str = "../signers") -> None:
    (root / "params.yaml").write_text(json.dumps({**PARAMS, "promotion": {**PARAMS["promotion"], "allowed_signers": path}}))


def sign(root: Path, name: str, content: dict, commit: str, key: str, *, date: str | None = None) -> None:
    """As somebody does it by hand, with any key and any date."""
    settings = ("-c", "gpg.format=ssh", "-c", f"user.signingKey={root.parent / key}")
    message = b"head\n\n" + json.dumps(content).encode() + b"\n"
    command = ("git", "-c", "user.name=a", "-c", "user.email=a@b", *settings, "tag", "--force", "--sign", "--cleanup=verbatim", "--file=-")
    dated = os.environ | ({"GIT_COMMITTER_DATE": date} if date else {})
    subprocess.run([*command, name, commit], cwd=root, input=message, env=dated, capture_output=True, check=True)


def test_our_own_tags_are_signed_and_the_signer_is_who_decided(root, monkeypatch, capsys):
    lineage = sound_commit(root)
    demand_signatures(root)
    assert add_version(root, NAME, lineage).signer == "ann@example.org"
    event = decisions.promote(root, NAME, None, by="Ben", reason="good")
    assert event.who == "signed by ann@example.org, stated by Ben" and read_promoted(root, NAME).version == "v1.0.0"
    decisions.rollback(root, NAME, None, by="Ann <ann@example.org>", reason="bad")
    assert read_for_decision(root, NAME).current is None
    monkeypatch.chdir(root)
    assert promote.main(["history", NAME]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert "signed by ann@example.org, stated by Ben" in rows[0] and re.search("signed by ann@example.org +bad", rows[1])


def test_a_tag_without_a_signature_decides_nothing(root):
    lineage = sound_commit(root)
    write_tag(root, f"{NAME}@v1.0.0", lineage, lineage["commit"])
    write_tag(root, f"{NAME}#prod#1", EVENT, lineage["commit"])
    assert read_promoted(root, NAME).version == "v1.0.0"
    demand_signatures(root)
    found = read_registry(root, NAME)
    assert found.versions == {} and found.events == [] and {tag.name for tag in found.bad} == {f"{NAME}@v1.0.0", f"{NAME}#prod#1"}
    with pytest.raises(ConfigError, match=rf"tag {NAME}#prod#1: expected a signature of an allowed signer, got error: no signature found"):
        read_for_decision(root, NAME)
    with pytest.raises(ConfigError, match=rf"tag {NAME}@v1\.0\.0: expected a signature of an allowed signer"):
        found.get("v1.0.0")


def test_a_signature_of_somebody_else_counts_for_nothing(root):
    lineage = sound_commit(root)
    demand_signatures(root)
    add_version(root, NAME, lineage)
    sign(root, f"{NAME}#prod#1", EVENT, lineage["commit"], "eve")
    with pytest.raises(ConfigError, match=rf"tag {NAME}#prod#1: .* got Good .* No principal matched"):
        read_promoted(root, NAME)
    sign(root, f"{NAME}#prod#1", EVENT, lineage["commit"], "ann")
    assert read_promoted(root, NAME).version == "v1.0.0"


def test_a_signed_tag_that_was_changed_is_refused(root):
    lineage = sound_commit(root)
    demand_signatures(root)
    add_version(root, NAME, lineage)
    sign(root, f"{NAME}#prod#1", EVENT, lineage["commit"], "ann")
    raw = git(root, "cat-file", "tag", f"{NAME}#prod#1").replace('"Ann"', '"Eve"') + "\n"
    changed = git(root, "hash-object", "-t", "tag", "-w", "--stdin", content=raw.encode())
    git(root, "update-ref", f"refs/tags/{NAME}#prod#1", changed)
    with pytest.raises(ConfigError, match=rf"tag {NAME}#prod#1: expected a signature of an allowed signer, got Could not verify"):
        read_promoted(root, NAME)


def test_the_signers_of_the_tags_commit_are_nobody(root):
    """A commit may bring a params.yaml and a list of its own."""
    lineage = sound_commit(root, signers=f"eve@example.org {(root.parent / 'eve.pub').read_text()}")
    demand_signatures(root)
    sign(root, f"{NAME}@v1.0.0", lineage, lineage["commit"], "eve")
    assert read_registry(root, NAME).versions == {}


def test_nothing_is_written_with_a_key_that_does_not_count(root):
    lineage = sound_commit(root)
    demand_signatures(root)
    git(root, "config", "user.signingKey", str(root.parent / "eve"))
    with pytest.raises(ConfigError, match=rf"tag {NAME}@v1\.0\.0: expected your key to sign it and to be one of signers, got Good"):
        add_version(root, NAME, lineage)
    git(root, "config", "user.signingKey", "/nowhere/key")
    with pytest.raises(
        ConfigError, match=rf"tag {NAME}@v1\.0\.0: expected (git to write it|your key to sign it).*git config user\.signingKey FILE"
    ):
        add_version(root, NAME, lineage)
    assert git(root, "tag", "--list") == ""


def test_a_list_of_signers_that_is_not_there_stops_all(root):
    lineage = sound_commit(root)
    write_tag(root, f"{NAME}@v1.0.0", lineage, lineage["commit"])
    demand_signatures(root, "../gone")
    with pytest.raises(ConfigError, match=r"promotion\.allowed_signers: expected a file of allowed signers, got No such file"):
        read_registry(root, NAME)


def test_tags_signed_again_as_documented_keep_who_registered(root):
    """Else whoever signs would be said to have registered the model."""
    lineage = sound_commit(root)
    write_tag(root, f"{NAME}@v1.0.0", lineage, lineage["commit"])
    write_tag(root, f"{NAME}#prod#1", EVENT, lineage["commit"])
    before = read_registry(root, NAME).versions["v1.0.0"]
    lines = DOCS.read_text().partition("git config gpg.format ssh")[2].splitlines()[1:]
    commands = itertools.takewhile(lambda line: line.startswith("    "), lines)
    git(root, "config", "gpg.format", "ssh")
    subprocess.run(["sh", "-ec", "\n".join(commands)], cwd=root, check=True, env={**os.environ, **UMA})
    demand_signatures(root)
    after = read_registry(root, NAME)
    version = after.versions["v1.0.0"]
    assert who(version.by, version.signer) == "signed by ann@example.org, stated by A"
    assert (version.by, version.at, version.lineage) == (before.by, before.at, before.lineage) and after.bad == ()
    assert after.events[0].who == "signed by ann@example.org, stated by Ann"


def test_an_expired_key_cannot_date_a_decision_back(root):
    """ssh-keygen judges `valid-before` by the date that the tag states."""
    lineage = sound_commit(root)
    demand_signatures(root)
    signers = root.parent / "signers"
    ann, eve = ((root.parent / f"{name}.pub").read_text() for name in ("ann", "eve"))
    signers.write_text(f'ann@example.org {ann}eve@example.org valid-before="20200101" {eve}')
    add_version(root, NAME, lineage)
    decisions.promote(root, NAME, None, by="Ann", reason="good")
    back = {"action": "rollback", "version": None, "previous": "v1.0.0", "by": "Ann", "reason": "bad", "override": None, "model": None}
    sign(root, f"{NAME}#prod!#2", back, lineage["commit"], "eve")
    with pytest.raises(ConfigError, match=rf"tag {NAME}#prod!#2: expected a signature of an allowed signer"):
        read_promoted(root, NAME)  # of today, when the key has expired
    sign(root, f"{NAME}#prod!#2", back, lineage["commit"], "eve", date="2019-12-01T00:00:00Z")
    with pytest.raises(
        ConfigError, match=rf"tag {NAME}#prod!#2: .*got one that is dated 2019-12-01T00:00:00\+00:00, before version v1\.0\.0"
    ):
        read_promoted(root, NAME)
    other = {**lineage, "md5": "1" * 32 + ".dir"}
    sign(root, f"{NAME}@v2.0.0", other, lineage["commit"], "eve", date="2019-12-01T00:00:00Z")
    assert set(read_registry(root, NAME).versions) == {"v1.0.0"}


def test_a_decision_is_not_dated_before_the_one_that_it_follows(root):
    lineage = sound_commit(root)
    write_tag(root, f"{NAME}@v1.0.0", lineage, lineage["commit"], second=1_700_000_000)
    write_tag(root, f"{NAME}#prod#1", EVENT, lineage["commit"], second=1_700_000_500)
    back = {**EVENT, "action": "rollback", "version": None, "previous": "v1.0.0"}
    write_tag(root, f"{NAME}#prod!#2", back, lineage["commit"], second=1_700_000_499)
    with pytest.raises(ConfigError, match=r"#prod!#2: .*, before decision 1 of 2023-11-14T22:21:40\+00:00, which it follows.*restore it"):
        read_for_decision(root, NAME)
    write_tag(root, f"{NAME}#prod!#2", back, lineage["commit"], second=1_700_000_500)  # older versions wrote two in a second
    assert read_for_decision(root, NAME).current is None


def test_a_clock_that_is_behind_writes_no_decision(root):
    lineage = sound_commit(root)
    write_tag(root, f"{NAME}@v1.0.0", lineage, lineage["commit"], second=4_000_000_000)
    with pytest.raises(ConfigError, match=rf"tag {NAME}#prod#1: expected a clock that is past the newest tag, of 2096-10-02T07:06:40"):
        decisions.promote(root, NAME, None, by="Ann", reason="good")
    assert git(root, "tag", "--list") == f"{NAME}@v1.0.0"


def test_a_subfolder_asks_for_the_same_signatures(root):
    lineage = sound_commit(root)
    write_tag(root, f"{NAME}@v1.0.0", lineage, lineage["commit"])
    demand_signatures(root)
    assert read_registry(root / "metrics", NAME).versions == {}
