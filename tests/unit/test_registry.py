"""A model laid out from DVC's cache by its hash, and what is found out on the way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from rlhf_core.config import ConfigError
from rlhf_core.registry import cache_folder, checkout, missing, verify
from rlhf_core.rounds import dvc_md5

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
    for name in ("../escaped", "/tmp/escaped"):
        with pytest.raises(ValueError, match="expected names of files inside the folder"):
            checkout(put_folder(root, {name: b""}), tmp_path / "model", root=root)
    with pytest.raises(ValueError, match=r"ends in \.dir"):
        checkout(put(root, b"one file"), tmp_path / "model", root=root)


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
    with pytest.raises(ConfigError, match="project: expected a project of DVC, got: "):
        cache_folder(root)
