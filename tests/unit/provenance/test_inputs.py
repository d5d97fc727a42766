"""What a run reads and DVC can't see: its hashes, when they are computed anew, and what is said of a change."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from clerk_params import CLERK_PARAMS
from tiny_models import save_tiny_models, tiny_tokenizer

from rlhf_core.config import Params, parse_params, read_yaml
from rlhf_core.data import places
from rlhf_core.provenance import file_hashes
from rlhf_core.provenance.dvc_cache import sha256_of_files
from rlhf_core.provenance.file_hashes import FileHashes, dvc_md5
from rlhf_core.provenance.inputs import changes_since, input_problems, read_inputs, summary

ROOT = Path(__file__).parents[3]
LONG_AGO = (1_700_000_000, 1_700_000_000)


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def project(tmp_path) -> Path:
    folder = tmp_path / "project"
    (folder / ".dvc").mkdir(parents=True)
    return folder


def params(*sources: dict, **model) -> Params:
    tree = read_yaml(CLERK_PARAMS)
    usual = {"name": "mine", "kind": "file", "format": "prompt", "uses": ["prompt"], "weight": 1.0}
    tree["data"]["sources"] = [*tree["data"]["sources"], *({**usual, **source} for source in sources)]
    tree["model"] |= model
    return parse_params(tree)


def old(path: Path, text: str) -> Path:
    """A file that was written long ago, as far as its times can be set."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, LONG_AGO)
    return path


class Digests:
    """How often a file was read for its hash; the hash is the real one."""

    def __init__(self, monkeypatch):
        self.count, real = 0, file_hashes.hashlib.file_digest

        def counted(file, name):
            self.count += 1
            return real(file, name)

        monkeypatch.setattr(file_hashes.hashlib, "file_digest", counted)


def hash_of(project: Path, path: Path) -> str:
    hashes = FileHashes(project)
    found = hashes.of_file(path)
    hashes.keep()
    return found.sha256


def test_a_file_is_hashed_once_and_again_where_it_looks_otherwise(project, monkeypatch):
    monkeypatch.setattr(file_hashes, "RACY_NS", 0)  # or the test waits two seconds for the time of its change to be over
    digests, path = Digests(monkeypatch), old(project.parent / "rows.jsonl", "one")
    first = hash_of(project, path)
    assert hash_of(project, path) == first and digests.count == 1
    os.utime(path)  # touched
    assert hash_of(project, path) == first and digests.count == 2
    old(path, "two")  # of the same size, with the same time of change as at first
    assert hash_of(project, path) != first and digests.count == 3
    other = old(project.parent / "other.jsonl", "six")
    other.replace(path)
    assert hash_of(project, path) != first and digests.count == 4


def md5s_of(project: Path, *paths: Path) -> list[str]:
    hashes = FileHashes(project)
    found = hashes.md5s(paths)
    hashes.keep()
    return found


def test_a_large_input_of_stages_is_read_once_and_a_small_one_each_time(project, monkeypatch):
    monkeypatch.setattr(file_hashes, "RACY_NS", 0)
    digests, content = Digests(monkeypatch), "x" * file_hashes.SMALL
    large, small = old(project / "model.safetensors", content), old(project / "rows.jsonl", "one")
    expected = [hashlib.md5(content.encode()).hexdigest(), hashlib.md5(b"one").hexdigest()]
    assert md5s_of(project, large, small) == expected and digests.count == 2
    assert md5s_of(project, large, small) == expected and digests.count == 3
    old(large, "y" * file_hashes.SMALL)
    assert md5s_of(project, large)[0] == hashlib.md5(b"y" * file_hashes.SMALL).hexdigest() and digests.count == 4


def test_hashes_by_two_algorithms_are_cached_together_while_the_file_stays(project, monkeypatch):
    monkeypatch.setattr(file_hashes, "RACY_NS", 0)
    digests, path = Digests(monkeypatch), old(project / "model.safetensors", "x" * file_hashes.SMALL)
    both = hash_of(project, path), *md5s_of(project, path)
    assert digests.count == 2
    assert (hash_of(project, path), *md5s_of(project, path)) == both and digests.count == 2
    old(path, "y" * file_hashes.SMALL)
    assert md5s_of(project, path) != [both[1]] and hash_of(project, path) != both[0] and digests.count == 4


def test_a_forged_cache_changes_no_hash_that_decides_about_a_model(project, monkeypatch):
    """The registry, the gate's check for rolled back models and the pins of rounds use these functions."""
    monkeypatch.setattr(file_hashes, "RACY_NS", 0)
    folder = project / "models/reward"
    path = old(folder / "model.safetensors", "x" * file_hashes.SMALL)
    (true,), md5, sha256 = md5s_of(project, path), dvc_md5(folder), sha256_of_files(folder)
    memory = project / ".dvc/tmp/input_hashes.json"
    memory.write_text(memory.read_text().replace(true, "0" * 32))
    assert md5s_of(project, path) == ["0" * 32]
    assert dvc_md5(folder) == md5 and sha256_of_files(folder) == sha256


def test_what_was_written_just_now_is_never_trusted(project, monkeypatch):
    digests, path = Digests(monkeypatch), project.parent / "rows.jsonl"
    path.write_text("one")
    now = path.stat()
    first = hash_of(project, path)
    path.write_text("two")
    os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns))
    assert hash_of(project, path) != first and digests.count == 2
    future = time.time() + 1000
    os.utime(path, (future, future))  # a server's clock may be ahead
    assert hash_of(project, path) == hash_of(project, path) and digests.count == 4


def test_a_file_that_is_being_written_is_refused(project, monkeypatch):
    path, real = old(project.parent / "rows.jsonl", "one"), file_hashes.hashlib.file_digest

    def grows(file, name):
        with path.open("a") as more:
            more.write("more")
        return real(file, name)

    monkeypatch.setattr(file_hashes.hashlib, "file_digest", grows)
    with pytest.raises(ValueError, match=r"rows.jsonl: expected a file that doesn't change during reading, got one that does"):
        FileHashes(project).of_file(path)


def test_a_folder_is_the_list_of_its_files(project):
    folder = project.parent / "data"
    old(folder / "a.jsonl", "a")
    old(folder / "deep/b.jsonl", "b")
    given = params({"path": "../data"})

    def sha256() -> str:
        return read_inputs(given, project)["sources"]["data.sources.mine"]["sha256"]

    first = sha256()
    old(folder / ".git/index", "not data")
    old(folder / ".cache/huggingface/a.metadata", "when it was fetched")
    assert sha256() == first
    assert len({first, (old(folder / "c.jsonl", "c") and sha256()), ((folder / "c.jsonl").rename(folder / "d.jsonl") and sha256())}) == 3
    (folder / "d.jsonl").unlink()
    assert sha256() == first


def test_inputs_name_paths_as_params_do_and_come_out_the_same_in_a_worktree(project):
    old(project / "own/rows.jsonl", "{}")
    old(project.parent / "model/config.json", "{}")
    old(project / "rules/mine.py", "")
    old(project / "rewards/kept.py", "")
    given = params(
        {"path": "own/rows.jsonl", "judge": "rules/mine.py:rule"},
        {"name": "two", "path": "own", "judge": "rewards/kept.py:rule"},
        path="../model",
        chat_template="own/turns.jinja",
    )
    old(project / "own/turns.jinja", "{{ messages }}")
    found = read_inputs(given, project)
    assert found["sources"]["data.sources.mine"].keys() == {"path", "size", "sha256"}
    assert found["sources"]["data.sources.two"]["files"] == 2 and found["model"]["model.path"]["path"] == "../model"
    assert found["judges"].keys() == {"data.sources.mine.judge"}  # rewards/ is a dependency already
    assert found["chat_template"]["model.chat_template"]["path"] == "own/turns.jinja"
    assert str(project.parent) not in json.dumps(found) and summary(found).startswith("6 files, ")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "rules"], ["commit", "-qm", "rules"], ["worktree", "add", "-q", "runs/a"]):
        subprocess.run([*git, *command], cwd=project, check=True, capture_output=True)
    assert read_inputs(given, project / "runs/a") == found


def test_the_files_of_an_environment_are_inputs_with_what_they_import(project):
    old(project / "agents/play.py", "from agents.world import step\n")
    old(project / "agents/world.py", "step = 1\n")
    tree = read_yaml(CLERK_PARAMS)
    tree["rl"]["environment"] = {"tools": ["agents/play.py:ask", "json:loads"]}
    found = read_inputs(parse_params(tree), project)["environment"]
    assert list(found) == ["rl.environment.tools.0", "rl.environment.tools.0 imports agents/world.py"]
    tree["rl"]["environment"] = {"command": ["python", "agents/play.py", "agents/run.sh", "--fast"]}
    old(project / "agents/run.sh", "node agent.js\n")
    found = read_inputs(parse_params(tree), project)["environment"]
    first, second = "rl.environment.command.1", "rl.environment.command.2"
    assert set(found) == {first, second, f"{first} imports agents/world.py"}
    assert found[second]["path"] == "agents/run.sh"
    assert read_inputs(params(), project)["environment"] == {}


def test_a_service_is_recorded_by_its_address_and_another_address_is_no_changed_input(project):
    tree = read_yaml(CLERK_PARAMS)
    tree["rl"]["reward"]["scorers"] = [{"name": "tone", "kind": "http", "url": "http://one/"}]
    before = read_inputs(parse_params(tree), project)
    assert before["scorers"] == {"rl.reward.scorers.tone": {"address": "http://one/"}}
    assert summary(before) == "1 service without a hash"
    lock = project / "dvc.lock"
    lock.write_text(json.dumps({"stages": {"train_policy": {"params": {"data/inputs.json": {"scorers": before["scorers"]}}}}}))
    tree["rl"]["reward"]["scorers"][0]["url"] = "http://two/"
    assert changes_since(lock, read_inputs(parse_params(tree), project), project) == [], "DVC reports the change of params"


def test_the_gate_runs_again_for_what_a_judge_is_asked_with_and_for_nothing_else(project):
    """A rewarded judge's questions and template are inputs of the gate; its weight, budget and deadlines aren't, nor is a judge that only
    measures.
    """
    template = old(project.parent / "mine.txt", "Judge the tone.")
    judge = {"name": "tone", "kind": "llm_judge", "url": "http://one/v1", "model": "m", "template": "../mine.txt"}
    tree = read_yaml(CLERK_PARAMS)

    def found(**changes) -> dict:
        tree["rl"]["reward"]["scorers"] = [judge | changes, judge | {"name": "measured", "weight": 0.0}]
        return read_inputs(parse_params(tree), project)

    before = found()
    assert set(before["llm_judges"]) == {"rl.reward.scorers.tone", "rl.reward.scorers.tone.template"} < set(before["scorers"])
    for change in ({"weight": 2.0}, {"budget_tokens": 9}, {"timeout": 9.0}, {"concurrency": 2}):
        assert found(**change)["llm_judges"] == before["llm_judges"]
    for change in ({"model": "n"}, {"scale": [0, 5]}, {"mode": "pairwise"}, {"request": {"top_p": 1.0}}, {"max_answer_tokens": 9}):
        assert found(**change)["llm_judges"] != before["llm_judges"]
    lock = project / "dvc.lock"
    recorded = {"data/inputs.json": {"llm_judges": before["llm_judges"]}}
    lock.write_text(json.dumps({"stages": {"gate_reward": {"params": recorded}}}))
    assert changes_since(lock, found(), project) == []
    old(template, "Judge the facts.")
    (line,) = changes_since(lock, found(), project)
    assert line.startswith("rl.reward.scorers.tone.template: ../mine.txt changed") and "gate_reward" in line
    template.unlink()
    assert any(
        "scorers.tone.template: expected a file with the judge's instructions" in p for p in input_problems(parse_params(tree), project)
    )


def test_a_change_is_reported_with_sizes_and_hashes(project):
    folder = project.parent / "data"
    for name in ("a", "b"):
        old(folder / f"{name}.jsonl", name)
    single = old(project.parent / "one.csv", "1")
    given = params({"path": "../data"}, {"name": "single", "path": "../one.csv"})
    before = read_inputs(given, project)
    lock = project / "dvc.lock"
    recorded = {"data/inputs.json": {"sources": before["sources"], "model": None}}
    lock.write_text(json.dumps({"stages": {"prepare_data": {"params": recorded}, "report": {"cmd": "true"}}}))
    assert changes_since(lock, before, project) == []
    old(folder / "a.jsonl", "longer")
    (folder / "b.jsonl").unlink()
    old(single, "22")
    changed = changes_since(lock, read_inputs(given, project), project)
    assert [line.partition(" -> ")[0] for line in changed] == [
        "data.sources.mine: ../data/a.jsonl changed: 1 bytes, sha256 ca978112ca1b",
        "data.sources.mine: ../data/b.jsonl changed: 1 bytes, sha256 3e23e8160039",
        "data.sources.single: ../one.csv changed: 1 bytes, sha256 6b86b273ff34",
    ]
    assert changed[0].endswith("-> 6 bytes, sha256 73834addcec7; to run again: prepare_data and what depends on it")
    assert "-> nothing; to run again" in changed[1]


def lay_out_hub(home: Path, kind: str, name: str, commit: str, **files: str) -> Path:
    repository = home / "hub" / f"{kind}--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs/main").write_text(commit)
    for file, text in files.items():
        old(repository / "snapshots" / commit / file.replace("_", ".", 1), text)
    return repository


def test_a_model_of_the_hub_is_the_commit_that_the_cache_has(project, tmp_path):
    first, second = "a" * 40, "b" * 40
    lay_out_hub(tmp_path / "hub-home", "models", "some/name", first, config_json="{}", model_safetensors="w")
    assert read_inputs(params(path="some/name"), project)["model"] == {"model.path": {"name": "some/name", "commit": first}}
    lay_out_hub(tmp_path / "hub-home", "models", "some/name", second, config_json="{}", model_safetensors="w")
    assert read_inputs(params(path="some/name"), project)["model"]["model.path"]["commit"] == second
    assert read_inputs(params(path="some/name", revision=first), project)["model"]["model.path"]["commit"] == first
    assert places.model_snapshot("some/name", "v2") is None and places.model_snapshot("some/other", None) is None


def test_a_data_set_of_the_hub_is_what_the_library_would_read(project, tmp_path):
    cache = tmp_path / "hub-home/datasets/some___my_data"
    for commit, age in (("a" * 40, 10), ("b" * 40, 5)):
        info = old(cache / "default/0.0.0" / commit / "dataset_info.json", "{}")
        os.utime(info.parent, (time.time() - age,) * 2)
    source = {"kind": "huggingface", "path": "some/MyData"}
    assert read_inputs(params(source), project)["sources"]["data.sources.mine"] == {"name": "some/MyData", "commit": "b" * 40}
    assert places.cached_data_set("some/MyData", "b" * 40, None) == "b" * 40
    assert places.cached_data_set("some/MyData", "a" * 40, None) is None  # the library would give the newer one
    assert places.cached_data_set("some/MyData", None, "other") is None


def test_a_silent_hub_is_reported(project, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    code = "from rlhf_core.data.places import model_commit; model_commit('some/name', None)"
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([os.sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "OSError: some/name: expected the hub's answer, got " in done.stderr


def test_the_teachers_of_a_run_are_hashed_unless_the_chain_makes_them(project):
    for name in ("one", "two"):
        old(project / f"{name}/config.json", name)
    tree = read_yaml(CLERK_PARAMS)
    tree["rl"]["distillation"] = {"teachers": [{"path": "one"}, {"path": "./models/sft"}, {"path": "two"}], "loss": "sampled"}
    found = read_inputs(parse_params(tree), project)["teachers"]
    keys = [f"rl.distillation.teachers.{number}.path" for number in (0, 2)]
    assert {key: entry["path"] for key, entry in found.items()} == dict(zip(keys, ("one", "two"), strict=True))
    assert found[keys[0]]["sha256"] != found[keys[1]]["sha256"]
    old(project / "two/config.json", "two, trained further")
    again = read_inputs(parse_params(tree), project)["teachers"]
    assert again[keys[0]] == found[keys[0]] and again[keys[1]]["sha256"] != found[keys[1]]["sha256"]
    shutil.rmtree(project / "one")
    assert any(line.startswith(f"{keys[0]}: expected a folder") for line in input_problems(parse_params(tree), project))
    tree["alignment"]["method"] = "dpo"
    assert read_inputs(parse_params(tree), project)["teachers"] == {}


def test_models_that_take_the_place_of_trained_ones_are_hashed_with_the_base_of_adapters(project):
    for name in ("reward", "base"):
        old(project / f"{name}/config.json", name)
    old(project / "adapters/adapter_config.json", json.dumps({"base_model_name_or_path": "base"}))
    tree = read_yaml(CLERK_PARAMS)
    tree["reward"]["path"], tree["external"]["path"], tree["rl"]["ppo"]["critic_init"] = "reward", "adapters", "sft"
    assert read_inputs(parse_params(tree), project)["policy"] == {}  # another method
    tree["alignment"]["method"] = "external"
    found = read_inputs(parse_params(tree), project)
    assert found["reward"]["reward.path"] == {"path": "reward", "files": 1, "size": 6} | {
        "sha256": found["reward"]["reward.path"]["sha256"]
    }
    assert {key: entry["path"] for key, entry in found["policy"].items()} == {
        "external.path": "adapters",
        "the base model of external.path": "base",
    }
    tree["reward"]["path"] = "registry"
    assert read_inputs(parse_params(tree), project)["reward"] == {}  # pinned by the flow
    old(project / "adapters/adapter_config.json", json.dumps({"base_model_name_or_path": "base", "revision": "v2"}))
    assert any(
        "expected no revision in adapter_config.json with the local folder base, got v2" in line
        for line in input_problems(parse_params(tree), project)
    )
    old(project / "adapters/adapter_config.json", "{}")
    assert any(
        line.startswith("external.path: ") and "base_model_name_or_path" in line for line in input_problems(parse_params(tree), project)
    )


@pytest.fixture
def of_the_hub(project) -> Params:
    """Params of a policy that consists of adapters in the hub's cache, of a base model at a revision."""
    tree = read_yaml(CLERK_PARAMS)
    tree["alignment"]["method"], tree["external"]["path"] = "external", "some/adapters"
    return parse_params(tree)


def lay_out_adapters(home: Path, **settings: str) -> Path:
    named = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "some/base", **settings})
    repository = lay_out_hub(home, "models", "some/adapters", "c" * 40)
    old(repository / "snapshots" / ("c" * 40) / "adapter_config.json", named)
    return old(repository / "snapshots" / ("c" * 40) / "adapter_model.safetensors", "w").parent


def test_the_base_of_adapters_from_the_hub_is_an_input_at_the_revision_that_they_name(project, tmp_path, of_the_hub):
    home = tmp_path / "hub-home"
    lay_out_adapters(home, revision="v2")
    assert input_problems(of_the_hub, project) == [
        "the base model of external.path: expected a folder, or model some/base at revision v2 in the hub's cache, got neither; correct "
        "the path, or set HF_HUB_OFFLINE=0 to download it"
    ]
    base = lay_out_hub(home, "models", "some/base", "a" * 40)
    shutil.copytree(save_tiny_models(tmp_path / "made", tiny_tokenizer())[0], base / "snapshots" / ("b" * 40))
    (base / "refs/v2").write_text("b" * 40)
    assert input_problems(of_the_hub, project) == []
    assert read_inputs(of_the_hub, project)["policy"] == {
        "external.path": {"name": "some/adapters", "commit": "c" * 40},
        "the base model of external.path": {"name": "some/base", "commit": "b" * 40},
    }


def test_adapters_that_the_hub_has_are_fetched_to_learn_their_base(project, tmp_path, of_the_hub, monkeypatch):
    """Else the next run would find another input."""
    home = tmp_path / "hub-home"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(sha="c" * 40))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(lay_out_adapters(home)))
    assert input_problems(of_the_hub, project) == [] and not home.exists()
    assert read_inputs(of_the_hub, project)["policy"].keys() == {"external.path", "the base model of external.path"}


def test_adapters_in_place_of_a_whole_model_are_refused_before_a_run(project, tmp_path):
    lay_out_adapters(tmp_path / "hub-home")
    (problem,) = input_problems(params(path="some/adapters"), project)
    assert problem.startswith("model.path: ") and "expected a config.json, got none" in problem
