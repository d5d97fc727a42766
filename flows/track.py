"""Sends runs to trackers: rlhf track RUN, or python -m flows.track.

Exit codes: 0 done, 2 refused, or a tracker is down.
"""

from __future__ import annotations

from functools import partial

from flows.chain.locks import only_flow
from flows.trackers.processes import check_installed, send
from flows.trackers.sinks import SWITCHES, configured
from rlhf_core.commands import NONE_GIVEN, Overrides, RunFolder, printed, run_module
from rlhf_core.config import ConfigError, overridden, parse_assignment, shown, with_recipes
from rlhf_core.paths import RUNS
from rlhf_core.process import exit_with
from rlhf_core.report.opened import run_folder


@printed()
def track(run: RunFolder = ".", *, given: Overrides = NONE_GIVEN) -> str:
    """Send what the trackers lack of a run that isn't at work.

    Args:
        run: a run's name, or a folder; by default the current one.
    """
    folder = run_folder(run)
    wanted = with_recipes(given.recipes, dict(map(parse_assignment, given.assignments)))
    if others := [key for key in wanted if not key.startswith("tracking")]:
        raise ConfigError(f"track: expected keys of `tracking`, got {', '.join(others)}; the run's results have its other params")
    if not (folder / "params.yaml").is_file():
        raise ConfigError(f"track: expected a run's folder with params.yaml, got {shown(run)}; `rlhf runs list` names the runs")
    text = (folder / "params.yaml").read_text(encoding="utf-8")
    config = overridden(text, wanted, subject=f"params.yaml of {folder.name}", complete=False)[1].tracking
    names = configured(config)
    if not names:
        keys = ", ".join(f"tracking.{key}" for key in SWITCHES.values())
        raise ConfigError(f"track: expected a tracker, got none; set one of {keys} with --set")
    check_installed(config)
    place = folder.resolve()
    with only_flow(*((place.parents[1], place.name) if place.parent.name == str(RUNS) else (place, None))):
        sent = send(folder, config)
    if missing := [name for name in names if name not in sent]:
        raise ConfigError(f"track: expected {', '.join(missing)} to take the run, got the problems above; try again later")
    return f"{folder.resolve().name}: sent to {', '.join(sent)}"


main = partial(run_module, "track")

if __name__ == "__main__":
    exit_with(main)
