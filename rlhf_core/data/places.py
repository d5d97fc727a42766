"""Locations of what params name: files and folders, also from a run's worktree, and commits in the caches of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlhf_core.config import shown

# Endings of the files that a source of kind file reads; `data.files` has a reader for each.
DATA_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
HUB_SECONDS = 30.0  # timeout of a request to the hub
ADAPTERS = "adapter_config.json"  # of PEFT, in a folder with adapters instead of a whole model
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_FETCHED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")  # files of a model's repository


def locate(path: str, folder: Path = Path()) -> Path:
    """Return a path relative to a workspace. In a git worktree, a path that doesn't exist there is taken relative to the main checkout.

    Runs work in worktrees under runs/. So they find data that git doesn't track, and paths outside the checkout such as ../shared/data.

    Args:
        folder: the workspace.
    Raises:
        ValueError: the text can't be a path.
    """
    here, main = folder / path, main_checkout(folder)
    if not Path(path).is_absolute() and main is not None and not exists(here) and exists(main / path):
        return main / path
    return here


def base_of(path: str) -> str:
    """Return from where a path counts, for an error: `, relative to the project's folder`; nothing for an absolute one."""
    return "" if Path(path).is_absolute() else ", relative to the project's folder"


def main_checkout(folder: Path) -> Path | None:
    """Return the main checkout of a git worktree; None if the folder is no worktree."""
    link = folder / ".git"
    if not link.is_file():
        return None
    return (folder / link.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).parents[1].parent


def exists(path: Path) -> bool:
    """Return whether the path exists; a broken link does.

    Raises:
        ValueError: the text can't be a path.
    """
    try:
        return os.path.lexists(path) and (path.is_symlink() or path.exists())
    except (OSError, ValueError) as error:
        raise ValueError(f"{shown(str(path))}: expected a path, got: {shown(str(error))}; correct it") from error


def is_data_file(name: str) -> bool:
    return name.lower().endswith(DATA_ENDINGS)


def is_hub_name(path: str) -> bool:
    """Return whether the text can be a name on the hub: `name` or `owner/name`."""
    return _HUB_NAME.fullmatch(path) is not None and ".." not in path


def hub_is_online() -> bool:
    """Return whether the hub may be contacted: HF_HUB_OFFLINE=0. By default it isn't (rlhf_core/process.py)."""
    return os.environ.get("HF_HUB_OFFLINE", "1").upper() not in ("1", "ON", "YES", "TRUE")


def model_snapshot(name: str, revision: str | None) -> Path | None:
    """Return the folder in the hub's cache with a model or adapters at a revision, by default main as last fetched; None: none, or no
    weights.
    """
    repository = _repository("models", name)
    commit = cached_commit(repository, revision)
    snapshot = repository / "snapshots" / (commit or "none")
    has_settings = any((snapshot / name).is_file() for name in ("config.json", ADAPTERS))
    return snapshot if has_settings and any(snapshot.glob("*.safetensors")) else None


def fetch_model(name: str, revision: str | None) -> str:
    """Return the same folder, which is downloaded if the cache lacks it and the hub may be contacted."""
    from huggingface_hub import snapshot_download

    return snapshot_download(name, revision=revision, allow_patterns=list(_FETCHED))


def cached_data_set(name: str, revision: str | None, subset: str | None) -> str | None:
    """Return the commit of a data set that the library `datasets` reads without the hub; None if it would find none.

    Without the hub the library reads what was prepared last, whatever the revision; so its cache decides here too.
    """
    owner, _, last = name.rpartition("/")
    snake = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", last)).lower()
    folder = data_sets_cache() / (f"{owner}___{snake}" if owner else snake)
    prepared = [path for path in folder.glob(f"{subset or '*'}/*/*") if (path / "dataset_info.json").is_file()]
    newest = max(prepared, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return None
    wanted = revision and (cached_commit(_repository("datasets", name), revision) or revision)
    return newest.name if wanted in (None, newest.name) else None


def cached_commit(repository: Path, revision: str | None) -> str | None:
    """Return the commit of a branch or tag when it was last fetched; a full commit hash is returned as it is."""
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    reference = repository / "refs" / (revision or "main")
    return reference.read_text(encoding="utf-8").strip() if reference.is_file() else None


def data_set_commit(name: str, revision: str | None, subset: str | None) -> str | None:
    """Return the commit at which a source's data are read: from the cache, or from the hub if the cache has none and the hub may be
    contacted.

    Raises:
        OSError: the hub doesn't answer or has no such data set.
    """
    if not hub_is_online():
        return cached_data_set(name, revision, subset)
    return cached_commit(_repository("datasets", name), revision) or _commit_on_hub("dataset_info", name, revision)


def model_commit(name: str, revision: str | None) -> str | None:
    """Return a model's commit, as `data_set_commit` returns a data set's.

    Raises:
        OSError: the hub doesn't answer or has no such model.
    """
    snapshot = model_snapshot(name, revision)
    if snapshot is not None:
        return snapshot.name
    return _commit_on_hub("model_info", name, revision) if hub_is_online() else None


def _commit_on_hub(what: str, name: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    try:
        return getattr(HfApi(), what)(name, revision=revision, timeout=HUB_SECONDS).sha
    except Exception as error:  # errors of the hub, of HTTP and of the network have no common base class
        lines = str(error).strip().splitlines() or [""]
        raise OSError(f"{shown(name)}: expected the hub's answer, got {type(error).__name__}: {shown(lines[0], 300)}") from error


def _repository(kind: str, name: str) -> Path:
    return _hub_cache() / "--".join([kind, *name.split("/")])


def _hub_cache() -> Path:
    """Return the hub's cache as huggingface_hub finds it; importing that takes time."""
    old = os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or old or _home() / "hub"))


def data_sets_cache() -> Path:
    return Path(os.path.expanduser(os.environ.get("HF_DATASETS_CACHE") or _home() / "datasets"))


def _home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")))
