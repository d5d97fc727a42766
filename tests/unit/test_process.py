"""What processes begin and end with, and another project's command line in such a process."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from whole_matrix import cells

from rlhf_core.process import IMPORT_THRESHOLD, PROCESS_ENVIRONMENT, SOCKET_BYTES, beside, bypass_proxies, module_command, socket_folder

ROOT = Path(__file__).parents[2]
CYCLE = """
class Loop:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("found")

Loop()
"""


@pytest.mark.parametrize(
    ("first", "message"),
    [("", "found\n"), ("from rlhf_core.process import configure_process\nconfigure_process()\nconfigure_process()", "")],
)
def test_a_configured_process_collects_no_garbage_at_exit(first, message):
    done = subprocess.run([sys.executable, "-c", f"{first}\n{CYCLE}"], capture_output=True, text=True, check=True)
    assert done.stdout == message and done.stderr == ""


def test_module_command_runs_the_installed_module_not_one_of_the_folder(tmp_path):
    elsewhere, here = tmp_path / "installed", tmp_path / "worktree"
    (elsewhere / "other").mkdir(parents=True)
    shown = ("gc.get_threshold()[0]", "os.environ['GOMP_SPINCOUNT']", "__name__", "sys.argv[1:]", "sys.argv[0] == __file__")
    (elsewhere / "other/__main__.py").write_text(f"import gc, os, sys\nprint({', '.join(shown)}, sep='|')\nsys.exit(7)\n")
    for name in ("rlhf_core", "other"):  # of a commit in which all of this was different
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    environment = {name: value for name, value in os.environ.items() if name not in PROCESS_ENVIRONMENT} | {"PYTHONPATH": str(elsewhere)}
    done = subprocess.run(module_command("other", "-m", "a b"), cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"{IMPORT_THRESHOLD}|{PROCESS_ENVIRONMENT['GOMP_SPINCOUNT']}|__main__|['-m', 'a b']|True\n"


def test_a_line_of_the_log_is_read_as_it_stands():
    program = (
        "import logging; from rlhf_core.process import show_own_log; show_own_log(); "
        "logging.getLogger('rlhf').info('source %s', 'a\\u202eb\\u200f'); logging.getLogger('other').info('not shown')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "source a⟨U+202E⟩b⟨U+200F⟩\n"


CONFIGURED = "from rlhf_core.process import configure_process\nconfigure_process()"


@pytest.mark.long
@pytest.mark.parametrize(("first", "printed"), [("", True), (CONFIGURED, False)])
def test_a_missing_kernel_of_bitsandbytes_that_nothing_calls_is_not_mentioned(first, printed):
    """Its import as on a CPU with AVX-512 in bfloat16, where it asks for the package kernels."""
    program = f"""
{first}
import sys
import bitsandbytes, bitsandbytes._ops, bitsandbytes.functional
bitsandbytes.functional.has_avx512bf16 = lambda: True
bitsandbytes._ops.register_kernel = lambda *_: lambda function: function
sys.modules["kernels"] = None
del sys.modules["bitsandbytes.backends.cpu.ops"]
import bitsandbytes.backends.cpu.ops
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert ("gemm_4bit_forward" in done.stderr) is printed, done.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_work_beside_a_block_is_told_of_its_end_and_waited_for(fails):
    happened = []

    def work(done: threading.Event) -> None:
        done.wait()
        happened.append("ended")

    with contextlib.suppress(ValueError), beside(work):
        happened.append("block")
        if fails:
            raise ValueError
    assert happened == ["block", "ended"]


@pytest.mark.parametrize(
    "command",
    cells(
        [
            "rlhf_core.planning --help",
            "rlhf_core.planning --check",
            "rlhf_core.planning --stages --params recipes/clerk.yaml",
            "rlhf_core.look --help",
            "rlhf_core.use --help",
            "rlhf_core.storage.clean --help",
            "rlhf_core.checkpoint.digest --help",
            "flows.runs list",
            "flows.compare_runs --help",
            "tools.params",
        ],
        ["rlhf_core.planning --stages --params recipes/clerk.yaml", "flows.runs list", "tools.params"],
    ),
)
def test_a_command_ends_quietly_when_the_reader_of_its_output_has_gone(command: str):
    done = without_reader("-m", *command.split())
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_command_that_is_through_keeps_its_exit_code_without_a_reader():
    program = "from rlhf_core.process import exit_with\ndef main():\n    print(1)\n    return 3\nexit_with(main)"
    done = without_reader("-c", program)
    assert (done.returncode, done.stderr) == (3, b"")


def test_a_command_that_fails_says_so_without_a_reader():
    program = "from rlhf_core.process import exit_with\ndef main():\n    print(1)\n    raise RuntimeError('lost')\nexit_with(main)"
    done = without_reader("-c", program)
    assert done.returncode and b"RuntimeError: lost" in done.stderr


def without_reader(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """A run of Python whose output is buffered and has no reader."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe()
    os.close(reading)
    try:
        how = {"stdout": writing, "stderr": subprocess.PIPE, "timeout": 60, "check": False}
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, **how)
    finally:
        os.close(writing)


def test_a_process_that_ends_with_its_parent_does():
    child = (
        "import signal, sys, time; from rlhf_core.process import end_with_parent; "
        "end_with_parent(int(sys.argv[1]), signal.SIGKILL); print('set', flush=True); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())], stdout=subprocess.PIPE, start_new_session=True); "
        "print(child.pid, child.stdout.readline().decode().strip(), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60)
    pid, answer = done.stdout.split()
    assert answer == "set"
    until = time.monotonic() + 10
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("given", "bypassed"),
    [
        ({"PATH": "/bin"}, None),
        ({"http_proxy": ""}, None),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "*"}, None),
        ({"http_proxy": "http://proxy:3128"}, "localhost,127.0.0.1,::1"),
        ({"ALL_PROXY": "socks5://proxy", "NO_PROXY": ".mine.org,localhost"}, ".mine.org,localhost,127.0.0.1,::1"),
        ({"HTTPS_PROXY": "http://proxy", "no_proxy": "a", "NO_PROXY": "b"}, "a,localhost,127.0.0.1,::1"),
    ],
)
def test_no_proxy_is_asked_for_this_machine(given, bypassed):
    environment = dict(given)
    bypass_proxies(environment)
    assert environment == (given if bypassed is None else given | {"no_proxy": bypassed, "NO_PROXY": bypassed})


def test_sockets_are_in_the_temporary_folder_unless_its_path_is_too_long(tmp_path, monkeypatch):
    short, long = "/tmp", tmp_path / ("x" * 100)
    long.mkdir()
    for folder, room, expected in (
        (short, 80, short),
        (str(long), 80, "/tmp"),
        (short, SOCKET_BYTES - 4, None),
        (short, SOCKET_BYTES - 5, short),
    ):
        monkeypatch.setattr("tempfile.tempdir", folder)
        if expected is None:
            with pytest.raises(
                OSError, match=f"temporary folder: expected a path of at most 3 bytes for sockets, got {folder}, and no other"
            ):
                socket_folder(room)
        else:
            assert socket_folder(room) == expected
