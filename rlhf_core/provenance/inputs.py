"""External inputs of a run: data, base models, judges and functions, chat templates. DVC tracks their hashes.

Stage hash_inputs writes the hashes to data/inputs.json, with paths as in params.yaml. Each stage depends on the sections of that file that
it reads (INPUT_SECTIONS of rlhf_core/config/stages.py). This module also reports all missing inputs together before a run starts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_core.config import EnvironmentConfig, HarnessConfig, Params, ScorerConfig, SourceConfig, number_of, read_yaml, shown
from rlhf_core.data import places
from rlhf_core.data.places import DATA_ENDINGS, base_of, exists, is_data_file, is_hub_name, locate
from rlhf_core.paths import INPUTS, POLICY_MODEL, REWARD_MODEL, SFT_MODEL
from rlhf_core.provenance.file_hashes import FileHash, FileHashes, files_below, of_listing
from rlhf_core.provenance.imported_files import imported_files

OWN_MODELS = tuple(map(str, (SFT_MODEL, REWARD_MODEL, POLICY_MODEL)))  # outputs of the chain, which are dependencies already
BASE = "the base model of external.path"
OWN_CODE = "rewards"  # already a dependency as a whole
SHOWN_FILES = 5  # of a folder, shown in a message

Tree = dict[str, Any]


def read_inputs(params: Params, workspace: Path = Path()) -> Tree:
    """Size and hash, or name and commit, of every external input, by section and key in params. A folder is one entry.

    Raises:
        OSError: a file can't be read, or the hub doesn't answer.
        ValueError: a file changes during reading, or a path is invalid.
    """
    hashes = FileHashes(workspace)
    try:
        return {
            "sources": {key: found for s in params.data.sources for key, found in _source(s, workspace, hashes).items() if found},
            "judges": _functions(((f"data.sources.{s.name}.judge", s.judge) for s in params.data.sources), workspace, hashes),
            "model": {"model.path": _model(params.model.path, params.model.revision, workspace, hashes)} if params.model.path else {},
            "chat_template": _template(params, workspace, hashes),
            "scorers": _scorers(dict(filter(None, [params.method_scorers])), workspace, hashes),
            "evaluation_scorers": _scorers(dict([params.evaluation_scorers]), workspace, hashes),
            "harness": _harness(params, workspace, hashes),
            "environment": _environment(params.rl.environment, workspace, hashes),
            "round_scorers": _scorers({"iterative.scorers": params.iterative.scorers}, workspace, hashes),
            "llm_judges": _judges(params.rewarded_judges, workspace, hashes),
            "external": {f"gate.external.{e.name}": _local(e.path, workspace, hashes) for e in params.gate.external},
            **{
                name: {key: _model(path, revision, workspace, hashes) for key, path, revision in of}
                for name, of in _given(params, workspace, fetch=True)
            },
        }
    finally:
        hashes.keep()


def read_recorded(workspace: Path = Path()) -> Tree | None:
    """Return the content of data/inputs.json; None if there is no such file."""
    with suppress(OSError, ValueError):
        return json.loads((workspace / INPUTS).read_text(encoding="utf-8"))
    return None


def _source(source: SourceConfig, workspace: Path, hashes: FileHashes) -> dict[str, Tree | None]:
    """Return the entries of a data source and of its pictures; none if the source reads no external input."""
    if source.path is None or source.kind == "clerk":
        return {}
    key = f"data.sources.{source.name}"
    pictures = {} if source.images is None else {f"{key}.images": _local(source.images, workspace, hashes)}
    if source.kind == "huggingface" and not exists(locate(source.path, workspace)):
        commit = places.data_set_commit(source.path, source.revision, source.subset)
        return {key: {"name": source.path, "commit": commit}, **pictures}
    return {key: _local(source.path, workspace, hashes), **pictures}


def _model(path: str, revision: str | None, workspace: Path, hashes: FileHashes) -> Tree | None:
    if not exists(locate(path, workspace)) and is_hub_name(path):
        return {"name": path, "commit": places.model_commit(path, revision)}
    return _local(path, workspace, hashes)


def _given(params: Params, workspace: Path, *, fetch: bool = False) -> Iterator[tuple[str, list[tuple[str, str, str | None]]]]:
    """Sections of ready-made models, each with key, path and revision. Versions of the registry are left out.

    Args:
        fetch: download a policy that the hub's cache lacks, if the hub may be used; else the base of its adapters isn't known yet.
    """
    reward = params.reward.path if params.reward.enabled and not params.reward.is_registered else None
    policy = params.external.path if params.alignment.method == "external" else None
    yield "reward", [("reward.path", reward, None)] if reward else []
    base = _base(policy, workspace, fetch=fetch) if policy else None
    yield "policy", [("external.path", policy, None)] * bool(policy) + ([(BASE, *base)] if base else [])
    yield "teachers", [(key, path, None) for key, path in params.teachers.items() if Path(path) != SFT_MODEL]


def _base(policy: str, workspace: Path, *, fetch: bool) -> tuple[str, str | None] | None:
    """Path or name, and revision, of the model that a policy's adapters belong to; None if it has no adapters or isn't here."""
    from rlhf_core.models.folder import base_of_adapters

    folder = locate(policy, workspace)
    if not exists(folder) and is_hub_name(policy):
        folder = places.model_snapshot(policy, None)
        if folder is None and fetch and places.hub_is_online():
            folder = Path(places.fetch_model(policy, places.model_commit(policy, None)))
    return None if folder is None else base_of_adapters(folder)


def _template(params: Params, workspace: Path, hashes: FileHashes) -> Tree:
    wanted = params.model.chat_template
    if wanted is None or not wanted.endswith(".jinja") or "{{" in wanted or "{%" in wanted:
        return {}
    return {"model.chat_template": _local(wanted, workspace, hashes)}


def _harness(params: Params, workspace: Path, hashes: FileHashes) -> Tree:
    """The folder with tasks for lm-evaluation-harness; the package's version has its own tasks."""
    harness = params.evaluation.harness
    path = None if harness is None else harness.include_path
    return {} if path is None else {"evaluation.harness.include_path": _local(path, workspace, hashes)}


def _environment(environment: EnvironmentConfig | None, workspace: Path, hashes: FileHashes) -> Tree:
    """Functions of an environment, and files of its command; of Python's the files that they import too."""
    if environment is None:
        return {}
    files = {f"rl.environment.{key}": path for key, path in environment.files(workspace).items()}
    named = {f"rl.environment.{key}": path for key, path in environment.functions.items()}
    programs = {key: f"{path}:" for key, path in files.items() if path.endswith(".py")}
    return {key: _local(path, workspace, hashes) for key, path in files.items()} | _functions((named | programs).items(), workspace, hashes)


def _scorers(lists: Mapping[str, list[ScorerConfig]], workspace: Path, hashes: FileHashes) -> Tree:
    """Functions, external reward models, services and judges' templates of lists of scorers, with their keys. Of a service only the address
    is known.
    """
    scorers = _with_keys(lists)
    services = {f"{key}.{s.name}": {"address": s.url} for key, s in scorers if s.url is not None}
    services |= _templates({f"{key}.{s.name}": s for key, s in scorers}, workspace, hashes)
    functions = ((f"{key}.{s.name}", s.path) for key, s in scorers if s.kind == "function")
    models = {f"{key}.{s.name}": _local(s.path, workspace, hashes) for key, s in scorers if is_ready_made(s)}
    return _functions(functions, workspace, hashes) | models | services


def _templates(scorers: Mapping[str, ScorerConfig], workspace: Path, hashes: FileHashes) -> Tree:
    return {f"{key}.template": _local(s.template, workspace, hashes) for key, s in scorers.items() if s.template is not None}


def _judges(scorers: Mapping[str, ScorerConfig], workspace: Path, hashes: FileHashes) -> Tree:
    """What the gate's verdict on each judge depends on: its address, the params that it is asked with, and its template."""
    known = {key: hashlib.sha256(json.dumps(s.asked_with, sort_keys=True).encode()).hexdigest() for key, s in scorers.items()}
    services = {key: {"address": s.url, "asked_with": known[key]} for key, s in scorers.items()}
    return services | _templates(scorers, workspace, hashes)


def _with_keys(lists: Mapping[str, list[ScorerConfig]]) -> list[tuple[str, ScorerConfig]]:
    return [(key, scorer) for key, scorers in lists.items() for scorer in scorers]


def is_ready_made(scorer: ScorerConfig) -> bool:
    """Return whether a scorer's reward model comes from outside the chain."""
    return scorer.kind == "reward_model" and scorer.path is not None and os.path.normpath(scorer.path) not in OWN_MODELS


def _functions(named: Iterable[tuple[str, str | None]], workspace: Path, hashes: FileHashes) -> Tree:
    """Files of functions inside or next to the project's folder and the files that they import; installed packages aren't tracked."""
    found = {}
    for key, path in named:
        place = (path or "").rpartition(":")[0]
        module = place.replace(".", "/")
        candidates = [place] if place.endswith(".py") else [f"{module}.py", f"{module}/__init__.py"] if place else []
        file = next((c for c in candidates if (workspace / c).is_file()), None)
        if file is None:
            continue
        also = imported_files(workspace / file, workspace, module=None if file == place else place)
        for name in (file, *(_shown_path(path, file, workspace) for path in also)):
            if Path(os.path.normpath(name)).parts[0] != OWN_CODE:
                entry = key if name == file else f"{key} imports {name}"
                found[entry] = _local(name, workspace, hashes, by=workspace / name)
    return found


def _shown_path(path: Path, file: str, workspace: Path) -> str:
    """Return the path to record for an imported file: relative to the workspace, or below the folder of `file` as params name it, or else
    absolute.
    """
    for root, prefix in ((workspace, ""), ((workspace / file).parent, os.path.dirname(file))):
        if path.is_relative_to(root.resolve()):
            return os.path.join(prefix, path.relative_to(root.resolve()))
    return str(path)


def _local(path: str, workspace: Path, hashes: FileHashes, by: Path | None = None) -> Tree | None:
    """Return the entry of a file or folder; None if nothing is there."""
    place = by or locate(path, workspace)
    if place.is_dir():
        listing = hashes.of_folder(place)
        found = of_listing(listing)
        hashes.keep_list(found.sha256, listing)
        return {"path": path, "files": len(listing), "size": found.size, "sha256": found.sha256}
    if not place.is_file():
        return None
    found = hashes.of_file(place)
    return {"path": path, "size": found.size, "sha256": found.sha256}


def changes_since(lock: Path, inputs: Tree, workspace: Path = Path(), *, ignored: Collection[str] = ()) -> list[str]:
    """Lines that name each input changed since the stages of dvc.lock ran, with the stages that run again.

    Args:
        ignored: stages to leave out.
    """
    stages = (read_yaml(lock).get("stages") or {}) if lock.exists() else {}
    stages_by_change: dict[str, dict[str, None]] = {}  # with the stages in the order of the chain, each once
    hashes = FileHashes(workspace)
    for stage, entry in stages.items():
        if stage in ignored:
            continue
        for section, before in (entry.get("params") or {}).get(str(INPUTS), {}).items():
            for line in _differences(before or {}, inputs.get(section) or {}, hashes):
                stages_by_change.setdefault(line, {})[stage] = None
    return [f"{line}; to run again: {', '.join(of)} and what depends on it" for line, of in stages_by_change.items()]


def changed_inputs(recorded: Tree, workspace: Path = Path()) -> list[str]:
    """Lines that name files and folders whose content isn't the recorded one. Names on the hub aren't looked up.

    Args:
        recorded: sections of data/inputs.json.
    """
    hashes, lines = FileHashes(workspace), []
    for key, entry in _local_entries(recorded):
        try:
            now = _local(entry["path"], workspace, hashes)
        except (OSError, ValueError) as error:
            lines.append(f"{key}: {error}")
            continue
        if now is None:
            lines.append(f"{key}: {entry['path']} is gone")
        elif now != entry:
            lines += [f"{key}: {line}" for line in _changed_files(entry, now, hashes)]
    hashes.keep()
    return list(dict.fromkeys(lines))


def input_files(recorded: Tree, workspace: Path = Path()) -> Iterator[Path]:
    """The files that `changed_inputs` compares, those of folders included; none is read."""
    for _, entry in _local_entries(recorded):
        place = locate(entry["path"], workspace)
        yield from files_below(place) if place.is_dir() else (place,)


def _local_entries(recorded: Tree) -> Iterator[tuple[str, Tree]]:
    return ((key, entry) for entries in recorded.values() for key, entry in (entries or {}).items() if entry and "path" in entry)


def _differences(before: Tree, now: Tree, hashes: FileHashes) -> Iterator[str]:
    """Changes of inputs with the same name and path in both; a changed path is a change of params, which DVC reports."""
    for key, new in now.items():
        old = before.get(key)
        if not old or not new or old == new or _place(old) != _place(new):
            continue
        if "address" in new:  # params say what a judge is asked with
            continue
        if "name" in new:
            yield f"{key}: {new['name']} was at commit {old.get('commit')}, is at {new['commit']}"
            continue
        yield from (f"{key}: {line}" for line in _changed_files(old, new, hashes))


def _place(entry: Tree) -> str | None:
    """Path, name on the hub or address of an input."""
    return next((entry[key] for key in ("path", "name", "address") if key in entry), None)


def _changed_files(old: Tree, new: Tree, hashes: FileHashes) -> Iterator[str]:
    path, was, now = new["path"], hashes.list_of(old["sha256"]), hashes.list_of(new["sha256"])
    if "files" not in new or was is None or now is None:
        yield f"{path} changed: {_summary(old)} -> {_summary(new)}"
        return
    names = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
    for name in names[:SHOWN_FILES]:
        one, other = (_file_summary(listing.get(name)) for listing in (was, now))
        yield f"{path}/{name} changed: {one} -> {other}"
    if len(names) > SHOWN_FILES:
        yield f"{path}: {number_of(len(names) - SHOWN_FILES, 'more file')} changed"


def _summary(entry: Tree) -> str:
    files = f"{number_of(entry['files'], 'file')}, " if "files" in entry else ""
    return f"{files}{entry['size']} bytes, sha256 {entry['sha256'][:12]}"


def _file_summary(found: FileHash | None) -> str:
    return "nothing" if found is None else f"{found.size} bytes, sha256 {found.sha256[:12]}"


def input_problems(params: Params, workspace: Path = Path(), *, rounds: bool = False) -> list[str]:
    """Problems of inputs that stages would refuse, judged by file names, sizes and the hub's cache without loading anything.

    Functions are checked in flows/chain/user_files.py, since their place depends on the run.

    Args:
        rounds: include the scorers of iterative DPO's rounds.
    """
    found: list[str] = []
    scorers = _with_keys(params.scorers_in_use | ({"iterative.scorers": params.iterative.scorers} if rounds else {}))
    try:
        given = [entry for _, entries in _given(params, workspace) for entry in entries]
    except (OSError, ValueError) as error:
        found, given = [f"external.path: {shown(str(error), 600)}"], []
    checks = [
        *((f"data.sources.{s.name}", _source_problem, s) for s in params.data.sources),
        *((f"gate.external.{e.name}.path", _data_problem, e.path) for e in params.gate.external),
        *((f"{key}.{s.name}.path", _ready_made_problem, s.path) for key, s in scorers if is_ready_made(s)),
        *((f"{key}.{s.name}.template", _template_problem, s.template) for key, s in scorers if s.template is not None),
        ("evaluation.harness", _harness_problem, params.evaluation.harness),
        ("model.path", partial(_model_problem, key="model.path", revision=params.model.revision), params.model.path),
        *((key, partial(_model_problem, key=key, revision=revision), path) for key, path, revision in given),
    ]
    for key, check, what in checks:
        try:
            problem = check(what, workspace)
        except (OSError, ValueError) as error:
            problem = shown(str(error), 600)
        if problem is not None:
            found.append(f"{key}: {problem}")
    return found


def _source_problem(source: SourceConfig, workspace: Path) -> str | None:
    if source.path is None or source.kind == "clerk":
        return None
    if source.images is not None and not locate(source.images, workspace).is_dir():
        return f"expected a folder of pictures in images, got {shown(source.images)} with none there; correct the path"
    if source.kind != "huggingface":
        return _data_problem(source.path, workspace)
    place = locate(source.path, workspace)
    if exists(place):
        if source.revision is not None:
            return f"expected no revision of the local folder {shown(source.path)}, got {shown(source.revision)}; remove it"
        empty = place.is_dir() and not any(files_below(place))
        return f"expected a data set in {shown(source.path)}, got an empty folder; correct the path" if empty else None
    if not is_hub_name(source.path):
        return f"expected a data set's folder or name, got {shown(source.path)} with nothing there; correct the path"
    if places.hub_is_online() or places.cached_data_set(source.path, source.revision, source.subset):
        return None
    return _not_cached("data set", source.path, source.revision)


def _not_cached(what: str, name: str, revision: str | None) -> str:
    wanted = f"{what} {shown(name)}" + (f" at revision {shown(revision)}" if revision else "")
    return f"expected a folder, or {wanted} in the hub's cache, got neither; correct the path, or set HF_HUB_OFFLINE=0 to download it"


def _data_problem(path: str, workspace: Path) -> str | None:
    place = locate(path, workspace)
    if not place.exists():
        got = "a link to nothing" if place.is_symlink() else "nothing there"
        return f"expected a data file or folder at {shown(path)}, got {got}; correct the path{base_of(path)}"
    files = sorted(f for f in files_below(place) if is_data_file(f.name)) if place.is_dir() else [place]
    if not files:
        return f"expected files in {shown(path)} that end in {', '.join(DATA_ENDINGS)}, got none; correct the path"
    for file in files:
        name = path if file == place else f"{path}/{file.relative_to(place)}"
        if not is_data_file(file.name):
            return f"expected a name that ends in {', '.join(DATA_ENDINGS)}, got {shown(name)}; convert or rename it"
        if not file.is_file():
            return f"expected {shown(name)} to be a file, got something else; correct the path"
        if file.stat().st_size == 0:
            return f"expected records in {shown(name)}, got an empty file; remove it or correct the path"
        if not os.access(file, os.R_OK):
            return f"expected read permission for {shown(name)}, got none; correct its permissions"
    return None


def _ready_made_problem(path: str, workspace: Path) -> str | None:
    if (locate(path, workspace) / "config.json").is_file():
        return None
    return f"expected a reward model's folder at {shown(path)}, got none with a config.json; correct the path"


def _template_problem(path: str, workspace: Path) -> str | None:
    if locate(path, workspace).is_file():
        return None
    return f"expected a file with the judge's instructions at {shown(path)}, got none; correct the path{base_of(path)}"


def _harness_problem(harness: HarnessConfig | None, workspace: Path) -> str | None:
    if harness is None:
        return None
    if find_spec("lm_eval") is None:
        return "expected the package lm_eval, got none; install it: pip install -c constraints.txt -e '.[eval]'"
    if harness.include_path is not None and not locate(harness.include_path, workspace).is_dir():
        return f"expected a folder with tasks at include_path, {shown(harness.include_path)}, got none; correct the path"
    return None


def _model_problem(path: str | None, workspace: Path, *, key: str, revision: str | None = None) -> str | None:
    from rlhf_core.models.folder import ADAPTERS, check_model_folder

    if path is None:
        return None
    place = locate(path, workspace)
    if place.is_dir():
        if revision is not None:
            name = "model.revision" if key == "model.path" else f"revision in {ADAPTERS}"
            return f"expected no {name} with the local folder {shown(path)}, got {shown(revision)}; set it to null"
    elif exists(place) or not is_hub_name(path):
        got = "a file" if exists(place) else "nothing"
        return (
            f"expected a folder with a pretrained model, got {shown(path)} with {got} there{base_of(path)}; put "
            "one there, or name another folder, or any model on Hugging Face, which is downloaded with HF_HUB_OFFLINE=0"
        )
    elif (place := places.model_snapshot(path, revision)) is None:
        return None if places.hub_is_online() else _not_cached("model", path, revision)
    if key != "external.path" or not (place / ADAPTERS).is_file():  # adapters are checked with their base, by check_model
        check_model_folder(place)
    return None


def summary(inputs: Tree) -> str:
    """Numbers of files, bytes, hub commits and services as text."""
    entries = {key: entry for section in inputs.values() for key, entry in section.items() if entry}.values()
    files = [entry for entry in entries if "size" in entry]
    count, size = sum(entry.get("files", 1) for entry in files), sum(entry["size"] for entry in files)
    commits, services = (sum(key in entry for entry in entries) for key in ("commit", "address"))
    counts = [f"{number_of(count, 'file')}, {size / 1e6:.1f} MB"] * bool(files) + [number_of(commits, "hub commit")] * bool(commits)
    counts += [f"{number_of(services, 'service')} without a hash"] * bool(services)
    return ", ".join(counts) or "none outside the project"
