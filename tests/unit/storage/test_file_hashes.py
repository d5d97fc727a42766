"""Hashes of files: each byte counts once, whichever threads read it, and a piece's hash is that of its bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.checkpoint.saved_state import SavedFiles
from rlhf_core.storage import hashing
from rlhf_core.storage.hashing import FileHash, HashedFile, Hashing, rank_of


def sha(*content: bytes) -> bytes:
    return hashlib.sha256(b"".join(content)).digest()


def hashed(path: Path, pieces=()) -> tuple[FileHash, dict]:
    (result,) = Hashing([HashedFile(path, pieces)]).results()
    assert not isinstance(result, OSError)
    return result


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 bytes and batches of 10, so that a short file has many."""
    monkeypatch.setattr(hashing, "BLOCK", 8)
    monkeypatch.setattr(hashing, "BATCH", 10)


@pytest.mark.parametrize("content", [b"", b"a", b"abcdefgh" * 1000])
def test_a_file_that_is_not_cut_has_its_plain_sha256(tmp_path: Path, content: bytes):
    (tmp_path / "file").write_bytes(content)
    assert hashed(tmp_path / "file")[0] == FileHash(len(content), hashlib.sha256(content).hexdigest())


def test_hashes_of_pieces_gaps_and_long_pieces_by_hand(tmp_path: Path, small_blocks: None):
    content = bytes(range(40))
    (tmp_path / "file").write_bytes(content)
    found, pieces = hashed(tmp_path / "file", [(3, 5), (5, 25), (4, 7)])
    long = sha(sha(content[5:13]), sha(content[13:21]), sha(content[21:25]))
    tail = sha(sha(content[25:33]), sha(content[33:40]))
    assert pieces[3, 5] == sha(content[3:5]) and pieces[5, 25] == long and pieces[4, 7] == sha(content[4:7])
    assert found == FileHash(40, sha(sha(content[:3]), pieces[3, 5], long, tail).hex(), (3, 5, 25, 40))


@settings(max_examples=100, deadline=None)
@given(
    content=st.binary(min_size=1, max_size=100),
    cuts=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=6),
    at=st.integers(0, 99),
)
def test_a_recorded_hash_is_found_again_and_not_after_any_change(tmp_path_factory: pytest.TempPathFactory, content, cuts, at):
    path = tmp_path_factory.mktemp("file") / "file"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "BLOCK", 8)
        patch.setattr(hashing, "BATCH", 10)
        found, pieces = hashed(path, [(a, min(b, len(content))) for a, b in cuts])
        assert found.ends is None or (found.ends[-1] == len(content) and list(found.ends) == sorted(set(found.ends)))
        for (start, end), digest in pieces.items():
            if end - start <= 8:
                assert digest == sha(content[start:end])
        recorded = FileHash.from_json(found.as_json())
        assert recorded == found
        (again,) = Hashing([HashedFile.as_recorded(path, recorded)]).results()
        assert again[0] == found
        changed = bytearray(content)
        changed[at % len(content)] ^= 1
        path.write_bytes(changed)
        (other,) = Hashing([HashedFile.as_recorded(path, recorded)]).results()
        assert other[0].sha256 != found.sha256


def test_a_file_that_cannot_be_read_or_shrinks_is_named_and_the_others_are_hashed(tmp_path: Path):
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 10)
    files = [HashedFile(tmp_path / name) for name in "abc"]
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_bytes(b"b")
    gone, short, whole = Hashing(files).results()
    assert isinstance(gone, FileNotFoundError)
    assert isinstance(short, OSError) and str(short) == f"{tmp_path / 'b'}: expected 10 bytes, got 1"
    assert whole[0].sha256 == hashlib.sha256(b"c" * 10).hexdigest()


def read_bytes() -> int:
    """That this process has read by system calls so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel counts bytes that are read on Linux only")
def test_the_state_digest_and_the_manifest_together_read_a_file_once(tmp_path: Path):
    torch.save({name: torch.arange(500_000, dtype=torch.float32) + i for i, name in enumerate("abcd")}, tmp_path / "reference.pt")
    size, before = (tmp_path / "reference.pt").stat().st_size, read_bytes()
    (saved,) = SavedFiles(tmp_path, ["reference.pt"]).result().values()
    table = 100_000  # of the archive, and its pickle
    assert size <= read_bytes() - before <= size + table
    assert len({value for _, _, value in saved.items}) == 4 and saved.hash.bytes == size


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("engine/zero_pp_rank_3_mp_rank_00_optim_states.pt", 3),
        ("engine/bf16_zero_pp_rank_12_mp_rank_00_optim_states.pt", 12),
        ("engine/mp_rank_00_model_states.pt", None),
        ("rng-1.pt", 1),
        ("rng.pt", None),
        ("driver.json", None),
    ],
)
def test_the_rank_of_a_file_is_in_its_name(name: str, rank: int | None):
    assert rank_of(name) == rank
