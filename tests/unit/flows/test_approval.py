"""The question of the flow `promote`, the model that its answer is about, and the description of a version."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from registry_tags import GATE, PARAMS, git, sound_commit, sound_lineage, write_tag

from flows.promote import describe, summary, versions_table
from flows.registry import decisions
from flows.registry.decisions import AnotherModel, add_version
from flows.registry.flow import question, version_to_approve
from flows.registry.state import Registry, read_promoted, read_registry
from flows.registry.tags import Version
from rlhf_core.config import ConfigError

NAME = "reward-model"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one version."""
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "--quiet")
    add_version(root, NAME, {**sound_commit(root), "sha256": {"weights": "a" * 64}})
    return root


def replace_version(root: Path, **changes: object) -> None:
    other = sound_commit(root, md5="9" * 32 + ".dir")
    write_tag(root, f"{NAME}@v1.0.0", {**other, **changes}, other["commit"])


def test_the_question_has_hashes_commit_and_verdict(root):
    version = read_registry(root, NAME).versions["v1.0.0"]
    text = question(version)
    assert version.md5 in text and version.sha256 in text and version.commit in text and text.endswith("its gate: passed.")


def test_an_approval_holds_for_its_model_only(root, tmp_path):
    note = tmp_path / "notes/run"
    chosen = version_to_approve(note, read_registry(root, NAME), None, resumed=False)
    assert version_to_approve(note, read_registry(root, NAME), None, resumed=True) == chosen
    replace_version(root)
    moved = read_registry(root, NAME)
    with pytest.raises(
        AnotherModel, match=r"reward-model v1\.0\.0: expected the model that was approved, md5 0{32}\.dir, got md5 9{32}\.dir"
    ):
        version_to_approve(note, moved, None, resumed=True)
    # Moved after the flow looked, before it wrote.
    with pytest.raises(AnotherModel, match="its tag was replaced after the question; request approval again"):
        decisions.promote(root, NAME, "v1.0.0", by="Ann", reason="good", approved=chosen.model)
    assert read_registry(root, NAME).events == []


def test_another_sha256_or_verdict_is_another_model(root, tmp_path):
    note = tmp_path / "note"
    chosen = version_to_approve(note, read_registry(root, NAME), "v1.0.0", resumed=False)
    for changes in ({"sha256": {"weights": "b" * 64}}, {"sha256": None}, {"gate": {**GATE, "passed": False}}):
        write_tag(root, f"{NAME}@v1.0.0", {**chosen.lineage, **changes}, chosen.commit)
        with pytest.raises(AnotherModel):
            version_to_approve(note, read_registry(root, NAME), "v1.0.0", resumed=True)


def test_a_resumed_run_without_its_note_asks_for_another_run(root, tmp_path):
    with pytest.raises(ConfigError, match="promote: expected the file run from the run's first start, got none; start another run"):
        version_to_approve(tmp_path / "run", read_registry(root, NAME), None, resumed=True)


def test_a_version_that_was_replaced_after_its_promotion_is_not_the_promoted_one(root):
    """The name stays and the model is another one: the decision keeps the hashes."""
    decisions.promote(root, NAME, "v1.0.0", by="Ann", reason="good")
    (event,) = read_registry(root, NAME).events
    assert event.model == {"md5": "0" * 32 + ".dir", "sha256": event.model["sha256"], "commit": event.model["commit"], "gate": "passed"}
    replace_version(root)
    git(
        root,
        "tag",
        "--force",
        f"{NAME}#prod#1",
        "HEAD",
        "-m",
        git(root, "for-each-ref", "--format=%(contents)", f"refs/tags/{NAME}#prod#1"),
    )
    with pytest.raises(
        ConfigError, match=r"tag reward-model#prod#1: expected v1\.0\.0 to be the model that was decided on, md5 0{32}\.dir, got"
    ):
        read_promoted(root, NAME)


def test_older_decisions_and_versions_without_sha256_are_read(root):
    version = read_registry(root, NAME).versions["v1.0.0"]
    older = {key: value for key, value in version.lineage.items() if key != "sha256"}
    write_tag(root, f"{NAME}@v1.0.0", older, version.commit)
    event = {"action": "promote", "version": "v1.0.0", "previous": None, "by": "Ann", "reason": "good", "override": None}
    write_tag(root, f"{NAME}#prod#1", event, version.commit)
    current = read_promoted(root, NAME)
    assert current.sha256 is None and current.identity == f"md5 {'0' * 32}.dir, identified by md5 only"
    assert json.loads(json.dumps(current.model))["sha256"] is None


def test_the_summary_of_a_policy_names_its_reward_model():
    parents = {"models/reward": "1" * 32 + ".dir"}
    lineage = sound_lineage("c" * 40, path="models/policy", parents=parents, reward_model_version="v3.0.0")
    policy = Version("policy", "v1.0.0", "c" * 40, "ann", "2026-01-01", lineage)
    text = summary(Registry("policy", {"v1.0.0": policy}, [], 0), policy)
    assert re.search(r"^reward model +v3\.0\.0$", text, re.MULTILINE)


def test_the_summary_has_the_hashes_of_sources_and_base_model():
    sources = {"data.sources.pairs": {"path": "../pairs.jsonl", "sha256": "a" * 64}, "data.sources.gone": None}
    inputs = {"sources": sources, "model": {"model.path": {"name": "some/model", "commit": "b" * 40}}}
    version = Version(NAME, "v1.0.0", "c" * 40, "ann", "2026-01-01", sound_lineage("c" * 40, inputs=inputs))
    registry = Registry(NAME, {"v1.0.0": version}, [], 0)
    text = summary(registry, version)
    assert f"data.sources.pairs ../pairs.jsonl {'a' * 12}\n" in text and f"model.path some/model {'b' * 12}\n" in text
    assert "a" * 13 not in text and describe(registry, version, None)["lineage"]["inputs"] == inputs


def test_the_registry_names_no_reward_model_that_a_policy_did_not_learn_from():
    parents = {"models/reward": "1" * 32 + ".dir", "models/sft": "2" * 32 + ".dir"}
    own = {"algorithm": "grpo", "reward": {"scorers": [{"name": "own", "kind": "function", "path": "my_rewards:own"}]}}
    for changes, gate_named in (({"alignment": {"method": "dpo"}}, True), ({"rl": own}, False)):
        lineage = sound_lineage("c" * 40, path="models/policy", parents=parents, params=PARAMS | changes)
        policy = Version("policy", "v1.0.0", "c" * 40, "ann", "2026-01-01", lineage)
        registry = Registry("policy", {"v1.0.0": policy}, [], 0)
        text = summary(registry, policy)
        assert re.search(r"^reward model +none used in training$", text, re.MULTILINE) and "models/reward" not in text
        assert ("gate of the reward model that scored its evaluation" in text) == gate_named and "gate of its reward model" not in text
        assert "no reward model used" in versions_table(registry, {"v1.0.0": None})
        assert question(policy).endswith("its training used no reward model.")
        assert describe(registry, policy, None)["trained_from"] == {"models/sft": "2" * 32 + ".dir"}
