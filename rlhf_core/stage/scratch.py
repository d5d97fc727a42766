"""The fingerprint of a stage's work, and its scratch folder `scratch/<stage>/<fingerprint>`, which holds the checkpoints of unfinished
work.

Work with other params, data or code has another fingerprint and folder. When new work starts, a warning names the newest checkpoint of
other work. With checkpoints.resume_from the work resumes from it, and the stage's metrics record that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from rlhf_core.checkpoint.manifest import MANIFEST, read_manifest
from rlhf_core.checkpoint.settings import Origin
from rlhf_core.checkpoint.store import checkpoint_steps
from rlhf_core.config import CheckpointsConfig, ConfigError, read_stages, read_yaml
from rlhf_core.files import replace_text
from rlhf_core.provenance.file_hashes import FileHashes, dvc_folder_md5
from rlhf_core.provenance.locked import check_locked
from rlhf_core.rounds.pins import read_round_stages
from rlhf_core.stage.carried import carried
from rlhf_core.stage.rollouts import step_files
from rlhf_core.storage.address import Storage, StorageFailed

WORK = "work.json"  # in a scratch folder: command, params and hashes of its work
STORED = "stored.json"  # in a scratch folder: where a storage has the work's files
JOURNAL = ".journal"  # ending of a kept journal's folder, whose name begins with that of the scratch folder
RECORDED = "recorded"  # in a journal's folder: it has the whole run
RESUMED_FROM = "resumed_from.json"  # in a scratch folder: the other work that it resumed from, oldest first
TAKING_OVER = "taking-over-"
NO_DEPENDENCY = re.compile(r"__pycache__|\.DS_Store|\.#.*|.*~|\..*\.sw[a-z]|4913")  # an editor's files; in .dvcignore too
CODE = ("tasks", "rlhf_core", "flows", "rewards")
SHOWN = 12  # differences shown in a message

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class StageInputs:
    """The inputs that determine a stage's results, and so identify its work.

    command: the stage's command. params: the params that dvc.yaml lists. files: md5 of each file of the dependencies by its path.
    """

    command: str
    params: dict[str, Any]
    files: dict[str, str]

    @property
    def fingerprint(self) -> str:
        return _hash(asdict(self))

    @property
    def folder_name(self) -> str:
        return self.fingerprint[:16]

    @property
    def origin(self) -> Origin:
        code = {path: md5 for path, md5 in self.files.items() if is_code(path)}
        data = {path: md5 for path, md5 in self.files.items() if not is_code(path)}
        return Origin(config=_hash([self.command, self.params]), data=_hash(data), code=_hash(code))

    def differences(self, older: StageInputs) -> list[str]:
        """Return the differences from `older`, one line each: params with both values, data files, code files."""
        return self.value_differences(older) + self.file_differences(older)

    def value_differences(self, older: StageInputs) -> list[str]:
        found = [] if self.command == older.command else [f"command: {older.command} -> {self.command}"]
        new, old = dict(_leaves(self.params)), dict(_leaves(older.params))
        for key in [*new, *(set(old) - set(new))]:
            if new.get(key) != old.get(key):
                found.append(f"{key}: {_value(old, key)} -> {_value(new, key)}")
        return found

    def file_differences(self, older: StageInputs) -> list[str]:
        found = []
        for path in sorted({*self.files, *older.files}, key=lambda p: (is_code(p), p)):
            before, now = older.files.get(path), self.files.get(path)
            if before != now:
                change = "new" if before is None else "gone" if now is None else "changed"
                found.append(f"{'code' if is_code(path) else 'data'}: {path} {change}")
        return found


def read_stage_inputs(stage: str, round_number: int | None = None, root: Path = Path()) -> StageInputs:
    """Read the inputs of a stage of dvc.yaml or, for a round, of rounds/dvc.yaml.

    Args:
        root: the project's folder.
    Raises:
        ConfigError: a dependency is missing.
    """
    tree = read_yaml(root / "params.yaml")
    definition = read_definition(stage, round_number, tree, root)
    return hash_stage_inputs(definition, stage_files(definition, stage, root), tree, root)


def read_definition(stage: str, round_number: int | None, tree: dict[str, Any], root: Path = Path()) -> dict[str, Any]:
    """Return a stage's entry in its dvc.yaml, filled in from the tree of params.yaml or from the round."""
    stages = read_stages(root / "dvc.yaml", tree) if round_number is None else read_round_stages(round_number, root)
    return stages[stage]


def stage_files(definition: dict[str, Any], stage: str, root: Path = Path()) -> list[Path]:
    """Return the files of a stage's dependencies, relative to the project's folder. Raises ConfigError if one is missing."""
    return [path for dependency in definition["deps"] for path in _files(Path(dependency), stage, root)]


def hash_stage_inputs(definition: dict[str, Any], files: list[Path], tree: dict[str, Any], root: Path = Path()) -> StageInputs:
    hashes = FileHashes(root)
    md5s = hashes.md5s([root / path for path in files])
    hashes.keep()
    return StageInputs(definition["cmd"], dict(_tracked(definition["params"], tree, root)), dict(zip(map(str, files), md5s, strict=True)))


def input_hashes(inputs: StageInputs, stage: str, round_number: int | None = None, *, metrics: bool = False) -> dict[str, str]:
    """Return the md5 of each data file and model that a stage depends on, as in dvc.lock. A file outside the project has its name as key.

    Args:
        inputs: this stage's. metrics: whether metrics and checks are included.
    """
    definition = read_definition(stage, round_number, read_yaml(Path("params.yaml")))
    paths = [Path(d) for d in definition["deps"] if not is_code(d) and (metrics or not d.startswith(("metrics/", "checks/")))]
    return {path.name if path.is_absolute() else path.as_posix(): md5_of(path, inputs.files) for path in paths}


def check_dependencies(inputs: StageInputs, stage: str, round_number: int | None = None) -> None:
    """Check that each output of an earlier stage that a stage reads has the hash of dvc.lock.

    Raises:
        ConfigError: an output has another hash in `inputs`.
    """
    for path, md5 in input_hashes(inputs, stage, round_number, metrics=True).items():
        check_locked(path, md5)


def md5_of(path: Path, files: dict[str, str]) -> str:
    """Return the md5 of a dependency as in dvc.lock, from the md5s of its files."""
    if str(path) in files:
        return files[str(path)]
    return dvc_folder_md5({Path(file).relative_to(path).as_posix(): md5 for file, md5 in files.items() if path in Path(file).parents})


def metrics_path(stage: str, round_number: int | None) -> Path | None:
    """Return a stage's first metrics file, or None if it has none."""
    definition = read_definition(stage, round_number, read_yaml(Path("params.yaml")))
    entry = next(iter(definition.get("metrics", [])), None)
    return None if entry is None else Path(entry if isinstance(entry, str) else next(iter(entry)))


def prepare_scratch(scratch: Path, inputs: StageInputs, config: CheckpointsConfig, stage: str) -> list[dict[str, Any]]:
    """Prepare the scratch folder of this work. The caller holds the stage's lock.

    Returns:
        The other work that this work resumed from, oldest first.
    Raises:
        ConfigError: the work can't resume from the folder that checkpoints.resume_from names.
    """
    older = [folder for folder in _older(scratch) if checkpoint_of(folder) is not None]
    of, _, name = (config.resume_from or "").partition("/")
    chosen = scratch.parent / name if of == stage else None
    taken_over = resumed_from(scratch)
    if taken_over and (chosen is None or taken_over[-1]["scratch"] != chosen.name) and not _has_own_checkpoint(scratch, inputs):
        log.info("%s: begins without the checkpoint of other work that an earlier start resumed from, since nothing came of it", stage)
        shutil.rmtree(scratch)
    if chosen is not None and chosen != scratch:
        _resume_from(chosen, scratch, inputs)
    elif older and checkpoint_of(scratch) is None:
        _tell(older[0], inputs, stage)
    scratch.mkdir(exist_ok=True)
    write_record(scratch / WORK, asdict(inputs))
    _clear(scratch, older, config.keep_abandoned, spared=chosen)
    return resumed_from(scratch)


def read_recorded_inputs(scratch: Path) -> StageInputs | None:
    """Return the inputs of the work of a scratch folder, or None without a record of them."""
    try:
        return StageInputs(**json.loads((scratch / WORK).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def resumed_from(scratch: Path) -> list[dict[str, Any]]:
    path = scratch / RESUMED_FROM
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def checkpoint_of(scratch: Path) -> tuple[str, int] | None:
    """Return the phase (a subfolder) and the step of the newest checkpoint in a scratch folder; None if it has none."""
    manifests = [p for p in scratch.glob(f"*/step-*/{MANIFEST}") if p.parent.name.removeprefix("step-").isdigit()]
    if not manifests:
        return None
    last = max(manifests, key=lambda p: p.stat().st_mtime_ns).parent
    return last.parent.name, int(last.name.removeprefix("step-"))


def _resume_from(chosen: Path, scratch: Path, inputs: StageInputs) -> None:
    """Copy the older work's checkpoints and curves into this work's scratch folder, unless an earlier start did."""
    if any(entry["scratch"] == chosen.name for entry in resumed_from(scratch)):
        return
    key = f"checkpoints.resume_from={chosen.parent.name}/{chosen.name}"
    found = checkpoint_of(chosen)
    if found is None:
        raise ConfigError(f"{key}: expected a scratch folder with a checkpoint, got none at {chosen}; set it to null to begin anew")
    if checkpoint_of(scratch) is not None:
        raise ConfigError(
            f"{key}: expected no checkpoint of this work itself, got one at {scratch}; set the key to null to resume from "
            "it, or remove the folder"
        )
    older = read_recorded_inputs(chosen)
    if older is None:
        raise ConfigError(f"{key}: expected {WORK} with the record of that work, got no such file; set it to null to begin anew")
    if older.command != inputs.command:
        raise ConfigError(f"{key}: expected work of the same command, {inputs.command}, got {older.command}; set it to null to begin anew")
    differences = inputs.differences(older)
    state = carried(inputs, older, phase=found[0], step=found[1], files=_files_of(chosen / found[0] / f"step-{found[1]}"))
    if state.refusals:
        raise ConfigError("\n".join(state.refusals))
    entry = {"scratch": chosen.name, "step": found[1], "of": found[0], "origin": asdict(older.origin), "differences": differences}
    entry["begun_anew"] = sorted(state.begun_anew)
    aside = scratch.with_name(TAKING_OVER + scratch.name)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for part in chosen.iterdir():
        if part.is_dir() and checkpoint_steps(part):
            shutil.copytree(part, aside / part.name)
        elif part.name == "curves.csv" or part in step_files(chosen).values():
            shutil.copy2(part, aside)
    write_record(aside / RESUMED_FROM, [*resumed_from(chosen), entry])
    shutil.rmtree(scratch, ignore_errors=True)
    aside.rename(scratch)
    log.warning(
        "%s: resumes from step %d of other work, %s; changes since then:\n%s",
        *(scratch.parent.name, found[1], chosen, _listed(differences)),
    )
    for field, keys in sorted(state.begun_anew.items()):
        log.warning("%s: %s of the checkpoint: begun anew, since %s", scratch.parent.name, field, _changed(keys))


def _changed(keys: list[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"{', '.join(keys[:3])}{more} changed"


def _has_own_checkpoint(scratch: Path, inputs: StageInputs) -> bool:
    """Return whether this work made a checkpoint in its scratch folder. With a storage, which alone may have one, it is assumed."""
    if stored_work(scratch) is not None:
        return True
    manifests = (p for p in scratch.glob(f"*/step-*/{MANIFEST}") if p.parent.name.removeprefix("step-").isdigit())
    for path in manifests:
        with contextlib.suppress(ValueError):  # a damaged one
            if read_manifest(path.parent)["origin"] == asdict(inputs.origin):
                return True
    return False


def _files_of(checkpoint: Path) -> list[str]:
    """Return the names of the files in a checkpoint; none if its manifest is damaged, so that an earlier checkpoint will be loaded."""
    try:
        return list(read_manifest(checkpoint)["files"])
    except ValueError:
        return []


def _tell(older: Path, inputs: StageInputs, stage: str) -> None:
    store, step = checkpoint_of(older) or ("", 0)
    noted = read_recorded_inputs(older)
    differences = [] if noted is None else inputs.differences(noted)
    log.warning(
        "%s: starts anew. %s has the checkpoint of step %d (%s) of other work; changes since then:\n%s\n"
        "  To resume from it anyway: checkpoints.resume_from=%s/%s",
        *(stage, older, step, store, _listed(differences), stage, older.name),
    )


def _clear(scratch: Path, older: list[Path], keep: int, *, spared: Path | None) -> None:
    """Keep the newest `keep` folders of other work with a checkpoint, and as many without; remove the rest, and with them the journals of
    unfinished work.
    """
    without = [folder for folder in _older(scratch) if folder not in older]
    for folder in {*older[keep:], *without[keep:]} - {spared}:
        log.info("%s: removed, the scratch folder of abandoned work", folder)
        _remove_stored(folder)
        shutil.rmtree(folder)
    kept = {journal_of(folder, kept=True) for folder in (scratch, *_older(scratch))}
    unfinished = [folder for folder in scratch.parent.glob(f"*{JOURNAL}") if folder not in kept and not (folder / RECORDED).exists()]
    for left_over in (*scratch.parent.glob(f"{TAKING_OVER}*"), *unfinished):
        shutil.rmtree(left_over)


def journal_of(scratch: Path, *, kept: bool) -> Path:
    """Return where RL's journal is (trainers/rl/journal.py). One that is kept stays when the stage has succeeded; its name has the other
    work's checkpoint from which this work resumed, since another policy sampled what follows that.
    """
    if not kept:
        return scratch / "journal"
    return scratch.with_name("-".join([scratch.name, *(f"{e['scratch']}-{e['step']}" for e in resumed_from(scratch)[-1:])]) + JOURNAL)


def is_recorded(scratch: Path) -> bool:
    """Return whether a journal has all that this work needs, so that no engine is needed."""
    return (journal_of(scratch, kept=True) / RECORDED).exists()


def remove_checkpoints(scratch: Path, *, since: int) -> None:
    """Remove the checkpoints and the journal's files that were written after `since` (ns), or all if a storage has them."""
    if stored_work(scratch) is not None:
        _remove_stored(scratch)
        shutil.rmtree(scratch)
        return
    for manifest in list(scratch.glob(f"*/step-*/{MANIFEST}")):
        if manifest.stat().st_mtime_ns > since:
            shutil.rmtree(manifest.parent)
    for noted in [*journal_of(scratch, kept=False).glob("*"), *journal_of(scratch, kept=True).glob("*")]:
        if noted.stat().st_mtime_ns > since:
            noted.unlink()


def stored_work(scratch: Path) -> dict[str, Any] | None:
    """Return where a storage has the files of a scratch folder's work (url, work and timeout), or None if no storage has them."""
    path = scratch / STORED
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_stored_work(scratch: Path, **known: Any) -> dict[str, Any]:
    write_record(scratch / STORED, known)
    return known


def _remove_stored(folder: Path) -> None:
    if (known := stored_work(folder)) is None:
        return
    try:
        Storage(known["url"], timeout=known["timeout"]).remove_folder(known["work"])
    except StorageFailed as error:
        log.warning("%s; its folder %s is left", error, known["work"])


def _older(scratch: Path) -> list[Path]:
    """Return the scratch folders of the stage's other work, most recently used first."""
    folders = [p for p in scratch.parent.iterdir() if p.is_dir() and p != scratch and re.fullmatch(r"[0-9a-f]{16}", p.name)]

    def last_at_work(folder: Path) -> int:
        return max(p.stat().st_mtime_ns for p in (folder, *folder.glob("*"), *folder.glob(f"*/step-*/{MANIFEST}")))

    return sorted(folders, key=last_at_work, reverse=True)


def is_code(path: str) -> bool:
    return Path(path).parts[0] in CODE or path.endswith(".py")


def write_record(path: Path, content: Any) -> None:
    replace_text(path, json.dumps(content, indent=1, sort_keys=True))


def _listed(differences: list[str]) -> str:
    lines = [f"  {line}" for line in differences[:SHOWN]] or ["  no recorded change"]
    return "\n".join(lines + ([f"  and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []))


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict | list) or not node:
        yield path, node
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _value(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "nothing"


def _tracked(params: list[str | dict[str, list[str]]], tree: dict[str, Any], root: Path) -> Iterator[tuple[str, Any]]:
    """Yield each entry of a stage's `params` with its value: a section or key of params.yaml, or keys of another file."""
    for entry in params:
        if isinstance(entry, str):
            yield entry, reduce(getitem, entry.split("."), tree)
            continue
        for file, keys in entry.items():
            found = read_yaml(root / file) if (root / file).exists() else None  # a stage run without DVC may lack the hashes of its inputs
            for key in keys:
                yield f"{file}:{key}", None if found is None else reduce(getitem, key.split("."), found)


def _files(path: Path, stage: str, root: Path) -> Iterator[Path]:
    place = root / path
    if not place.exists():
        raise ConfigError(
            f"{path}: expected the output of an earlier stage, got nothing; run `dvc repro {stage}`, which also runs missing stages"
        )
    if place.is_file():
        yield path
    else:
        files = (p.relative_to(place) for p in place.rglob("*") if p.is_file())
        yield from sorted(path / file for file in files if not any(map(NO_DEPENDENCY.fullmatch, file.parts)))


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
