"""What the driver of a training job tells of ranks that failed, and which network interface its processes use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import warm_python
from clerk_params import CLERK_PARAMS
from ray.exceptions import ActorDiedError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerHealthCheckTimeoutError

from rlhf_core.config import ConfigError, parse_params, read_yaml, set_key
from rlhf_core.engines.ray.train import RankGroup, _failure
from rlhf_core.process import STOPPED_BY_SIGNAL
from rlhf_core.stage.ray_job import network

ROOT = Path(__file__).parents[3]


def group(folder: Path) -> RankGroup:
    return RankGroup(4, gpus=False, threads=1, folder=folder, start_timeout=120.0, rank_timeout=60.0, stop_requested=lambda: False)


def test_a_rank_that_died_is_named_rather_than_those_whose_connection_broke(tmp_path):
    lost = {0: RuntimeError("Connection closed by peer"), 2: ActorDiedError(), 3: RuntimeError("Connection reset")}
    failed = _failure(WorkerGroupError("", lost), group(tmp_path))
    assert str(failed) == "rank 2: expected to finish its work, got a dead process; run the stage again"
    assert failed.cause is None


def test_a_stopped_rank_is_not_called_dead(tmp_path):
    failed = _failure(WorkerGroupError("", {1: WorkerHealthCheckTimeoutError("hanging")}), group(tmp_path))
    assert "rank 1: expected to finish its work, got no answer within cluster.rank_timeout=60 s; it was stopped" in str(failed)


def test_a_refusal_counts_before_its_consequences_on_other_ranks(tmp_path):
    refusal = ValueError("sft step 3: expected a finite loss, got nan")
    (tmp_path / "traceback-1").write_text("Traceback ...")
    failed = _failure(WorkerGroupError("", {0: RuntimeError("Connection closed by peer"), 1: refusal}), group(tmp_path))
    assert failed.cause is refusal and failed.traceback == "Traceback ..." and str(failed).startswith("rank 1: ")


def test_an_error_of_communication_alone_names_the_first_rank(tmp_path):
    failed = _failure(WorkerGroupError("", {3: RuntimeError("timed out\nat line 3"), 1: RuntimeError("closed")}), group(tmp_path))
    assert str(failed) == "rank 1: expected to finish its work, got RuntimeError: closed"


def test_ranks_without_room_are_told_with_the_setting_of_the_deadline(tmp_path):
    failed = _failure(ControllerError(TimeoutError("no room")), group(tmp_path))
    assert str(failed) == (
        "ranks: expected room for 4 of them within cluster.start_timeout=120 s and all of them to start, got TimeoutError: no room; lower "
        "the number of ranks or add nodes"
    )


def test_a_rank_that_dies_as_it_starts_is_no_lack_of_room(tmp_path):
    failed = _failure(ControllerError(WorkerGroupStartupFailedError("an actor failed to initialize")), group(tmp_path))
    assert str(failed) == "ranks: expected all 4 to start, got a dead process (an actor failed to initialize); run the stage again"


@pytest.mark.parametrize(("started", "code", "printed"), [([], STOPPED_BY_SIGNAL, ""), ([1], 0, "went on\n")])
def test_a_stop_ends_the_driver_only_before_any_rank_has_started(tmp_path, started, code, printed):
    program = f"""
import time
from pathlib import Path
from rlhf_core.engines.ray.train import RankGroup, _watching_start
from rlhf_core.storage.board import open_board
group = RankGroup(2, False, 1, Path({str(tmp_path)!r}), 60.0, 60.0, stop_requested=lambda: True)
board = open_board(group.folder)
board.clear()
for rank in {started}:
    board.write(f"started-{{rank}}", "")
with _watching_start(group, board):
    time.sleep(2.0)
print("went on")
"""
    done = warm_python.run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (code, printed), done.stderr


def test_both_libraries_of_collectives_get_the_network_interface():
    assert network("eth1") == {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1"}
    assert network(None) == {}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cluster.network_interface", "eth0; rm", "cluster.network_interface"),
        ("sft.ranks", 0, "sft.ranks"),
        ("sft.ranks", 100, r"sft.batch_size: expected at least ranks=100, got 64; raise it, so that each rank has an example"),
        ("dpo.ranks", 65, r"dpo.batch_size: expected at least ranks=65, got 64"),
        ("sft.pretrain.batch_size", 3, r"sft.pretrain.batch_size: expected at least ranks=4, got 3"),
    ],
)
def test_settings_of_ranks_are_refused_by_name(key: str, value: object, message: str):
    tree = read_yaml(CLERK_PARAMS)
    set_key(tree, "sft.ranks", 4)
    set_key(tree, "alignment.method", "dpo")
    set_key(tree, key, value)
    with pytest.raises(ConfigError, match=message):
        parse_params(tree)
