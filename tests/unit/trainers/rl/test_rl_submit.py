"""What train_policy refuses before Ray starts, what it tells the job, and what it writes at its end."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from clerk_params import CLERK_PARAMS
from teacher_service import teaching
from tiny_models import tiny_tokenizer

from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.config import Params, parse_params, read_yaml, set_key
from rlhf_core.data.schema import write_rows
from rlhf_core.models.tokenizer import encode_prompt
from rlhf_core.stage.job import Job, forget_refusal, refusal_of, refuse
from rlhf_core.stage.run import TAIL, StageRefused
from rlhf_core.stage.setup import rl_setup
from rlhf_core.storage.work import REFUSED
from rlhf_core.trainers.rl.job import PLACEMENT, RlJob
from rlhf_core.trainers.rl.submit import check_rewards, check_teachers, describe_job, final_figures, rl_job

ROOT = Path(__file__).parents[4]
PASSED = {"passed": True, "message": "passed: it is good."}
ON_CPUS = {"gpus": 0, "per_rank": 0.0, "per_engine": 0.0, "weight_transfer": ["gloo", "gloo"], "take_turns": False, "dispatch": "equal"}
REJECTED = {"passed": False, "message": "rejected: too few pairs.", "override": None}


def params(*scorers: dict, **changes) -> Params:
    tree = read_yaml(CLERK_PARAMS)
    if scorers:
        tree["rl"]["reward"]["scorers"] = [{"name": s["kind"], "weight": 1.0, "normalization": "none", **s} for s in scorers]
    for key, value in changes.items():
        set_key(tree, key.replace("__", "."), value)
    return parse_params(tree)


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    """Prompts without labels, demonstrations, and a reward model."""
    monkeypatch.chdir(tmp_path)
    prepared = tmp_path / "data/prepared"
    row = {"id": "1", "source": "mine", "split": "train", "messages": [{"role": "user", "content": "2 + 2?"}]}
    write_rows(prepared, "prompt", [row | {"label": None}])
    write_rows(prepared, "sft", [row | {"response": "4"}])
    (prepared / "sources.json").write_text(json.dumps({"mine": {"kind": "clerk", "judge": "clerk"}}))
    (tmp_path / "models/reward").mkdir(parents=True)
    (tmp_path / "models/reward/config.json").write_text("{}")
    (tmp_path / "models/reward/chat_template.jinja").write_text("{{ messages[0].content }}")
    return tmp_path


def test_the_chains_own_reward_model_must_have_passed_its_gate(workspace):
    assert check_rewards(params().rl, PASSED) is None
    assert check_rewards(params().rl, REJECTED | {"override": "to see what happens"}) == "to see what happens"
    with pytest.raises(StageRefused, match=r"expected one that passed the gate, got one that didn't; rejected: too few pairs\."):
        check_rewards(params().rl, REJECTED)
    with pytest.raises(StageRefused, match="passed the gate"):  # the critic would start from it
        check_rewards(params({"kind": "judge"}).rl, REJECTED)


def test_a_run_that_uses_no_own_reward_model_needs_no_gate(workspace):
    check_rewards(params({"kind": "judge"}, rl__ppo__critic_init="sft").rl, REJECTED)
    check_rewards(params({"kind": "judge"}, rl__algorithm="grpo").rl, REJECTED)
    check_rewards(params({"kind": "reward_model", "path": "models/reward"}, rl__algorithm="grpo").rl, REJECTED)


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (
            {"kind": "reward_model", "path": "elsewhere"},
            "scorer reward_model: expected a reward model's folder, got no config.json at elsewhere",
        ),
        (
            {"kind": "function", "path": "mine.py:score"},
            "scorer function mine.py:score: expected an importable module, got FileNotFoundError",
        ),
        ({"kind": "number"}, "scorers ['number']: expected prompts with labels, got none with one"),
    ],
)
def test_missing_scorer_inputs_are_named_before_the_start(workspace, scorer, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_rewards(params(scorer).rl, PASSED)


def test_one_label_is_enough(workspace):
    row = {"source": "mine", "split": "train", "messages": [{"role": "user", "content": "2 + 2?"}]}
    write_rows(workspace / "data/prepared", "prompt", [row | {"id": "1", "label": None}, row | {"id": "2", "label": "4"}])
    check_rewards(params({"kind": "number"}).rl, PASSED)


def test_demonstrations_in_the_update_need_some(workspace):
    check_rewards(params(rl__ptx__coef=0.1).rl, PASSED)
    row = {"id": "1", "source": "mine", "split": "test", "messages": [{"role": "user", "content": "2 + 2?"}], "response": "4"}
    write_rows(workspace / "data/prepared", "sft", [row])  # none to train on
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rl\.ptx\.coef: expected 0 without demonstrations, got 0\.1"):
            check_rewards(params(rl__ptx__coef=0.1).rl, PASSED)
        (workspace / "data/prepared/sft.parquet").unlink(missing_ok=True)


def test_the_stage_repeats_the_drivers_refusal(workspace):
    """The stage's last line goes into the flow's state and the page of a stopped chain, where there is no log above it."""
    given = workspace
    assert refusal_of(given) == "expected to be able to train, got a refusal in its output; change what that names"
    assert (
        refuse(given, ValueError("scorer function mine.py:score: expected an importable module,\n got KeyError ('TABLE'); name it"))
        == REFUSED
    )
    assert refusal_of(given) == "scorer function mine.py:score: expected an importable module, got KeyError ('TABLE'); name it"
    forget_refusal(given)
    assert "a refusal in its output" in refusal_of(given)


def job(workspace: Path, given: Params) -> RlJob:
    (workspace / "scratch").mkdir(exist_ok=True)
    frame = {"fingerprint": "0" * 64, "scratch": workspace / "scratch", "store_settings": lambda **how: StoreSettings(**how)}
    return describe_job(SimpleNamespace(params=given, **frame), workspace / "out")


def test_the_job_gets_judges_whose_files_are_absolute_and_where_sft_trains(workspace):
    judges = {"rule": "rewards/stories.py:kind", "package": "package.module:kind", "clerk": "clerk", "none": None}
    sources = {name: {"kind": "file", "judge": judge} for name, judge in judges.items()}
    (workspace / "data/prepared/sources.json").write_text(json.dumps(sources))
    made = job(workspace, params(sft__train_on_thoughts=False, sft__train_on="all_turns"))
    assert made.source_judges == {"rule": f"{workspace}/rewards/stories.py:kind", "package": "package.module:kind", "clerk": "clerk"}
    assert (made.train_on, made.train_on_thoughts) == ("all_turns", False)


def test_the_job_gets_absolute_folders_of_the_models_it_uses(workspace):
    own = job(workspace, params())
    assert own.reward_model == str(workspace / "models/reward") and own.scorer_models == {"reward_model": own.reward_model}
    others = job(
        workspace,
        params(
            {"kind": "reward_model", "name": "other", "path": "elsewhere"},
            {"kind": "function", "path": "rewards/mine.py:score"},
            {"kind": "function", "name": "module", "path": "package.module:score"},
            {"kind": "llm_judge", "name": "helpful", "url": "http://a/v1", "model": "m", "template": "rewards/judge.txt"},
            rl__algorithm="grpo",
            rl__environment={"path": "agents/notebook.py:play"},
        ),
    )
    assert others.rl.environment.path == f"{workspace}/agents/notebook.py:play"
    assert others.reward_model is None and others.scorer_models == {"other": str(workspace / "elsewhere")}
    assert [s.path for s in others.rl.reward.scorers[:3]] == ["elsewhere", f"{workspace}/rewards/mine.py:score", "package.module:score"]
    assert others.rl.reward.scorers[3].template == f"{workspace}/rewards/judge.txt"
    described = rl_job(others, params(), root=workspace, work=workspace / "scratch")
    described.write(workspace / "job.pkl")
    assert Job.read(workspace / "job.pkl") == described and described.arguments == (others,)


def test_the_job_has_the_steps_that_the_epochs_over_its_prompts_make(workspace, sft_folder, caplog):
    """65 of 66 prompts leave room for a response; of 4 each step has 2 prompts, and 1.5 epochs begin a 49th batch."""
    caplog.set_level("INFO", "rlhf")
    texts = ["Please sort 4172. " * 30, *["2 + 2?"] * 65]
    message = {"source": "mine", "split": "train", "label": None}
    rows = [{**message, "id": str(i), "messages": [{"role": "user", "content": text}]} for i, text in enumerate(texts)]
    write_rows(workspace / "data/prepared", "prompt", [*rows, {**rows[1], "id": "x", "split": "test"}])
    (workspace / "models/sft").symlink_to(sft_folder)
    short = {"rl__epochs": 1.5, "rl__steps": None, "rl__samples_per_step": 8, "rl__minibatch_size": 8, "rl__algorithm": "rloo"}
    assert job(workspace, params(**short)).rl.steps == 49
    assert "rl: 49 steps of 2 prompts, 1.5 epochs of 65 prompts" in caplog.text
    assert job(workspace, params(**short | {"rl__steps": 7})).rl.steps == 7
    assert "rl: rl.steps 7 replaces rl.epochs; passes over each rollout batch are rl.ppo_epochs 1" in caplog.text
    with pytest.raises(ValueError, match=r"rl\.kl\.refresh_reference_every: expected less than steps=49, got 49"):
        job(workspace, params(**short, rl__kl__refresh_reference_every=49))
    with pytest.raises(ValueError, match=r"rl\.steps: expected the number of steps of rl\.epochs, got null"):
        RlJob(**{**dict(job(workspace, params())), "rl": params(**short).rl})


def test_final_figures_are_means_over_the_last_steps_of_every_scorer_too(tmp_path):
    given = params({"kind": "judge"}, {"kind": "length", "target_length": 5}, rl__algorithm="grpo")
    steps = 3 * TAIL
    rows = pd.DataFrame({"step": range(1, steps + 1)})
    for name in ("kl_mean", "response_length", "entropy", "truncated_fraction", "score_length"):
        rows[name] = 1.5
    rows["score_mean"] = [100.0] * 2 * TAIL + [2.0, 4.0] * (TAIL // 2)
    rows["score_judge"] = [100.0] * 2 * TAIL + [0.25, 0.75] * (TAIL // 2)
    rows["logprob_difference"] = [3e-6] + [1e-6] * (steps - 1)
    rows.to_csv(tmp_path / "curves.csv", index=False)
    monitor = {"stopped": None, "warnings": [], "chosen_step": steps}
    (tmp_path / "monitor.json").write_text(json.dumps(monitor))
    (tmp_path / PLACEMENT).write_text(json.dumps(ON_CPUS))
    figures = final_figures(tmp_path, given.rl)
    assert figures["monitor"] == monitor
    assert (figures["score_mean"], figures["score_judge"], figures["score_length"]) == (3.0, 0.5, 1.5)
    assert (figures["score_first_step"], figures["logprob_difference_max"], figures["steps"]) == (100.0, 3e-6, steps)
    assert "best_step" not in figures
    (tmp_path / "best.json").write_text(json.dumps({"step": 20, "metric": "judge", "value": 0.8}))
    best = final_figures(
        tmp_path, params(rl__evaluation__every=10, rl__evaluation__keep_best=True).rl.model_copy(update={"reward": given.rl.reward})
    )
    assert (best["best_step"], best["best_metric"], best["best_value"]) == (20, "judge", 0.8)


TAUGHT = {
    **{"rl__algorithm": "grpo", "rl__kl__placement": "loss", "rl__kl__estimator": "k3", "rl__reward__scorers": []},
    **{"rl__distillation": {"teachers": [{"path": "teacher"}, {"path": "models/sft"}], "loss": "sampled"}},
}


def test_the_job_gets_the_folders_of_its_teachers_and_other_tokens_are_refused_before_it(workspace, sft_folder, tokenizer):
    shutil.copytree(sft_folder, workspace / "models/sft", dirs_exist_ok=True)
    shutil.copytree(sft_folder, workspace / "teacher")
    given = params(**TAUGHT)
    assert [Path(folder).resolve() for folder in job(workspace, given).teacher_models] == [workspace / "teacher", workspace / "models/sft"]
    check_teachers(given)
    tiny_tokenizer(vocab_size=310).save_pretrained(workspace / "teacher")
    with pytest.raises(ValueError, match=r"rl\.distillation\.teachers\.0\.path: expected the tokens of models/sft"):
        check_teachers(given)


def test_what_teachers_cannot_do_is_refused_before_the_job(workspace, sft_folder, tokenizer):
    """A label that prompts lack, more tokens than there are, and an address at which nothing, or another model, answers."""
    shutil.copytree(sft_folder, workspace / "models/sft", dirs_exist_ok=True)
    own = {"teachers": [{"path": "models/sft"}]}
    for further, message in (
        (
            {"teacher_template": "{prompt} {label}"},
            "teacher_template: expected a label of every training prompt, got none of 1 of source mine",
        ),
        ({"top_k": len(tokenizer)}, f"top_k: expected less than the {len(tokenizer)} tokens there are, got {len(tokenizer)}"),
    ):
        with pytest.raises(ValueError, match=f"rl.distillation.{message}"):
            check_teachers(params(**TAUGHT | {"rl__distillation": own | further}))
    with teaching(sft_folder, tokenizer) as teacher:
        at_an_address = TAUGHT | {"rl__rollout__temperature": 1.0}
        given = params(**at_an_address | {"rl__distillation": {"teachers": [{"service": teacher.service}], "loss": "sampled"}})
        assert job(workspace, given).teacher_models == []
        check_teachers(given)
        prompt = tokenizer.decode(encode_prompt(tokenizer, [{"role": "user", "content": "2 + 2?"}]))
        assert prompt in [asked["prompt"] for asked in teacher.requests]
        teacher.tokenizer = tiny_tokenizer(vocab_size=290)
        with pytest.raises(ValueError, match=r"rl\.distillation\.teachers\.0\.service: .*another tokenizer"):
            check_teachers(given)
    with pytest.raises(
        ValueError, match=r"rl\.distillation\.teachers\.0\.service: expected a model at http://127.0.0.1:\d+/v1 that returns"
    ):
        check_teachers(given)


def test_final_figures_without_a_reward_are_those_of_the_distillation(tmp_path):
    rows = pd.DataFrame({"step": range(1, 4), "distillation_loss": [0.5, 0.3, 0.1], "logprob_difference": 1e-6, "score_mean": None})
    for name in ("kl_mean", "response_length", "entropy", "truncated_fraction"):
        rows[name] = 1.5
    rows.to_csv(tmp_path / "curves.csv", index=False)
    (tmp_path / "monitor.json").write_text(json.dumps({"stopped": None, "warnings": [], "chosen_step": 3}))
    (tmp_path / PLACEMENT).write_text(json.dumps(ON_CPUS))
    figures = final_figures(tmp_path, params(**TAUGHT).rl.model_copy(update={"steps": 3}))
    assert (figures["algorithm"], figures["distillation_loss_first_step"], figures["distillation_loss"]) == ("distillation", 0.5, 0.1)
    assert not {"score_mean", "score_first_step"} & figures.keys() and not any(value != value for value in figures.values())


def test_the_setup_says_how_a_policy_was_trained():
    two = params(
        rl__placement="two_groups",
        rl__trainer__ranks=2,
        rl__trainer__zero_stage=2,
        rl__lora={"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": ["q_proj"]},
    )
    setup = rl_setup(two.rl, ON_CPUS)
    assert setup["groups"] == [
        {"roles": ["policy", "reference"], "ranks": 2},
        {"roles": ["critic", "reward_models"], "ranks": 2},
    ]
    assert (setup["ranks"], setup["zero_stage"], setup["engines"], setup["backend"]) == (4, 2, 2, "vllm")
    assert (setup["weight_transfer"], setup["gpus"], setup["lora"]["rank"]) == (["gloo", "gloo"], None, 4)
    assert (setup["take_turns"], setup["dispatch"]) == (False, "equal")
    shared = {"gpus": 4, "per_rank": 0.6, "per_engine": 0.4, "weight_transfer": ["ipc", "nccl"], "take_turns": True, "dispatch": "dynamic"}
    on_gpus = rl_setup(two.rl, shared)
    assert (on_gpus["weight_transfer"], on_gpus["gpus"]) == (["ipc", "nccl"], {"in_cluster": 4, "per_rank": 0.6, "per_engine": 0.4})


def test_the_end_of_a_short_run_is_its_last_third(tmp_path, caplog):
    given = params(rl__algorithm="grpo")
    rows = pd.DataFrame({"step": range(1, 11)})
    for name in ("kl_mean", "response_length", "entropy", "truncated_fraction", "score_reward_model", "logprob_difference"):
        rows[name] = 1.0
    rows["score_mean"] = [float(step) for step in range(1, 11)]
    rows.to_csv(tmp_path / "curves.csv", index=False)
    (tmp_path / "monitor.json").write_text('{"stopped": null}')
    (tmp_path / PLACEMENT).write_text(json.dumps(ON_CPUS))
    figures = final_figures(tmp_path, given.rl)
    assert (figures["score_mean"], figures["averaged_steps"]) == (8.5, 4)  # (7 + 8 + 9 + 10) / 4; a third of 10, rounded up
    assert (figures["steps"], figures["planned_steps"], figures["ended_by"]) == (10, 60, "max_minutes")
    assert "rl: max_minutes ended the training after step 10 of 60, at 17% of the learning rate's schedule" in caplog.text
    assert "ended_by" not in final_figures(tmp_path, given.rl.model_copy(update={"steps": 10}))
    (tmp_path / "monitor.json").write_text('{"stopped": {"limit": "kl"}}')
    assert "ended_by" not in final_figures(tmp_path, given.rl)


def test_output_that_nobody_reads_any_more_does_not_end_the_stage():
    """As where the flow was killed: the job's checkpoint is still to come."""
    reported = "from rlhf_core.stage.ray_job import print_output; [print_output(f'rl {k}\\n') for k in range(3)]; raise SystemExit(7)"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-c", reported], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (7, "")
