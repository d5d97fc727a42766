"""A run whose gate would compare a process reward model with one of whole responses is refused at its start."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS

from flows.chain.pins import check_promoted
from rlhf_core.config import ConfigError, apply_overrides


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n    no_scm = true\n[cache]\n    dir = elsewhere\n")
    return tmp_path


def put(root: Path, content: str, suffix: str = "") -> str:
    md5 = hashlib.md5(content.encode()).hexdigest() + suffix
    path = root / ".dvc/elsewhere/files/md5" / md5[:2] / md5[2:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return md5


def promoted(root: Path, separator: str | None) -> dict[str, str]:
    config = {"model_type": "llama"} | ({} if separator is None else {"step_separator": separator})
    entries = [{"md5": put(root, json.dumps(config)), "relpath": "config.json"}]
    return {"version": "v1.0.0", "md5": put(root, json.dumps(entries), ".dir"), "sha256": "0" * 64}


def workspace(root: Path, own: str | None, **gate) -> Path:
    (root / "params.yaml").write_bytes(CLERK_PARAMS.read_bytes())
    changes = {f"gate.{key}": value for key, value in gate.items()}
    if own is not None:
        changes |= {"reward.step_separator": own, "rl.ppo.critic_init": "sft"}
        changes["data.sources"] = [
            {"name": "steps", "kind": "file", "path": "x.jsonl", "format": "stepwise", "uses": ["stepwise", "prompt"]},
            {"name": "shown", "kind": "file", "path": "y.jsonl", "format": "messages", "uses": ["sft"]},
        ]
    apply_overrides(root / "params.yaml", changes)
    return root


@pytest.mark.parametrize("role", ["incumbent", "anchor"])
@pytest.mark.parametrize(("own", "theirs"), [("\n", None), (None, "\n")])
def test_a_promoted_model_of_another_kind_is_refused(root: Path, role: str, own: str | None, theirs: str | None):
    wanted, got = ("a process reward model", "a reward model of whole responses")[:: 1 if own else -1]
    run = workspace(root, own, **{role: promoted(root, theirs)})
    with pytest.raises(ConfigError, match=f"gate.{role} v1.0.0: expected {wanted} to compare with, got {got}; keep the two kinds"):
        check_promoted(root, run)
    check_promoted(root, workspace(root, own, **{role: promoted(root, theirs)}, override="compared by hand"))


@pytest.mark.parametrize("both", ["\n", None])
def test_a_promoted_model_of_the_same_kind_or_out_of_reach_is_left_to_the_gate(root: Path, both: str | None):
    check_promoted(root, workspace(root, both, incumbent=promoted(root, both), anchor=promoted(root, both)))
    absent = promoted(root, "\n" if both is None else None) | {"md5": "0" * 32 + ".dir"}
    check_promoted(root, workspace(root, both, incumbent=absent))


def test_a_promoted_model_whose_files_are_damaged_is_refused_with_a_message(root: Path):
    model = promoted(root, None)
    for path in (root / ".dvc/elsewhere/files/md5").rglob("*"):
        if path.is_file() and not path.name.endswith(".dir"):
            path.write_text("{}")
    with pytest.raises(ConfigError, match="md5"):
        check_promoted(root, workspace(root, None, incumbent=model))
