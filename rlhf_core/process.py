"""Set-up of every process of the pipeline: environment variables, garbage collection, logging, and exit with its parent.

`python -P <this file> <module> <arguments>` runs a module's command line in such a process; see `module_command`.
"""

import atexit
import contextlib
import ctypes
import gc
import logging
import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import NoReturn

# No usage statistics, network access only on request, fewer log lines, and threads that don't spin.
PROCESS_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "RAY_COLOR_PREFIX": "0",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "WANDB_MODE": "offline",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # otherwise each engine logs how it binds its memory
    "DS_LOG_LEVEL": "error",
    "PYTHONUTF8": "1",  # paths and texts are UTF-8, whatever the locale
    # How long a waiting OpenMP thread spins before it sleeps. Never: a step on two idle cores takes 1.5 times as long. The default,
    # a hundred times this: ten times as long whenever another process is busy on the same cores. docs/performance.md has the trade.
    "GOMP_SPINCOUNT": "3000",
    # The threads of NumPy and SciPy spin for 2**20 processor ticks; the default is 2**26.
    "OPENBLAS_THREAD_TIMEOUT": "20",
    # Memory that a step frees is kept for the next step. With glibc's default limits a trainer returns and maps thousands of pages a step.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}


# Set in a git hook, and by users who keep the repository elsewhere; they could name another repository than the project's folder.
GIT_PLACES = frozenset(
    (
        *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"),
        *("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE", "GIT_PREFIX"),
    )
)

IMPORT_THRESHOLD = 100_000  # new objects between two garbage collections while modules are imported
DEFAULT_THRESHOLD = gc.get_threshold()
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


SOCKET_BYTES = 107  # of a socket's path on Linux
VLLM_SOCKET = 36  # bytes of the name of a socket of vLLM, a UUID
LOOPBACK = ("localhost", "127.0.0.1", "::1")

STOPPED_BY_SIGNAL = 128 + signal.SIGTERM  # exit code after a stop by SIGTERM; a shell reports the same


class Interrupted(BaseException):
    """A stop was requested by a signal; the work so far is in a checkpoint, if the work has checkpoints.

    It is no error, so what takes a library's exceptions as refusals doesn't take this one.
    """


class StepAbandoned(Exception):
    """SIGTERM arrived before an RL step, or the start of a job's actors, had changed any state."""


class Stop:
    """SIGTERM's handler in a job's driver. While actors start or rollouts are collected, SIGTERM ends that at once; otherwise the step is
    completed first.
    """

    def __init__(self) -> None:
        self._requested = self._interruptible = False

    def request(self, *_: object) -> None:
        """The signal handler."""
        self._requested = True
        if self._interruptible:
            self._interruptible = False
            raise StepAbandoned

    def is_set(self) -> bool:
        return self._requested

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """A block that SIGTERM abandons.

        Raises:
            StepAbandoned: SIGTERM arrived, now or before.
        """
        if self._requested:
            raise StepAbandoned
        self._interruptible = True
        try:
            yield
        except KeyboardInterrupt:  # what Ray makes of an exception that a handler raises within a call into Ray
            raise (StepAbandoned if self._requested else KeyboardInterrupt) from None
        finally:
            self._interruptible = False


@contextlib.contextmanager
def held(number: int) -> Iterator[None]:
    """Defer signals to the end of the block, since their handlers may raise. Does nothing outside the main thread."""
    handler = signal.getsignal(number)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(number, lambda *_: came.append(number))
    try:
        yield
    finally:
        signal.signal(number, handler)
        if came:
            signal.raise_signal(number)


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Call `work` in a daemon thread while the block runs. Leaving the block sets its event and waits for it."""
    done = threading.Event()
    thread = threading.Thread(target=work, args=(done,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def bypass_proxies(environment: MutableMapping[str, str]) -> None:
    """Name this machine in no_proxy, where a proxy is set: Ray's head and Prefect's server are asked at its loopback address."""
    if any(environment.get(name) for proxy in ("http_proxy", "https_proxy", "all_proxy") for name in (proxy, proxy.upper())):
        named = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
        hosts = [host for host in named.split(",") if host.strip()]
        if "*" in map(str.strip, hosts):  # no host has a proxy
            return
        environment["no_proxy"] = environment["NO_PROXY"] = ",".join(dict.fromkeys([*hosts, *LOOPBACK]))


def socket_folder(room: int) -> str:
    """Return the temporary folder, or a usual one with a shorter path where sockets in it couldn't be opened.

    Args:
        room: bytes of a socket's path below the folder.
    Raises:
        OSError: all paths are too long, or can't be written.
    """
    for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp", f"/run/user/{os.getuid()}", "/dev/shm"):
        if len(os.fsencode(folder)) + 1 + room <= SOCKET_BYTES and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise OSError(
        f"temporary folder: expected a path of at most {SOCKET_BYTES - 1 - room} bytes for sockets, got {tempfile.gettempdir()}, and no "
        "other that can be written; set TMPDIR to a shorter one"
    )


def configure_process() -> None:
    """Set the environment of this process and its children (a variable that is already set wins) and garbage collection for imports.

    To be called before anything large is imported. At exit Python skips its last garbage collection, since the memory is freed anyway.
    """
    for name, value in PROCESS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    bypass_proxies(os.environ)
    with contextlib.suppress(OSError):  # refused where a socket is needed
        if (folder := socket_folder(VLLM_SOCKET)) != tempfile.gettempdir():
            os.environ.setdefault("VLLM_RPC_BASE_PATH", folder)
    hush_libraries()
    collect_rarely()
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def hush_libraries() -> None:
    """Silence bitsandbytes' warning on CPUs with AVX-512 in bfloat16 that a kernel of its own for 4 bits is missing, which nothing here
    calls: PEFT imports it for every adapter, and rlhf_core/models/lora.py multiplies by dequantized weights.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def without_git_places() -> dict[str, str]:
    """This process's environment, in which a git command finds the repository of its working folder."""
    return {name: value for name, value in os.environ.items() if name not in GIT_PLACES}


def collect_rarely() -> None:
    """Collect garbage rarely while modules are imported: Python's default, a collection after every 700 new objects, slows down the
    import of PyTorch and vLLM.
    """
    gc.set_threshold(IMPORT_THRESHOLD)


def collect_by_default() -> None:
    """Collect garbage as Python does by default, for training: with the threshold for imports, reference cycles of hundreds of steps
    (70 KB each) would stay in memory.
    """
    gc.set_threshold(*DEFAULT_THRESHOLD)


def freeze_gc() -> None:
    """Exclude the existing objects, those of imported modules, from garbage collection, which makes later collections short.

    To be called after the large imports and before models are built.
    """
    gc.freeze()


def end_with_parent(parent: int | None = None, number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent thread ends for any reason. Does nothing outside Linux.

    May be called between fork and exec: it makes system calls only and takes no lock.

    Args:
        parent: number of the parent process; this process exits at once if that one is no longer its parent.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def exit_with(command: Callable[[], int | None]) -> NoReturn:
    """Run a command whose only pipes are its output, and exit with its code. Quietly, with 0 if the command isn't through, where the reader
    of its output has gone, as `| head` does.
    """
    code: int | str | None = 0
    try:
        try:
            code = command()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit
    sys.exit(code)


def module_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs another project's module as `python -m` does, in a process configured by `configure_process`.

    It skips garbage collections at start and exit, which shortens DVC commands. The command names this file's path instead of its module,
    since the working directory may hold an older commit.
    """
    return [sys.executable, "-P", __file__, module, *arguments]


def show_own_log() -> None:
    """Write the pipeline's log lines to stdout, beside progress bars, and only warnings of other libraries.

    Characters that would reorder a line on a terminal are written as their code points.
    """
    from rlhf_core.config import reordering_shown  # imported here: DVC's processes, which start with this file, need neither
    from rlhf_core.progress import STATUS

    class VisibleFormatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return reordering_shown(super().format(record))

    class BarHandler(logging.StreamHandler):
        def emit(self, record: logging.LogRecord) -> None:
            with STATUS.aside():
                super().emit(record)

    handler = BarHandler(sys.stdout)
    handler.setFormatter(VisibleFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("rlhf").setLevel(logging.INFO)


if __name__ == "__main__":
    configure_process()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
