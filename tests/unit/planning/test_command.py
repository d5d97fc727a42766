"""The command says which workload its prediction is of, and where each quantity comes from."""

from __future__ import annotations

import json
import sys

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.config import load_params
from rlhf_core.planning.__main__ import main
from rlhf_core.planning.describe import stages_text
from rlhf_core.planning.hardware import GIB, GPUS
from rlhf_core.planning.machine import Gpu, Machine
from rlhf_core.planning.models import base_model, of_shape
from rlhf_core.planning.preflight import STAGES, plan_stages, preflight
from rlhf_core.planning.shape import SIZES
from rlhf_core.planning.stages import Models

PARAMS = CLERK_PARAMS


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    monkeypatch.setattr(sys, "argv", ["planning", "--params-file", str(PARAMS), *arguments])
    assert main() == code
    return capsys.readouterr().out


def verdicts(out: str) -> dict[str, str]:
    """What the lines before the tables of --stages say, by stage."""
    _, lines, *_ = out.split("\n\n")
    return {stage: verdict.strip() for stage, _, verdict in (line.strip().partition(":") for line in lines.splitlines())}


def test_the_workload_stands_before_the_prediction_with_its_keys(monkeypatch, capsys):
    out = printed(monkeypatch, capsys, "--samples", "512", "--response-length", "20")
    workload, _, prediction = out.partition("\n\nproposed: ")
    reported = {line[:20].strip(): line[20:].split() for line in workload.splitlines() if line.startswith("  ")}
    assert reported["samples"] == ["512", "responses", "a", "step", "--samples"]
    assert reported["prompt length"] == ["76", "tokens", "model.max_length", "-", "rl.rollout.max_new_tokens"]  # 96 - 20
    assert reported["response length"][0] == "20" and reported["response length"][-1] == "--response-length"
    assert reported["minibatch"][0] == "256" and reported["minibatch"][-1] == "rl.minibatch_size"
    assert reported["steps"][0] == "60" and reported["steps"][-1] == "rl.steps"
    assert "GPUs" in prediction


def test_json_has_the_workload_too(monkeypatch, capsys):
    found = json.loads(printed(monkeypatch, capsys, "--json", "--algorithm", "grpo"))
    assert found["workload"]["group size"] == {"value": 8, "unit": "responses to a prompt", "source": "rl.grpo.group_size"}
    assert found["workload"]["prompts"]["value"] == 32  # 256 / 8
    assert found["proposed"]["fits"]


FOUR_ENGINES = ("--engine-gpus", "4", "--tensor-parallel", "1")


def test_a_sync_by_gloo_is_predicted_to_take_longer(monkeypatch, capsys, tmp_path):
    seconds = {}
    for way in ("auto", "gloo"):
        recipe = tmp_path / f"{way}.yaml"
        recipe.write_text(f"rl: {{rollout: {{weight_transfer: {way}}}}}")
        found = json.loads(printed(monkeypatch, capsys, "--json", "--model", "llama3-8b", *FOUR_ENGINES, "--params", str(recipe)))
        seconds[way] = [found["layouts"][name]["seconds"]["sync"] for name in ("apart", "colocated")]
    weights = 4 * 8.03e9  # float32, to 4 engines or 8
    assert seconds["gloo"][0] > 4 * weights / 2.1e9 > 10 * seconds["auto"][0]
    assert seconds["gloo"][1] > 8 * weights / 2.1e9 > seconds["auto"][1]


def test_the_bandwidth_of_gloo_can_be_set(monkeypatch, capsys, tmp_path):
    (tmp_path / "gloo.yaml").write_text("rl: {rollout: {weight_transfer: gloo}}")
    arguments = ("--json", "--model", "llama3-8b", "--layout", "apart", *FOUR_ENGINES, "--params", str(tmp_path / "gloo.yaml"))
    given = ((), ("--gloo", "2.1"), ("--gloo", "8.4"))
    default, same, faster = (json.loads(printed(monkeypatch, capsys, *arguments, *more))["proposed"]["seconds"]["sync"] for more in given)
    assert default == same
    # float32 weights to 4 engines; the copies to and from the hosts stay
    assert default - faster == pytest.approx(4 * 4 * SIZES["llama3-8b"].parameters * (1 / 2.1e9 - 1 / 8.4e9))


EIGHT_ON = ("--stages", "--model", "llama3-8b", "--gpu", "h100", "--gpus")


def test_stages_that_lack_memory_are_told_first_with_the_preflights_remedy(monkeypatch, capsys):
    out = printed(monkeypatch, capsys, *EIGHT_ON, "8", code=1)
    found = verdicts(out)
    assert list(found) == list(STAGES) and found["gate_reward"] == "fits"
    eight = of_shape(SIZES["llama3-8b"])
    gpu = Gpu(GPUS["h100"].memory, GPUS["h100"].memory)
    refusal = preflight("train_sft", load_params(PARAMS), Machine(float("inf"), (gpu,) * 8, float("inf"), 8), Models(eight))
    assert "; set sft.ranks=8 and sft.zero_stage=3 (" in refusal
    assert found["train_sft"] == (
        "lacks memory: training rank: 172 GiB needed of the 76.6 GiB that its GPU has left; set sft.ranks=8 and sft.zero_stage=3"
    )
    values = json.loads(printed(monkeypatch, capsys, *EIGHT_ON, "8", "--json", code=1))
    assert values["train_sft"]["remedy"] == {"sft.ranks": 8, "sft.zero_stage": 3} and values["gate_reward"]["remedy"] is None


def test_a_shortage_within_the_predictions_error_is_no_certain_one(monkeypatch, capsys):
    found = verdicts(printed(monkeypatch, capsys, *EIGHT_ON, "1", "--gpu-memory", "170", "--host-memory", "500", code=1))
    assert found["train_sft"].startswith("may lack memory, by less than the prediction's error of 10%: training rank: 172 GiB needed of")


def test_refused_and_unpredicted_stages_are_told_first_and_apart(monkeypatch, capsys, tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "{sft: {ranks: 4}, reward: {enabled: false}, rl: {algorithm: grpo, reward: {scorers: "
        "[{name: other, kind: reward_model, path: no-such-model, normalization: initial}]}}}"
    )
    arguments = (*EIGHT_ON, "2", "--params", str(tmp_path / "recipe.yaml"))
    found = verdicts(printed(monkeypatch, capsys, *arguments, code=1))
    assert found["train_sft"].startswith("refused: sft.ranks: expected at most the 2 GPUs that are there, got 4; lower it")
    assert found["train_policy"].startswith("not predicted: ") and "no-such-model" in found["train_policy"]
    assert found["gate_reward"] == "loads no model"
    values = json.loads(printed(monkeypatch, capsys, *arguments, "--json", code=1))
    assert values["train_sft"]["refused"] and not values["train_policy"]["refused"]


def test_processes_on_a_cpu_are_printed_with_all_that_they_take():
    params, machine = load_params(PARAMS), Machine(64 * GIB)
    plans, problems = plan_stages(params, machine, base_model(params.model))
    out = stages_text(plans, machine, problems)
    assert "  1 x Ray: 1.25 GiB\n" in out  # 1 GiB, and 0.25 GiB of freed memory
    assert "(largest of 3 phases)" in out and "of 1 phases" not in out


def test_memory_of_hosts_that_was_not_given_is_said_to_be_unchecked(monkeypatch, capsys):
    out = printed(monkeypatch, capsys, *EIGHT_ON, "1", code=1)
    assert out.startswith("Memory of each stage (1 GPU of 79 GiB, host memory not checked):\n") and "inf" not in out


def test_host_memory_replaces_this_machines_where_no_gpus_are_given(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for host, is_told in (("1", "lacks memory: "), ("500", "fits")):
        out = printed(monkeypatch, capsys, "--stages", "--host-memory", host, code=host == "1")
        assert f"{host} GiB" in out.splitlines()[0] and verdicts(out)["train_policy"].startswith(is_told)


def test_usage_names_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--help"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("Usage: rlhf plan [OPTIONS]")


def test_a_plan_without_a_model_names_options_that_exist(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    assert main() == 2
    assert "expected --model, or --params with a recipe that names one" in capsys.readouterr().err


def test_a_plan_whose_responses_leave_no_room_for_prompts_is_refused(monkeypatch, capsys):
    command = ["plan", "--params-file", str(PARAMS), "--set", "rl.rollout.max_new_tokens=500", "--set", "alignment.method=dpo"]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 2
    err = capsys.readouterr().err
    assert "rl.rollout.max_new_tokens: expected less than model.max_length" in err and "dpo, which has no RL, pass --stages" in err


def test_a_plan_of_rl_for_another_method_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan", "--params-file", str(PARAMS), "--set", "alignment.method=dpo"])
    assert main() == 0
    assert "alignment.method: dpo has no RL" in capsys.readouterr().err
