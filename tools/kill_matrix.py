"""Runs the kill matrix: python -m tools.kill_matrix [--only counted|free] [--runs N] [--seed N] [--folder F]; docs/resume.md describes it.

Each run is an RL job of the small chain whose episodes a program plays, two steps ahead, with an evaluation and a text scorer. SIGKILL hits
its driver (with the endpoint and the loop of the agents), an engine, the scorer and an agent, at moments that the seed draws, all but the
driver twice; a job that ends is run again. With `counted` all digests, weights, curves and metrics must have the bits of an undisturbed
run. With `free` (as `recorded`, and with a program that reads the clock) each row of the curves that a killed driver had written must come
again, and the whole run must have the same bits when it is trained again from its journal. Exits with 1 when a run fails.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

import psutil

from rlhf_core.checkpoint.digest import differences, read_digest
from tools.resume_matrix import LIMIT, ROOT, Cell, compare, make_workspace, prepare, rows_done, state_digests

sys.path.insert(0, str(ROOT / "tests" / "integration"))
from small_chain import alive_processes, begin, command_line

TABLE = ROOT / "docs/tables/kills.csv"
STAGE, STEPS, RUNS, STARTS = "train_policy", 32, 3, 12
LAST = 26  # the last row after which a process is killed, since looking for it takes time
KILLS = {"driver": 1, "engine": 2, "scorer": 2, "agent": 2}  # in a run
PROGRAM, IN_FLIGHT = "agents/talks.py", "rollouts drawn ahead"
VICTIMS = {  # regular expressions of command lines
    "driver": r"-m rlhf_core\.stage\.driver ",
    "engine": r"ray::(RolloutActor|rollout[.])",
    "scorer": r"ray::(TextScorers|scorer[.])",
    "agent": rf"^\S*python\S* -S -E \S*{PROGRAM}",
}
TALKS = '''"""An agent that says how long a reply was, or with an argument what the clock says."""
import http.client, json, os, sys, threading, time, urllib.parse

place = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])


def post(path, body, key):
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=300)
    connection.request("POST", place.path + path, json.dumps(body), {"Authorization": "Bearer " + key})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status >= 400:
        raise RuntimeError(text.decode())
    return json.loads(text) if text else None


def play(task, key):
    messages, said = list(task["messages"]), 0
    for turn in range(task["max_turns"]):
        choice = post("/chat/completions", {"messages": messages}, key)["choices"][0]
        said += len(choice["message"]["content"])
        if choice["finish_reason"] == "length" or said % 4 == turn:
            break
        clock = time.time_ns() // 1000 % 100
        time.sleep(said % 7 / 100)
        messages += [choice["message"], {"role": "user", "content": str(clock if sys.argv[1:] else said)}]
    return said % 5 / 4


def work():
    while True:
        if episode := post("/episodes/claim", {}, os.environ["OPENAI_API_KEY"]):
            try:
                end = {"score": play(episode["task"], episode["key"])}
            except RuntimeError as error:
                end = {"error": str(error)}
            post("/episodes/finish", end, episode["key"])


threads = [threading.Thread(target=work) for _ in range(int(os.environ["EPISODES_AT_ONCE"]))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
'''
Schedule = Literal["counted", "free"]


@dataclass(frozen=True)
class Row:
    """A SIGKILL. after: rows of the curves.    problems: of the whole run; empty if nothing differs."""

    schedule: Schedule
    run: int
    killed: str
    after: int
    problems: list[str] = field(default_factory=list)


def cell(schedule: Schedule) -> Cell:
    command = ["python", "-S", "-E", PROGRAM, *["clock"] * (schedule == "free")]
    scorers = [
        {"name": "environment", "kind": "environment", "normalization": "initial"},
        {"name": "brief", "kind": "length", "target_length": 4, "weight": 0.1, "normalization": "none"},
    ]
    rl = {
        "algorithm": "grpo",
        "grpo": {"group_size": 4},
        "steps": STEPS,
        "samples_per_step": 16,
        "minibatch_size": 16,
        "checkpoint_every": 5,
        "max_replacements": 100,
        "environment": {"command": command, "processes": 2, "claims": 24, "max_turns": 4},
        "reward": {"scorers": scorers, "max_unscored_fraction": 1.0},
        "rollout": {
            "backend": "pytorch",
            "engines": 2,
            "max_lag": 2,
            "max_new_tokens": 64,
            "stop": ["e", "o"],
            "schedule": "recorded" if schedule == "free" else "counted",
        },
        "evaluation": {"every": 8, "prompts": 8},
    }
    return Cell(schedule, STAGE, "train_rl", {"model": {"max_length": 192}, "rl": rl}, STEPS, job=True)


class Kills:
    """Kills processes of each kind, each some rows of the curves later than the one before.

    rows: what is killed, and after how many rows.    written: rows of the curves when a driver was killed, by number.
    """

    def __init__(self, drawn: random.Random):
        victims = drawn.sample(list(KILLS), counts=list(KILLS.values()), k=sum(KILLS.values()))
        rows = sorted(drawn.sample(range(1, LAST + 1), len(victims)))
        self.rows, self._drawn = list(zip(victims, rows, strict=True)), drawn
        self.left, self.written = list(self.rows), dict[int, str]()

    def look(self, workspace: Path) -> None:
        """Kill the next process if it is its turn."""
        if not self.left or rows_done(workspace) < self.left[0][1]:
            return
        victim, _ = self.left[0]
        time.sleep(self._drawn.uniform(0, 0.3))
        found = [p for p in alive_processes(workspace) if re.search(VICTIMS[victim], " ".join(command_line(p)))]
        if not found:  # between two starts
            return
        with suppress(psutil.NoSuchProcess):
            (chosen := self._drawn.choice(found)).kill()
            self.left.pop(0)
            if victim == "driver":
                psutil.wait_procs([chosen], timeout=10)
                (path,) = workspace.glob("scratch/*/*/curves.csv")
                self.written |= {i: row for i, row in enumerate(path.read_text().splitlines(keepends=True)) if row.endswith("\n")}


def run_to_the_end(workspace: Path, kills: Kills | None = None) -> list[str]:
    """Run the stage until it succeeds. Returns problems."""
    for _ in range(STARTS):
        stage, until = begin(workspace, "tasks.train_rl"), time.monotonic() + LIMIT
        try:
            while stage.poll() is None and time.monotonic() < until:
                if kills is not None:
                    kills.look(workspace)
                time.sleep(0.01)
        finally:  # its job ends with it
            stage.kill()
        if not stage.wait():
            return []
    return [f"exit code {stage.returncode} after {STARTS} starts"]


def with_program(base: Path, folder: Path, of: Cell) -> Path:
    workspace = make_workspace(base, folder, of, None)
    (workspace / "agents").mkdir()
    (workspace / PROGRAM).write_text(TALKS)
    return workspace


def try_run(schedule: Schedule, number: int, base: Path, folder: Path, seed: int) -> list[Row]:
    """The kills of one run, and what differs."""
    of, kills = cell(schedule), Kills(random.Random(f"{seed} {schedule} {number}"))
    killed, other = with_program(base, folder / "killed", of), folder / "again"
    problems = run_to_the_end(killed, kills)
    problems += [f"not killed: {kills.left}"] if kills.left else []
    if schedule == "counted":
        other = folder.parent / "undisturbed"
        if not (other / "metrics" / f"{STAGE}.json").exists():
            problems += run_to_the_end(with_program(base, other, of))
    elif not problems:
        final = (killed / f"plots/{STAGE}.csv").read_text().splitlines(keepends=True)
        problems += [f"row {i} of the curves differs" for i, row in kills.written.items() if row != final[i]]
        with_program(base, other, of)
        (kept,) = killed.glob(f"scratch/{STAGE}/*.journal")
        shutil.copytree(kept, other / kept.relative_to(killed))
        problems += run_to_the_end(other)
    if not problems:
        problems = compared(other, killed, schedule)
    return [Row(schedule, number, victim, after, problems) for victim, after in kills.rows]


def compared(other: Path, killed: Path, schedule: Schedule) -> list[str]:
    """What differs between two runs: as `compare`, but with `free` rollouts in flight, of which a replay has fewer tokens, don't count."""
    if schedule == "counted":
        return compare(other, killed, STAGE)[1]
    problems = [problem for problem in compare(other, killed, STAGE)[1] if IN_FLIGHT not in problem]
    for name, path in state_digests(other, STAGE).items():
        found = differences(read_digest(path), read_digest(state_digests(killed, STAGE)[name]))
        problems += [f"{name}: {difference}" for difference in found if IN_FLIGHT not in difference]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.kill_matrix", description=__doc__)
    parser.add_argument("--only", choices=get_args(Schedule), action="append", help="a schedule; default: both")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each schedule (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of the chain and the results; kept, and continued if it exists")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="rlk") as temporary:
        folder = (chosen.folder or Path(temporary)).resolve()
        results = folder / "results.json"
        rows = [Row(**row) for row in json.loads(results.read_text())] if results.exists() else []
        base = prepare(folder / "base")
        for number, schedule in itertools.product(range(chosen.runs), chosen.only or get_args(Schedule)):
            if any((row.schedule, row.run) == (schedule, number) for row in rows):
                continue
            began = time.monotonic()
            found = try_run(schedule, number, base, folder / schedule / str(number), chosen.seed)
            rows += found
            results.write_text(json.dumps([asdict(row) for row in rows], indent=1))
            told = "; ".join(found[0].problems) or "same bits"
            sys.stdout.write(f"{schedule} {number}: {told} ({time.monotonic() - began:.0f} s)\n")
            sys.stdout.flush()
        write_table(rows, chosen.seed)
    return 1 if any(row.problems for row in rows) else 0


def write_table(rows: list[Row], seed: int, table: Path = TABLE) -> None:
    """Write one row for each kill. Runs that weren't made keep their rows."""
    with table.open(encoding="utf-8", newline="") as file:
        header, *written = csv.reader(file)
    found = [[r.schedule, str(seed), str(r.run), r.killed, str(r.after), "; ".join(r.problems) or "same bits"] for r in rows]
    made = {tuple(row[:3]) for row in found}
    found += [row for row in written if tuple(row[:3]) not in made]
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(sorted(found, key=lambda row: (row[0], *map(int, row[1:3]), int(row[4]))))


if __name__ == "__main__":
    sys.exit(main())
