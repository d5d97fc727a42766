"""Serves a model with vLLM's OpenAI server until Ctrl-C or SIGTERM."""

from __future__ import annotations

import json
import shlex
import signal
import threading
from typing import TextIO

from rlhf_core.config import ConfigError
from rlhf_core.engines.vllm.server import ServerSettings, VllmServer, check_port, is_loopback, lacks
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.paths import STAGE_METRICS
from rlhf_core.use.choice import Chosen, head_width, read_json

INSTEAD = "use `chat`, which runs on PyTorch, or load the folder with transformers; vLLM on a GPU may run it"


def check_servable(chosen: Chosen, *, trust_remote_code: bool) -> None:
    """Check, without starting vLLM, that it supports the model: by the run's check_model metrics and by the head size.

    Raises:
        ConfigError: vLLM can't run it.
    """
    checks = (None if chosen.project is None else read_json(chosen.project / STAGE_METRICS["check_model"])) or {}
    result = str(checks.get("checks", {}).get("vllm", ""))
    if result.startswith("refused"):
        raise ConfigError(f"{chosen.name}: expected a model that vLLM can run, got one that check_model {result}; {INSTEAD}")
    load_tokenizer(str(chosen.folder), trust_remote_code=trust_remote_code)  # which tries the chat template
    if why := lacks(head_width(chosen, trust_remote_code=trust_remote_code)):
        raise ConfigError(f"{chosen.name}: expected a model that vLLM can run here, got {why}; {INSTEAD}")


def check_address(settings: ServerSettings) -> None:
    """Check that the server's address can be used safely.

    Raises:
        ConfigError: other machines could use the server without a key, or the port is taken.
    """
    if settings.api_key is None and not is_loopback(settings.host):
        raise ConfigError(
            f"--host: expected a key for requests from other machines, got none for {settings.host}; name the environment variable "
            "that holds one with --api-key-env, or leave --host at 127.0.0.1"
        )
    try:
        check_port(settings)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def serve(settings: ServerSettings, out: TextIO, *, key_variable: str | None) -> int:
    """Serve until a stop signal. Returns the exit code: 0 after a stop, 1 if the server exited unexpectedly.

    Raises:
        ValueError: the server didn't start.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(f"Starting vLLM for {settings.name}; on a CPU that takes about a minute.", file=out, flush=True)
    with VllmServer(settings) as server:
        if not server.wait_until_ready(stop.is_set):
            return 0
        print(
            f"Serving {settings.name} at {settings.address}/v1 until Ctrl-C. Try it:\n{curl(settings, key_variable)}", file=out, flush=True
        )
        code = server.wait(stop.is_set)
    if code is None:
        print("Stopped.", file=out, flush=True)
        return 0
    print(f"vLLM's server exited unexpectedly with code {code}.", file=out, flush=True)
    return 1


def curl(settings: ServerSettings, key_variable: str | None) -> str:
    """Return a shell command with an example request. The key stays in its environment variable."""
    body = {"model": settings.name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
    key = "" if key_variable is None else f' -H "Authorization: Bearer ${key_variable}"'
    return f"curl {settings.address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
