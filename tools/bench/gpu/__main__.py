"""Checks what works on this GPU, and how fast: python -m tools.bench.gpu [--parts default_job,turns,...] [--minutes M] [--again PART ...]

Runs the parts that have no result in --out yet, the most useful first, so the same command continues where an earlier call stopped. Writes
results.json, gpu.md and logs.txt (all output) there, and the logs of Ray's processes of a job that failed. --write FOLDER ... puts the
results of such folders into docs/gpu.md instead; the last folder that has a part counts. Exit code 1: a part failed, was stopped or
didn't run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from rlhf_core.process import STOPPED_BY_SIGNAL, configure_process
from tools.bench.gpu.harness import PARTS, RAN, Check, Result, find_about, models_in_memory, read_results, run_parts, write_results
from tools.bench.gpu.processes import ROOT
from tools.bench.gpu.shapes import models_folder
from tools.bench.gpu.table import markdown, put_into

TABLE = "gpu.md"
DOCUMENT = ROOT / "docs" / "gpu.md"
MODEL_BYTES = 12 << 30  # of all models and an exported policy


def main() -> int:
    arguments = parse()
    configure_process()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED_BY_SIGNAL))  # parts end with this process
    try:
        if arguments.write is not None:
            put_into(arguments.document, read_folders(arguments.write))
            return 0
        results = check(arguments)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if all(result.outcome == RAN for result in results) else 1


def check(arguments: argparse.Namespace) -> list[Result]:
    """Run the parts, and write results and table after each, so that an interrupted check has them."""
    until = time.monotonic() + 60 * arguments.minutes
    about = find_about(rehearse=arguments.rehearse)
    print("; ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with models_folder(arguments.models, within=models_in_memory(MODEL_BYTES)) as models:
        now = Check(arguments.out.resolve(), models.resolve(), arguments.rehearse, about, until)
        found = {name: result for name, result in now.earlier().items() if name not in arguments.again}
        for result in run_parts([part for part in PARTS if part.name in arguments.parts], now, dict(found)):
            print(f"== {result.part}: {result.outcome} {result.reason}".rstrip(), flush=True)
            found[result.part] = result
            write_results(now.out, list(found.values()))
            (now.out / TABLE).write_text(markdown(list(found.values())), encoding="utf-8")
    print((arguments.out / TABLE).read_text(encoding="utf-8"), flush=True)
    return [found[name] for name in arguments.parts]


def read_folders(folders: list[Path]) -> list[Result]:
    """Return the newest result of each part in several folders; the last folder that has a part counts.

    Raises:
        ValueError: a folder has no results.
    """
    found: dict[str, Result] = {}
    for folder in folders:
        results = read_results(folder)
        if not results:
            raise ValueError(f"{folder}: expected a folder with results, got none in it; give the --out of a check")
        found |= {result.part: result for result in results}
    return list(found.values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [part.name for part in PARTS]
    parts = f"some of {', '.join(every)}, separated by commas or spaces; without it all"
    parser.add_argument("--parts", type=names, nargs="+", metavar="PART", default=[every], help=parts)
    parser.add_argument("--again", type=names, nargs="+", metavar="PART", default=[], help="parts that run although they have a result")
    parser.add_argument("--minutes", type=minutes, default=15.0, help="for all parts; those that no longer fit are left for another call")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "gpu")
    parser.add_argument("--models", type=Path, help="folder for models with random weights, which stay; without it a temporary one")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on whatever is there: shows that the check runs")
    parser.add_argument("--write", type=Path, nargs="+", metavar="FOLDER", help="put results into the document, and run nothing")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="of --write")
    arguments = parser.parse_args()
    arguments.parts = [name for given in arguments.parts for name in given]
    arguments.again = [name for given in arguments.again for name in given]
    return arguments


def names(text: str) -> list[str]:
    known = [part.name for part in PARTS]
    given = [name.strip() for name in text.split(",") if name.strip()]
    if not given or (unknown := [name for name in given if name not in known]):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(unknown) if given else 'none'}")
    return given


def minutes(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
