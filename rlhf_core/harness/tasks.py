"""Tasks of lm-evaluation-harness: found by name, loaded with their data, and tried before anything is trained."""

from __future__ import annotations

import contextlib
import logging
import os
import random
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config import HarnessConfig, Params, number_of, shown
from rlhf_core.data.places import hub_is_online, locate
from rlhf_core.models.tokenizer import load_tokenizer

KEY = "evaluation.harness"
PYTHON_SEED, OTHER_SEED = 0, 1234  # the harness's own, with which published figures are computed
BOOTSTRAP = 1000  # samples for the standard error of what isn't a mean: known to 2 %
GENERATION = "generate_until"  # request and output type of tasks that sample

log = logging.getLogger("rlhf")


def load_tasks(config: HarnessConfig) -> dict[str, Any]:
    """Return the harness's dictionary of tasks and groups with these names, and with their data.

    Paths in a task's files are relative to include_path.

    Raises:
        ValueError: the package is missing, there is no such task, or its data or functions can't be loaded.
    """
    if find_spec("lm_eval") is None:
        raise ValueError(f"{KEY}: expected the package lm_eval, got none; install it: pip install -c constraints.txt -e '.[eval]'")
    os.environ["DISABLE_MULTIPROC"] = "1"  # else the harness forks a process for each core, which Ray's and vLLM's threads don't survive
    folder = _folder(config)
    random.seed(PYTHON_SEED)
    np.random.seed(OTHER_SEED)
    manager = _manager(config, folder)
    with contextlib.chdir(folder or Path()):
        try:
            loaded = manager.load(config.tasks)
        except Exception as error:  # data sets, YAML and functions of tasks raise anything
            raise ValueError(_load_problem(config, error)) from error
    for task in loaded["tasks"].values():
        _set_fewshot(task, config.num_fewshot)
    return loaded


def _folder(config: HarnessConfig) -> Path | None:
    if config.include_path is None:
        return None
    folder = locate(config.include_path)
    if not folder.is_dir():
        raise ValueError(f"{KEY}.include_path: expected a folder with tasks at {shown(config.include_path)}, got none; correct the path")
    return folder.resolve()


def _manager(config: HarnessConfig, folder: Path | None) -> Any:
    """Return a task manager that knows all names. The harness's own tasks are thousands of files, which are read only if needed."""
    from lm_eval.tasks import TaskManager

    own = None if folder is None else TaskManager(include_path=str(folder), include_defaults=False)
    if own is not None and set(config.tasks) <= set(own.all_tasks):
        return own
    manager = _manager_of_all(folder)
    if unknown := sorted(set(config.tasks) - set(manager.all_tasks)):
        near = get_close_matches(unknown[0], manager.all_tasks, n=4)
        local = "" if own is None else f"; {shown(config.include_path)} has {', '.join(own.all_tasks) or 'none'}"
        raise ValueError(
            f"{KEY}.tasks: expected names of the harness's tasks, got {shown(', '.join(unknown))}{local}; "
            f"{'names like it are ' + ', '.join(near) if near else '`lm-eval ls tasks` lists them'}"
        )
    return manager


@cache
def _manager_of_all(folder: Path | None) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=None if folder is None else str(folder))


def _load_problem(config: HarnessConfig, error: Exception) -> str:
    reason = shown((str(error).strip() or type(error).__name__).splitlines()[0], 300)
    fetched = "" if hub_is_online() else "fetch the data set once with HF_HUB_OFFLINE=0, or "
    return (
        f"{KEY}.tasks: expected {', '.join(config.tasks)} with their data, got {type(error).__name__}: {reason}; {fetched}write a task "
        "with local files in evaluation.harness.include_path (docs/harness.md)"
    )


def _set_fewshot(task: Any, wanted: int | None) -> None:
    """Set the number of examples as the harness does: a task that says 0 keeps 0."""
    own = task.get_config("num_fewshot")
    if wanted is not None and own != 0:
        task.set_config(key="num_fewshot", value=wanted)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=OTHER_SEED)


def run_tasks(config: HarnessConfig, model: Any, *, limit: int | None, generation_first: bool = False) -> dict[str, Any]:
    """Return the harness's results with those of each document.

    Args:
        model: a `HarnessModel`.
        generation_first: tasks that sample come before tasks of log-likelihoods, else after them.
    """
    from lm_eval import evaluator

    loaded = load_tasks(config)
    order = sorted(loaded["tasks"].items(), key=lambda item: (item[1].OUTPUT_TYPE == GENERATION) != generation_first)
    return evaluator.evaluate(
        model,
        loaded | {"tasks": dict(order)},
        limit=limit,
        bootstrap_iters=BOOTSTRAP,
        apply_chat_template=config.chat_template,
        fewshot_as_multiturn=config.chat_template,
    )


def try_tasks(params: Params, tokenizer_folder: Path) -> None:
    """Build the first request of each task, and compute its figures from answers that say nothing, without a model.

    Raises:
        ValueError: a task isn't found, lacks its data, or asks for what the evaluation doesn't do.
    """
    from rlhf_core.harness.model import HarnessModel

    config = params.evaluation.harness
    if config is None:
        return
    load_tasks(config)  # whose errors say what to do
    tokenizer = load_tokenizer(str(tokenizer_folder), trust_remote_code=params.model.trust_remote_code)
    model = HarnessModel(
        tokenizer,
        max_length=params.harness_max_length,
        score=lambda pairs: [(-1.0, False)] * len(pairs),
        generate=lambda prompts, *_: [[] for _ in prompts],
    )
    try:
        found = run_tasks(config, model, limit=1)
    except Exception as error:  # functions of tasks and templates raise anything
        raise ValueError(
            f"{KEY}: expected tasks that can be tried on one document, got {type(error).__name__}: {shown(str(error), 600)}"
        ) from error
    log.info("%s: %s tried", KEY, number_of(len(found["n-samples"]), "task"))
