"""Finds the model to use: a run's policy, a folder or a version of the registry."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_core.config import ConfigError, shown
from rlhf_core.models.folder import check_model_folder, read_settings
from rlhf_core.paths import POLICY_MODEL, PROMOTED, RUNS, SFT_MODEL, STAGE_METRICS
from rlhf_core.provenance.locked import check_locked

FETCH = ("flows.promote", "fetch")  # a subprocess that verifies the version's tag against its commit and every file against its hash
FETCH_SECONDS = 3600.0
MAX_CONTEXT = 4096  # default limit in tokens, since the KV cache grows with the context
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_VERSION = re.compile(r"(policy|reward-model)@(v\d+\.\d+\.\d+)")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Chosen:
    """A model to use.

    name: for messages. folder: its files. project: the folder with its run's metrics; None if unknown. md5: as in dvc.lock, where it is
    known.
    """

    name: str
    folder: Path
    project: Path | None
    md5: str | None = None


def choose(*, run: str | None = None, model: Path | None = None, version: str | None = None) -> Chosen:
    """Return the chosen model; by default the policy of the current folder. At most one argument may be given.

    Raises:
        ConfigError: there is no such model.
    """
    if version is not None:
        return _version(version)
    if model is not None:
        folder = model
        found = Chosen(folder.resolve().name, folder, _project_of(folder))
    elif run is not None:
        folder = RUNS / run / POLICY_MODEL
        found = Chosen(run, folder, RUNS / run)
        if not _NAME.fullmatch(run) or not folder.is_dir():
            raise ConfigError(f"--run: expected a run with a policy, got {shown(run)}, and nothing at {shown(str(folder))}; {_runs_here()}")
    else:
        found = Chosen("policy", POLICY_MODEL, Path())
        if not POLICY_MODEL.is_dir():
            raise ConfigError(
                f"{POLICY_MODEL}: expected this folder's policy, got nothing; name a run, a folder or a version: {_runs_here()}"
            )
    return _checked(found)


def beside(chosen: Chosen, other: str) -> Chosen:
    """Return the second model of a chat: `sft`, models/sft of the chosen model's run, or a folder.

    Raises:
        ConfigError: there is no such model.
    """
    if other != "sft":
        return _checked(Chosen(Path(other).resolve().name, Path(other), None))
    folder = None if chosen.project is None else chosen.project / SFT_MODEL
    if folder is None or not folder.is_dir():
        raise ConfigError(f"--beside sft: expected {SFT_MODEL} beside {chosen.name}, got none; give the folder of another model")
    found = read_json(chosen.project / STAGE_METRICS["train_sft"]) or {}
    return _checked(Chosen("sft" if found.get("trained", True) else "given model", folder, chosen.project))


def reward_class(chosen: Chosen) -> str | None:
    """Return the model's class, if it is one that scores text; None: it generates text."""
    kinds = [str(kind) for kind in read_settings(chosen.folder, "config.json").get("architectures") or []]
    return kinds[0] if kinds and all(kind.endswith("ForSequenceClassification") for kind in kinds) else None


def check_language_model(chosen: Chosen) -> None:
    """Check that the model generates text.

    Raises:
        ConfigError: the model is a reward model, which generates no text.
    """
    if (kind := reward_class(chosen)) is not None:
        raise ConfigError(f"{chosen.folder}: expected a language model, got {shown(kind)}, a reward model; choose a policy")


def context_length(chosen: Chosen, wanted: int | None, *, trust_remote_code: bool) -> int:
    """Return the longest conversation in tokens, answers included.

    Raises:
        ConfigError: `wanted` exceeds the model's positions.
    """
    positions = _text_config(chosen, trust_remote_code).get("max_position_embeddings")
    if wanted is not None and positions is not None and wanted > positions:
        raise ConfigError(f"--max-length: expected at most {positions}, the positions of {chosen.name}, got {wanted}; lower it")
    return wanted or min(positions or MAX_CONTEXT, MAX_CONTEXT)


def saved_dtype(chosen: Chosen, *, trust_remote_code: bool) -> str:
    """Return the dtype of the model's files, in which it is also run; float32 if unknown."""
    found = str(_text_config(chosen, trust_remote_code).get("dtype")).removeprefix("torch.")
    return found if found in _DTYPES else "float32"


def head_width(chosen: Chosen, *, trust_remote_code: bool) -> int | None:
    """Return the size of an attention head; None if the model's configuration names none."""
    config = _text_config(chosen, trust_remote_code)
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return config.get("head_dim") or (width // heads if width and heads else None)


def _text_config(chosen: Chosen, trust_remote_code: bool) -> dict[str, Any]:
    from transformers import AutoConfig

    from rlhf_core.models.folder import refusals

    with refusals(chosen.folder):
        config = AutoConfig.from_pretrained(chosen.folder, trust_remote_code=trust_remote_code).get_text_config()
    names = ("max_position_embeddings", "dtype", "hidden_size", "num_attention_heads", "head_dim")
    return {name: getattr(config, name, None) for name in names}


def _version(version: str) -> Chosen:
    match = _VERSION.fullmatch(version)
    if match is None:
        raise ConfigError(f"--version: expected a version of the registry such as policy@v1.0.0, got {shown(version)}; correct it")
    artifact, number = match.groups()
    folder = PROMOTED / f"{artifact}-{number}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", *FETCH, artifact, "--version", number, "--to", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    if done.returncode != 0:
        raise ConfigError(f"--version {version}: expected files of that version, got: {shown(done.stderr.strip(), 1000) or 'no reason'}")
    return _checked(Chosen(version, folder, None))


def _checked(found: Chosen) -> Chosen:
    try:
        check_model_folder(found.folder.absolute())
        if found.project is not None:  # else no dvc.lock is known, or the registry has verified each file
            path = Path(os.path.relpath(found.folder.absolute(), found.project.absolute())).as_posix()
            return replace(found, md5=check_locked(path, root=found.project))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return found


def _project_of(folder: Path) -> Path | None:
    """Return the run or checkout that contains a model's folder."""
    parents = folder.absolute().parents
    return next((p for p in parents[1:4] if (p / "dvc.yaml").is_file() and (p / "params.yaml").is_file()), None)


def _runs_here() -> str:
    found = sorted(path.parts[1] for path in RUNS.glob(f"*/{POLICY_MODEL}")) if RUNS.is_dir() else []
    rounds = "; for a series of rounds use --model runs/SERIES/rounds/N/policy" if any(RUNS.glob("*/rounds/*/policy")) else ""
    return (f"runs with one: {', '.join(found)}" if found else "there is no run with one yet") + rounds


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file; None if it doesn't exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
