"""A small project for tests of the registry: a git repository with DVC and four stages that take no time.

The reward model's bytes follow from the seed (200: bytes with an md5 collision), and so do its held-out scores: 900 less the seed (modulo
100) of 1,000 pairs are in the right order. The gate judges these scores; there is no model that could score anything else. Round 1 of
iterative DPO wins on 480 prompts of 700, round 2 on 350.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import warm_python
from clerk_params import CLERK_PARAMS
from collision import FIRST
from small_workspace import ROOT, environment, git

from rlhf_core.config import apply_overrides
from rlhf_core.rounds.pins import Pin, PromptsPin, Round, write_rounds
from rlhf_core.rounds.promotion import next_budget
from rlhf_core.rounds.spending import outcome_of, record_rounds
from rlhf_core.stage.files import read_json

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
    from rlhf_core.config import load_params
    from rlhf_core.gate.looks import write_result
    from rlhf_core.gate.run import judge_model
    from rlhf_core.gate.verdict import with_registry
    from rlhf_core.provenance.file_hashes import dvc_md5
    from rlhf_core.stage.files import write_json

    typed, model = load_params(), Path("models/reward")
    where = {"heldout": Path("data/reward_heldout.parquet"), "prepared": Path("data/prepared"), "reward_model": model}
    gate = judge_model(typed, **where, source_judges={}, infer=lambda *_: {"measured": {"probes": {}, "external": []}, "members": 1})
    gate = with_registry(gate, typed.gate, dvc_md5(model))
    write_result(gate["look"]["split"], gate["look"]["model"], **{key: gate[key] for key in ("passed", "accuracy", "confidence")})
    write_json(folder / "gate.json", gate)
    sys.exit(not gate["passed"] and gate["override"] is None)
elif stage == "train_round":
    policy = Path("rounds", sys.argv[2], "policy")
    policy.mkdir(parents=True, exist_ok=True)
    (policy / "content").write_text(f"round {sys.argv[2]} of seed {params['seed']}")
elif stage == "evaluate_round":
    from rlhf_core.config import load_params
    from rlhf_core.rounds.pins import read_rounds
    from rlhf_core.rounds.promotion import verdict
    from rlhf_core.stage.files import write_json

    number, wins = int(sys.argv[2]), 480 if sys.argv[2] == "1" else 350
    rate = {"value": wins / 700, "low": wins / 700 - 0.04, "high": wins / 700 + 0.04, "wins": wins, "losses": 700 - wins, "n": 700}
    metrics = {"win_rate": {"sampled": rate}, "trained": True}
    metrics |= verdict(metrics, load_params().iterative.promotion, read_rounds()[number].budget)
    write_json(Path("rounds", sys.argv[2], "metrics/evaluate.json"), metrics)
else:
    (folder / "content").write_text(f"{stage} of seed {params['seed']}")
    ids = [f"test-{i}" for i in range(1000)] + [f"validation-{i}" for i in range(50)]
    if stage == "prepare_data":
        from rlhf_core.data.schema import write_rows

        ask = [{"role": "user", "content": "Sort 12."}]
        same = {"source": "clerk", "messages": ask, "rejected": "b"}
        write_rows(folder, "preference", [{"id": i, "split": i.partition("-")[0], "chosen": f"a {i}", **same} for i in ids])
    if stage == "train_reward":
        from rlhf_core.data.heldout import as_heldout_table

        right = 900 - params["seed"] % 100
        scores = [(1.0, 0.0) if k < right or k >= 1000 else (0.0, 1.0) for k in range(len(ids))]
        rows = [(i, "clerk", i.partition("-")[0], *score, 9, 8, i, 4, 0.0, 0.0) for i, score in zip(ids, scores)]
        as_heldout_table(rows).to_parquet("data/reward_heldout.parquet")
        (folder / "config.json").write_text("{}")
        for number in range(1, params["reward"]["ensemble"]):
            (folder / f"member_{number}").mkdir()
            (folder / f"member_{number}/config.json").write_text("{}")
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
    outs: [models/reward, data/reward_heldout.parquet]
  gate_reward:
    cmd: exec python work.py gate_reward
    params: [gate]
    deps: [work.py, data/prepared, data/reward_heldout.parquet, models/reward]
    metrics: [{metrics/gate.json: {cache: false}}]
"""
# Two rounds of iterative DPO; the second is not better.
ROUNDS = """
stages:
  train_round:
    foreach: {"1": models/sft, "2": rounds/1/policy}
    do:
      wdir: ..
      cmd: exec python work.py train_round ${key}
      params: [seed]
      deps: [work.py, models/reward, "${item}"]
      outs: ["rounds/${key}/policy"]
  evaluate_round:
    foreach: {"1": 1, "2": 2}
    do:
      wdir: ..
      cmd: exec python work.py evaluate_round ${key}
      deps: [work.py, "rounds/${key}/policy"]
      metrics: [{"rounds/${key}/metrics/evaluate.json": {cache: false}}]
"""


def add_rounds(worktree: Path) -> None:
    (worktree / "rounds").mkdir()
    (worktree / "rounds/dvc.yaml").write_text(ROUNDS)
    budget, pin = None, Pin(path="models/sft", md5="0")
    rounds = {}
    for number, accepted in ((1, False), (2, True)):  # accepted: the one before
        budget = next_budget(budget, accepted=accepted, error_budget=0.05, rounds=30)
        inputs = {"origin": pin, "policy": pin, "gate": pin, "reward_models": {}, "prompts": PromptsPin(first=0, count=1, sha256="0")}
        rounds[number] = Round(**inputs, budget=budget)
    write_rounds(rounds, worktree)
    dvc(worktree, "repro", "rounds/dvc.yaml")
    found = {number: read_json(worktree / f"rounds/{number}/metrics/evaluate.json") for number in rounds}
    made = [(number, entry.budget, outcome_of(found[number])) for number, entry in rounds.items()]
    record_rounds(worktree.name, "the SFT model", made, worktree)
    commit(worktree, "Two rounds")


def make_project(folder: Path) -> Path:
    """A committed project in `folder`; nothing has run."""
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("tmp", "cache", "config.local"))
    for file in (CLERK_PARAMS, *(ROOT / name for name in (".gitignore", ".dvcignore", "pyproject.toml"))):
        shutil.copy(file, folder)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    write_stages(folder)
    return folder


def write_stages(project: Path) -> None:
    """Commit the stages of this module as those of a project."""
    (project / "work.py").write_text(WORK.replace("@", FIRST.hex()))
    (project / "dvc.yaml").write_text(DVC)
    commit(project, "Stages that take no time")


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
    done = warm_python.run(command, cwd=folder, env=environment(PATH=path, DVC_NO_ANALYTICS="1"))
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def without_identity(folder: Path) -> dict[str, str]:
    """The environment of a machine without a git identity."""
    (folder / "empty").write_text("[user]\n\tuseConfigOnly = true\n")  # else git invents one from user and host
    nobody = {"GIT_CONFIG_GLOBAL": str(folder / "empty"), "GIT_CONFIG_NOSYSTEM": "1", "EMAIL": ""}
    return {"HOME": str(folder), **nobody}
