"""check_model tries a small copy of a model that sees, with a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from seeing_models import FAMILIES, save_seeing_model
from tiny_models import tiny_params

from rlhf_core.config import ConfigError, Params
from rlhf_core.model_check.check import run_trials
from rlhf_core.models.tokenizer import pretrained_tokenizer
from rlhf_core.models.vision import save_tokenizer

JUDGE = {"name": "quality", "kind": "llm_judge", "url": "http://localhost:1/v1", "mode": "pointwise"}
QUICK = ("qwen2_5_vl", "llava")
SCORER = {"name": "length", "kind": "length", "target_length": 3}
RL = {
    "alignment.method": "rl", "rl.algorithm": "grpo", "rl.ppo.critic_init": "sft", "rl.reward.scorers": [SCORER],
    "rl.rollout.backend": "pytorch",
}  # fmt: skip
SOURCE = {"name": "a", "kind": "file", "path": "a.jsonl", "format": "preference", "uses": ["sft", "preference", "prompt"], "weight": 1.0}


def params_of(model: Path | str, **changes) -> Params:
    base = {
        "model.path": str(model), "model.architecture": None, "model.vision": "frozen", "model.max_length": 256, "data.sources": [SOURCE],
        "alignment.method": "dpo", "reward.enabled": False, "rl.reward.scorers": [], "rl.evaluation.sources": [], "sft.lora": {"rank": 2},
    }  # fmt: skip
    return tiny_params(**{**base, **changes})


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name not in QUICK)])
def test_small_copy_computes_pictures_as_transformers_does(family, tmp_path):
    model = save_seeing_model(tmp_path / "model", family)
    of_pairs = {"reward.enabled": True, "evaluation.backend": "pytorch"}
    for changes, columns in ((of_pairs, ["sft", "reward", "dpo", "lora", "pytorch"]), (RL, ["sft", "lora", "pytorch"])):
        params = params_of(model, **changes)
        save_tokenizer(pretrained_tokenizer(params.model), tmp_path / "tokenizer")
        _, findings = run_trials(params, tmp_path / "tokenizer", tmp_path / "scratch")
        assert [f.column for f in findings] == columns
        assert all(f.refusal is None and f.difference < (3e-5 if family == "internvl" else 1e-5) for f in findings), findings


def test_a_limit_below_a_picture_s_tokens_is_refused(tmp_path):
    params = params_of(save_seeing_model(tmp_path / "model"), **{"model.max_length": 40})
    settings = tmp_path / "model" / "preprocessor_config.json"
    settings.write_text(settings.read_text(encoding="utf-8").replace("1024", "65536"), encoding="utf-8")  # pixels of a picture, at most
    save_tokenizer(pretrained_tokenizer(params.model), tmp_path / "tokenizer")
    with pytest.raises(ValueError, match=r"model\.max_length: expected room for a picture of 64 x 48 pixels, which takes \d+ tokens"):
        run_trials(params, tmp_path / "tokenizer", tmp_path / "scratch")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alignment.method": "rejection_sampling"}, "alignment.method: expected one of rl, dpo, kto with model.vision"),
        (RL | {"rl.environment": {"tools": ["a.py:b"]}}, "rl.environment: expected null with model.vision"),
        (RL | {"rl.distillation": {"teachers": [{"path": "a/b"}]}}, "rl.distillation: expected null with model.vision"),
        (
            RL | {"rl.reward.scorers": [SCORER, JUDGE]},
            "rl.reward.scorers: expected none of kind http or llm_judge with model.vision, got quality",
        ),
        (RL | {"rl.rollout.backend": "vllm", "rl.rollout.tensor_parallel_size": 2}, "rl.rollout.tensor_parallel_size: expected 1"),
        (
            {"cluster.inference_ranks": 2, "cluster.inference_ranks_per_model": 2, "evaluation.backend": "vllm"},
            "cluster.inference_ranks_per_model: expected 1 with model.vision, got 2",
        ),
        (RL | {"rl.trainer.zero_stage": 3}, "rl.trainer.zero_stage: expected at most 2 with model.vision frozen, got 3"),
        ({"reward.zero_stage": 3, "reward.enabled": True}, "reward.zero_stage: expected at most 2 with model.vision frozen, got 3"),
        ({"reward.step_separator": "\n", "reward.enabled": True}, "reward.step_separator: expected null with model.vision, got a text"),
        ({"evaluation.harness": {"tasks": ["a"]}}, "evaluation.harness: expected null with model.vision, got some"),
        ({"evaluation.scorers": [JUDGE]}, "evaluation.scorers: expected none of kind http or llm_judge with model.vision, got quality"),
        ({"sft.zero_stage": 3}, "sft.zero_stage: expected at most 2 with model.vision frozen, got 3"),
        ({"model.vision": "trained", "sft.zero_stage": 2}, "sft.zero_stage: expected at most 1 with model.vision trained, got 2"),
        ({"dpo.ranks": 2, "dpo.sequence_parallel": 2}, "dpo.sequence_parallel: expected 1 with model.vision, got 2"),
        ({"dpo.gradient_checkpointing": True}, "dpo.gradient_checkpointing: expected false with model.vision, got true"),
        ({"data.sources": [{"name": "c", "kind": "clerk", "uses": ["sft"]}]}, "data.sources.c.kind: expected file, huggingface or shapes"),
        (
            {"model.vision": None, "data.sources": [SOURCE | {"images": "x"}]},
            "data.sources: expected no images of ['a'] without model.vision",
        ),
        ({"model.path": None, "model.architecture": {}}, "vision: expected trained or null without model.path, got frozen"),
    ],
)
def test_what_isn_t_built_is_refused_with_the_params(changes, message):
    if "model.architecture" in changes:
        changes = changes | {"model.architecture": {"hidden_size": 16, "intermediate_size": 32, "layers": 2, "heads": 2, "vocab_size": 300}}
    with pytest.raises(ConfigError) as error:
        params_of("a/b", **changes)
    assert message in str(error.value)
