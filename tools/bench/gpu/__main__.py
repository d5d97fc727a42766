"""What works on this GPU, and how fast: python -m tools.bench.gpu [--parts tests,training,...] [--minutes M] [--out FOLDER] [--rehearse]

Writes <part>.json for each part and gpu.md into --out. --write FOLDER ... puts the results of such folders into docs/gpu.md instead; the
last folder that has a part counts. Exit code 1: a part failed, was stopped or didn't run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from rlhf_core.process import STOPPED_BY_SIGNAL, configure_process
from tools.bench.gpu.cases import ROOT
from tools.bench.gpu.harness import PARTS, RAN, Result, find_about, read_result, run_parts
from tools.bench.gpu.shapes import models_folder
from tools.bench.gpu.table import markdown, put_into

TABLE = "gpu.md"
DOCUMENT = ROOT / "docs" / "gpu.md"


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
    """Run the parts and write the table after each, so that an interrupted check has one."""
    until = time.monotonic() + 60 * arguments.minutes
    about, results = find_about(rehearse=arguments.rehearse), []
    print("; ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if part.name in arguments.parts]
    how = {"until": until, "rehearse": arguments.rehearse, "about": about}
    with models_folder(arguments.models) as models:
        for result in run_parts(parts, arguments.out.resolve(), models=models.resolve(), **how):
            results.append(result)
            print(f"== {result.part}: {result.outcome} {result.reason}".rstrip(), flush=True)
            (arguments.out / TABLE).write_text(markdown(results, parts), encoding="utf-8")
    print((arguments.out / TABLE).read_text(encoding="utf-8"), flush=True)
    return results


def read_folders(folders: list[Path]) -> list[Result]:
    """
    Raises:
        ValueError: a folder has no results.
    """
    found: dict[str, Result] = {}
    for folder in folders:
        paths = [path for part in PARTS if (path := folder / f"{part.name}.json").exists()]
        if not paths:
            raise ValueError(f"{folder}: expected a folder with results, got none in it; give the --out of a check")
        found |= {path.stem: read_result(path) for path in paths}
    return list(found.values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [part.name for part in PARTS]
    parts = f"some of {', '.join(every)}, separated by commas or spaces; without it all"
    parser.add_argument("--parts", type=names, nargs="+", metavar="PART", default=[every], help=parts)
    parser.add_argument("--minutes", type=minutes, default=20.0, help="for all parts; those that no longer fit are not run")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "gpu")
    parser.add_argument("--models", type=Path, help="folder for models with random weights, which stay; a temporary one if not given")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on whatever is there: shows that the check runs")
    parser.add_argument("--write", type=Path, nargs="+", metavar="FOLDER", help="put results into the document, and run nothing")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="of --write")
    arguments = parser.parse_args()
    arguments.parts = [name for given in arguments.parts for name in given]
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
