"""The whole chain with its real parts: through Prefect, again, by DVC alone, with other parameters, rejected, refused."""

from __future__ import annotations

import json
import re
import time

import pandas as pd
import pytest
from small_chain import (
    NAMED,
    ORDER,
    PLANTED,
    PYTORCH_ROLLOUTS,
    SMALL,
    assert_nothing_left,
    change_params,
    copy_chain,
    log_of,
    outcomes,
    ran,
    run,
)

from rlhf_core.data.schema import read_rows
from rlhf_core.models.weights import read_state_dict
from rlhf_core.report.page import METHOD_TITLES

pytestmark = pytest.mark.timeout(900)


def test_every_stage_ran_and_left_its_results(chain):
    assert outcomes(chain.printed) == dict.fromkeys(ORDER, "ran")
    assert ran(chain.printed) == ORDER
    assert f"Report: {chain.workspace / 'reports/report.html'}" in chain.printed
    assert "Traceback" not in chain.printed and "ERROR" not in chain.printed
    assert_nothing_left(chain.workspace)
    assert not list((chain.workspace / "scratch").glob("*/*/*")), "expected no left-overs of finished work"


def test_the_real_parts_took_part(chain):
    workspace = chain.workspace
    metrics = {path.stem: json.loads(path.read_text()) for path in (workspace / "metrics").iterdir()}
    assert metrics["validation"]["passed"] and len(metrics["validation"]["expectations"]) > 20
    assert (workspace / "reports/data_docs/index.html").exists()  # Great Expectations
    assert metrics["gate"]["passed"] and metrics["gate"]["threshold"] == 0.3
    assert metrics["train_policy"]["steps"] == SMALL["rl"]["steps"]
    assert 0 < metrics["train_policy"]["logprob_difference_max"] < 1e-4  # vLLM and DeepSpeed, each with its own arithmetic
    assert {"greedy", "sampled"} <= set(metrics["evaluate"])
    assert len(pd.read_parquet(workspace / "data/evaluation_samples.parquet")) == 2 * SMALL["evaluation"]["table_rows"]


def test_no_secret_is_shown_or_kept_and_no_other_machine_is_listened_to(chain):
    """Secrets are those of the environment, Prefect's password and Ray's token; they appear in no command line, log, result or report."""
    found = chain.watched
    assert len(found["secrets"]) >= len(PLANTED) + 2 and found["shown"] == [] and found["open"] == []
    # The flow, its server, and DVC outside stages, which may need keys for remotes.
    strangers = [line for line in found["carried"] if not re.search(r"flows\.full_pipeline|create_app|dvc (status|cache dir)|git ", line)]
    assert strangers == []
    secrets = [secret.encode() for secret in found["secrets"]]
    files = [log_of(chain.workspace), *(p for p in chain.workspace.rglob("*") if p.is_file())]
    kept = [str(p) for p in files if any(secret in p.read_bytes() for secret in secrets)]
    assert kept == [str(chain.workspace / ".prefect/auth")]
    assert (chain.workspace / ".prefect/auth").stat().st_mode & 0o077 == 0


LOOKS = """\
import json, os
from pathlib import Path
def score(prompts, responses, labels, metadata):
    print(dict(os.environ), flush=True)
    (Path(__file__).parents[2] / "looks.json").write_text(json.dumps(dict(os.environ)))
    return [0.0] * len(responses)
"""


@pytest.mark.long
def test_a_reward_function_sees_of_the_environment_what_it_may(chain, tmp_path):
    """Started by DVC in a shell with all keys."""
    workspace = copy_chain(chain.workspace, tmp_path / "looks")
    (workspace / "rewards/looks.py").write_text(LOOKS)
    reward = {"name": "looks", "kind": "function", "path": "rewards/looks.py:score", "weight": 1.0, "normalization": "none"}
    brief = {"steps": 2, "algorithm": "rloo", "reward": {"scorers": [reward]}}
    change_params(workspace, PYTORCH_ROLLOUTS, {"rl": brief, "flow": {"environment": list(NAMED)}})
    code, printed = run(workspace, "dvc", "repro", "--single-item", "train_policy")
    assert code == 0, printed
    seen = json.loads((tmp_path / "looks.json").read_text())
    assert not set(PLANTED) & set(seen) and seen["SCORER_API_KEY"] == NAMED["SCORER_API_KEY"] and "PATH" in seen
    assert not any(secret in printed for secret in PLANTED.values())


def test_curves_have_every_step_once(chain):
    plots = chain.workspace / "plots"
    rl = pd.read_csv(plots / "train_policy.csv")
    assert list(rl["step"]) == list(range(1, SMALL["rl"]["steps"] + 1))
    assert rl[["score_mean", "kl_mean", "grad_norm", "value_loss"]].notna().all(axis=None)
    assert rl[["policy_ratio_min", "policy_ratio_max"]].eq(1).all(axis=None)  # a batch is one optimizer step, on policy
    sft = pd.read_csv(plots / "train_sft.csv")
    steps = SMALL["sft"]["pretrain"]["steps"] + SMALL["sft"]["steps"]
    assert list(sft["step"]) == list(range(steps)) and sft["loss"].iloc[-1] < sft["loss"].iloc[0]


def test_each_model_is_another_than_the_one_it_started_from(chain):
    sft, policy = (read_state_dict(chain.workspace / "models" / name) for name in ("sft", "policy"))
    assert sft.keys() == policy.keys()
    assert all((sft[name] != policy[name]).any() for name in sft)


def test_a_second_run_is_cached_and_a_second_repro_too(chain, tmp_path):
    workspace = copy_chain(chain.workspace, tmp_path / "again")  # other tests read the first one meanwhile
    started = time.monotonic()
    code, printed = run(workspace, "flows.full_pipeline")
    assert code == 0 and outcomes(printed) == dict.fromkeys(ORDER, "cached")
    assert time.monotonic() - started < 60  # 3 s on an idle machine
    code, printed = run(workspace, "dvc", "repro")
    assert code == 0 and ran(printed) == [] and printed.count("didn't change, skipping") == len(ORDER), printed


WAYS = [("dpo", "train_policy"), ("kto", "train_policy"), ("rejection_sampling", "train_policy"), ("conditional_sft", "report")]


@pytest.mark.long
@pytest.mark.parametrize(("method", "last"), WAYS)
def test_each_way_to_the_policy_without_rl_trains_one_that_is_evaluated_and_reported(chain, tmp_path, method, last):
    """Through the report for the method whose policy is prompted otherwise; the rest run the stage that trains the policy, alone."""
    workspace = copy_chain(chain.workspace, tmp_path / "way")
    brief = {"steps": 8, "batch_size": 16, "checkpoint_every": 4, "eval_every": 4}
    if method == "rejection_sampling":
        brief["sampling"] = {"prompts": 24, "samples_per_prompt": 3, "max_new_tokens": 16}
    change_params(workspace, {"alignment": {"method": method}, method: brief}, PYTORCH_ROLLOUTS)
    alone = last == "train_policy"
    code, printed = run(workspace, "dvc", "repro", *(["--single-item"] if alone else []), last)
    before = [] if alone else ["validate_data", "check_model"]
    assert code == 0 and ran(printed) == [*before, *ORDER[ORDER.index("train_policy") : ORDER.index(last) + 1]], printed
    metrics = json.loads((workspace / "metrics/train_policy.json").read_text())
    assert (metrics["method"], metrics["steps"], metrics["setup"]["ranks"]) == (method, 8, 1)
    curves = pd.read_csv(workspace / "plots/train_policy.csv")
    assert len(curves) == 8 and curves["loss"].notna().all() and curves["heldout_loss"].notna().sum() == 2
    if alone:
        return
    evaluation = json.loads((workspace / "metrics/evaluate.json").read_text())
    shown = set(pd.read_parquet(workspace / "data/evaluation_samples.parquet")["id"])
    assert evaluation["split"] == "test" and shown <= {row["id"] for row in read_rows(workspace / "data/prepared", "prompt", "test")}
    assert evaluation["sampled"]["policy"]["n"] == 20 and evaluation["kl"]["sampled"] != 0
    assert METHOD_TITLES[method] in (workspace / "reports/report.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_dpos_evaluation_with_its_own_scorers_reruns_alone_when_one_changes(chain, tmp_path):
    """RL's section asks for vLLM and the reward model, the evaluation for PyTorch, a length and a function outside rewards/."""
    workspace = copy_chain(chain.workspace, tmp_path / "own")
    (workspace / "vowels.py").write_text("def share(prompts, responses, labels, metadata):\n    return [0.25] * len(responses)\n")
    scorers = [{"name": "brief", "kind": "length", "target_length": 4}, {"name": "vowels", "kind": "function", "path": "vowels.py:share"}]
    brief = {"steps": 4, "batch_size": 16, "checkpoint_every": 4, "eval_every": 4}
    own = {"scorers": scorers, "backend": "pytorch", "stop": ["e"]}
    change_params(workspace, {"alignment": {"method": "dpo"}, "dpo": brief, "evaluation": own})
    code, printed = run(workspace, "dvc", "repro", "report")
    assert code == 0 and ran(printed) == ["validate_data", "check_model", "train_policy", "evaluate", "report"], printed
    checks = json.loads((workspace / "metrics/check_model.json").read_text())["checks"]
    assert checks["pytorch"] == "right" and "vllm" not in checks
    policy = json.loads((workspace / "metrics/evaluate.json").read_text())["greedy"]["policy"]
    assert policy["scores"].keys() == {"brief", "vowels"} and policy["scores"]["vowels"]["mean"] == 0.25
    shown = pd.read_parquet(workspace / "data/evaluation_samples.parquet")
    after = [len(text) - text.index("e") for text in shown["policy_response"] if "e" in text]
    assert after and max(after) < 16, "an answer goes on after the token with an e"
    (workspace / "vowels.py").write_text("def share(prompts, responses, labels, metadata):\n    return [0.5] * len(responses)\n")
    code, printed = run(workspace, "dvc", "repro", "report")
    assert code == 0 and ran(printed) == ["check_model", "evaluate", "report"], printed
    assert "evaluation.scorers.vowels: vowels.py changed" in printed
    policy = json.loads((workspace / "metrics/evaluate.json").read_text())["greedy"]["policy"]
    assert policy["scores"]["vowels"]["mean"] == 0.5


@pytest.mark.long
def test_a_rejected_reward_model_stops_the_chain_before_any_policy_is_trained(chain, tmp_path):
    workspace = copy_chain(chain.workspace, tmp_path / "gate")
    change_params(workspace, {"gate": {"min_accuracy": 0.999}})
    code, printed = run(workspace, "flows.full_pipeline")
    assert code == 3
    assert "GateRejected: rejected: expected the lower end of the interval to reach gate.min_accuracy=0.999" in printed
    assert ran(printed) == ["gate_reward"]
    assert outcomes(printed) == {**dict.fromkeys(ORDER[:5], "cached"), "gate_reward": "failed", **dict.fromkeys(ORDER[6:], "not reached")}
    gate = json.loads((workspace / "metrics/gate.json").read_text())
    assert not gate["passed"] and gate["threshold"] == 0.999 and 0 < gate["low"] < gate["accuracy"] < 0.999
