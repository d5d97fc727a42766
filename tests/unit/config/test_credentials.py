"""Credentials in params, recipes and overrides: refused without being repeated, and nothing that only resembles one."""

from __future__ import annotations

import json
import time

import pytest
from clerk_params import CLERK_PARAMS, ROOT

from flows.chain.overrides import check
from flows.full_pipeline import main
from rlhf_core.config import ConfigError, apply_overrides, credential_in, load_params

DEFAULT = CLERK_PARAMS
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


DIGITS = "0123456789abcdef" * 4
AWS = "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY"  # of AWS's documentation
# One of each common form, each built of two parts for the same reason.
SHAPES = {
    "AWS access key": "AKIA" + "ABCDEFGH01234567",
    "AWS secret key": AWS,
    "AWS secret key, named": "aws_secret_access_key=" + AWS,
    "Azure storage": "DefaultEndpointsProtocol=https;AccountName=x;AccountKey=" + LETTERS + "/+==",
    "Anthropic": "sk" + "-ant-api03-" + LETTERS,
    "DigitalOcean": "dop" + "_v1_" + DIGITS,
    "GitHub": "gh" + "p_" + LETTERS,
    "GitLab": "gl" + "pat-" + LETTERS[:20],
    "Google": "AIza" + LETTERS + "abcde",
    "Groq": "gsk" + "_" + LETTERS + LETTERS,
    "Hugging Face": "hf" + "_" + LETTERS,
    "JWT": "eyJ" + "hbGciOiJIUzI1NiJ9." + "eyJ" + "zdWIiOiIxMjM0NTY3ODkwIn0." + LETTERS,
    "npm": "npm" + "_" + LETTERS + "abcdef",
    "OpenAI": "sk" + "-proj-" + LETTERS,
    "password in an address": "postgresql://rlhf:" + "hunter2@db/prefect",
    "password:": "the judge's password: " + "hunter2!",
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "PyPI": "pypi-" + "AgEIcHlwaS5vcmc" + LETTERS * 3,
    "SendGrid": "SG" + "." + LETTERS[:22] + "." + (LETTERS * 2)[:43],
    "Slack": "xox" + "b-1234567890-" + LETTERS,
    "Slack hook": "https://hooks.slack.com/services/" + "T012AB/B345CD/" + LETTERS,
    "Stripe": "sk" + "_live_" + LETTERS[:24],
    "Telegram": "123456789" + ":" + LETTERS + "abcde",
    "token=": "retry with token=" + "abc123def456",
    "token in JSON": '{"access_token": "' + 'abc123def456"}',
    "Bearer": "Authorization: Bearer " + LETTERS,
    "W&B": "WANDB_API_KEY=" + DIGITS[:40],
    "W&B, in words": "log to wandb with " + DIGITS[:40],
    "W&B, own server": "local" + "-" + DIGITS[:40],
}
LOOKALIKES = [
    *(DIGITS[:32], DIGITS[:40], DIGITS, "md5 " + DIGITS[:32] + ".dir", "sha256:" + DIGITS, "commit " + DIGITS[:40], "AC" + DIGITS[:30]),
    *("org/RLHFv2-Llama-3.1-8B-Instruct-PPO-GAE095", "meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen2.5-Math-7B-Instruct-GGUF-Q4KM"),
    *("allenai/OLMo2Instruct1124PreferenceMix7B", "runs/2026-11-27T09-15-00/models/policy/checkpoint-0004000"),
    *(
        "the password: wrong in half of the answers",
        "tokens: 512",
        "first token: 0.5",
        "stop at token=</s>",
        "eos_token: <|reserved_special_7|>",
    ),
    *(
        "pad_token=[PAD1234]",
        "api_key=${OPENAI_KEY_2}",
        "{{ bos_token }}{% for m in messages %}",
        "its secret: better data",
        "secret = 3 epochs",
    ),
    *(
        "a token: llama",
        "Bearer of bad news about the checkpoint",
        "npm_install_step_2",
        "dop_v1",
        "the bearer instruments1 of 2026 that we tried",
    ),
    *(
        "wandb run of model-v2, loss 0.25",
        "local-model",
        "sk_live",
        "hooks.slack.com",
        "https://host/page?token=short",
        "AccountKey=",
        "max_new_tokens=2048x2",
    ),
    *("aGVsbG8gd29ybGQ=", "step 12345678:loss", "2026-11-27", "user@host:/data/v2/train.jsonl", "[MASK]", "pass: 1e-5", "token budget=4k2"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_common_form_is_recognised_alone_and_within_words(shape):
    assert credential_in(SHAPES[shape]), shape
    assert credential_in(f"because ({SHAPES[shape]}) is new"), shape


@pytest.mark.parametrize("text", [*LOOKALIKES, *HARMLESS])
def test_hashes_paths_and_words_are_no_credentials(text):
    assert credential_in(text) is None
    assert credential_in(f"because {text} is new") is None


def test_the_repositorys_own_texts_hold_no_credentials():
    """Params, recipes and docs, line by line: thousands of look-alikes."""
    files = [*ROOT.glob("*.yaml"), *(ROOT / "recipes").glob("*.yaml"), *(ROOT / "docs").glob("*.md")]
    found = {f"{file.name}: {line}": kind for file in files for line in file.read_text().splitlines() if (kind := credential_in(line))}
    assert found == {}


@pytest.mark.parametrize("key", ["model.template_options.api_key", "rl.prompt_weights.password", "tracking.wandb_project"])
def test_the_key_tells_that_its_value_is_a_credential(key):
    value = "hunter2" if key.endswith("password") else DIGITS[:40]
    assert credential_in(value) is None and credential_in(value, key)


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


@pytest.mark.parametrize(
    "part",
    [
        "x",
        "sk-",
        "a-",
        "-eyJ",
        "a://",
        "x://a:",
        "http://",
        "?key=",
        "-----BEGIN ",
        "//x/",
        "token:",
        "wandb",
        "bearer ",
        "0a",
        "aws",
        "glpat-",
    ],
)
def test_a_long_word_takes_no_long_time(part):
    started = time.process_time()
    credential_in(part * (100_000 // len(part)))
    assert time.process_time() - started < 5
