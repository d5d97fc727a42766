"""The environment of all tests: offline and without library output, set before anything reads it.

Child processes behave as on a user's machine: they react to SIGINT and SIGHUP, which background jobs and CI runners often ignore, and write
bytecode, which hundreds of processes would otherwise compile again.
"""

import gc
import logging
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from long_results import LongResults
from ruamel.yaml import YAML

from rlhf_core.process import configure_process

configure_process()
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Workers take files in this order: the chain and the longest files first, so that no worker is left with one at the end, and those that
# need the chain once it is done; then all others.
ORDER = (
    *("test_chain.py", "test_flow.py", "test_two_ranks.py", "test_model_registry.py", "test_resume.py"),
    *("test_supervised_ranks.py", "test_flow_stages.py", "test_validation.py", "test_report.py", "test_runs.py"),
    *("test_inference_ranks.py", "test_sequence_parallel.py", "test_gate.py", "test_edits.py", "test_tracked_inputs.py"),
)


def pytest_collection_modifyitems(items):
    """Files without a place keep their order behind the others."""
    places = {name: place for place, name in enumerate(ORDER)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_addoption(parser):
    parser.addoption("--results", type=Path, help="CSV table that gets a row for each file of tests that ran; rows of other files stay")


def pytest_configure(config):
    if (table := config.getoption("--results")) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(LongResults(config.rootpath / table))


def pytest_collection_finish():
    """Exclude imported objects from garbage collection; they live to the end."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def equal_yaml_parsed_once() -> Iterator[None]:
    """Keep what ruamel.yaml makes of a text: hundreds of tests lay overrides over the same params.yaml, and each load takes 0.1 s."""
    load = YAML.load

    @lru_cache(maxsize=32)
    def pickled(kind: tuple[str, ...], pure: bool, text: str) -> bytes:
        return pickle.dumps(load(YAML(typ=list(kind), pure=pure), text))

    def load_again(yaml: YAML, stream: object) -> object:
        if not isinstance(stream, str) or len(stream) < 5000 or yaml.version is not None:
            return load(yaml, stream)
        return pickle.loads(pickled(tuple(yaml.typ), yaml.pure, stream))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(YAML, "load", load_again)
        yield


@pytest.fixture(scope="session")
def world() -> Iterator[None]:
    """DeepSpeed's world of one rank, in this process; DeepSpeed keeps its groups, so a process can leave it once only."""
    import torch.distributed as dist

    from rlhf_core.engines.deepspeed.engine import join_world

    join_world()
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    """Remove the log handlers that a test adds: their streams are closed when it ends."""
    before = {name: list(logging.getLogger(name).handlers) for name in (None, "rlhf")}
    yield
    for name, handlers in before.items():
        logging.getLogger(name).handlers[:] = handlers


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """One thread of torch in this process, whatever a stage that an earlier test or fixture ran in it has set."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
