"""How the GPUs of a cluster are shared by the actors of an RL job, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config import ConfigError, RlConfig, load_params, parse_params, read_yaml, set_key
from rlhf_core.planning.placement import Placement, place


def rl(**changes) -> RlConfig:
    config = load_params().rl
    trainer = {k: v for k, v in changes.items() if k in ("ranks", "gpus_per_rank")}
    rollout = {k: v for k, v in changes.items() if k in ("engines", "gpus_per_engine")}
    return config.model_copy(
        update={"trainer": config.trainer.model_copy(update=trainer), "rollout": config.rollout.model_copy(update=rollout)}
    )


def test_the_default_job_runs_on_one_gpu():
    config = rl()
    assert (config.trainer.ranks, config.rollout.engines) == (1, 2)
    assert place(config, 1) == Placement(1, 0.6, 0.2)
    assert place(config, 1).shares_engine_gpus


def test_without_gpus_none_is_requested():
    assert place(rl(gpus_per_rank=1.0), 0) == Placement(0, 0.0, 0.0)
    assert not place(rl(), 0).shares_engine_gpus


@pytest.mark.parametrize(
    ("ranks", "engines", "gpus", "per_rank", "per_engine"),
    [
        (1, 2, 3, 1.0, 1.0),  # one each
        (1, 2, 2, 1.0, 0.5),  # the engines share what the rank leaves
        (1, 3, 2, 1.0, 0.3333),  # rounded down: three parts of 0.3334 wouldn't fit
        (2, 2, 2, 0.6, 0.4),  # an engine beside each rank
        (2, 3, 2, 0.6, 0.2),  # as many as fit beside a rank
        (4, 4, 8, 1.0, 1.0),
        (6, 4, 8, 1.0, 0.5),
    ],
)
def test_auto_gives_each_a_gpu_or_shares_of_fewer(ranks, engines, gpus, per_rank, per_engine):
    assert place(rl(ranks=ranks, engines=engines), gpus) == Placement(gpus, per_rank, per_engine)


def test_what_is_set_is_kept_and_the_other_takes_the_rest():
    assert place(rl(gpus_per_engine=0.4), 1) == Placement(1, 0.2, 0.4)
    assert place(rl(gpus_per_rank=0.5), 1) == Placement(1, 0.5, 0.25)
    assert place(rl(gpus_per_rank=0.5), 3) == Placement(3, 0.5, 1.0)
    assert place(rl(gpus_per_rank=0.5, gpus_per_engine=0.25), 1) == Placement(1, 0.5, 0.25)


@pytest.mark.parametrize(
    ("changes", "gpus", "message"),
    [
        ({"gpus_per_rank": 1.0, "gpus_per_engine": 1.0}, 1, r"1 x 1 .*2 x 1 .*GPUs, got 1; that is 3 together"),
        ({"gpus_per_rank": 0.6, "gpus_per_engine": 0.3}, 1, r"1 x 0\.6 .*2 x 0\.3 .*got 1; that is 1\.2 together"),
        ({"gpus_per_rank": 1.0}, 1, r"got 1; .*set gpus_per_rank and gpus_per_engine to auto"),
        ({"ranks": 2}, 1, r"rl\.trainer\.ranks: expected at most the cluster's 1 GPUs, got 2"),
        # 1.8 of 2 GPUs, of which no single one has room for the second engine
        ({"gpus_per_rank": 0.6, "gpus_per_engine": 0.6, "engines": 2}, 2, r"got 2; that is 1\.8 together"),
    ],
)
def test_a_job_that_asks_for_more_than_there_is_is_refused_at_once(changes, gpus, message):
    with pytest.raises(ValueError, match=message):
        place(rl(**changes), gpus)


@pytest.mark.parametrize(
    ("key", "value", "ranks"),
    [
        ("rl.trainer.gpus_per_rank", 2.0, 1),
        ("rl.rollout.gpus_per_engine", 1.5, 1),
        ("rl.rollout.gpus_per_engine", 0.0, 1),
        ("rl.trainer.gpus_per_rank", 0.5, 2),
    ],
)
def test_a_share_is_auto_or_a_part_of_one_gpu_and_ranks_have_more_than_half(key, value, ranks):
    tree = read_yaml(Path("params.yaml"))
    set_key(tree, "rl.trainer.ranks", ranks)
    set_key(tree, key, value)
    with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
        parse_params(tree)


@pytest.mark.parametrize(("key", "count"), [("rl.trainer.gpus_per_rank", "ranks"), ("rl.rollout.gpus_per_engine", "engines")])
def test_nothing_is_reserved_that_an_actor_does_not_use(key, count):
    tree = read_yaml(Path("params.yaml"))
    set_key(tree, key, 2.0)
    with pytest.raises(ConfigError, match=rf"{key}: expected auto or at most 1, got 2; raise {count} instead"):
        parse_params(tree)


def test_engines_beside_a_rank_are_counted_where_ray_puts_them():
    assert place(rl(), 1).engines_beside_ranks(rl()) == 2
    assert place(rl(), 3).engines_beside_ranks(rl()) == 0
    assert place(rl(ranks=2, engines=2), 2).engines_beside_ranks(rl(ranks=2, engines=2)) == 1
