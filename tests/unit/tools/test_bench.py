"""The benchmark's own arithmetic and settings; it is run by hand, not here."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
from tiny_models import tiny_tokenizer

from rlhf_core.config import load_params
from rlhf_core.models.tokenizer import encode_prompt
from rlhf_core.preparation.sources import load_source
from tools.bench.growth import Point, make_workspace
from tools.bench.growth import table as growth_table
from tools.bench.limits import table
from tools.bench.peers import ROOT, draw, line, summary, tokens_per_sample
from tools.bench.workload import Workload, write_jsonl


def test_online_work_has_equal_lengths_one_optimizer_step_and_the_kl_where_trl_has_it():
    grpo, rloo = (Workload(method, "model", "rows", steps=3, batch_size=16).params.rl for method in ("grpo", "rloo"))
    assert (grpo.algorithm, grpo.steps, grpo.samples_per_step, grpo.minibatch_size) == ("grpo", 3, 16, 16)
    assert (grpo.rollout.min_new_tokens, grpo.rollout.max_new_tokens) == (23, 24)  # the last one may be the end token
    assert (grpo.kl.placement, grpo.kl.estimator, rloo.kl.placement, rloo.kl.estimator) == ("loss", "k3", "reward", "k1")


def test_a_case_without_a_computing_time_has_only_the_clocks_ratio():
    # Rounds: 300 / 100 = 3 and 200 / 200 = 1; medians 250 and 150, 250 / 150 = 1.67.
    found = summary({"clock": {"ours": [300.0, 200.0], "theirs": [100.0, 200.0]}})
    row = line({"model": "small", "case": "grpo", "tokens_per_sample": 40.0, **found})
    assert row == "| small | grpo | 250 (200 to 300) | 150 (100 to 200) | 10000 | 6000 | 1.67 (1.00 to 3.00) |  |"


def test_tokens_of_a_sample_are_those_of_its_conversations_and_of_a_response_yet_to_come(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    ask = [{"role": "user", "content": "hello there"}]
    prompt, brief, long = len(encode_prompt(tokenizer, ask)), *(len(tokenizer(text).input_ids) for text in ("yes", "yes indeed, and more"))
    assert brief < long

    def measured(method: str, row: dict) -> float:
        rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": ask, **row}] * 2)
        return tokens_per_sample(Workload(method, str(tmp_path), rows, steps=1, batch_size=8))

    assert measured("sft", {"response": "yes"}) == prompt + brief + 1  # the end token
    assert measured("dpo", {"chosen": "yes", "rejected": "yes indeed, and more"}) == 2 * prompt + brief + long + 2
    assert measured("grpo", {}) == prompt + 24


def test_what_starts_a_head_of_ray_has_not_imported_ray():
    """It reads whether there are tokens when it is imported, which is before the head has made one."""
    names = ("limits", "peers", "ours_online", "driver", "gpu.harness", "gpu.jobs", "gpu.job")
    modules = ", ".join(f"tools.bench.{name}" for name in names)
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; assert 'ray' not in sys.modules"], cwd=ROOT, check=True)


def test_the_figure_has_a_dot_for_each_round_and_the_same_bytes_again(tmp_path):
    found = [
        {"model": "small", "case": case, **summary({"clock": {"ours": [300.0] * rounds, "theirs": [100.0] * rounds}})}
        for case, rounds in (("grpo", 3), ("sft", 2))
    ]
    for name in ("peers.svg", "again.svg"):
        draw(found, tmp_path / name)
    text = (tmp_path / "peers.svg").read_text()
    assert text == (tmp_path / "again.svg").read_text() and "grpo, small" in text and "sft, small" in text
    drawn = [text.split(f'id="rounds-{place}"')[1].split("</g>")[0].count("<use ") for place in range(2)]
    assert drawn == [3, 2]


def test_shares_of_a_step_and_of_the_limits():
    step = {
        "seconds": 2.0,
        "seconds_generate": 0.8,
        "seconds_score": 0.1,
        "seconds_forward": 0.2,
        "seconds_update": 0.7,
        "seconds_sync": 0.05,
        "in_turn": 0.4,
        "in_a_row": 0.32,
    }
    rounds = {"step": [step], "train": [{"stage": 900.0, "bare": 1000.0}], "start": [25.0], "bare_start": [20.0]}
    lines = table(argparse.Namespace(models=["small"], samples=256), {"small": rounds})
    # 256 responses of 24 tokens in 0.8 s are 7680 tokens/s, in 0.4 s 15360, in 0.32 s 19200.
    # 2 - (0.8 + 0.1 + 0.2 + 0.7) - 0.05 = 0.15 s are neither.
    assert "| small | rollouts beside bare vLLM in turn, tokens/s | 7680 | 15360 | 0.50 |" in lines
    assert "| small | the same, one batch after the other, tokens/s | 7680 | 19200 | 0.40 |" in lines
    assert "| small | start of an RL job to its first step, s | 25.0 | 20.0 | 0.80 |" in lines
    assert "| small | SFT, tokens/s | 900 | 1000 | 0.90 |" in lines
    assert "| small | GRPO step: weight sync, s | 0.050 | 2.000 | 0.025 |" in lines
    assert "| small | GRPO step: neither work nor sync, s | 0.150 | 2.000 | 0.075 |" in lines


def test_offline_work_knows_nothing_of_rollouts():
    with pytest.raises(ValueError, match="rollout"):
        _ = Workload("sft", "model", "rows", steps=3, batch_size=16, overrides={"rollout.max_new_tokens": 3}).params


def test_growth_is_reported_as_an_exponent():
    points = [Point("prepare_data", 100, 2.0, 0.5), Point("prepare_data", 400, 16.0, 1.0), Point("SFT step by parameters", 7, 1.0, 1.0)]
    # four times the size: 8 times the time is 4**1.5, twice the memory 4**0.5
    assert growth_table(points)[2:] == [
        "| prepare_data | 100 | 2 | 0.50 |  |  |",
        "| prepare_data | 400 | 16 | 1.00 | 1.50 | 0.50 |",
        "| SFT step by parameters | 7 | 1 | 1.00 |  |  |",
    ]


def test_the_data_of_growth_is_what_the_stage_takes(tmp_path):
    make_workspace(tmp_path, 3)
    params = load_params(tmp_path / "params.yaml")
    rows = load_source(params.data.sources[0].model_copy(update={"path": str(tmp_path / "pairs.jsonl")}), seed=0).rows
    assert {use: len(of_use) for use, of_use in rows.items()} == {"sft": 3, "preference": 3, "prompt": 3}
