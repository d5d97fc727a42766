"""What a stage reads when it starts, and whether that is unchanged when it ends.

DVC hashes params and dependencies after a stage has ended. A file edited in between would be recorded as the one that the stage read, and
DVC's run cache would return these results for every later run with the edited file. Such a stage therefore fails, and DVC records nothing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config import ConfigError, parse_params, read_yaml
from rlhf_core.paths import INPUTS, SCRATCH
from rlhf_core.provenance.inputs import changed_inputs, input_files, read_recorded
from rlhf_core.stage.scratch import SHOWN, StageInputs, hash_stage_inputs, read_definition, read_stage_inputs, stage_files, write_record

WATCH_SECONDS = 15.0  # between two looks at the files of a running stage
READ = "read.json"  # in the scratch folder of a stage: what its last successful run has read
_UNDO = "undo that before it ends, or its results won't be recorded"

Looks = dict[Path, tuple[int, int, int]]  # size, time of the last write, inode

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class Changes:
    """Differences from what was there when the stage started, one line each.

    values: changed params. files: changed code and data. written: files that were written and have their first content again; a process
    that started in between may have read another.
    """

    values: list[str]
    files: list[str]
    written: list[str]

    @property
    def lines(self) -> list[str]:
        return self.values + self.files

    def shown(self) -> str:
        lines = self.lines or [f"{path} was written, and is as before now" for path in self.written]
        return "; ".join(lines[:SHOWN] + [f"and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN))


class Reading:
    """The params and dependencies of a stage as they are when the object is made.

    Attributes:
        params: all of params.yaml, checked. inputs: the stage's command, params and hashes of its dependencies.
        clean_until: time in ns up to which no file was written. The processes that wrote earlier checkpoints read the files as they were
            hashed; a later checkpoint may be from a process that was started afterwards and read other files.
    Raises:
        ConfigError: params are refused, a dependency is missing, or a file outside the project isn't what stage hash_inputs has hashed.
    """

    def __init__(self, stage: str, round_number: int | None):
        self._stage, self._round_number = stage, round_number
        self.clean_until = time.time_ns()
        tree = read_yaml(Path("params.yaml"))
        self.params = parse_params(tree, "params.yaml")
        definition = read_definition(stage, round_number, tree)
        self._looks = self._look()  # before the files are read
        self.inputs = hash_stage_inputs(definition, stage_files(definition, stage), tree)
        if changed := changed_inputs(self._recorded):
            raise ConfigError(
                f"{INPUTS}: expected the hashes of what this stage reads, got others for {'; '.join(changed[:SHOWN])}; it was edited after "
                "stage hash_inputs: run the chain or `dvc repro` again"
            )

    @property
    def _recorded(self) -> dict[str, Any]:
        prefix = f"{INPUTS}:"
        return {name.removeprefix(prefix): value for name, value in self.inputs.params.items() if name.startswith(prefix)}

    def changes(self) -> Changes:
        """Compare the params and dependencies with what is there. Files of unchanged size, time and inode aren't read again."""
        try:
            now = read_stage_inputs(self._stage, self._round_number)
        except (ConfigError, OSError, ValueError, LookupError, TypeError) as error:  # half a file, or none
            return Changes([f"params or dependencies can't be read any more: {error}"], [], [])
        files = now.file_differences(self.inputs) + changed_inputs(self._recorded)
        looks = _looks_of([*map(Path, self.inputs.files), *input_files(self._recorded)])
        written = [] if files else [str(path) for path, look in looks.items() if self._looks.get(path) != look]
        return Changes(now.value_differences(self.inputs), files, written)

    def watch(self, done: threading.Event) -> None:
        """Warn of each change while the stage runs, until `done` is set."""
        last, changed, warned = self._looks, False, ""
        while not done.wait(WATCH_SECONDS):
            at = time.time_ns()
            if (looks := self._look()) == last:
                self.clean_until = self.clean_until if changed else at
                continue
            last, changes = looks, self.changes()
            changed = changed or bool(changes.files or changes.written)
            if changes.lines and (found := changes.shown()) != warned:
                warned = found
                log.warning("%s: changed while the stage runs, which goes on with what it read: %s; %s", self._stage, found, _UNDO)

    def _look(self) -> Looks:
        """Return size, time and inode of all dependencies, new ones included, of params.yaml and dvc.yaml, and of data/inputs.json and the
        files that it lists.
        """
        with suppress(ConfigError, OSError, ValueError, LookupError, TypeError, AttributeError):
            tree = read_yaml(Path("params.yaml"))
            files = stage_files(read_definition(self._stage, self._round_number, tree), self._stage)
            return _looks_of([*files, *input_files(read_recorded() or {}), *map(Path, ("params.yaml", "dvc.yaml", INPUTS))])
        return {}

    def record(self) -> None:
        """Write down what the stage has read, which the flow compares with dvc.lock (flows/chain/recorded.py)."""
        write_record(SCRATCH / self._stage / READ, asdict(self.inputs))


def unlike_record(stage: str, round_number: int | None, root: Path) -> tuple[StageInputs, list[str]] | None:
    """Return what the last successful run of a stage has read, and how the workspace differs; None if there is no record or no difference.

    Args:
        root: the project's folder.
    """
    with suppress(OSError, ValueError, TypeError):
        read = StageInputs(**json.loads((root / SCRATCH / stage / READ).read_text(encoding="utf-8")))
        try:
            differences = read_stage_inputs(stage, round_number, root).differences(read)
        except (ConfigError, OSError, ValueError, LookupError, TypeError) as error:
            return read, [f"params or dependencies can't be read any more: {error}"]
        return (read, differences) if differences else None
    return None


def _looks_of(files: Iterable[Path]) -> Looks:
    looks: Looks = {}
    for path in files:
        with suppress(OSError):
            found = path.stat()
            looks[path] = found.st_size, found.st_mtime_ns, found.st_ino
    return looks
