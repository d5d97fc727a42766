"""The evaluation has one model at a time (engine, reward model, then each policy, in model.dtype), and scorers and an engine of its own."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from clerk_params import CLERK_PARAMS
from transformers import PreTrainedModel

from rlhf_core.config import parse_params, read_yaml, set_key
from rlhf_core.data.schema import read_rows, write_rows
from tests.tiny_models import save_tiny_models, tiny_tokenizer

ROOT = Path(__file__).parents[3]


def live_models() -> int:
    gc.collect()
    return sum(isinstance(o, PreTrainedModel) and isinstance(o.get_output_embeddings() or getattr(o, "score", None), torch.nn.Module)
               and type(o).__name__.endswith(("ForCausalLM", "ForSequenceClassification")) for o in gc.get_objects())  # fmt: skip


@pytest.fixture
def params(tmp_path, monkeypatch, request):
    """A workspace with an SFT model, a policy and a reward model; params with PyTorch's rollouts."""
    tree = read_yaml(CLERK_PARAMS)
    changes = {"rl.rollout.backend": "pytorch", "evaluation.prompts": 4, "evaluation.max_new_tokens": 4, "model.dtype": request.param}
    for key, value in changes.items():
        set_key(tree, key, value)
    monkeypatch.chdir(tmp_path)
    for name in ("sft", "policy"):
        sft, reward = save_tiny_models(tmp_path / name, tiny_tokenizer(), seed=1 if name == "sft" else 2)
        (tmp_path / "models").mkdir(exist_ok=True)
        sft.rename(tmp_path / "models" / name)
        if name == "sft":
            reward.rename(tmp_path / "models/reward")
    rows = [
        {"id": str(i), "source": "mine", "split": "test", "messages": [{"role": "user", "content": f"Sort {i}."}], "label": None}
        for i in range(4)
    ]
    write_rows(tmp_path / "data/prepared", "prompt", rows)
    (tmp_path / "data/prepared/sources.json").write_text(json.dumps({"mine": {"kind": "file", "judge": None}}))
    return parse_params(tree)


@pytest.mark.parametrize("params", ["float32", "bfloat16"], indirect=True)
def test_each_model_is_gone_before_the_next_is_loaded(params, monkeypatch):
    from rlhf_core.evaluation.policy import answer_prompts, measure

    seen = []
    load = PreTrainedModel.from_pretrained.__func__

    def recorded(cls, *args, **kwargs):
        before = live_models()
        model = load(cls, *args, **kwargs)
        loaded = model[0] if isinstance(model, tuple) else model
        seen.append((type(loaded).__name__, before, str(loaded.dtype)))
        return model

    outside = live_models()  # of other tests
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(recorded))
    folders = {"sft": Path("models/sft"), "policy": Path("models/policy")}
    where = {"reward_model": Path("models/reward"), "source_judges": {}, "gate_texts": set()}
    answers = answer_prompts(params, read_rows(Path("data/prepared"), "prompt", "test"), folders, **where)
    metrics = measure(params, answers, folders, gate_texts=set())
    dtype = f"torch.{params.model.dtype}"
    expected = ["LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaForCausalLM", "LlamaForCausalLM"]
    assert seen == [(name, outside, dtype) for name in expected]
    assert metrics["kl"]["sampled"] != 0.0


@pytest.mark.parametrize("params", ["float32"], indirect=True)
def test_after_dpo_the_evaluations_own_engine_scorers_and_stop_count(params):
    """RL's section asks for vLLM, the reward model, which isn't there, and another stop string."""
    from rlhf_core.evaluation.policy import answer_prompts

    scorers = [{"name": "brief", "kind": "length", "target_length": 2}, {"name": "any", "kind": "regex", "pattern": ".", "weight": 0.0}]
    tree = params.model_dump()
    tree["alignment"]["method"], tree["reward"]["enabled"] = "dpo", False
    tree["rl"]["rollout"] |= {"backend": "vllm", "stop": ["#"]}
    tree["evaluation"] |= {"scorers": scorers, "backend": "pytorch", "stop": list("abcdefghijklmnopqrstuvwxyz")}
    folders = {"sft": Path("models/sft"), "policy": Path("models/policy")}
    where = {"reward_model": Path("models/absent"), "source_judges": {}, "gate_texts": set()}
    answers = answer_prompts(parse_params(tree), read_rows(Path("data/prepared"), "prompt", "test"), folders, **where)
    found = [answer for by_model in answers.values() for of_model in by_model.values() for answer in of_model]
    assert len(found) == 16 and all(answer.components.keys() == {"brief", "any"} for answer in found)
    assert all(answer.score == answer.components["brief"] for answer in found)
    lower = [answer for answer in found if any(c.islower() and c.isascii() for c in answer.text)]
    assert lower and all(answer.finished and len(answer.response_ids) <= 4 for answer in lower)
