"""Serving: what is refused before anything starts, and what a server that doesn't start leaves behind. One that does: test_tutorial.py."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import psutil
import pytest
import torch

from rlhf_core.config import ConfigError
from rlhf_core.engines.vllm import server as vllm_server
from rlhf_core.engines.vllm.server import ServerSettings, VllmServer, is_loopback
from rlhf_core.use.__main__ import main
from rlhf_core.use.choice import Chosen, choose
from rlhf_core.use.serve import check_address, check_servable, curl


def settings(folder: Path = Path("model"), **changes) -> ServerSettings:
    usual = {"name": "mine", "host": "127.0.0.1", "port": free_port(), "api_key": None, "max_length": 32, "dtype": "float32"}
    return ServerSettings(**{"folder": folder, "trust_remote_code": False, "start_seconds": 1.0, **usual, **changes})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of vLLM's CPU build")
def test_heads_that_the_cpu_build_lacks_are_refused_with_what_to_use(sft_folder):
    with pytest.raises(ConfigError, match=r"sft: expected a model that vLLM can run here, got attention heads of width 8; .*; use `chat`"):
        check_servable(choose(model=sft_folder), trust_remote_code=False)


@pytest.mark.parametrize("cuda", [True, False])
def test_only_on_a_cpu_nothing_is_compiled(monkeypatch, cuda):
    """On a GPU vLLM's compiled graphs are most of its speed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    assert ("TORCH_COMPILE_DISABLE" in vllm_server._environment(settings())) is not cuda
    assert ("--enforce-eager" in vllm_server._command(settings())) is not cuda


@pytest.mark.parametrize(("own", "expected"), [(None, "ieee"), ("tf32", "tf32")])
def test_float32_is_float32_on_a_gpu_unless_a_user_wants_less(monkeypatch, own, expected):
    """As in rollout engines: Triton, which computes attention in float32, rounds to TF32 by default."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    if own is not None:
        monkeypatch.setenv("TRITON_F32_DEFAULT", own)
    assert vllm_server._environment(settings())["TRITON_F32_DEFAULT"] == expected


def test_what_check_model_has_refused_is_refused(tmp_path, sft_folder):
    (tmp_path / "metrics").mkdir()
    verdict = {"model": "Llama", "checks": {"vllm": "refused: numbers are 3 apart"}}
    (tmp_path / "metrics/check_model.json").write_text(json.dumps(verdict))
    with pytest.raises(ConfigError, match="got one that check_model refused: numbers are 3 apart; use `chat`"):
        check_servable(Chosen("mine", sft_folder, tmp_path), trust_remote_code=False)


def test_other_machines_need_a_key_and_the_port_has_to_be_free(sft_folder, monkeypatch, capsys):
    with pytest.raises(ConfigError, match=r"--host: expected a key for requests from other machines, got none for 0.0.0.0"):
        check_address(settings(host="0.0.0.0"))
    check_address(settings(host="0.0.0.0", api_key="k"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"--port: expected a free one on 127.0.0.1, got"):
            check_address(settings(port=taken.getsockname()[1]))
    monkeypatch.delenv("MY_KEY", raising=False)
    assert main(["serve", "--model", str(sft_folder), "--api-key-env", "MY_KEY"]) == 2
    assert "expected a key in the environment variable MY_KEY, got nothing" in capsys.readouterr().err
    assert is_loopback("localhost") and is_loopback("::1") and not is_loopback("example.org")


def test_the_line_for_curl_names_the_keys_variable_and_not_the_key():
    line = curl(settings(host="::", port=8123, api_key="secret"), "MY_KEY")
    assert line.startswith("curl http://[::1]:8123/v1/chat/completions") and "$MY_KEY" in line and "secret" not in line
    assert "Authorization" not in curl(settings(), None)


def test_a_server_that_is_late_is_given_up_and_nothing_of_it_stays(sft_folder):
    begun = time.monotonic()
    with (
        pytest.raises(ValueError, match=r"expected it to start in 1 s, got no answer; raise --start-timeout"),
        VllmServer(settings(sft_folder)) as server,
    ):
        process = psutil.Process(server._process.pid)
        assert "secret" not in " ".join(process.cmdline())
        server.wait_until_ready(lambda: False)
    assert time.monotonic() - begun < 30 and not process.is_running()


def test_one_that_is_stopped_while_it_starts_ends_as_well(sft_folder):
    with VllmServer(settings(sft_folder, start_seconds=60.0)) as server:
        process = psutil.Process(server._process.pid)
        assert server.wait_until_ready(lambda: True) is False
    assert not process.is_running()
