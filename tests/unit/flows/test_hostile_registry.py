"""Tags that somebody made by hand, moved or broke: they are named and left out, and nothing is decided where that could change it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))
from hostile import NASTY_VALUES, NESTED, is_clear, mangled
from registry_tags import sound_lineage

from flows import promote as command
from flows.registry.decisions import add_version, promote, rollback
from flows.registry.state import read_for_decision, read_registry
from rlhf_core.config import ConfigError

NAME = "reward-model"
OTHER = "1" * 32 + ".dir"  # another model's md5
TAGGER = b"tagger A <a@b> 1700000000 +0000"


def git(root: Path, *arguments: str, content: bytes | None = None) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, input=content, capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A repository of one commit."""
    root = tmp_path_factory.mktemp("repository")
    git(root, "init", "--quiet")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m", "one")
    return root


def write_tag(root: Path, name: str, message: bytes, *, tagger: bytes = TAGGER) -> None:
    head = git(root, "rev-parse", "HEAD")
    content = f"object {head}\ntype commit\ntag {name}\n".encode() + tagger + b"\n\n" + message
    sha = git(root, "hash-object", "-t", "tag", "-w", "--literally", "--stdin", content=content)
    git(root, "update-ref", f"refs/tags/{name}", sha)


def clear(root: Path) -> None:
    for tag in filter(None, git(root, "tag", "--list").split("\n")):
        git(root, "update-ref", "-d", f"refs/tags/{tag}")


def version(root: Path, **changes) -> bytes:
    return b"a version\n\n" + json.dumps({**sound_lineage(git(root, "rev-parse", "HEAD")), **changes}).encode()


def event(**changes) -> bytes:
    entry = {"action": "promote", "version": "v1.0.0", "previous": None, "by": "ann", "reason": "good", "override": None}
    return b"an event\n\n" + json.dumps({**entry, **changes}).encode()


def refusal(root: Path) -> str:
    """The problem of the only tag that is left out."""
    (bad,) = read_registry(root, NAME).bad
    assert is_clear(bad.problem) and bad.name in bad.problem, bad
    return bad.problem


def test_sound_tags_are_a_registry(root):
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}#prod#1", event())
    write_tag(root, f"{NAME}#production#1", b"another stage's, which is nobody's business here")
    assert read_registry(root, NAME).current.version == "v1.0.0"


def test_a_tags_date_is_the_taggers_own(root):
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root), tagger=b"tagger Ann B. <a@b> 1700000000 -0330")
    (found,) = read_registry(root, NAME).versions.values()
    assert (found.by, found.at) == ("Ann B.", "2023-11-14T18:43:20-03:30")


# Of the first git's own formatting ends with an error, for all tags at once.
@pytest.mark.parametrize("date", ["1\t700000000 +0000", "9" * 14 + " +0000", "9" * 5000 + " +0000", "1700000000 +9999", "1700000000", ""])
def test_a_date_that_there_is_not_is_refused_by_the_tags_name(root, date):
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}#prod#1", event(), tagger=f"tagger A <a@b> {date}".encode())
    assert f"tag {NAME}#prod#1: expected one made by `rlhf registry`, got one with" in refusal(root)


def test_a_long_line_takes_no_long_time(root):
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root), tagger=b"tagger " + b"<" * 100_000)
    started = time.monotonic()
    assert "got one without a date" in refusal(root)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("name", ["v1.0.0", "v1.2.3", "v01.0.0", "v1", "v", "v1.0.0-rc1", "v\u0661.0.0", "v" + "9" * 180 + ".0.0"])
def test_a_version_made_by_hand_is_refused_by_name(root, name):
    clear(root)
    git(root, "update-ref", f"refs/tags/{NAME}@{name}", git(root, "rev-parse", "HEAD"))
    assert f"tag {NAME}@{name}: expected one made by `rlhf registry`" in refusal(root)
    if name != "v1.0.0" and "999" not in name:
        write_tag(root, f"{NAME}@{name}", version(root))
        assert f"tag {NAME}@{name}: expected " in refusal(root)


@pytest.mark.parametrize("name", ["#prod#1", "#prod!#2", "#prod#x", "#prod#01", "#prod!#", "#prod#@v1.0.0"])
def test_an_assignment_made_by_hand_is_refused_by_name(root, name):
    clear(root)
    git(root, "update-ref", f"refs/tags/{NAME}{name}", git(root, "rev-parse", "HEAD"))
    assert f"tag {NAME}{name}: expected one made by `rlhf registry`" in refusal(root)


def test_a_tag_is_read_by_its_whole_name(root):
    """Of a name with what Python takes for the end of a line, the first part is another tag's name."""
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}@v2.0.0", version(root, md5=OTHER))
    made = git(root, "rev-parse", f"refs/tags/{NAME}@v2.0.0")
    for end in ("\u2028", "\u2028x", "\u0085", "\u3000"):
        clear(root)
        write_tag(root, f"{NAME}@v1.0.0", version(root))
        git(root, "update-ref", f"refs/tags/{NAME}@v2.0.0{end}", made)
        (bad,) = read_registry(root, NAME).bad
        assert bad.name == f"{NAME}@v2.0.0{end}" and is_clear(bad.problem)
        assert list(read_registry(root, NAME).versions) == ["v1.0.0"]
        git(root, "update-ref", "-d", f"refs/tags/{NAME}@v2.0.0{end}")


def test_the_command_that_removes_a_tag_is_one_word_for_a_shell(root):
    clear(root)
    name = f"{NAME}@v1';touch${{IFS}}here;'"
    git(root, "update-ref", f"refs/tags/{name}", git(root, "rev-parse", "HEAD"))
    removal = read_registry(root, NAME).bad[0].problem.rpartition("remove it with `")[2].removesuffix("`")
    assert shlex.split(removal) == ["git", "tag", "-d", name]


def test_an_event_about_a_version_that_is_not_there_is_refused(root):
    """The promoted version would be nothing, and the next flow would take that for its incumbent."""
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}#prod#1", event(version="v7.0.0"))
    assert f"tag {NAME}#prod#1: expected a registered version, got 'v7.0.0'" in refusal(root)


KEYS = ["commit", "md5", "gate", "path", "action", "version", "previous", "by", "reason", "override", "more"]
VALUES = [v for v in NASTY_VALUES if not isinstance(v, bytes | set) and v is not NESTED]


@settings(max_examples=30)
@given(key=st.sampled_from(KEYS), value=st.sampled_from(VALUES))
def test_any_value_in_a_tag_is_taken_or_refused_by_its_name(root, key, value):
    clear(root)
    try:
        write_tag(root, f"{NAME}@v1.0.0", version(root, **{key: value}))
        write_tag(root, f"{NAME}#prod#1", event(**{key: value}))
    except (TypeError, ValueError, RecursionError):  # not a value of JSON
        return
    taken_or_refused(root)


@settings(max_examples=30)
@given(data=st.data())
def test_any_message_of_a_tag_is_read_or_refused_by_its_name(root, data):
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    name = data.draw(st.sampled_from([f"{NAME}@v2.0.0", f"{NAME}#prod#1"]))
    message = version(root) if "@" in name else event()
    write_tag(
        root,
        name,
        data.draw(mangled(message)).replace(b"\x00", b""),
        tagger=data.draw(mangled(TAGGER)).replace(b"\x00", b"").replace(b"\n", b""),
    )
    taken_or_refused(root)


def taken_or_refused(root: Path) -> None:
    found = read_registry(root, NAME)
    for bad in found.bad:
        assert is_clear(bad.problem) and f"tag {NAME}" in bad.problem, bad.problem[:500]
    assert len(found.versions) + len(found.events) + len(found.bad) == len(git(root, "tag", "--list").split("\n"))
    assert found.current is None or found.current.version in found.versions
    for name in found.versions:
        found.state(name)
    found.before()
    if any("#" in bad.name for bad in found.bad):
        with pytest.raises(ConfigError, match="until then it isn't certain which"):
            read_for_decision(root, NAME)


def test_a_moved_tag_is_refused(root):
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root, commit="0" * 40))
    assert "someone moved it" in refusal(root)


def test_one_bad_version_leaves_the_others_readable(root):
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}@v2.0.0", b"garbage")
    write_tag(root, f"{NAME}#prod#1", event())
    found = read_for_decision(root, NAME)
    assert list(found.versions) == ["v1.0.0"] and found.current.version == "v1.0.0"
    assert f"tag {NAME}@v2.0.0: expected one made by `rlhf registry`" in refusal(root)
    for act in (
        lambda: promote(root, NAME, None, by="a", reason="b"),
        lambda: add_version(root, NAME, sound_lineage("c" * 40, md5="1" * 32 + ".dir")),
    ):
        with pytest.raises(ConfigError, match=rf"tag {NAME}@v2\.0\.0: .*it isn't certain which version is the newest"):
            act()
    with pytest.raises(ConfigError, match=rf"tag {NAME}@v2\.0\.0: expected one made by"):
        found.get("v2.0.0")


@pytest.mark.parametrize("name", ["#prod#2", "#prod!#2", "#prod#1000", "#prod#x", "#prod#x@v1"])
def test_a_bad_assignment_stops_decisions_and_no_reading(root, name):
    """It could have been a rollback of what is promoted."""
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}#prod#1", event())
    write_tag(root, f"{NAME}{name}", b"garbage")
    assert read_registry(root, NAME).current.version == "v1.0.0"
    how = {"by": "ann", "reason": "none"}
    acts = (lambda: read_for_decision(root, NAME), lambda: promote(root, NAME, "v1.0.0", **how), lambda: rollback(root, NAME, None, **how))
    for act in acts:
        with pytest.raises(ConfigError, match=rf"tag {NAME}{name}: .*until then it isn't certain which"):
            act()


def test_a_tag_under_another_name_is_refused(root):
    """A signed promotion could be played again so."""
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}#prod#1", event())
    git(root, "update-ref", f"refs/tags/{NAME}#prod#5", git(root, "rev-parse", f"refs/tags/{NAME}#prod#1"))
    assert f"tag {NAME}#prod#5: " in refusal(root) and f"made as '{NAME}#prod#1' and renamed" in refusal(root)


@pytest.mark.parametrize(
    ("changes", "printed"),
    [
        ({"previous": "v2.0.0"}, "one that replaces v2.0.0 while nothing was promoted"),
        ({"action": "rollback"}, "one that replaces nothing|a rollback to v1.0.0, which is registered"),
        ({"version": "v2.0.0"}, "a promotion without an override that v2.0.0 needs: expected one that passed its gate"),
        ({"version": None, "action": "rollback"}, "None enters the stage"),
        (
            {"model": {"md5": "1" * 32 + ".dir", "sha256": None, "commit": "c", "gate": "passed"}},
            "to be the model that was decided on, md5 11",
        ),
    ],
)
def test_a_promotion_that_could_not_have_been_made_is_refused(root, changes, printed):
    clear(root)
    rejected = {"needed": True, "passed": False, "message": "rejected: bad", "override": None}
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}@v2.0.0", version(root, gate=rejected, md5=OTHER))
    write_tag(root, f"{NAME}#prod#1", event(**changes))
    assert re.search(printed, refusal(root)), refusal(root)


def test_a_rollback_of_nothing_to_nothing_is_refused(root):
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}#prod!#1", event(action="rollback", version=None))
    assert "one that names no version" in refusal(root)


def test_a_removed_decision_is_noticed_by_the_next_one(root):
    """Without the rollback in between, v1.0.0 would not be known as rolled back."""
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}@v2.0.0", version(root, md5=OTHER))
    write_tag(root, f"{NAME}#prod#1", event())
    back = (
        b"head\n\n"
        + json.dumps({**json.loads(event(action="rollback").partition(b"\n\n")[2]), "version": None, "previous": "v1.0.0"}).encode()
    )
    write_tag(root, f"{NAME}#prod!#2", back)
    write_tag(root, f"{NAME}#prod#3", event(version="v2.0.0"))
    assert set(read_for_decision(root, NAME).rolled_back) == {"v1.0.0"}
    git(root, "tag", "-d", f"{NAME}#prod!#2")
    assert "while v1.0.0 was promoted, as if a tag was missing" in refusal(root)


def test_a_model_has_one_version(root):
    """Under another name a rolled-back version would be a new one."""
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}@v2.0.0", version(root))
    assert f"tag {NAME}@v2.0.0: " in refusal(root) and "got one of the model of v1.0.0, md5 0000" in refusal(root)


def test_two_tags_with_one_number_are_refused(root):
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}#prod#1", event())
    write_tag(root, f"{NAME}#prod!#1", b"a\n\n" + json.dumps({"action": "unassign", "version": "v1.0.0", "because_of": "v1.0.0"}).encode())
    assert "got one with the number of" in refusal(root)


@pytest.mark.parametrize(
    ("content", "printed"),
    [
        (b'{"a": ' + b"[" * 600 + b"]" * 600 + b"}", "more than 200 nested brackets"),
        (b'{"commit": "' + b"x" * (1 << 20) + b'"}', "bytes, which is more than 1048576"),
        (b'{"a": 1, "a": 2}', "the same key twice"),
        (b'{"a": NaN}', "NaN, which JSON doesn't have"),
    ],
)
def test_a_tag_is_read_within_limits(root, content, printed):
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", b"head\n\n" + content)
    assert printed in refusal(root)


def rolled_back_registry(root: Path) -> None:
    """v1.0.0 and v2.0.0 were promoted, and decision 3 rolled back v2.0.0."""
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root))
    write_tag(root, f"{NAME}@v2.0.0", version(root, md5=OTHER))
    write_tag(root, f"{NAME}#prod#1", event())
    write_tag(root, f"{NAME}#prod#2", event(version="v2.0.0", previous="v1.0.0"))
    write_tag(root, f"{NAME}#prod#3", event(action="rollback", previous="v2.0.0"))


def test_removing_a_bad_decision_is_not_advised(root):
    """Without the rollback the rolled-back version would be promoted, and no check could notice."""
    rolled_back_registry(root)
    write_tag(root, f"{NAME}#prod#3", event(action="rollback", version="v7.0.0", previous="v2.0.0"))
    with pytest.raises(ConfigError) as reported:
        read_for_decision(root, NAME)
    for problem in (refusal(root), str(reported.value)):
        assert "git tag -d" not in problem and "remove it with" not in problem
        assert "restore it with `git fetch --tags --force` from the repository that it was pushed to, or from a backup" in problem
        assert "don't remove a decision: v2.0.0 would then be promoted" in problem


@pytest.mark.parametrize(
    ("name", "promoted"),
    [("#prod#4", "v1.0.0"), ("#prod!#9", "v1.0.0"), ("#prod#x", "v1.0.0"), ("#prod#2", "v1.0.0"), ("#prod#1", "nothing")],
)
def test_a_bad_decision_says_what_would_be_promoted_without_it(root, name, promoted):
    rolled_back_registry(root)
    write_tag(root, f"{NAME}{name}", b"garbage")
    problem = next(bad.problem for bad in read_registry(root, NAME).bad if bad.name == f"{NAME}{name}")
    assert "git tag -d" not in problem and f"don't remove a decision: {promoted} would then be promoted" in problem
    assert is_clear(problem)


def test_a_moved_version_is_warned_of_once_and_states_are_unknown(root, monkeypatch, capsys):
    """A version's decisions are left out with it: v2.0.0, which was rolled back, must not look as if it was never promoted."""
    rolled_back_registry(root)
    write_tag(root, f"{NAME}@v1.0.0", version(root, commit="0" * 40))
    monkeypatch.chdir(root)
    assert command.main(["show", NAME]) == 0
    table, warned = capsys.readouterr()
    assert warned.count("someone moved it") == 1 and warned.count(f"{NAME}@v1.0.0") == 1
    assert f"left out with it: {NAME}#prod#1, {NAME}#prod#2, {NAME}#prod#3" in warned
    assert re.search(r"v2\.0\.0 +unknown ", table) and "registered " not in table.splitlines()[2].split("main")[0]
    assert command.main(["show", NAME, "promoted"]) == 2
    assert "until then it isn't certain which" in capsys.readouterr().err


def test_show_with_bad_tags_only_names_them(root, monkeypatch, capsys):
    clear(root)
    write_tag(root, f"{NAME}@v1.0.0", b"garbage")
    write_tag(root, f"{NAME}@v2.0.0", b"garbage")
    monkeypatch.chdir(root)
    assert command.main(["show", NAME]) == 0
    reported = capsys.readouterr().out
    assert f"all its tags are bad: {NAME}@v1.0.0, {NAME}@v2.0.0" in reported and "a clone needs its tags" not in reported
    assert command.main(["show", NAME, "v3.0.0"]) == 2
    assert f"all its tags are bad: {NAME}@v1.0.0, {NAME}@v2.0.0" in capsys.readouterr().err
