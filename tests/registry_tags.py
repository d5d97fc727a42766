"""Contents of registry tags and matching commits, for tests that need no model."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

from rlhf_core.provenance.lineage import lineage

GATE = {"needed": True, "passed": True, "message": "passed: it did", "override": None}
PROMOTION = {"require_approval": True, "approval_timeout": 60, "allowed_signers": None}
RL = {"algorithm": "grpo", "reward": {"scorers": [{"name": "reward_model", "kind": "reward_model"}]}}
PARAMS = {"seed": 1, "alignment": {"method": "rl"}, "rl": RL, "reward": {"enabled": True}, "promotion": PROMOTION}
PATHS = {"reward-model": "models/reward", "policy": "models/policy"}


def sound_lineage(commit: str, **changes: Any) -> dict[str, Any]:
    """A lineage as by rlhf_core.provenance.lineage, of a model that doesn't exist."""
    return {
        **{"commit": commit, "md5": "0" * 32 + ".dir", "path": "models/reward", "run": "main", "gate": GATE, "size": 1, "files": 2},
        **{"data": None, "parents": {}, "packages": {}, "reward_model_version": None, "previous_version": None},
        "params": PARAMS,
        **changes,
    }


def git(root: Path, *arguments: str, content: bytes | None = None) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *identity, *arguments], cwd=root, input=content, capture_output=True, check=True)
    return done.stdout.decode().strip()


def write_tag(root: Path, name: str, content: dict[str, Any] | bytes, commit: str, *, second: int = 1_700_000_000) -> None:
    """Write a tag by hand, unchecked. content: bytes are the whole message."""
    message = content if isinstance(content, bytes) else b"a line\n\n" + json.dumps(content).encode()
    raw = f"object {commit}\ntype commit\ntag {name}\ntagger A <a@b> {second} +0000\n\n".encode() + message
    git(root, "update-ref", f"refs/tags/{name}", git(root, "hash-object", "-t", "tag", "-w", "--literally", "--stdin", content=raw))


def sound_commit(root: Path, *, md5: str = "0" * 32 + ".dir", gate: dict[str, Any] | None = None, **files: str) -> dict[str, Any]:
    """A commit with a run's results, and its lineage for a reward model.

    Args:
        files: additional or replaced ones, as `dvc_lock="..."`; double underscores stand for slashes.
    """
    verdict = json.dumps(gate or GATE, indent=2)
    lock = {
        "schema": "2.0",
        "stages": {
            "train_reward": {"cmd": "train", "outs": [{"path": "models/reward", "hash": "md5", "md5": md5, "size": 1, "nfiles": 2}]},
            "gate_reward": {
                "cmd": "gate",
                "deps": [{"path": "models/reward", "hash": "md5", "md5": md5}],
                "outs": [{"path": "metrics/gate.json", "hash": "md5", "md5": hashlib.md5(verdict.encode()).hexdigest(), "size": 1}],
            },
        },
    }
    content = {
        "dvc.lock": json.dumps(lock),
        "dvc.yaml": json.dumps({"artifacts": {name: {"path": path} for name, path in PATHS.items()}}),
        "params.yaml": json.dumps(PARAMS),
        "metrics/gate.json": verdict,
    }
    given = {name.replace("__", "/").replace("_", "."): text for name, text in files.items()}
    for name, text in (content | given).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    git(root, "add", "--force", *content, *given)
    git(root, "commit", "--quiet", "--allow-empty", "--no-verify", "-m", "a run")
    commit = git(root, "rev-parse", "HEAD")
    (root / "params.yaml").write_text(json.dumps(PARAMS), encoding="utf-8")  # the working folder keeps its own
    made = lineage(
        "models/reward",
        commit=commit,
        run="main",
        params=PARAMS,
        lock=lock,
        gate=gate or GATE,
        decided={"by": "gate_reward", "split": "test"},
    )
    return {**made, "packages": {}, "reward_model_version": None, "previous_version": None}
