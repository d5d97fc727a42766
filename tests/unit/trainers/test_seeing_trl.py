"""SFT and DPO with pictures have the losses and gradients of TRL on the same batch, from texts and pictures on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from seeing_models import rows, save_seeing_model, seeing, store
from tiny_models import settings, tiny_params

from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.models.build import load_language_model, save_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.trainers.preference.objectives import PairObjective, ResponseForward
from rlhf_core.trainers.preference.train import begin_pairs
from rlhf_core.trainers.sft.train import sft_phase
from rlhf_core.trainers.supervised.demonstrations import encode_demonstrations

TESTS = Path(__file__).parents[2]
DEADLINE = 300  # seconds for TRL's imports and passes on a busy machine
TOLERANCE = 1e-4
pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL isn't installed; it is in the extra `peers`"),
]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_sft_and_dpo_are_trl_s(family: str, tmp_path: Path):
    reference, pictures = save_seeing_model(tmp_path / "reference", family), store(tmp_path / "data", 6)
    tokenizer, sight = seeing(reference, tmp_path / "data")
    policy = load_language_model(reference, vision="frozen")
    with torch.no_grad():
        for parameter in policy.get_decoder().parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    save_model(policy, policy.state_dict(), tokenizer, tmp_path / "policy")
    pairs = [row for row in rows(pictures, several=False) if row["id"] != "0"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    theirs = losses_of_trl(tmp_path)

    examples = list(encode_demonstrations(pairs, tokenizer, max_length=256)[0])
    engine = TrainEngine(PolicyModule(load_language_model(tmp_path / "policy", vision="frozen")), settings(disable_dropout=True))
    phase = sft_phase("sft", examples, [], steps=1, batch_size=8, pad_id=0, microbatch_tokens=120, sight=sight)
    loss = phase.train_batch(engine, list(range(len(examples))))["loss"]
    assert (loss, engine.step()) == pytest.approx(theirs["sft"], abs=TOLERANCE, rel=TOLERANCE)

    engine = TrainEngine(PolicyModule(load_language_model(tmp_path / "policy", vision="frozen")), settings(disable_dropout=True))
    forward, module = ResponseForward(0, False, 120, sight), PolicyModule(load_language_model(reference, vision="frozen")).eval()

    @torch.no_grad()
    def of_reference(_: TrainEngine, microbatches: list) -> list[torch.Tensor]:
        return [forward.logprobs(module, part.groups) for part in microbatches]

    config = tiny_params(**{"dpo.beta": 0.3, "dpo.nll_coef": 0.0}).dpo
    loss = PairObjective(config, forward, of_reference).train_batch(engine, list(begin_pairs(pairs, tokenizer, max_length=256)()[0]))[
        "loss"
    ]
    assert (loss, engine.step()) == pytest.approx(theirs["dpo"], abs=TOLERANCE, rel=TOLERANCE)
    assert abs(loss - 0.6931) > 0.01  # the models differ


def losses_of_trl(folder: Path) -> dict[str, tuple[float, float]]:
    places = (str(folder / name) for name in ("policy", "reference", "data", "rows.jsonl"))
    command = [sys.executable, str(TESTS / "trl_seeing.py"), *places]
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment = {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: tuple(values) for name, values in json.loads(done.stdout.splitlines()[-1]).items()}
