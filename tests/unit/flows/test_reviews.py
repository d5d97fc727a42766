"""Reviews of registry versions: who approved or rejected one and why, what follows from it, and the page that a reviewer reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from registry_tags import GATE, PARAMS, git, sound_commit, write_tag

from flows.promote import describe, gate_facts, page, review, summary
from flows.registry import decisions
from flows.registry.decisions import add_version
from flows.registry.flow import _reviewed
from flows.registry.page import render_version
from flows.registry.reviews import read_reviews, rejected
from flows.registry.state import Registry, read_registry
from flows.stores.git_remote import fetch_tags, push_tags
from rlhf_core.config import ConfigError

NAME = "reward-model"


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    """A repository with two versions, the first of them promoted."""
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "--quiet")
    add_version(root, NAME, sound_commit(root))
    decisions.promote(root, NAME, "v1.0.0", by="Ann", reason="the first one")
    changed = json.dumps(PARAMS | {"seed": 2})
    line = sound_commit(root, md5="2" * 32 + ".dir", params_yaml=changed)
    add_version(root, NAME, line | {"params": PARAMS | {"seed": 2}})
    (root / "params.yaml").write_text(json.dumps(PARAMS))
    monkeypatch.chdir(root)
    return root


def registry(root: Path) -> Registry:
    return read_registry(root, NAME)


def drawn(root: Path, version: str) -> str:
    chosen = registry(root).versions[version]
    return render_version(root, registry(root), chosen, gate_facts(chosen))


def reviewed(root: Path, answer: str = "approve", by: str = "Bo", reason: str = "read 50 answers") -> None:
    decisions.review(root, NAME, "v2.0.0", answer, by=by, reason=reason)


def test_a_review_says_who_and_why_and_belongs_to_its_model(root):
    reviewed(root)
    reviewed(root, "reject", by="Cy", reason="refuses too much")
    found = read_reviews(root, registry(root))
    assert [(r.number, r.answer, r.by, r.reason) for r in found.of("v2.0.0")] == [
        (1, "approve", "Bo", "read 50 answers"),
        (2, "reject", "Cy", "refuses too much"),
    ]
    assert found.of("v1.0.0") == [] and found.bad == ()
    assert git(root, "for-each-ref", "--format=%(contents:subject)", f"refs/tags/{NAME}-review-v2.0.0-2").endswith(
        "stated by Cy: refuses too much"
    )


def test_a_rejected_version_needs_an_override_and_an_approval_lifts_it(root):
    reviewed(root, "reject", reason="refuses too much")
    with pytest.raises(
        ConfigError, match=r"no review rejects, got one that was rejected, stated by Bo: refuses too much; .* with --override"
    ):
        decisions.promote(root, NAME, "v2.0.0", by="Ann", reason="better")
    reviewed(root, "approve", by="Cy", reason="repaired")
    assert decisions.promote(root, NAME, "v2.0.0", by="Ann", reason="better").override is None
    reviewed(root, "reject", reason="after all")
    assert registry(root).current.version == "v2.0.0", "a later review doesn't undo a promotion"


def test_a_rejection_is_named_beside_the_gates_before_anyone_overrides_it(root):
    refused = sound_commit(root, md5="3" * 32 + ".dir", gate=GATE | {"passed": False, "message": "rejected: too low"})
    add_version(root, NAME, refused)
    decisions.review(root, NAME, "v3.0.0", "reject", by="Bo", reason="refuses too much")
    with pytest.raises(
        ConfigError, match=r"rejected: too low.*; expected a version that no review rejects, .*refuses too much; .* --override"
    ):
        decisions.promote(root, NAME, "v3.0.0", by="Ann", reason="better")


def test_an_override_is_kept_with_the_promotion(root):
    reviewed(root, "reject")
    assert decisions.promote(root, NAME, "v2.0.0", by="Ann", reason="better", override="urgent").override == "urgent"


def test_the_flow_takes_an_approving_review_for_the_answer(root):
    found, chosen = registry(root), registry(root).versions["v2.0.0"]
    assert _reviewed(root, found, chosen, None) is None
    reviewed(root)
    answer = _reviewed(root, found, chosen, None)
    assert (answer.approve, answer.by, answer.reason) == (True, "Bo", "read 50 answers")
    assert _reviewed(root, found, chosen, "expected one that passed its gate") is None, "an override is asked about"
    reviewed(root, "reject")
    assert _reviewed(root, found, chosen, None) is None and rejected(root, found, chosen)


@pytest.mark.parametrize("change", [{"model": {"md5": "9" * 32 + ".dir"}}, {"action": "maybe"}, {"by": 1}])
def test_a_review_of_another_model_or_form_is_left_out_and_stops_a_promotion(root, change):
    chosen = registry(root).versions["v2.0.0"]
    content = {"action": "approve", "by": "Bo", "reason": "x", "model": chosen.model}
    content |= {key: content[key] | value if isinstance(value, dict) else value for key, value in change.items()}
    write_tag(root, f"{NAME}-review-v2.0.0-1", content, chosen.commit)
    assert read_reviews(root, registry(root)).of("v2.0.0") == []
    with pytest.raises(ConfigError, match=r"until then it isn't certain whether v2\.0\.0 was rejected"):
        decisions.promote(root, NAME, "v2.0.0", by="Ann", reason="better")


@pytest.mark.parametrize(("by", "reason"), [("", "x"), ("Bo", " "), ("Bo", "a\x1b[31m"), ("Bo", "token=abc123def456")])
def test_words_that_cant_be_kept_are_refused(root, by, reason):
    with pytest.raises(ConfigError, match=r"^(by|reason): expected (some )?words"):
        reviewed(root, by=by, reason=reason)
    assert read_reviews(root, registry(root)).of("v2.0.0") == []


def test_the_command_reviews_and_show_tells(root, capsys):
    assert review(NAME, "v2.0.0", approve=False, by="Bo <b@c>", reason="slow") == 0
    told = capsys.readouterr().out
    assert told.startswith("reward-model v2.0.0: rejected, stated by Bo <b@c>: slow\n") and "rlhf push reward-model@v2.0.0" in told
    assert review(NAME, "v9.0.0", approve=True, by="Bo", reason="x") == 2 and "expected a registered version" in capsys.readouterr().err
    found, chosen = registry(root), registry(root).versions["v2.0.0"]
    reviews = read_reviews(root, found).of("v2.0.0")
    assert "rejected, stated by Bo <b@c>: slow" in summary(found, chosen, reviews=reviews)
    assert describe(found, chosen, None, reviews)["reviews"][0]["reason"] == "slow"


def test_reviews_travel_with_the_tags_of_their_versions(root, tmp_path):
    reviewed(root, "reject", reason="refuses too much")
    git(tmp_path, "init", "--quiet", "--bare", "origin.git")
    git(root, "remote", "add", "origin", str(tmp_path / "origin.git"))
    push_tags(root, "origin", NAME)
    other = tmp_path / "other"
    git(tmp_path, "clone", "--quiet", "--no-tags", str(tmp_path / "origin.git"), str(other))
    (other / "params.yaml").write_text(json.dumps(PARAMS))
    fetch_tags(other, "origin", NAME)
    with pytest.raises(ConfigError, match="refuses too much"):
        decisions.promote(other, NAME, "v2.0.0", by="Ann", reason="better")


def test_the_page_has_who_why_what_changed_and_how_to_answer(root, capsys):
    reviewed(root, reason="<b>read</b> 50")
    text = drawn(root, "v2.0.0")
    for part in (
        "Bo has approved it",
        "&lt;b&gt;read&lt;/b&gt; 50",
        "<td><code>1</code></td><td><code>2</code></td>",
        "2" * 32,
        "passed: it did",
    ):
        assert part in text, part
    assert "rlhf registry review reward-model v2.0.0 --reject" in text and "From v1.0.0" in text
    assert page(NAME, open_=False) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == Path("reports/reward-model-v2.0.0.html") and path.read_text() == text


def test_the_page_of_the_promoted_version_compares_with_the_one_before(root):
    decisions.promote(root, NAME, "v2.0.0", by="Ann", reason="better")
    assert "From v1.0.0" in drawn(root, "v2.0.0")
    assert "promoted: v1.0.0 → v2.0.0" in drawn(root, "v2.0.0")
    assert "From v2.0.0" in drawn(root, "v1.0.0")
