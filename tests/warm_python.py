"""Python programs in processes of their own that have most imports already, which would take each of them seconds."""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from rank_processes import CLEAN


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Like subprocess.run of `python -m <module> ...` or `python -c <code> ...` that captures text, but forked with imports.

    For programs whose own imports are not what is tested.

    Raises:
        subprocess.TimeoutExpired: it is killed then. subprocess.CalledProcessError: it failed, with `check`.
    """
    python, kind, program, *arguments = map(str, command)
    assert python == sys.executable and kind in ("-m", "-c"), f"expected python -m or -c, got {command}"
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("out", "err")]
        given = (kind, program, arguments, str(cwd or Path.cwd()), dict(os.environ if env is None else env), list(map(str, outputs)))
        process = CLEAN.Process(target=_main, args=given)
        process.start()
        process.join(timeout)
        late = process.is_alive()
        process.kill()
        process.join()
        printed = [path.read_text(errors="replace") if path.exists() else "" for path in outputs]
    if late:
        raise subprocess.TimeoutExpired(command, timeout, *printed)
    done = subprocess.CompletedProcess(command, process.exitcode, *printed)
    if check:
        done.check_returncode()
    return done


def _main(kind: str, program: str, arguments: list[str], cwd: str, env: dict[str, str], outputs: list[str]) -> None:
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    sys.argv = [program, *arguments]
    atexit._clear()  # of the process that it was forked from
    code = 0
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if code == 1 and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.last_value = error  # as Python does, for exit functions
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
