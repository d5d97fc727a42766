"""Checks before a run that the files named in params exist: data, models, reward functions, judges, a chat template.

Nothing is loaded or executed here. Stage check_model loads the functions (docs/scorers.md).
"""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from flows.chain.worktree import git_environment, worktree_path
from rlhf_core.config import ConfigError, Params, shown
from rlhf_core.data.places import base_of
from rlhf_core.paths import RUNS
from rlhf_core.provenance.inputs import input_problems


def check_user_files(root: Path, name: str | None, params: Params, *, rounds: bool = False) -> None:
    """Check that the files exist where a run reads them: the current folder, or a named run's existing or future worktree.

    Args:
        name: the run's name; None: it works in `root`.
        rounds: whether to include the scorers of iterative DPO's rounds.
    Raises:
        ConfigError: names all files that are missing or unreadable.
    """
    folder = root if name is None else worktree_path(root, name)
    problems = [*_missing_functions(root, name, folder, params, rounds)]
    problems += input_problems(params, folder if folder.exists() else root, rounds=rounds)
    if problems:
        raise ConfigError("\n".join(problems))


def _missing_functions(root: Path, name: str | None, folder: Path, params: Params, rounds: bool) -> Iterator[str]:
    """Yield a line for each function, and for a chat template, that params name and whose file will not be there."""
    for key, wanted in _functions(params, rounds):
        place = wanted.rpartition(":")[0]
        candidates = [place] if place.endswith(".py") else _module_files(root, place)
        if candidates and not any(_will_be_there(root, folder, path) for path in candidates):
            yield _problem(key, wanted, next((path for path in candidates if (root / path).is_file()), None), root, name)
    for number, word in enumerate(params.rl.environment.command if params.rl.environment else ()):
        if (word.endswith(".py") or (root / word).is_file()) and not _will_be_there(root, folder, word):
            yield _problem(f"rl.environment.command.{number}", word, word if (root / word).is_file() else None, root, name)
    template = params.model.chat_template or ""
    named = template.endswith(".jinja") and "{{" not in template and "{%" not in template
    if named and not (_will_be_there(root, folder, template) or (root / template).is_file()):  # either is read (`data.places.locate`)
        yield _problem("model.chat_template", template, None, root, name)


def _functions(params: Params, rounds: bool) -> Iterator[tuple[str, str]]:
    """Yield the key and `file.py:name` or `package.module:name` of each function that the run calls."""
    for key, scorers in (params.scorers_in_use | ({"iterative.scorers": params.iterative.scorers} if rounds else {})).items():
        yield from ((f"{key}.{scorer.name}", scorer.path) for scorer in scorers if scorer.kind == "function")
    if params.rl.environment is not None:
        yield from ((f"rl.environment.{key}", path) for key, path in params.rl.environment.functions.items())
    yield from ((f"data.sources.{source.name}.judge", source.judge) for source in params.data.sources if source.judge is not None)


def _module_files(root: Path, module: str) -> list[str]:
    """Return possible files of a module in the project's folder; none for an installed or unknown module, which check_model reports."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != root.resolve()]
    if not module or importlib.machinery.PathFinder.find_spec(module.partition(".")[0], elsewhere) is not None:
        return []
    path = module.replace(".", "/")
    return [file for file in (f"{path}.py", f"{path}/__init__.py") if (root / file).is_file()]


def _will_be_there(root: Path, folder: Path, path: str) -> bool:
    """Return whether a file is in a run's folder; for a future worktree, whether its base commit has the file.

    The result is True if that is unknown: a link's target is checked once the worktree exists.
    """
    try:
        inside = not Path(path).is_absolute() and ".." not in Path(path).parts
        if folder.exists() or not inside:
            return Path(os.path.normpath(folder / path)).is_file()
        if (root / path).parent.resolve() != (root.resolve() / path).parent:
            return True
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown(path)}: expected a path, got: {shown(str(error))}; correct it") from error
    branch = f"refs/heads/run/{folder.name}"  # a removed worktree is made again from its branch
    return _has(root, branch if _has(root, branch) else "HEAD", path)


def _has(root: Path, commit: str, path: str | None = None) -> bool:
    """Return whether the commit exists and has the file."""
    command = ["git", "cat-file", "-e", commit if path is None else f"{commit}:./{path}"]
    return subprocess.run(command, cwd=root, env=git_environment(), capture_output=True, check=False).returncode == 0


def _problem(key: str, wanted: str, in_root: str | None, root: Path, name: str | None) -> str:
    place = "in the project's folder" if name is None else f"in the worktree {RUNS}/{name}"
    if name is None or in_root is None:
        return f"{key}: expected {shown(wanted)} {place}, got no such file; correct the path{base_of(wanted)}"
    here = Path(os.path.normpath(root.absolute() / in_root))
    if not here.is_relative_to(root.absolute()):
        _, colon, function = wanted.rpartition(":")
        absolute = shown(f"{here}{colon}{function if colon else ''}")
        return f"{key}: expected {shown(wanted)} {place}, got a path out of the project's folder; write it absolute, {absolute}"
    advice = "commit it: a named run's worktree starts from the last commit"
    if worktree_path(root, name).exists():
        advice += (
            f"; then choose another name, or remove this worktree with `git worktree remove --force {RUNS}/{name}` and "
            f"`git branch -D run/{name}`"
        )
    return f"{key}: expected {shown(wanted)} {place}, got the file only in the project's folder; {advice}"
