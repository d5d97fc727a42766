"""Credentials in params, recipes and overrides: refused without being repeated, and nothing that only resembles one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from flows.chain.overrides import check
from flows.full_pipeline import main
from rlhf_core.config import ConfigError, apply_overrides, credential_in, load_params

DEFAULT = Path(__file__).parents[3] / "params.yaml"
# Put together here, so that no scanner takes this file for a leak.
LETTERS = "abcdefghij0123456789ABCDEFGHIJ"
SECRETS = {
    "cluster.address": "http://user:" + "hunter2@head:8265",
    "model.path": "https://" + LETTERS + "@huggingface.co/org/model",
    "tracking.wandb_project": "hf" + "_" + LETTERS,
    "report.title": "sk" + "-proj-" + LETTERS,
    "gate.override": "the key is AKIA" + "ABCDEFGH01234567, by the way",
    "tracking.tensorboard_dir": "s3://key:" + "secret@bucket/logs",
    "data.sources": [{"name": "x", "kind": "file", "path": "https://host/f?sig=" + LETTERS, "uses": ["sft"], "weight": 1.0}],
    "rl.rollout.stop": ["gh" + "p_" + LETTERS],
    "model.template_options": {"note": "-----BEGIN OPENSSH " + "PRIVATE KEY-----\nMII"},
    "rl.prompt_weights": {"gh" + "p_" + LETTERS: 1.0},
}
HARMLESS = [
    *("http://head:8265", "../shared/hf_models/llama", "sk-learn", "task-1", "org/model", "s3://bucket/data@v1/train.jsonl"),
    *("ssh://git@host/repository", "https://host/page?key=short", "user@example.org", "a reason: the risk-averse judge was wrong"),
    *("org/sk-wikipedia-preference-pairs-2024", "data/sk-SK/sk-instructions-translated-v2.jsonl"),
    *("0" * 40, "hf_rlhf", "git@github.com:org/name.git", "http://host/a@b:c"),
]


@pytest.mark.parametrize("key", SECRETS)
def test_a_credential_is_refused_by_its_key_and_not_repeated(tmp_path, key):
    path = tmp_path / "params.yaml"
    path.write_bytes(DEFAULT.read_bytes())
    value = SECRETS[key]
    for refuse in (check, apply_overrides):
        with pytest.raises(ConfigError, match=r"expected no credential, got .*docs/security.md") as error:
            refuse(path, {key: value})
        assert key.split(".")[0] in str(error.value)
        assert not any(word in str(error.value) for word in ("hunter2", LETTERS, "ABCDEFGH01234567", "secret@", "MII"))
    assert path.read_bytes() == DEFAULT.read_bytes()


def test_a_credential_in_the_file_itself_is_refused(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(DEFAULT.read_text().replace("address: null", f"address: {json.dumps(SECRETS['cluster.address'])}"))
    with pytest.raises(ConfigError, match=r"params.yaml: cluster.address: expected no credential, got a password in an address"):
        load_params(path)


def test_the_command_line_refuses_it_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_bytes(DEFAULT.read_bytes())
    assert main(["--set", f"cluster.address={SECRETS['cluster.address']}"]) == 2
    message = capsys.readouterr().err
    assert "cluster.address: expected no credential" in message and "hunter2" not in message
    assert [p.name for p in tmp_path.iterdir()] == ["params.yaml"]


@pytest.mark.parametrize("key", ["0123456789abcdef" * 2, "ant-api03-aB3_" + LETTERS + "-x", "or-v1-" + "0a1b2c3d" * 8, LETTERS + LETTERS])
def test_keys_of_each_vendors_form_are_seen(key):
    assert credential_in(f"the key is sk-{key}.") == "a key of OpenAI's or Anthropic's form"


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_resembles_one_is_taken(text):
    assert credential_in(text) is None


@pytest.mark.parametrize("part", ["x", "sk-", "a-", "-eyJ", "a://", "x://a:", "http://", "?key=", "-----BEGIN "])
def test_a_long_word_takes_no_long_time(part):
    started = time.process_time()
    credential_in(part * (100_000 // len(part)))
    assert time.process_time() - started < 5
