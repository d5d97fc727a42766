"""Programs in the sandbox: what they can do, what they can't, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hostile_programs import LIMITS as HOSTILE_LIMITS
from hostile_programs import PROGRAMS, workers

from rlhf_core.scorers.sandbox.box import Limits, Sandbox, SandboxFailure, check_sandbox
from rlhf_core.scorers.sandbox.seccomp import CLONE, CLONE3, DENIED, seccomp_program
from rlhf_core.scorers.sandbox.worker import interpreter, path_files

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SYSTEM_PYTHON = "/usr/bin/python3"  # for another user: this interpreter may lie in a closed folder
LIMITS = Limits(seconds=2.0, memory_mib=256)
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
UNPRIVILEGED = 4321


def left(mark: str, *, within: float = 1.0) -> list[int]:
    """Processes whose command line has the mark, after a wait for their end."""
    deadline = time.monotonic() + within
    while True:
        found = [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if mark in _text(p)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def can_be_another_user() -> bool:
    if os.geteuid() != 0 or not Path(SYSTEM_PYTHON).exists():
        return False
    program = "import sys; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([SYSTEM_PYTHON, "-c", program], user=UNPRIVILEGED, cwd="/", check=False).returncode == 0


@pytest.fixture(scope="module", params=["this user", "another user"])
def hostile(request, tmp_path_factory) -> tuple[dict, str]:
    """What became of each program, and the mark in their command lines."""
    if (another := request.param == "another user") and not can_be_another_user():
        pytest.skip("needs root and a Python of the system, 3.11 or newer")
    mark = f"mark-{uuid.uuid4().hex}"
    secret = tmp_path_factory.mktemp("secret") / "secret.txt"
    secret.write_text("the expected output")
    secret.chmod(0o644)
    command = [SYSTEM_PYTHON if another else sys.executable, str(HERE / "hostile_programs.py"), str(secret), mark]
    who = {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": []} if another else {}
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=120, **who)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["user"] == (UNPRIVILEGED if another else os.geteuid())
    assert left(mark) == []
    return found["outcomes"], mark


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_is_contained(hostile, name):
    outcome = hostile[0][name]
    assert "ESCAPED" not in outcome["stdout"], outcome
    assert outcome["size"] <= 16 << 20
    assert outcome["seconds"] < HOSTILE_LIMITS.most, outcome


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fork bomb", "PermissionError"),
        ("network", "PermissionError"),
        ("passwords", "FileNotFoundError"),
        ("the repository", "FileNotFoundError"),
        ("memory", "MemoryError"),
        ("disk", "No space left"),
        ("inodes", "No space left"),
        ("open files", "Too many open files"),
        ("threads", "can't start new thread"),
        ("endless output", "File too large"),
    ],
)
def test_a_limit_is_what_stops_it(hostile, name, said):
    """No other failure hides that the attack was never tried."""
    assert said in hostile[0][name]["stderr"], hostile[0][name]


@pytest.mark.parametrize("name", ["sleep", "computing", "signals ignored"])
def test_a_program_is_killed_at_its_time(hostile, name):
    assert hostile[0][name]["timed_out"]


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox() as made:
        yield made


def run(sandbox: Sandbox, program: str, stdin: str = "", **options):
    return sandbox.run({"main.py": textwrap.dedent(program)}, ["main.py"], stdin=stdin, limits=LIMITS, **options)


def test_ordinary_programs_work(sandbox):
    """Input and output in Unicode, files, threads, asyncio, a deep recursion, and the standard library's compiled modules."""
    outcome = run(
        sandbox,
        """
        import asyncio, bisect, collections, decimal, hashlib, heapq, itertools, json, math, random, re, sqlite3, sys, threading
        print(input(), sys.stdin.read().split())
        open("kept.txt", "w").write("é")
        print(open("kept.txt").read(), asyncio.run(asyncio.sleep(0.001, "slept")))
        found = []
        threads = [threading.Thread(target=found.append, args=(n,)) for n in range(8)]
        [t.start() for t in threads], [t.join() for t in threads]
        def depth(n): return n and 1 + depth(n - 1)
        print(sorted(found), depth(900))
        exit(3)
        """,
        stdin="größe\n1 2\n",
    )
    assert (outcome.code, outcome.timed_out, outcome.stderr) == (3, False, "")
    assert outcome.stdout == "größe ['1', '2']\né slept\n[0, 1, 2, 3, 4, 5, 6, 7] 900\n"


def test_a_program_may_read_a_large_input_or_leave_it(sandbox):
    assert run(sandbox, "print(len(input()))", stdin="x" * (8 << 20)).stdout == f"{8 << 20}\n"
    assert run(sandbox, "print('no')", stdin="x" * (8 << 20)).stdout == "no\n"


def test_each_program_begins_in_an_empty_folder_with_the_same_order_of_sets(sandbox):
    program = "import os\nprint(sorted(os.listdir('.')), list({'a', 'b', 'c', 'd', 'e'}))\nopen('left', 'w').close()"
    first, second = run(sandbox, program), run(sandbox, program)
    assert first.stdout.startswith("['main.py'] ") and first == second


def test_path_files_beside_the_interpreter_are_empty_so_that_no_program_waits_for_them(sandbox):
    files = path_files()
    assert any(Path(file).stat().st_size for file in files) or not files, "as packaging tools leave them"
    assert json.loads(run(sandbox, f"print([len(open(file).read()) for file in {files!r}])").stdout) == [0] * len(files)


@pytest.mark.long
def test_a_run_takes_at_most_40_ms_more_than_python_alone(sandbox, tmp_path):
    """Median of 20, taken in turn since the machine may be busy."""
    (tmp_path / "main.py").write_text("print(6 * 7)")

    def seconds(call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    pairs = [
        (
            seconds(lambda: run(sandbox, "print(6 * 7)")),
            seconds(lambda: subprocess.run([interpreter(), tmp_path / "main.py"], capture_output=True, check=True)),
        )
        for _ in range(20)
    ]
    assert statistics.median(boxed - plain for boxed, plain in pairs) < 0.040


def test_a_worker_that_dies_is_the_sandboxs_failure_and_is_replaced():
    mark = f"mark-{uuid.uuid4().hex}"
    before = workers()
    with Sandbox() as sandbox:
        (worker,) = workers() - before
        killer = threading.Timer(0.5, os.kill, (worker, signal.SIGKILL))
        killer.start()
        with pytest.raises(SandboxFailure, match="the sandbox's process ended"):
            sandbox.run({"main.py": "import time; time.sleep(50)"}, ["main.py", mark], limits=LIMITS)
        assert left(mark) == []
        assert run(sandbox, "print(1)").stdout == "1\n"


def test_nothing_is_left_of_a_program_whose_scorer_is_killed():
    mark = f"mark-{uuid.uuid4().hex}"
    program = f"""
        from rlhf_core.scorers.sandbox.box import Limits, Sandbox
        Sandbox().run({{"main.py": "import time; time.sleep(50)"}}, ["main.py", "{mark}"], limits=Limits(seconds=20.0, memory_mib=256))
    """
    scorer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT)
    deadline = time.monotonic() + 20
    while not (started := [pid for pid in left(mark, within=0) if pid != scorer.pid]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert started
    scorer.kill()
    scorer.wait()
    assert left(mark) == []


def test_a_program_that_is_killed_from_outside_is_the_sandboxs_failure(sandbox):
    """As the kernel does where the machine has no memory left."""
    mark = f"mark-{uuid.uuid4().hex}"

    def kill() -> None:
        while not (found := left(mark, within=0)):
            time.sleep(0.02)
        os.kill(found[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(SandboxFailure, match=r"killed from outside"):
        sandbox.run({"main.py": "import time; time.sleep(50)"}, ["main.py", mark], limits=LIMITS)
    killer.join()


def test_a_program_that_gets_no_core_is_the_sandboxs_failure():
    """It shares one core with eight others, and would need more time than it gets; with enough time it ends."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
        with Sandbox() as sandbox:
            busy = "import time\nwhile time.process_time() < 0.5: pass"
            with pytest.raises(SandboxFailure, match=r"killed after 0\.4 s, before"):
                run(sandbox, busy, most=0.4)
            assert sandbox.run({"main.py": busy}, ["main.py"], limits=Limits(seconds=0.7, memory_mib=256)).ok  # a sleeper has 2.4 s
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()


def refusal(preparation: str) -> str:
    """What `check_sandbox` says in a process that first executes the preparation."""
    program = textwrap.dedent(preparation) + textwrap.dedent(
        """
        from rlhf_core.scorers.sandbox.box import Limits, check_sandbox
        try:
            check_sandbox("scorer tests", Limits(seconds=2.0, memory_mib=256))
        except ValueError as error:
            print(error)
        """
    )
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_kernel_that_forbids_user_namespaces_is_named_with_what_allows_them():
    said = refusal(
        """
        from rlhf_core.scorers.sandbox import kernel
        kernel.unshare(kernel.CLONE_NEWUSER)
        open("/proc/sys/user/max_user_namespaces", "w").write("0")
        """
    )
    assert said.startswith("scorer tests: expected namespaces for untrusted programs, got: ")
    assert "sysctl user.max_user_namespaces=" in said


def test_a_container_that_forbids_them_is_named_with_what_allows_them():
    said = refusal(
        """
        import platform, struct
        from rlhf_core.scorers.sandbox import kernel
        from rlhf_core.scorers.sandbox.seccomp import DENIED, MACHINES
        number = DENIED["unshare"][MACHINES[platform.machine()][1]]
        kernel.no_new_privileges()
        steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
        kernel.install_filter(b"".join(struct.pack("=HBBI", *step) for step in steps))
        """
    )
    assert "Operation not permitted" in said and "seccomp=unconfined" in said


def test_the_sandbox_works_here():
    check_sandbox("scorer tests", LIMITS)


@pytest.mark.parametrize("limits", [Limits(seconds=0.001, memory_mib=256), Limits(seconds=2.0, memory_mib=8)], ids=["time", "memory"])
def test_limits_without_room_for_the_interpreter_are_refused(limits):
    """Every program would fail, and every response score 0."""
    with pytest.raises(ValueError, match=r"scorer tests: expected Python to start within .*; raise seconds or memory_mib"):
        check_sandbox("scorer tests", limits)


def verdict(program: bytes, machine: int, number: int, argument: int = 0) -> int:
    """What the filter returns for a system call: the few instructions of BPF that it has."""
    data = struct.pack("=iIQQ", number if number < 1 << 31 else number - (1 << 32), machine, 0, argument)
    steps = [struct.unpack("=HBBI", program[i : i + 8]) for i in range(0, len(program), 8)]
    at, register = 0, 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == 0x20:
            (register,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            return value
        else:
            holds = {0x15: register == value, 0x35: register >= value, 0x45: register & value != 0}[code]
            at += yes if holds else no


@pytest.mark.parametrize(("machine", "audit", "column"), [("x86_64", 0xC000003E, 0), ("aarch64", 0xC00000B7, 1)])
def test_the_filter_of_a_machine(machine, audit, column):
    program = seccomp_program(machine)
    denied = {numbers[column] for numbers in DENIED.values()} - {None}
    assert {n for n in range(463) if verdict(program, audit, n) == EPERM} == denied | {CLONE[column]}
    assert verdict(program, audit, CLONE3) == ENOSYS == verdict(program, audit, 463)
    assert verdict(program, audit, (1 << 30) + 57) == ENOSYS  # x32 on x86-64
    assert verdict(program, 0x40000003, 1) == KILL  # 32-bit calls have other numbers


@pytest.mark.parametrize(("machine", "audit", "clone"), [("x86_64", 0xC000003E, 56), ("aarch64", 0xC00000B7, 220)])
def test_threads_may_be_made_and_processes_may_not(machine, audit, clone):
    """The flags of clone are its first argument: those of glibc's pthread_create have CLONE_THREAD, those of fork only a signal."""
    program = seccomp_program(machine)
    assert (verdict(program, audit, clone, 0x3D0F00), verdict(program, audit, clone, 17)) == (ALLOW, EPERM)


@pytest.mark.parametrize(
    ("header", "column", "pattern"),
    [
        ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0, r"#define __NR_(\w+)\s+(\d+)"),
        ("/usr/include/asm-generic/unistd.h", 1, r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
    ],
)
def test_the_numbers_are_those_of_the_kernels_headers(header, column, pattern):
    if not Path(header).exists():
        pytest.skip("no headers of Linux here")
    known = {name: int(number) for name, number in re.findall(pattern, Path(header).read_text())}
    named = {name: numbers[column] for name, numbers in DENIED.items() if name in known and numbers[column] is not None}
    assert len(named) > 60 and named == {name: known[name] for name in named}
    assert (known["clone"], known["clone3"]) == (CLONE[column], CLONE3)


def test_an_unknown_machine_is_refused():
    with pytest.raises(OSError, match="aarch64"):
        seccomp_program("riscv64")
