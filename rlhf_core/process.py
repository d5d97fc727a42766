"""What every process of ours begins with: no usage statistics, no waiting for a network that isn't there, no spinning threads.

python -P <this file> <module> <arguments>: the module's command line in such a process; see `quietly`.
"""

import atexit
import gc
import logging
import os
import runpy
import sys

QUIET_ENVIRONMENT = {
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
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # else each engine says how it binds its memory
    "DS_LOG_LEVEL": "error",
    # How long a waiting OpenMP thread spins before it sleeps. Never: a step on two idle cores takes 1.5 times as long. The default,
    # a hundred times this: ten times as long whenever another process is busy on the same cores. docs/performance.md has the trade.
    "GOMP_SPINCOUNT": "3000",
    # NumPy's and SciPy's threads, one for each core, spin as well: for 2 to the power of this many ticks of the processor, by default 26.
    "OPENBLAS_THREAD_TIMEOUT": "20",
    # What a step frees stays for the next one. By glibc's own limits a trainer of RL gave memory back and took it again, some 6,000 to
    # 14,000 pages in each step of a small model.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}


NEW_OBJECTS = 100_000  # between two looks for cyclic garbage, while a process starts
USUAL_THRESHOLD = gc.get_threshold()


def be_quiet() -> None:
    """Set the environment for this process and all that it starts; what a user has set already wins."""
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    collect_rarely()
    end_quickly()


def collect_rarely() -> None:
    """To be called before anything large is imported: Python looks for cyclic garbage after every 700 new objects, a fifth of the time
    that it takes to import PyTorch and vLLM.
    """
    gc.set_threshold(NEW_OBJECTS)


def collect_as_usual() -> None:
    """To be called where long work begins: what a step leaves in cycles would else add up for hundreds of steps, 70 KB in each."""
    gc.set_threshold(*USUAL_THRESHOLD)


def freeze_gc() -> None:
    """To be called when all that is large has been imported and nothing has been built: garbage is never looked for among what there is by
    now. One look through it all takes a trainer 0.3 s, in the middle of a step.
    """
    gc.freeze()


def end_quickly() -> None:
    """When this process ends, Python doesn't look for garbage once more among all there is, which goes with the process anyway."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def quietly(module: str, *arguments: str) -> list[str]:
    """The command that runs another project's module as `python -m` does, but without the garbage collections of its start and its end: a
    seventh of the computing of DVC's shorter commands. By this file's path, since the folder that it runs in may hold an older commit.
    """
    return [sys.executable, "-P", __file__, module, *arguments]


def show_own_log() -> None:
    """Our log lines go to stdout as they are; of other libraries only warnings are shown. What would reorder a line is shown by number."""
    from rlhf_core.config import reordering_shown  # by then a process of ours has it; DVC's, which start here too, need none of it
    from rlhf_core.progress import STATUS

    class AsItStands(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return reordering_shown(super().format(record))

    class BesideTheBar(logging.StreamHandler):
        def emit(self, record: logging.LogRecord) -> None:
            with STATUS.aside():
                super().emit(record)

    handler = BesideTheBar(sys.stdout)
    handler.setFormatter(AsItStands("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("rlhf").setLevel(logging.INFO)


if __name__ == "__main__":
    be_quiet()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
