"""Which environment variables a stage sees, and what it says of those that it doesn't."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS

from flows.chain.stages import dvc_environment, stage_environment
from rlhf_core import environment as rules
from rlhf_core.config import ConfigError, Params, ScorerConfig, load_params, parse_params, read_yaml, set_key
from rlhf_core.data.functions import load_function
from rlhf_core.scorers.text import ScoreItem, TextScorers

ROOT = Path(__file__).parents[2]
SECRETS = {
    *("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "GITHUB_TOKEN", "OPENAI_API_KEY", "DATABASE_URL", "MY_VARIABLE", "SSH_AUTH_SOCK"),
    *("HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY", "RAY_AUTH_TOKEN", "RAY_REDIS_PASSWORD", "DVC_STUDIO_TOKEN", "SLURM_JWT"),
    *("PREFECT_API_AUTH_STRING", "PREFECT_API_URL", "GIT_DIR", "VIRTUAL_ENV"),
}
SETTINGS = {
    *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "HF_HOME"),
    *("HF_HUB_CACHE", "HF_HUB_OFFLINE", "PYTHONHASHSEED", "VLLM_CPU_KVCACHE_SPACE", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"),
    *("http_proxy", "HTTPS_PROXY", "XDG_CACHE_HOME", "SLURM_JOB_ID", "WANDB_MODE", "TOKENIZERS_PARALLELISM", "TRITON_CACHE_DIR"),
    *("LD_LIBRARY_PATH", "TORCHINDUCTOR_CACHE_DIR", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "RAYON_NUM_THREADS", "NVCC_APPEND_FLAGS", "CUDACXX"),
}


def params(**changes) -> Params:
    tree = read_yaml(CLERK_PARAMS)
    for key, value in changes.items():
        set_key(tree, key.replace("__", "."), value)
    return parse_params(tree)


@pytest.fixture
def shell(monkeypatch) -> None:
    """A user's, with settings and secrets."""
    for name in (SECRETS | SETTINGS) - {"PATH", "HOME"}:
        monkeypatch.setenv(name, f"value-of-{name}")


@pytest.fixture
def workspace(tmp_path) -> Path:
    (tmp_path / "params.yaml").write_text(CLERK_PARAMS.read_text())
    return tmp_path


def test_a_stage_sees_settings_and_no_secrets(shell, workspace):
    seen = stage_environment(workspace)
    assert seen.keys() & SECRETS == set() and not any(f"value-of-{name}" in seen.values() for name in SECRETS)
    assert seen.keys() >= SETTINGS and seen["NCCL_DEBUG"] == "value-of-NCCL_DEBUG"


def test_a_stage_sees_variables_that_the_user_has_set():
    """`setdefault` of a variable that was taken out would overwrite it."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "rlhf_core").rglob("*.py"))
    named = set(re.findall(r"environ\.setdefault\(\s*\"(\w+)\"", code))
    assert "DASHBOARD_METRIC_PORT" in named and [name for name in named if not rules.is_listed(name)] == []


def test_dvc_itself_sees_the_credentials_of_its_remotes_and_not_prefects(shell, workspace):
    seen = dvc_environment(workspace)
    assert seen["AWS_SECRET_ACCESS_KEY"] == "value-of-AWS_SECRET_ACCESS_KEY"
    assert not {"PREFECT_API_AUTH_STRING", "PREFECT_API_URL"} & seen.keys()


def test_a_run_sees_its_own_code_and_not_its_checkouts(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([f"{tmp_path}/runs/..", "/elsewhere"]))
    for folder, seen in ((tmp_path / "runs/mine", ["/elsewhere"]), (tmp_path, [f"{tmp_path}/runs/..", "/elsewhere"])):
        folder.mkdir(parents=True, exist_ok=True)
        assert dvc_environment(folder)["PYTHONPATH"].split(os.pathsep) == [str(folder), *seen]


def test_what_params_name_is_seen(shell, workspace):
    named = CLERK_PARAMS.read_text().replace("  environment: []", "  environment: [OPENAI_API_KEY, MY_VARIABLE]")
    (workspace / "params.yaml").write_text(named)
    assert load_params(workspace / "params.yaml").flow.environment == ["OPENAI_API_KEY", "MY_VARIABLE"]
    assert stage_environment(workspace).keys() & SECRETS == {"OPENAI_API_KEY", "MY_VARIABLE"}


def test_the_key_of_a_service_is_seen_where_it_scores(shell):
    def service(name: str) -> dict:
        return {"name": "judge", "kind": "http", "url": "http://judge/", "api_key_env": name}

    of_rl = params(rl__reward__scorers=[service("OPENAI_API_KEY")], flow__environment=["MY_VARIABLE"])
    assert of_rl.environment == ["MY_VARIABLE", "OPENAI_API_KEY"] and "OPENAI_API_KEY" in rules.of_stage(of_rl, "evaluate", {})
    unused = params(rejection_sampling__scorers=[service("DATABASE_URL")], iterative__scorers=[service("GITHUB_TOKEN")])
    assert unused.environment == ["GITHUB_TOKEN"], "a series of rounds may follow; rejection sampling isn't the method"


@pytest.mark.parametrize("name", ["", "A B", "A=1", "sk-123", "1A", "A,B"])
def test_a_name_that_can_be_none_of_a_variable_is_refused(name):
    with pytest.raises(ConfigError, match=r"flow.environment.0"):
        params(flow__environment=[name])


@pytest.mark.parametrize(
    ("changes", "online", "names"),
    [
        ({}, "0", {}),
        ({"tracking__wandb_project": "p"}, "1", {}),
        ({"model__path": "org/model"}, "0", {"HF_TOKEN": rules.MODEL_READERS}),
        ({"model__path": "org/model"}, "1", {}),
        ({"model__path": str(ROOT)}, "0", {}),
        ({"cluster__address": "http://head:8265"}, "1", {"RAY_AUTH_TOKEN": rules.TRAINING}),
        (
            {"cluster__address": "http://head:8265", "cluster__inference_ranks": 2},
            "1",
            {"RAY_AUTH_TOKEN": rules.TRAINING + rules.INFERENCE_STAGES},
        ),
    ],
)
def test_a_key_is_seen_by_the_stages_that_use_it(changes, online, names):
    stages = ["prepare_data", "check_model", "train_sft", "gate_reward", "train_policy", "evaluate", "rounds/dvc.yaml:train_round@2", None]
    for stage in stages:
        seen = rules.of_stage(params(**changes), stage, {"HF_HUB_OFFLINE": online}) - {"HUGGING_FACE_HUB_TOKEN"}
        plain = (stage and stage.partition(":")[2].partition("@")[0]) or stage
        assert seen == {name for name, users in names.items() if plain is None or plain in users}, stage


def test_the_rest_leaves_the_process_and_its_name_is_kept_for_hints():
    environment = {"PATH": "/bin", "OPENAI_API_KEY": "a", "MINE": "b", "HF_TOKEN": "c", rules.WITHHELD: "EARLIER,MINE"}
    rules.keep_visible({"MINE"}, named=["MINE"], environment=environment)
    assert environment == {"PATH": "/bin", "MINE": "b", rules.NAMED: "MINE", rules.WITHHELD: "EARLIER,HF_TOKEN,OPENAI_API_KEY"}


REWARD = """\
import os
def needs_key(prompts, responses, labels, metadata):
    os.environ["THEIR_API_KEY"]
def says_so(prompts, responses, labels, metadata):
    raise RuntimeError("set THEIR_API_KEY to use this client")
def other(prompts, responses, labels, metadata):
    {}["colour"]
"""


@pytest.mark.parametrize(("name", "hinted"), [("needs_key", True), ("says_so", True), ("other", False)])
def test_a_scorer_without_its_variable_gets_a_hint(tmp_path, monkeypatch, caplog, name, hinted):
    monkeypatch.setenv(rules.WITHHELD, "OTHER,THEIR_API_KEY")
    (tmp_path / "mine.py").write_text(REWARD)
    config = ScorerConfig(name="f", kind="function", weight=1.0, normalization="none", path=f"{tmp_path}/mine.py:{name}")
    TextScorers(0, [config], {}).score_items("f", [ScoreItem("q", [], "r", None, {"id": "1", "source": "s"})])
    assert (
        "THEIR_API_KEY is set in the shell but hidden from stages: if this code may read it, name it in flow.environment" in caplog.text
    ) == hinted


def test_a_module_without_its_variable_gets_a_hint(tmp_path, monkeypatch):
    monkeypatch.setenv(rules.WITHHELD, "THEIR_API_KEY")
    (tmp_path / "early.py").write_text("import os\nKEY = os.environ['THEIR_API_KEY']\ndef score(): pass\n")
    with pytest.raises(ValueError, match=r"KeyError \('THEIR_API_KEY'\); THEIR_API_KEY is set in the shell.*flow.environment"):
        load_function(f"{tmp_path}/early.py:score", (), what="scorer function")
