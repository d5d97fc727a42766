"""Options of the section rl on the real parts, many at once: each run is the stage train_policy in a copy of the finished small chain.

Their jobs go to a Ray head that was there before (cluster.address). A stage that starts a head of its own is killed in test_resume.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from small_chain import (
    DEADLINE,
    actor_process,
    assert_nothing_left,
    await_checkpoint,
    begin,
    change_params,
    copy_chain,
    driver_process,
    newest_checkpoint,
    output_of,
    ran,
    results,
    run,
    stage_process,
)
from small_workspace import wait_until

from rlhf_core.paths import processes_file
from rlhf_core.process import STOPPED_BY_SIGNAL
from rlhf_core.stage.run import CRASHED

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

WORK = ("generate", "score", "baseline", "forward", "update", "evaluate", "checkpoint")  # phases of a step in which models or disks work

GROUPS = {
    "algorithm": "grpo",
    "policy_loss": "gspo",
    "steps": 10,
    "minibatch_size": 8,
    "checkpoint_every": 2,
    "grpo": {"group_size": 4},
    "kl": {"target": 0.2, "horizon": 50, "refresh_reference_every": 3},
    "reward": {
        "clip": None,
        "scorers": [
            {"name": "vowel", "kind": "regex", "pattern": "[aeiou]", "weight": 1.0, "normalization": "running"},
            {"name": "brief", "kind": "length", "target_length": 2, "weight": 0.0, "normalization": "none"},
            {"name": "reward_model", "kind": "reward_model", "weight": 0.0, "normalization": "none"},
        ],
    },
    "rollout": {"top_p": 0.95, "top_k": 200},
    "correction": {"kind": "tis"},
    "dynamic_sampling": {"enabled": True, "max_rounds": 3},
    "prompt_weights": {"clerk": 2.0},
    "evaluation": {"every": 3, "prompts": 16, "metric": "brief", "keep_best": True},
    "monitor": {"always": {"metric": "entropy", "above": 0.0, "window": 3, "patience": 4, "action": "warn"}},
}
CRITIC = {
    "algorithm": "ppo",
    "steps": 6,
    "minibatch_size": 8,
    "ppo": {"critic_init": "sft", "critic_warmup_steps": 2},
    "max_replacements": 1,
    "max_approx_kl": 1e-9,  # the first minibatch is on the policy, the second isn't any more
    "ptx": {"coef": 0.5, "batch_size": 4},
    "reward": {
        "scorers": [
            {"name": "reward_model", "kind": "reward_model", "weight": 1.0, "normalization": "initial"},
            {"name": "even", "kind": "function", "path": "rewards/flaky.py:even", "weight": 0.5, "normalization": "initial"},
            {"name": "flaky", "kind": "function", "path": "rewards/flaky.py:flaky", "weight": 0.0, "normalization": "none", "timeout": 4.0},
        ],
        "max_unscored_fraction": 0.9,
    },
    "rollout": {"backend": "pytorch", "min_new_tokens": 3, "engines": 2, "dispatch": "dynamic", "max_concurrent_sequences": 4},
}
FLAKY = '''
import time

CALLS = []


def even(prompts, responses, labels, metadata):
    """Unscored where a response has an odd number of tokens."""
    return [1.0 * m["finished"] if m["response_length"] % 2 == 0 else None for m in metadata], {"tokens": metadata[0]["response_length"]}


def flaky(prompts, responses, labels, metadata):
    CALLS.append(1)
    if len(CALLS) == 3:  # of a process: the first call is the calibration, the third is step 2
        raise RuntimeError("nothing to say")
    if len(CALLS) == 4:
        time.sleep(3600)
    return [1.0] * len(responses)
'''
GREEDY = {
    "algorithm": "remax",
    "policy_loss": "cispo",
    "steps": 60,
    "kl": {"placement": "loss", "estimator": "k3"},  # nothing asks for log-probabilities before the update
    "evaluation": {"every": 2, "prompts": 16},
    "monitor": {"always": {"metric": "response_length", "above": 0.0, "from_step": 3, "patience": 2, "action": "rollback"}},
    "lora": {"rank": 4, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear", "quantize": "nf4"},
    "rollout": {"stop": ["e", "a"], "min_new_tokens": 2},
    "reward": {"scorers": [{"name": "brief", "kind": "length", "target_length": 4, "weight": 1.0, "normalization": "none"}]},
}
AHEAD = {
    "algorithm": "rloo",
    "steps": 40,
    "checkpoint_every": 2,
    "rloo": {"group_size": 4},
    "rollout": {"backend": "pytorch", "max_lag": 2},
}
TIMED = {
    "algorithm": "rloo",
    "steps": None,
    "epochs": 5000.0,
    "learning_rate": 1e-6,  # no limit ends the run first
    "max_minutes": 0.2,
    "checkpoint_every": 2,
    "rloo": {"group_size": 4},
    "evaluation": {"every": 100_000, "prompts": 16, "keep_best": True},
    "rollout": {"backend": "pytorch"},
}


@dataclass(frozen=True)
class Trained:
    workspace: Path
    printed: str
    curves: pd.DataFrame
    metrics: dict


def train(chain, cluster: dict, folder: Path, rl: dict, **files: str) -> Path:
    """A workspace whose next stage is train_policy."""
    workspace = copy_chain(chain.workspace, folder)
    change_params(workspace, {"rl": rl}, cluster)
    for name, text in files.items():
        (workspace / "rewards" / f"{name}.py").write_text(text)
    return workspace


def trained(workspace: Path) -> Trained:
    code, printed = run(workspace, "tasks.train_rl")
    assert code == 0, printed
    return read(workspace, printed)


def read(workspace: Path, printed: str) -> Trained:
    timings = pd.read_csv(workspace / "reports/timings/train_policy.csv")
    busy = sum(timings[f"seconds_{phase}"] for phase in WORK if f"seconds_{phase}" in timings)
    rest = (1 - busy / timings["seconds"]).median()
    print(f"{workspace.name}: {timings['seconds'].median():.2f} s a step, of which the driver itself takes {rest:.1%}")
    metrics = json.loads((workspace / "metrics/train_policy.json").read_text())
    return Trained(workspace, printed, pd.read_csv(workspace / "plots/train_policy.csv"), metrics)


def trained_though_killed(workspace: Path, *, steps: int) -> Trained:
    """The stage is killed after a checkpoint and another follows its job; then the driver is killed, and in the next job an engine."""
    stage = begin(workspace, "tasks.train_rl")
    await_checkpoint(workspace, "train_policy", stage)
    driver = driver_process(workspace)
    driver.suspend()  # or the job might be done before anybody follows it
    stage_process(workspace, "train_policy").kill()
    stage.wait()
    start, stage = len(output_of(workspace)), begin(workspace, "tasks.train_rl")
    wait_until(lambda: "already at work on this; following it" in output_of(workspace)[start:], 60, "a stage that follows the job")
    driver.kill()
    assert stage.wait(timeout=DEADLINE) == CRASHED, output_of(workspace)[-3000:]
    assert_nothing_left(workspace)
    reached = newest_checkpoint(workspace, "train_policy")
    start, stage = len(output_of(workspace)), begin(workspace, "tasks.train_rl")
    await_checkpoint(workspace, "train_policy", stage)
    actor_process(workspace, "rollout").kill()
    assert stage.wait(timeout=DEADLINE) == 0, output_of(workspace)[-3000:]
    again = read(workspace, output_of(workspace)[start:])
    assert "replaced (1 of at most rl.max_replacements=4), and the call is repeated" in again.printed
    assert 0 < reached < steps and f"rl: resuming from the checkpoint of step {reached}" in again.printed
    return again


def assert_same_results(a: Trained, b: Trained) -> None:
    for name in ("models/policy/model.safetensors", "plots/train_policy.csv", "metrics/train_policy.json"):
        assert results(a.workspace)[name] == results(b.workspace)[name], name


@pytest.fixture(scope="module")
def groups(chain, cluster, tmp_path_factory) -> Trained:
    return trained(train(chain, cluster, tmp_path_factory.mktemp("groups") / "groups", GROUPS))


def test_groups_are_drawn_again_until_they_teach_something(groups):
    rows = groups.curves
    assert list(rows["step"]) == list(range(1, 11))
    assert rows["dynamic_rounds"].between(1, 3).all() and rows["dynamic_rounds"].max() > 1
    assert (rows["dropped_groups"] > 0).any() and (rows["dropped_groups"] <= 8).all()  # two rounds of at most four more prompts
    # once four groups have been found each response has a sibling that is scored differently: no advantage is 0
    assert (rows["advantage_zero_fraction"][rows["dynamic_rounds"] < 3] == 0).all()


def test_a_filtered_sampler_agrees_with_the_trainer_on_what_it_drew_from(groups):
    assert (groups.curves["logprob_difference"] < 1e-4).all() and (groups.curves["ratio_mean"] - 1).abs().max() < 1e-2


def test_the_best_policy_on_the_validation_prompts_is_the_one_that_is_kept(groups):
    evaluated = groups.curves.dropna(subset=["eval_brief"])
    assert list(evaluated["step"]) == [3, 6, 9, 10]  # and before the first step, which the log has
    assert evaluated[["eval_score", "eval_vowel", "eval_reward_model"]].notna().all(axis=None)
    assert "rl: before training  eval_score" in groups.printed
    best = groups.metrics["best_value"]
    assert groups.metrics["best_metric"] == "brief" and best >= evaluated["eval_brief"].max() - 1e-5
    if groups.metrics["best_step"]:
        step = evaluated.set_index("step").loc[groups.metrics["best_step"]]
        assert step["eval_brief"] == pytest.approx(best, rel=1e-5)


def test_the_coefficient_follows_the_divergence_from_a_reference_that_moves(groups):
    rows = groups.curves
    factors = (rows["kl_coef"] / rows["kl_coef"].shift(1))[1:].to_numpy()
    # horizon 50, 16 samples, target 0.2: a factor of 1 + clip(kl / 0.2 - 1, -0.2, 0.2) * 16 / 50
    expected = 1 + (rows["kl_mean"] / 0.2 - 1).clip(-0.2, 0.2)[:-1].to_numpy() * 16 / 50
    assert factors == pytest.approx(expected, rel=1e-4)
    afresh = rows.set_index("step")["kl_mean"].abs()[[1, 4, 7, 10]]  # before any update, and right after the reference was renewed
    assert afresh.max() < 1e-5 < rows["kl_mean"].abs().max()


def test_killed_run_again_and_without_its_engine_it_ends_with_the_same_bits(chain, cluster, groups, tmp_path):
    again = trained_though_killed(train(chain, cluster, tmp_path / "killed", GROUPS), steps=10)
    assert_same_results(again, groups)
    # A window of three steps is full in step 3, and passed for four in step 6: counted across the kill.
    assert [w["step"] for w in again.metrics["monitor"]["warnings"] if w["limit"] == "always"] == [6]
    assert "rl: step 6: limit always: " in groups.printed


@pytest.fixture(scope="module")
def critic(chain, cluster, tmp_path_factory) -> Trained:
    at_once = {"cluster": cluster["cluster"] | {"threads": 2}}  # policy and critic, each with a core
    return trained(train(chain, at_once, tmp_path_factory.mktemp("critic") / "critic", CRITIC, flaky=FLAKY))


def test_only_the_critic_learns_at_first_and_a_minibatch_that_is_too_far_ends_the_step(critic):
    rows = critic.curves.set_index("step")
    learned = ["policy_loss", "grad_norm", "ptx_loss"]
    assert rows.loc[:2, learned].isna().all(axis=None) and rows.loc[3:, learned].notna().all(axis=None)
    assert rows[["value_loss", "critic_grad_norm"]].notna().all(axis=None)
    assert list(rows["stopped_early"]) == [0, 0, 1, 1, 1, 1]
    assert (
        rows["kl_mean"].abs().loc[:3].max() < 1e-5 < rows["kl_mean"].abs().loc[4:].max()
    )  # the policy moves after its first update, in step 3


def test_what_a_scorer_cant_score_is_counted_and_one_that_fails_does_not_stop_the_run(critic):
    rows = critic.curves
    assert (rows["failed_reward_model"] == 0).all()
    assert rows["failed_even"].between(1, 15).all() and (rows["unscored_fraction"] == rows["failed_even"] / 16).all()
    # The calibration and step 1 are its first calls; it raises in step 2 and is late in step 3: a new actor repeats the call. That one
    # raises in step 5 and is late in step 6, and no further actor may be started.
    assert list(rows["failed_flaky"]) == [0, 16, 0, 0, 16, 16]
    assert "replaced (1 of at most rl.max_replacements=1), and the call is repeated" in critic.printed
    assert "scorer flaky: expected a score for every response, got none for 16; RuntimeError: nothing to say" in critic.printed
    assert "expected scores of 16 responses, got none (scorer rank 0: expected score_items to finish, got no answer" in critic.printed


def test_what_a_function_measures_is_in_a_column_of_its_own(critic):
    measured = [json.loads(text) for text in critic.curves["scorer_metrics"]]
    assert all(set(m) == {"even.tokens"} and 3 <= m["even.tokens"] <= 16 for m in measured)


def test_no_response_ends_before_the_fewest_tokens_and_log_probabilities_still_agree(critic):
    assert (critic.curves["response_length"] >= 3).all() and (critic.curves["logprob_difference"] < 1e-4).all()
    setup = critic.metrics["setup"]
    assert (setup["engines"], setup["take_turns"], setup["dispatch"]) == (2, False, "dynamic")


@pytest.fixture(scope="module")
def greedy(chain, cluster, tmp_path_factory) -> Trained:
    """Through DVC, which goes on to the report."""
    workspace = train(chain, cluster, tmp_path_factory.mktemp("greedy") / "greedy", GREEDY)
    code, printed = run(workspace, "dvc", "repro")
    assert code == 0 and ran(printed) == ["check_model", "train_policy", "evaluate", "report"], printed
    return read(workspace, printed)


def test_a_stop_string_ends_a_response_the_greedy_one_is_the_baseline_and_adapters_on_4_bits_reach_vllm(greedy):
    rows = greedy.curves
    # 16 tokens fit; a and e are in most words
    assert (rows["response_length"] < 12).all() and (rows["truncated_fraction"] < 0.5).all()
    assert (rows["response_length"] >= 2).all() and (rows["logprob_difference"] < 1e-4).all()
    assert rows["grad_norm"].gt(0).all() and rows["advantage_zero_fraction"].lt(1).all()
    assert rows["kl_mean"].abs().loc[0] < 1e-5 < rows["kl_mean"].abs().loc[3]  # of the policy and itself without adapters
    # On policy: what the update computed is what vLLM was compared with, after it.
    assert rows["logprob_difference"].gt(0).all() and rows["mismatch_mean"].gt(0).all()
    assert rows["policy_ratio_max"].eq(1).all() and rows["policy_ratio_min"].eq(1).all()
    assert not math.isnan(greedy.metrics["score_brief"])
    # Past its limit from step 3 on and stopped in step 4: only what was evaluated before training and in step 2 may be the best.
    assert list(rows["step"]) == [1, 2, 3, 4] and greedy.metrics["steps"] == 4
    monitor = greedy.metrics["monitor"]
    assert (monitor["stopped"]["limit"], monitor["stopped"]["step"]) == ("always", 4) and monitor["chosen_step"] in (0, 2)
    assert "back to the best by score" in greedy.printed
    setup = greedy.metrics["setup"]
    (line,) = re.findall(r"rl: on 127\.0\.0\.1 \(node [0-9a-f]{8}\): (.*)", greedy.printed)
    places = json.loads(processes_file(greedy.workspace / "reports/timings/train_policy.csv").read_text())
    assert list(places) == [*(f"rollout rank {k}" for k in range(setup["engines"])), "trainer rank 0"]
    assert line == ", ".join(f"{name} (pid {place['pid']})" for name, place in places.items())
    assert "<td>trainer rank 0</td>" in (greedy.workspace / "reports/timings/time.html").read_text(encoding="utf-8")
    assert setup["lora"]["quantize"] == "nf4" and setup["weight_transfer"] == ["gloo"] * setup["engines"]
    assert ", nf4</td>" in (greedy.workspace / "reports/report.html").read_text(encoding="utf-8")
    assert_nothing_left(greedy.workspace)


def test_another_algorithm_reruns_only_what_follows_and_back_is_restored(chain, greedy):
    workspace, before = greedy.workspace, results(chain.workspace)
    assert greedy.metrics["algorithm"] == "remax"
    assert results(workspace)["models/policy/model.safetensors"] != before["models/policy/model.safetensors"]

    (workspace / "params.yaml").write_text((chain.workspace / "params.yaml").read_text())
    code, printed = run(workspace, "dvc", "repro")
    assert code == 0 and ran(printed) == [] and printed.count("is cached - skipping run") == 4, printed
    assert (workspace / "dvc.lock").read_text() == (chain.workspace / "dvc.lock").read_text() and results(workspace) == before


def test_minutes_end_a_run_as_its_last_step_would_and_count_on_after_a_stop(chain, cluster, tmp_path):
    workspace = train(chain, cluster, tmp_path / "timed", TIMED)
    stage = begin(workspace, "tasks.train_rl")
    await_checkpoint(workspace, "train_policy", stage)
    wait_until(lambda: seconds_trained(workspace) > 4 or stage.poll() is not None, DEADLINE, "a checkpoint after four seconds")
    stage.terminate()
    assert stage.wait(timeout=DEADLINE) == STOPPED_BY_SIGNAL, output_of(workspace)[-3000:]
    reached, before = newest_checkpoint(workspace, "train_policy"), seconds_trained(workspace)
    timed = trained(workspace)
    assert re.search(r"rl: (\d+) steps of 4 prompts, 5000 epochs of \d+ prompts", timed.printed)[1] == str(timed.metrics["planned_steps"])
    assert f"rl: resuming from the checkpoint of step {reached}" in timed.printed and 4 < before < 12
    steps, last = timed.metrics["steps"], timed.curves.iloc[-1]
    assert timed.metrics["ended_by"] == "max_minutes" and list(timed.curves["step"]) == list(range(1, steps + 1)) and steps > reached
    assert not math.isnan(last["eval_score"]) and timed.metrics["monitor"]["chosen_step"] in (0, steps)
    timings = pd.read_csv(workspace / "reports/timings/train_policy.csv")["seconds"]
    # The step in which the minutes are over is the last. A second is for what is between steps.
    assert 11 <= before + timings[reached:].sum() < 13 + timings.max()
    assert f"rl: max_minutes ended the training after step {steps} of {timed.metrics['planned_steps']}" in timed.printed


def seconds_trained(workspace: Path) -> float:
    """Of the newest checkpoint."""
    found = [0.0]
    for path in workspace.glob("scratch/train_policy/*/*/step-*/manifest.json"):
        with contextlib.suppress(FileNotFoundError):  # a newer one has replaced it
            found.append(json.loads(path.read_text())["seconds"])
    return max(found)


@pytest.fixture(scope="module")
def ahead(chain, cluster, tmp_path_factory):
    return trained(train(chain, cluster, tmp_path_factory.mktemp("rl") / "ahead", AHEAD))


def test_responses_drawn_ahead_are_of_the_policies_before(ahead):
    rows = ahead.curves
    assert list(rows["policy_lag_max"]) == [0, 1, *[2] * 38] and rows["policy_lag"].iloc[1:].between(1, 2).all()
    assert rows["spans_per_response"].between(1, 2).all() and rows["spans_per_response"].iloc[3:].mean() > 1.1
    assert rows["cut_off"].eq(0).all()
    # The ratio is to the policy that sampled, which in step 1 is the trained one.
    assert rows["policy_ratio_max"].iloc[1:].gt(1.01).all() and abs(rows["policy_ratio_max"].iloc[0] - 1) < 1e-4
    assert rows["approx_kl"].iloc[1:].gt(rows["approx_kl"].iloc[0]).mean() > 0.5
    assert rows["logprob_difference"].between(0, 1e-4).all() and "mismatch_mean" not in rows


def test_responses_drawn_ahead_survive_a_kill(chain, cluster, ahead, tmp_path):
    assert_same_results(trained_though_killed(train(chain, cluster, tmp_path / "killed", AHEAD), steps=40), ahead)


def test_sampling_that_disagrees_with_the_trainer_stops_the_run(chain, cluster, tmp_path):
    disagreeing = {"rollout": {"backend": "pytorch", "max_logprob_difference": 1e-12}}
    workspace = train(chain, cluster, tmp_path / "budget", disagreeing)
    code, printed = run(workspace, "dvc", "repro", "--single-item", "train_policy")
    assert code != 0
    assert (
        "policy version 0: expected rollout engine 0 to give the probe the trainer's log-probabilities, got a largest difference" in printed
    )
    assert "above rl.rollout.max_logprob_difference=1e-12; both have loaded the same model, so the arithmetic differs" in printed
    assert "\ntrain_policy: RL job: policy version 0: expected rollout engine 0 to give" in printed and "Traceback" not in printed
    assert not (workspace / "models/policy").exists()
    assert_nothing_left(workspace)


def test_a_stop_while_actors_start_prints_no_stack_trace_and_promises_no_checkpoint(chain, cluster, tmp_path):
    workspace = train(chain, cluster, tmp_path / "stopped", {"steps": 3, "rollout": {"backend": "pytorch"}})
    stage = begin(workspace, "tasks.train_rl")
    wait_until(lambda: "rl: starting 1 rollout engine (pytorch) and 1 trainer rank;" in output_of(workspace), 120, "the actors' start")
    stage.terminate()
    assert stage.wait(timeout=DEADLINE) == STOPPED_BY_SIGNAL
    printed = output_of(workspace)
    assert (
        printed.endswith("train_policy: stopped by a signal; run it again\n") and "train_policy: RL job on the Ray cluster at " in printed
    )
    assert "SIGTERM received at time" not in printed and "Traceback" not in printed
    assert_nothing_left(workspace)
