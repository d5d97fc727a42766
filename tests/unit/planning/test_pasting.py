"""What the command prints to paste is the planned run, and what it plans can be given as keys or as options."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.config import overridden, parse_assignment, read_text
from rlhf_core.planning.__main__ import main
from rlhf_core.planning.hardware import GIB
from rlhf_core.planning.remedy import shown

PARAMS = CLERK_PARAMS
ON = ("--gpu", "h100", "--gpus", "8")
GRPO = ("--algorithm", "grpo", "--group-size", "16", "--samples", "512", "--minibatch", "128", "--ppo-epochs", "2", "--no-reference")
LONG = ("--prompt-length", "500", "--longest", "1500", "--microbatch-tokens", "8192", "--max-concurrent", "64")


@pytest.fixture
def printed(monkeypatch, capsys):
    def run(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["planning", "--params-file", str(PARAMS), *arguments])
        assert main() == code, capsys.readouterr()
        return capsys.readouterr().out

    return run


def pasted(out: str) -> list[str]:
    """The --set arguments of the proposal, as a shell splits them."""
    return shlex.split(out[out.index("  --set ") :].replace("\\\n", " "))


def planned(printed, *arguments: str) -> dict:
    found = json.loads(printed("--json", *arguments))
    workload = {name: assumed["value"] for name, assumed in found["workload"].items()}
    return {"workload": workload, "proposed": found["proposed"]}


@pytest.mark.parametrize(
    "options",
    [
        ("--model", "qwen2.5-7b", "--dtype", "bfloat16", *LONG),
        ("--model", "qwen2.5-1.5b", "--dtype", "bfloat16", *GRPO, "--response-length", "300", "--prompt-length", "200"),
        ("--model", "Qwen/Qwen2.5-7B-Instruct", "--dtype", "bfloat16", "--set", "rl.steps=7", "--set", "sft.lora={rank: 16, alpha: 32.0}"),
    ],
)
def test_the_pasted_lines_alone_give_the_planned_run(printed, options):
    lines = pasted(printed(*options, *ON))
    first, again = planned(printed, *options, *ON), planned(printed, *lines, *ON)
    assert again == first
    overrides = dict(parse_assignment(text) for text in lines[1::2])
    _, params = overridden(read_text(PARAMS), overrides, subject="params.yaml")  # they are valid for a run
    assert params.rl.samples_per_step == first["workload"]["samples"] and params.model.dtype == "bfloat16"
    params_as_planned = printed("--json", *lines, *ON, "--layout", "params")
    assert json.loads(params_as_planned)["proposed"]["seconds"] == first["proposed"]["seconds"]


ROOMY = ("--model", "qwen2.5-7b", "--dtype", "bfloat16", "--set", "model.max_length=4096", *ON)


@pytest.mark.parametrize("of_prompts", [300, 3800])
def test_a_mean_prompt_length_leaves_the_longest_sample_as_it_is(printed, of_prompts):
    options = (*ROOMY, "--prompt-length", str(of_prompts), "--longest", "256")
    out = printed(*options)
    assert f"since no key holds it: --prompt-length {of_prompts};" in out
    lines = pasted(out)
    assert {"model.max_length=4096", "rl.rollout.max_new_tokens=256"} <= set(lines)
    first, again = planned(printed, *options), planned(printed, *lines, *ON, "--prompt-length", str(of_prompts))
    assert again == first and first["workload"]["prompt length"] == of_prompts
    # Memory is counted at the longest sample, as the preflight counts it; time at the mean.
    longest = planned(printed, *lines, *ON)
    assert longest["workload"]["prompt length"] == 4096 - 256 and longest["workload"]["longest sample"] == 4096
    same = ("--layout", "apart", "--engine-gpus", "4", "--tensor-parallel", "1", "--zero-stage", "3", "--no-offload", "--checkpointing")
    mean, most = (planned(printed, *lines, *ON, *same, *more)["proposed"] for more in (("--prompt-length", str(of_prompts)), ()))
    assert [g["needed"] for g in mean["groups"]] == [g["needed"] for g in most["groups"]]
    assert mean["seconds"]["step"] < most["seconds"]["step"]


def test_a_longest_sample_with_room_for_mean_prompts_only_is_mentioned(printed, monkeypatch, capsys):
    for more, is_told in (((), True), (("--set", "model.max_length=4096"), False)):
        given = ("--model", "qwen2.5-7b", "--dtype", "bfloat16", *LONG, *more, *ON)
        assert ("model.max_length=2000" in pasted(printed(*given))) == is_told
        monkeypatch.setattr(sys, "argv", ["planning", "--params-file", str(PARAMS), *given])
        assert main() == 0
        assert ("model.max_length: leaves 500 tokens for a prompt, the mean; longer" in capsys.readouterr().err) == is_told


def test_only_keys_that_differ_from_params_are_printed(printed):
    lines = pasted(
        printed("--model", "qwen2.5-7b", "--dtype", "bfloat16", "--algorithm", "ppo", "--ppo-epochs", "1", "--layout", "colocated", *ON)
    )
    keys = {text.partition("=")[0] for text in lines[1::2]}
    assert {"model.path", "model.dtype", "rl.trainer.ranks"} <= keys
    assert keys.isdisjoint({"rl.algorithm", "rl.ppo_epochs", "rl.placement", "rl.trainer.sequence_parallel", "model.max_length"})


def test_options_that_no_key_holds_are_named(printed):
    out = printed("--model", "qwen2.5-7b", "--dtype", "bfloat16", "--reward-model", "qwen2.5-1.5b", *ON)
    assert "since no key holds it: --reward-model qwen2.5-1.5b;" in out


@pytest.mark.parametrize("mode", [(), ("--stages",)])
def test_both_modes_take_set(printed, monkeypatch, capsys, mode):
    model = ("--set", "model.path=Qwen/Qwen2.5-7B", "--set", "model.dtype=bfloat16")
    code = 1 if mode else 0
    by_keys = json.loads(printed(*mode, "--json", *model, *ON, code=code))
    by_options = json.loads(printed(*mode, "--json", "--model", "qwen2.5-7b", "--dtype", "bfloat16", *ON, code=code))
    if not mode:
        assert [found.pop("workload")["dtype"]["source"] for found in (by_keys, by_options)] == ["model.dtype", "--dtype"]
    assert by_keys == by_options
    printed(*mode, "--set", "model.dtyp=bfloat16", code=2)
    monkeypatch.setattr(sys, "argv", ["planning", "--params-file", str(PARAMS), *mode, "--set", "rl.algorithm"])
    assert main() == 2 and "expected key=value" in capsys.readouterr().err


def test_a_key_set_for_the_stages_changes_their_memory(printed):
    model = ("--stages", "--json", "--model", "qwen2.5-1.5b", "--dtype", "bfloat16", *ON)
    split = ("--set", "sft.ranks=8", "--set", "sft.zero_stage=3")
    whole, part = (json.loads(printed(*model, *more))["train_sft"]["processes"][0] for more in ((), split))
    assert part["count"] == 8 and part["needed"] < whole["needed"] / 2


def layouts(out: str) -> list[list[str]]:
    _, _, table, *_ = out.split("\n\n")[1:5]
    return [line.split() for line in table.splitlines()[1:]]


def test_the_best_setting_of_each_layout_is_printed_best_first(printed):
    arguments = ("--model", "qwen2.5-7b", "--dtype", "bfloat16", "--prompt-length", "512", "--response-length", "512", *ON)
    rows = layouts(printed(*arguments))
    assert {row[0] for row in rows} == {"colocated", "apart", "three-parts"}
    steps = [float(row[1]) for row in rows]
    assert steps == sorted(steps) and all(float(row[2]) > 0 for row in rows)
    for row in rows:  # each is the best of its layout
        (alone,) = layouts(printed(*arguments, "--layout", row[0]))
        assert alone == row


def test_a_layout_that_is_impossible_or_does_not_fit_says_why(printed):
    grpo = ("--model", "qwen2.5-7b", "--dtype", "bfloat16", "--algorithm", "grpo")
    assert "three-parts" in (out := printed(*grpo, *ON)) and "needs a critic" in out
    assert "needs more than 1 GPU" in printed(*grpo, "--gpu", "b200", "--gpus", "1")
    assert "none fits" in printed("--model", "qwen2.5-72b", "--dtype", "bfloat16", "--gpu", "h100", "--gpus", "1", code=1)


@pytest.mark.parametrize(
    "value", ["a: b", "[open", "yes", "1e3", "null", "", "a 'quoted' $HOME", None, True, 1e-5, [1, "x: y"], {"k": None}]
)
def test_a_value_is_written_so_that_a_shell_and_yaml_read_it_again(value):
    (word,) = shlex.split(shlex.quote(f"rl.key={shown(value)}"))
    assert parse_assignment(word) == ("rl.key", value)


def test_a_setting_that_the_proposal_replaces_is_mentioned(printed, monkeypatch, capsys):
    given = ("--model", "qwen2.5-7b", "--dtype", "bfloat16", *ON, "--set", "rl.trainer.zero_stage=1", "--set", "rl.trainer.ranks=8")
    monkeypatch.setattr(sys, "argv", ["planning", "--params-file", str(PARAMS), *given, "--layout", "colocated"])
    assert main() == 0
    assert capsys.readouterr().err == "rl.trainer.zero_stage: the proposal sets it otherwise; --layout params predicts yours\n"


SEVEN_ON_ONE = ("--model", "qwen2.5-7b", "--dtype", "bfloat16", "--algorithm", "grpo", "--gpu", "h100", "--gpus", "1")


def test_host_memory_of_a_step_is_told_and_checked_as_the_preflight_counts_it(printed):
    out = printed(*SEVEN_ON_ONE)
    needed = json.loads(printed("--json", *SEVEN_ON_ONE))["proposed"]["host"] / GIB
    assert f"needs {needed:.3g} GiB of host memory on the fullest node, not checked: pass --host-memory" in out
    on = ("--gpu", "h100", "--gpus", "1")
    for host, fits in ((needed + 1, True), (needed - 1, False)):  # of a host's memory the preflight leaves 3% free
        given = (*pasted(out), *on, "--host-memory", str(host / 0.97))
        assert json.loads(printed("--json", *given, "--layout", "params", code=not fits))["proposed"]["fits"] == fits
        stages = json.loads(printed("--stages", "--json", *given, code=1))
        assert [s["where"] for s in stages["train_policy"]["shortages"]] == ([] if fits else ["a host of the GPUs"])
    assert "of host memory" in printed(*SEVEN_ON_ONE, "--host-memory", "60", code=1)


def test_bfloat16_is_named_where_it_makes_float32_fit(printed, monkeypatch, capsys):
    long = ("--model", "qwen2.5-7b", "--set", "model.max_length=2048", *ON, "--host-memory", "800")
    remedy = json.loads(printed("--stages", "--json", *long, code=1))["train_policy"]["remedy"]
    assert remedy["model.dtype"] == "bfloat16"
    assert json.loads(printed("--stages", "--json", *long, *settings_of(remedy), code=1))["train_policy"]["fits"]
    without = {key: value for key, value in remedy.items() if key != "model.dtype"}
    assert not json.loads(printed("--stages", "--json", *long, *settings_of(without), code=1))["train_policy"]["fits"]
    tight = ("--model", "qwen2.5-7b", "--gpu", "h100", "--gpus", "1", "--algorithm", "grpo", "--host-memory", "230")
    monkeypatch.setattr(sys, "argv", ["planning", "--params-file", str(PARAMS), *tight])
    assert main() == 1 and "set model.dtype=bfloat16" in capsys.readouterr().err
    assert json.loads(printed("--json", *tight, "--dtype", "bfloat16"))["proposed"]["fits"]


def settings_of(keys: dict) -> list[str]:
    return [argument for key, value in keys.items() for argument in ("--set", f"{key}={shown(value)}")]


def test_hours_of_a_pass_over_pairs_are_those_of_its_flop(printed):
    model = ("--model", "qwen2.5-1.5b", "--dtype", "bfloat16", "--algorithm", "grpo", "--samples", "1024", *ON)
    given = (*model, "--prompt-length", "300", "--response-length", "200", "--checkpointing", "--pairs", "60000")
    found = json.loads(printed("--json", *given))
    hours, step = found["hours"], found["proposed"]["seconds"]["step"]
    # matrices of 28 layers: 2 * 1536 * (1536 + 256) of attention and 3 * 1536 * 8960 of the MLP; the head 151936 * 1536
    trunk, head = 28 * (2 * 1536 * 1792 + 3 * 1536 * 8960), 151936 * 1536
    attention = 2 * 28 * 500 * 1536
    trunk_pass, whole_pass = (500 * (2 * matrices + attention) for matrices in (trunk, trunk + head))
    per_hour = 8 * 989e12 * 0.37 * 3600
    assert hours["SFT"] == pytest.approx(60_000 * 4 * whole_pass / per_hour)
    assert hours["reward model"] == pytest.approx(120_000 * 4 * trunk_pass / per_hour)
    assert hours["DPO"] == pytest.approx(120_000 * 5 * whole_pass / per_hour)
    assert hours["RL"] == pytest.approx(469 * step / 3600)  # 128 prompts a step
    out = printed(*given)
    assert "Hours of a pass over 60,000 pairs, or in RL prompts, on 8 GPUs:" in out and f"  RL             {hours['RL']:10.3g}\n" in out
