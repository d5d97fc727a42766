"""Measures memory and disk over a long RL run: python -m tools.faults.long_run [--steps 500] [--figure FILE].

Measures every few seconds: resident memory of all processes by role, the share of Ray's object store in /dev/shm, and the size of the
stage's scratch folder and Ray's folder. Prints the slope of each over the second half of the run, and plots them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import linear_regression

import pandas as pd
import psutil
from small_chain import begin, change_params, output_of, temporary

from tools.faults.lab import Laboratory, alive_processes, processes

EVERY_SECONDS = 3.0
MIB = 2**20
TINY = {
    "samples_per_step": 16,
    "checkpoint_every": 25,
    "rollout": {"max_new_tokens": 8, "max_concurrent_sequences": 16},
    "evaluation": {"every": 50, "prompts": 16, "metric": "score", "keep_best": True},
    "monitor": {"kl": None, "entropy": None, "repetition": None},  # no early end
}
ROLES = ("train_policy", "driver", "trainer", "rollout", "scorer", "raylet", "gcs")


def measure(workspace: Path) -> dict[str, float]:
    """Each quantity in MiB, and the number of finished steps."""
    found, known = {}, set()
    for role in ROLES:
        members = processes(workspace, role)
        known |= {p.pid for p in members}
        found[f"memory of {'stage' if role == 'train_policy' else role}"] = sum(map(_resident, members))
    found["memory of the rest of Ray"] = sum(_resident(p) for p in alive_processes(workspace) if p.pid not in known)
    found["shared memory"] = sum(_object_store(p) for p in processes(workspace, "raylet"))
    found["scratch folder"] = _size(workspace / "scratch/train_policy")
    found["Ray's folder"] = _size(temporary(workspace))
    return {"step": _steps(workspace), **found}


def _resident(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return process.memory_info().rss / MIB
    return 0.0


def _object_store(raylet: psutil.Process) -> float:
    """The object store's MiB in /dev/shm, found by its descriptor since the file is unlinked."""
    folder = Path(f"/proc/{raylet.pid}/fd")
    inodes = {}
    with suppress(OSError):
        for link in folder.iterdir():
            if "/dev/shm/" in os.readlink(link):
                status = link.stat()
                inodes[status.st_ino] = status.st_blocks * 512 / MIB
    return sum(inodes.values())


def _size(folder: Path) -> float:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total / MIB


def _steps(workspace: Path) -> int:
    for path in (workspace / "scratch/train_policy").glob("*/curves.csv"):
        with suppress(OSError):
            return max(0, path.read_text().count("\n") - 1)
    return 0


def slopes(rows: pd.DataFrame) -> pd.DataFrame:
    """MiB at the start and the end of the second half of the steps, and MiB per 100 steps by least squares, for each column."""
    late = rows[rows["step"] >= rows["step"].max() / 2]
    found = {
        name: (late[name].iloc[0], late[name].iloc[-1], 100 * linear_regression(late["step"], late[name]).slope)
        for name in rows.columns
        if name not in ("step", "seconds")
    }
    return pd.DataFrame.from_dict(found, orient="index", columns=["at half", "at the end", "per 100 steps"]).round(2)


def draw(rows: pd.DataFrame, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, chosen, title in (
        (axes[0], [c for c in rows if c.startswith("memory of ")], "resident memory, MiB"),
        (axes[1], ["shared memory", "scratch folder", "Ray's folder"], "shared memory and disk, MiB"),
    ):
        for name in chosen:
            axis.plot(rows["step"], rows[name], label=name.removeprefix("memory of "), linewidth=1.4)
        axis.set(xlabel="RL step", title=title, ylim=(0, None))
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": "long run"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.long_run", description="Memory and disk over a long RL run.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=Path("scratch/faults"), help="for the workspace (default: %(default)s)")
    parser.add_argument("--figure", type=Path, help="draw into this file, .svg or .png")
    arguments = parser.parse_args()
    workspace = Laboratory(arguments.folder.resolve()).workspace("long-run", "train_policy", "one")
    change_params(workspace, {"rl": {"steps": arguments.steps, **TINY}})
    stage, started, rows = begin(workspace, "tasks.train_rl"), time.monotonic(), []
    while stage.poll() is None:
        row = measure(workspace)
        if row["step"] and row["memory of trainer"] and row["memory of rollout"]:  # the actors end before the stage
            rows.append({"seconds": time.monotonic() - started, **row})
        time.sleep(EVERY_SECONDS)
    if stage.returncode:
        sys.stderr.write(output_of(workspace)[-3000:])
        return 1
    table = pd.DataFrame(rows)
    table.to_csv(workspace.with_suffix(".csv"), index=False)
    sys.stdout.write(f"{len(table)} measurements in {table['seconds'].iloc[-1]:.0f} s; MiB:\n{slopes(table).to_string()}\n")
    if arguments.figure is not None:
        draw(table, arguments.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
