"""Sampling and scoring as a job of two ranks on Ray: results, an engine in a process of its own, and a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from tiny_models import DEFAULTS, MAX_LENGTH, save_tiny_models, tiny_tokenizer

ROOT = Path(__file__).parents[2]
DEADLINE = 400  # seconds; two Ray heads start on a machine that may be busy
DVC = """
stages:
  evaluate:
    cmd: python -m work
    params: [seed, model]
    deps: [work.py]
    metrics: [found.json]
"""
WORK = """
import json, os
from pathlib import Path

PROMPTS, SEEDS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]], [1, 2, 3]

def sample(run, policy, engine_apart):
    from rlhf_core.engines.rollout.process import EngineProcess
    from rlhf_core.engines.rollout.open import open_here
    from rlhf_core.engines.deepspeed.ranks import in_shares, all_gather, rank
    from rlhf_core.engines.rollout.requests import SamplingSettings

    how = dict(backend="pytorch", model_path=policy, max_length=run.params.model.max_length, dtype="float32", max_concurrent_sequences=4,
               threads=1, seed=0, trust_remote_code=False, gpu_memory_fraction=0.5)
    engine = EngineProcess(open_here, **how) if engine_apart else open_here(**how)
    settings = SamplingSettings(9, 1.0)

    def draw(own):
        found = engine.generate([PROMPTS[i] for i in own], [SEEDS[i] for i in own], settings, stop_ids=(2,), group_size=2)
        return [[sample.response_ids for sample in group] for group in found]

    samples = in_shares(range(len(PROMPTS)), draw)
    if engine_apart:
        engine.close()
    return {"samples": samples, "processes": all_gather((rank(), os.getpid()))}

def refuse(run):
    from rlhf_core.engines.deepspeed.ranks import in_shares, rank

    def score(own):
        if rank() == 1:
            raise ValueError("scores: expected numbers, got none; correct the scorer")
        return own

    return {"scores": in_shares([1, 2, 3], score)}

def main():
    from rlhf_core.stage.run import Stage
    from rlhf_core.stage.training import infer
    import work

    with Stage("evaluate", resumable=False) as stage:
        found = infer(stage, work.sample, "policy/sft", stage.params.cluster.inference_ranks > 1)
        if stage.params.cluster.inference_ranks > 1:
            try:
                infer(stage, work.refuse)
            except ValueError as error:
                found["refusal"] = str(error)
        Path("found.json").write_text(json.dumps(found | {"process": os.getpid()}))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "dvc.yaml").write_text(DVC)
    (tmp_path / "work.py").write_text(WORK)
    save_tiny_models(tmp_path / "policy", tiny_tokenizer())
    return tmp_path


def found_by(workspace: Path, ranks: int) -> dict:
    yaml = YAML()
    tree = yaml.load(DEFAULTS.read_text())
    tree["cluster"]["inference_ranks"] = ranks
    tree["model"]["max_length"] = MAX_LENGTH
    tree["flow"]["preflight"] = "off"  # the workspace has no models of a chain
    with (workspace / "params.yaml").open("w") as file:
        yaml.dump(tree, file)
    command = [sys.executable, "-m", "work"]
    environment = {**os.environ, "PYTHONPATH": f"{workspace}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((workspace / "found.json").read_text())


@pytest.mark.long
def test_a_job_of_two_ranks_samples_as_the_stage_alone_and_passes_on_a_refusal(workspace: Path):
    alone, job = found_by(workspace, 1), found_by(workspace, 2)
    assert alone["processes"] == [[0, alone["process"]]]
    (first, second), own = job["processes"], job["process"]
    assert (first[0], second[0]) == (0, 1) and len({first[1], second[1], own}) == 3
    assert job["samples"] == alone["samples"] and len({tuple(ids) for group in alone["samples"] for ids in group}) == 6
    assert job["refusal"].endswith("scores: expected numbers, got none; correct the scorer")
