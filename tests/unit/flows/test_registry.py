"""A model laid out from DVC's cache by its hash, and what is found out on the way."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from collision import FIRST, SECOND

from rlhf_core.config import ConfigError
from rlhf_core.config.gate import IncumbentConfig
from rlhf_core.provenance.dvc_cache import cache_folder, checkout, folder_sha256, listing, missing, sha256_of_files, verify
from rlhf_core.provenance.file_hashes import dvc_md5

FILES = {"config.json": b"{}", "shards/weights.bin": bytes(range(256)) * 5000}  # more than one chunk of a megabyte


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project whose cache DVC finds from its settings."""
    (tmp_path / "project/.dvc").mkdir(parents=True)
    (tmp_path / "project/.dvc/config").write_text("[core]\n    no_scm = true\n[cache]\n    dir = elsewhere\n")
    return tmp_path / "project"


def put(root: Path, content: bytes, suffix: str = "") -> str:
    md5 = hashlib.md5(content).hexdigest()
    path = place(root, md5 + suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return md5 + suffix


def place(root: Path, md5: str) -> Path:
    return root / ".dvc/elsewhere/files/md5" / md5[:2] / md5[2:]


def put_folder(root: Path, files: dict[str, bytes] = FILES) -> str:
    """As DVC writes a folder's listing: sorted by name, keys sorted."""
    entries = [{"md5": put(root, content), "relpath": name} for name, content in sorted(files.items())]
    return put(root, json.dumps(entries, sort_keys=True).encode(), ".dir")


def test_a_folder_comes_back_as_it_was_and_a_second_time_nothing_happens(root, tmp_path):
    md5 = put_folder(root)
    verify(md5, root=root)
    checkout(md5, tmp_path / "model", root=root)
    assert {name: (tmp_path / "model" / name).read_bytes() for name in FILES} == FILES
    assert dvc_md5(tmp_path / "model") == md5
    place(root, md5).unlink()
    checkout(md5, tmp_path / "model", root=root)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "project"]


@pytest.mark.parametrize("look", [lambda md5, root: checkout(md5, root / "model", root=root), lambda md5, root: verify(md5, root=root)])
@pytest.mark.parametrize("name", sorted(FILES))
def test_a_missing_or_tampered_file_is_named_and_nothing_is_left(root, name, look):
    md5 = put_folder(root)
    file = place(root, hashlib.md5(FILES[name]).hexdigest())
    file.write_bytes(FILES[name][:-1] + b"!")
    with pytest.raises(ValueError, match=rf"^{name}: expected md5 {file.parent.name}{file.name}, got .*delete that file.*dvc pull"):
        look(md5, root)
    file.unlink()
    with pytest.raises(ValueError, match=rf"^{name}: expected md5 \w+ in DVC's cache, got nothing; `dvc pull`"):
        look(md5, root)
    assert missing(md5, root / ".dvc/elsewhere/files/md5") == [name]
    assert sorted(p.name for p in root.iterdir()) == [".dvc"]


def test_a_listing_that_is_missing_changed_or_points_outside_is_refused(root, tmp_path):
    md5 = put_folder(root)
    place(root, md5).write_text("[]")
    with pytest.raises(ValueError, match="the list of its files: expected md5"):
        checkout(md5, tmp_path / "model", root=root)
    place(root, md5).unlink()
    with pytest.raises(ValueError, match=r"the list of its files: expected md5 .* in DVC's cache, got nothing"):
        checkout(md5, tmp_path / "model", root=root)
    for name in ("../escaped", "/tmp/escaped", ".", "./a", "a/", "a//b"):
        with pytest.raises(ValueError, match="expected names of files inside the folder"):
            checkout(put_folder(root, {name: b""}), tmp_path / "model", root=root)
    with pytest.raises(ValueError, match=r"ends in \.dir"):
        checkout(put(root, b"one file"), tmp_path / "model", root=root)


def test_names_that_can_not_all_be_files_are_refused(root, tmp_path):
    with pytest.raises(ValueError, match="expected files, got one inside another, 'a'; don't use it"):
        checkout(put_folder(root, {"a": b"", "a/b": b""}), tmp_path / "model", root=root)
    entries = [{"relpath": "a", "md5": put(root, content)} for content in (b"one", b"two")]
    with pytest.raises(ValueError, match="expected each file once, got one twice"):
        checkout(put(root, json.dumps(entries).encode(), ".dir"), tmp_path / "model", root=root)


def test_another_content_in_the_folder_is_not_overwritten(root, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine").write_text("precious")
    with pytest.raises(ValueError, match=r"or nothing there, got .*move it away"):
        checkout(put_folder(root), tmp_path / "model", root=root)
    assert (tmp_path / "model/mine").read_text() == "precious"


def test_the_cache_is_where_dvc_has_it(root: Path):
    assert cache_folder(root) == root / ".dvc/elsewhere/files/md5"
    (root / ".dvc/config.local").write_text("[cache]\n    dir = /nearer\n")
    assert cache_folder(root) == Path("/nearer/files/md5")
    for name in ("config", "config.local"):
        (root / ".dvc" / name).unlink()
    assert cache_folder(root) == root / ".dvc/cache/files/md5"


def test_a_relative_folder_is_the_one_that_we_are_in(tmp_path: Path, monkeypatch):
    for name in ("one", "other"):  # without settings, which could tell them apart
        (tmp_path / name / ".dvc").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        assert cache_folder(Path()) == tmp_path / name / ".dvc/cache/files/md5"


@pytest.mark.parametrize("text", ["[cache\n", "cache = /x\n", "[cache]\n    dir = %(x)s\n"])
def test_settings_that_dvc_can_not_read_are_refused(root: Path, text: str):
    (root / ".dvc/config.local").write_text(text)
    with pytest.raises(ConfigError, match="project: expected a DVC project, got: "):
        cache_folder(root)


def collide(root: Path) -> tuple[str, dict[str, str], Path]:
    """A registered model, md5 and sha256s; and the file of the cache in whose place another content of its md5 was put."""
    assert FIRST != SECOND and hashlib.md5(FIRST).digest() == hashlib.md5(SECOND).digest()
    md5 = put_folder(root, {"config.json": b"{}", "weights": FIRST})
    wanted = verify(md5, root=root)
    put(root, SECOND)
    return md5, wanted, place(root, hashlib.md5(FIRST).hexdigest())


def test_another_content_with_the_same_md5_is_refused_by_its_sha256(root, tmp_path):
    md5, wanted, _ = collide(root)
    checkout(md5, tmp_path / "by_md5", root=root)  # nothing else is known of an older version
    assert (tmp_path / "by_md5/weights").read_bytes() == SECOND
    sha256 = hashlib.sha256(FIRST).hexdigest()
    with pytest.raises(
        ValueError, match=rf"^weights: expected sha256 {sha256}, got {hashlib.sha256(SECOND).hexdigest()}, although the md5"
    ):
        checkout(md5, tmp_path / "model", root=root, sha256=wanted)
    with pytest.raises(ValueError, match=rf"^md5 {md5}: expected sha256 {folder_sha256(wanted)}, got \w+, although the md5 matches"):
        checkout(md5, tmp_path / "model", root=root, sha256=folder_sha256(wanted))
    assert not (tmp_path / "model").exists()
    for known in (wanted, folder_sha256(wanted)):
        with pytest.raises(ValueError, match="although the md5 matches"):
            checkout(md5, tmp_path / "by_md5", root=root, sha256=known)  # what lies there already is no better
    put(root, FIRST)
    for known in (wanted, folder_sha256(wanted)):
        checkout(md5, tmp_path / "model", root=root, sha256=known)
    assert sha256_of_files(tmp_path / "model") == wanted


def test_the_gate_does_not_load_an_incumbent_of_another_content(root, tmp_path, monkeypatch):
    from rlhf_core.gate.scoring import compare_to_promoted

    md5, wanted, _ = collide(root)
    monkeypatch.chdir(root)
    incumbent = IncumbentConfig(version="v1.0.0", md5=md5, sha256=folder_sha256(wanted))
    with pytest.raises(ValueError, match="although the md5 matches"):
        compare_to_promoted(None, "incumbent", incumbent, confidence=0.95, scratch=tmp_path, load_options={})


def test_the_sha256_of_a_folder_can_be_had_from_a_shell(tmp_path):
    for name in ("b/é.bin", "a.json", "b/1", "B", "b.x"):
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_text(name)
    command = r"find . -type f -printf '%P\n' | LC_ALL=C sort | xargs -d '\n' sha256sum | sha256sum"
    done = subprocess.run(command, shell=True, cwd=tmp_path / "model", check=True, capture_output=True, text=True)
    assert done.stdout.split()[0] == folder_sha256(sha256_of_files(tmp_path / "model"))


@pytest.mark.parametrize(
    "content",
    [
        *(b"{}", b"[1]", b'[{"relpath": "a"}]', b'[{"relpath": "", "md5": "' + b"0" * 32 + b'"}]', b"[" * 100_000, b"\xff"),
        *(b'[{"relpath": "a", "md5": "../../../../etc/passwd"}]', b'[{"relpath": "a\\nb", "md5": "' + b"0" * 32 + b'"}]'),
    ],
)
def test_a_list_of_files_that_is_none_is_refused(root, content):
    """It comes from a remote, and a tag's commit says which one is meant."""
    with pytest.raises(ValueError, match=r"md5 \w+\.dir: expected (a list of files|names of files inside the folder), got .*don't use it"):
        listing(put(root, content, ".dir"), root / ".dvc/elsewhere/files/md5")
