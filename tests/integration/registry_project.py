"""A small project for tests of the registry: a git repository with DVC and four stages that take no time.

The reward model's bytes follow from the seed (200: bytes with an md5 collision), the gate's verdict from gate.min_accuracy. The registry
decides from these files alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from collision import FIRST
from small_workspace import ROOT, environment, git

from rlhf_core.config import apply_overrides

WORK = '''"""One of six stages: python work.py <stage> [round]."""

import json
import sys
from pathlib import Path

from ruamel.yaml import YAML

COLLIDES = bytes.fromhex("@")
params = YAML(typ="safe", pure=True).load(Path("params.yaml").read_text())
stage = sys.argv[1]
folder = Path({"prepare_data": "data/prepared", "train_sft": "models/sft", "train_reward": "models/reward"}.get(stage, "metrics"))
folder.mkdir(parents=True, exist_ok=True)
if stage == "gate_reward":
    passed = params["gate"]["min_accuracy"] <= 0.9
    message = f"{'passed' if passed else 'rejected'}: accuracy 0.9 against {params['gate']['min_accuracy']}."
    gate = {"needed": True, "passed": passed, "message": message, "override": params["gate"]["override"]}
    gate |= {"accuracy": 0.9 - params["seed"] / 1000, "look": {"number": params["seed"], "level": 0.025 / params["seed"]}}
    (folder / "gate.json").write_text(json.dumps(gate))
    sys.exit(not passed and params["gate"]["override"] is None)
elif stage == "train_round":
    policy = Path("rounds", sys.argv[2], "policy")
    policy.mkdir(parents=True, exist_ok=True)
    (policy / "content").write_text(f"round {sys.argv[2]} of seed {params['seed']}")
elif stage == "evaluate_round":
    verdict = Path("rounds", sys.argv[2], "metrics/evaluate.json")
    verdict.parent.mkdir(parents=True, exist_ok=True)
    decided = {"promotion": {"split": "promotion", "level": 0.001}}
    verdict.write_text(json.dumps({"accepted": sys.argv[2] == "1", "reason": "no better", **decided}))
else:
    (folder / "content").write_text(f"{stage} of seed {params['seed']}")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "weights").write_bytes(params["seed"].to_bytes(1, "big") * 1000 if params["seed"] != 200 else COLLIDES)
'''

DVC = """
artifacts:
  reward-model: {path: models/reward, type: model}
  policy: {path: models/reward, type: model}  # any model will do
stages:
  prepare_data:
    cmd: exec python work.py prepare_data
    params: [data]
    deps: [work.py]
    outs: [data/prepared]
  train_sft:
    cmd: exec python work.py train_sft
    params: [sft]
    deps: [work.py, data/prepared]
    outs: [models/sft]
  train_reward:
    cmd: exec python work.py train_reward
    params: [seed, reward]
    deps: [work.py, models/sft]
    outs: [models/reward]
  gate_reward:
    cmd: exec python work.py gate_reward
    params: [seed, gate]
    deps: [work.py, models/reward]
    metrics: [{metrics/gate.json: {cache: false}}]
"""
# Two rounds of iterative DPO; the second is not better.
ROUNDS = """
stages:
  train_round:
    foreach: {1: models/sft, 2: rounds/1/policy}
    do:
      wdir: ..
      cmd: exec python work.py train_round ${key}
      params: [seed]
      deps: [work.py, models/reward, "${item}"]
      outs: ["rounds/${key}/policy"]
  evaluate_round:
    foreach: {1: 1, 2: 2}
    do:
      wdir: ..
      cmd: exec python work.py evaluate_round ${key}
      deps: [work.py, "rounds/${key}/policy"]
      metrics: [{"rounds/${key}/metrics/evaluate.json": {cache: false}}]
"""


def add_rounds(worktree: Path) -> None:
    (worktree / "rounds").mkdir()
    (worktree / "rounds/dvc.yaml").write_text(ROUNDS)
    dvc(worktree, "repro", "rounds/dvc.yaml")
    commit(worktree, "Two rounds")


def make_project(folder: Path) -> Path:
    """A committed project in `folder`; nothing has run."""
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("tmp", "cache", "config.local"))
    for name in (".gitignore", ".dvcignore", "params.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "work.py").write_text(WORK.replace("@", FIRST.hex()))
    (folder / "dvc.yaml").write_text(DVC)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    commit(folder, "A small project")
    return folder


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "-m", message)


def candidate(project: Path, name: str, **overrides: object) -> Path:
    """A run's worktree with the chain finished and committed; params as in `seed=1`."""
    worktree = project / "runs" / name
    git(project, "worktree", "add", "--quiet", "-b", f"run/{name}", str(worktree), "main")
    local = f"[cache]\n    dir = {project / '.dvc/cache'}\n"
    (worktree / ".dvc/config.local").write_text(local)
    apply_overrides(worktree / "params.yaml", {key.replace("__", "."): value for key, value in overrides.items()})
    dvc(worktree, "repro", check=False)
    commit(worktree, f"Results of run {name}")
    return worktree


def dvc(folder: Path, *arguments: str, check: bool = True) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment(PATH=path, DVC_NO_ANALYTICS="1"), check=False, capture_output=True, text=True
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def without_identity(folder: Path) -> dict[str, str]:
    """The environment of a machine without a git identity."""
    (folder / "empty").write_text("[user]\n\tuseConfigOnly = true\n")  # else git invents one from user and host
    nobody = {"GIT_CONFIG_GLOBAL": str(folder / "empty"), "GIT_CONFIG_NOSYSTEM": "1", "EMAIL": ""}
    return {"HOME": str(folder), **nobody}
