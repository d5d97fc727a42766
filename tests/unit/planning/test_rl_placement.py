"""How the GPUs of a cluster are shared by the actors of an RL job, and what is refused."""

from __future__ import annotations

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.config import ConfigError, RlConfig, load_params, parse_params, read_yaml, set_key
from rlhf_core.planning.placement import GpuPlacement, check_gpus, place, transfer_ways, unused_shares


def rl(placement: str = "together", **changes) -> RlConfig:
    config = load_params(CLERK_PARAMS).rl.model_copy(update={"placement": RlConfig.model_validate(tree(placement)).placement})
    trainer = {k: v for k, v in changes.items() if k in ("ranks", "gpus_per_rank")}
    rollout = {k: v for k, v in changes.items() if k in ("engines", "gpus_per_engine", "tensor_parallel_size")}
    return config.model_copy(
        update={"trainer": config.trainer.model_copy(update=trainer), "rollout": config.rollout.model_copy(update=rollout)}
    )


def tree(placement) -> dict:
    return read_yaml(CLERK_PARAMS)["rl"] | {"placement": placement}


def shares(config: RlConfig, gpus: int) -> tuple[float, float]:
    found = place(config, gpus)
    return found.per_rank, found.per_engine


def test_the_default_job_runs_on_one_gpu():
    config = rl()
    assert (config.trainer.ranks, config.rollout.engines) == (1, 2)
    assert place(config, 1) == GpuPlacement(1, 0.6, 0.2, ((0,),), (0, 0))
    assert place(config, 1).shares_engine_gpus


def test_without_gpus_none_is_requested():
    assert shares(rl(gpus_per_rank=1.0), 0) == (0.0, 0.0)
    assert not place(rl(), 0).shares_engine_gpus
    assert unused_shares(rl()) == []
    assert unused_shares(rl(gpus_per_engine=0.5)) == ["rl.rollout.gpus_per_engine: 0.5 has no effect, because the cluster has no GPU"]


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
    assert shares(rl(ranks=ranks, engines=engines), gpus) == (per_rank, per_engine)


def test_what_is_set_is_kept_and_the_other_takes_the_rest():
    assert shares(rl(gpus_per_engine=0.4), 1) == (0.2, 0.4)
    assert shares(rl(gpus_per_rank=0.5), 1) == (0.5, 0.25)
    assert shares(rl(gpus_per_rank=0.5), 3) == (0.5, 1.0)
    assert shares(rl(gpus_per_rank=0.5, gpus_per_engine=0.25), 1) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("changes", "gpus", "message"),
    [
        ({"gpus_per_rank": 1.0, "gpus_per_engine": 1.0}, 1, r"1 x 1 .*2 x 1 .*GPUs, got 1; that is 3 together"),
        ({"gpus_per_rank": 0.6, "gpus_per_engine": 0.3}, 1, r"1 x 0\.6 .*2 x 0\.3 .*got 1; that is 1\.2 together"),
        ({"gpus_per_rank": 1.0}, 1, r"got 1; .*set gpus_per_rank and gpus_per_engine to auto"),
        ({"ranks": 2}, 1, r"rl\.trainer\.ranks: expected at most the cluster's 1 GPU, got 2"),
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
    ],
)
def test_a_share_is_auto_or_a_part_of_one_gpu(key, value, ranks):
    tree = read_yaml(CLERK_PARAMS)
    set_key(tree, "rl.trainer.ranks", ranks)
    set_key(tree, key, value)
    with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
        parse_params(tree)


@pytest.mark.parametrize(("key", "count"), [("rl.trainer.gpus_per_rank", "ranks"), ("rl.rollout.gpus_per_engine", "engines")])
def test_nothing_is_reserved_that_an_actor_does_not_use(key, count):
    tree = read_yaml(CLERK_PARAMS)
    set_key(tree, key, 2.0)
    with pytest.raises(ConfigError, match=rf"{key}: expected auto or at most 1, got 2; raise {count} instead"):
        parse_params(tree)


def test_engines_beside_a_rank_are_counted():
    assert place(rl(), 1).engines_beside_ranks() == 2
    assert place(rl(), 3).engines_beside_ranks() == 0
    assert place(rl(ranks=2, engines=2), 2).engines_beside_ranks() == 1
    assert place(rl("two_groups", engines=2), 2).engines_beside_ranks(1) == 1


@pytest.mark.parametrize(
    ("placement", "changes", "gpus", "ranks", "engines"),
    [
        ("together", {"ranks": 2}, 4, ((0, 1),), (2, 3)),
        ("together", {"ranks": 2}, 2, ((0, 1),), (0, 1)),  # engine k beside rank k
        ("two_groups", {"ranks": 2}, 8, ((0, 1), (2, 3)), (4, 5)),
        ("two_groups", {"ranks": 2}, 4, ((0, 1), (2, 3)), (0, 1)),
        ("two_groups", {"ranks": 2}, 5, ((0, 1), (2, 3)), (4, 4)),
        ("apart", {"ranks": 1, "engines": 4}, 8, ((0,), (1,), (2,), (3,)), (4, 5, 6, 7)),
        ([{"roles": ["policy"], "ranks": 2}, {"roles": ["critic", "reference", "reward_models"]}], {}, 5, ((0, 1), (2,)), (3, 4)),
        # if the settings say so, groups share GPUs, but never two ranks of a group
        ("two_groups", {"ranks": 2, "gpus_per_rank": 0.5}, 4, ((0, 1), (0, 1)), (2, 3)),
        ("two_groups", {"ranks": 2, "gpus_per_rank": 0.3}, 2, ((0, 1), (0, 1)), (0, 1)),
    ],
)
def test_each_rank_and_engine_has_its_gpu(placement, changes, gpus, ranks, engines):
    config = rl(placement, **{"engines": 2} | changes)
    found = place(config, gpus)
    assert (found.ranks, found.engines) == (ranks, engines)
    for number in found.actors:
        taken = found.per_rank * sum(group.count(number) for group in ranks) + found.per_engine * engines.count(number)
        assert 0 < taken <= 1 and found.share(number, 0.3) == (1.0 if found.actors[number] == 1 else 0.3)


@pytest.mark.parametrize(
    ("placement", "changes", "gpus", "message"),
    [
        ("two_groups", {"ranks": 2}, 3, r"room for 4 x 0\.6 .*got 3; .*put roles together in rl\.placement, let groups share GPUs"),
        ("apart", {"ranks": 1}, 2, r"room for 4 x 0\.6"),
        ("two_groups", {"ranks": 2, "gpus_per_rank": 0.5}, 1, r"rl\.trainer\.ranks: expected at most the cluster's 1 GPU, got 2"),
    ],
)
def test_groups_that_find_no_gpus_are_refused_with_what_is_missing(placement, changes, gpus, message):
    with pytest.raises(ValueError, match=message):
        place(rl(placement, **changes), gpus)


def test_two_processes_on_a_gpu_are_refused_unless_they_were_placed_there():
    planned = {"trainer rank 0": (0,), "trainer rank 1": (1,), "rollout rank 0": (0,)}
    right = {"trainer rank 0": ["a GPU 3"], "trainer rank 1": ["b GPU 3"], "rollout rank 0": ["a GPU 3"]}
    check_gpus(planned, right)
    with pytest.raises(ValueError, match=r"a GPU 3: expected processes .* got trainer rank 0 and trainer rank 1 and rollout rank 0; "):
        check_gpus(planned, right | {"trainer rank 1": ["a GPU 3"]})
    with pytest.raises(ValueError, match=r"trainer rank 1: expected 1 GPU, got none"):
        check_gpus(planned, right | {"trainer rank 1": []})


def test_an_engine_on_several_gpus_has_all_of_them_and_shares_what_is_planned():
    planned = {"trainer rank 0": (0,), "trainer rank 1": (1,), "rollout rank 0": (0, 1), "rollout rank 1": (2, 3)}
    right = {"trainer rank 0": ["a 1"], "trainer rank 1": ["a 0"], "rollout rank 0": ["a 0", "a 1"], "rollout rank 1": ["b 0", "b 1"]}
    check_gpus(planned, right)  # which of a block's GPUs a rank has is Ray's choice
    for wrong in (["b 0"], ["b 0", "b 0"], ["b 0", "b 1", "b 2"]):
        with pytest.raises(ValueError, match=r"rollout rank 1: expected 2 GPUs, got \['b 0'"):
            check_gpus(planned, right | {"rollout rank 1": wrong})
    with pytest.raises(ValueError, match=r"a 1: expected processes .* got trainer rank 0 and rollout rank 0 and rollout rank 1; "):
        check_gpus(planned, right | {"rollout rank 1": ["a 1", "b 1"]})


@pytest.mark.parametrize(
    ("placement", "changes", "nodes", "ranks", "engines", "bundles"),
    [
        # whole GPUs for each: ranks first, engines on a node
        ("together", {"ranks": 2}, [8], ((0, 1),), (2, 4), [1, 1, 2, 2]),
        ("together", {"ranks": 3}, [4, 4], ((0, 1, 2),), (4, 6), [1, 1, 1, 2, 2]),
        ("two_groups", {"ranks": 2}, [4, 4], ((0, 1), (2, 3)), (4, 6), [1, 1, 1, 1, 2, 2]),
        ("together", {"ranks": 4, "tensor_parallel_size": 4, "engines": 1}, [2, 6], ((0, 1, 2, 3),), (4,), [1, 1, 1, 1, 4]),
        ("together", {"ranks": 2, "tensor_parallel_size": 4, "engines": 1}, [6, 2], ((0, 1),), (4,), [1, 1, 4]),
        ("together", {"ranks": 1}, [3], ((0,),), (1, 1), [1, 2]),
        # engines share the GPUs that ranks leave, or those of the ranks
        ("together", {"ranks": 2}, [4], ((0, 1),), (2, 2), [1, 1, 2]),
        ("together", {"ranks": 4}, [4], ((0, 1, 2, 3),), (0, 2), [2, 2]),
        ("two_groups", {"ranks": 2, "tensor_parallel_size": 4, "engines": 1}, [4], ((0, 1), (2, 3)), (0,), [4]),
        # not where several groups have a rank on a GPU
        ("two_groups", {"ranks": 2, "gpus_per_rank": 0.5}, [4], ((0, 1), (0, 1)), (2, 2), [1, 1, 2]),
        ("two_groups", {"ranks": 2, "gpus_per_rank": 0.4}, [2], (), (), None),
    ],
)
def test_an_engine_on_several_gpus_has_them_on_one_node(placement, changes, nodes, ranks, engines, bundles):
    config = rl(placement, **{"engines": 2, "tensor_parallel_size": 2} | changes)
    if bundles is None:
        with pytest.raises(ValueError, match=r"expected a cluster with room for .* x tensor_parallel_size\) GPUs, got"):
            place(config, sum(nodes), nodes)
        return
    found = place(config, sum(nodes), nodes)
    assert (found.ranks, found.engines, list(map(len, found.bundles))) == (ranks, engines, bundles)
    for gpu in found.actors:
        assert sum(gpu in group for group in ranks) * found.per_rank + found.engines_on(gpu) * found.per_engine <= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 2, "backend": "pytorch"}, r"tensor_parallel_size: expected 1 with backend pytorch, got 2; .*only vllm"),
        ({"prefix_caching": True, "backend": "pytorch"}, r"prefix_caching: expected auto or false with backend pytorch, got true; "),
        ({"enforce_eager": True, "backend": "pytorch"}, r"enforce_eager: expected false with backend pytorch, got true; .*only vllm"),
        ({"gpus_per_engine": 2.0}, r"gpus_per_engine: expected auto or at most 1, got 2; raise engines instead, or tensor_parallel_size"),
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size: expected .* got 0"),
    ],
)
def test_engines_that_do_not_exist_are_refused(changes, message):
    params = read_yaml(CLERK_PARAMS)
    params["rl"]["rollout"] |= changes
    with pytest.raises(ConfigError, match=rf"rl\.rollout\.{message}"):
        parse_params(params)


@pytest.mark.parametrize(
    ("algorithm", "prefix_caching", "max_length", "on_gpu", "expected"),
    [
        ("grpo", "auto", 512, True, True),
        ("grpo", "auto", 512, False, False),
        ("ppo", "auto", 512, True, False),  # one sample a prompt
        ("grpo", "auto", 48, True, False),  # prompts of at most 16 tokens
        ("grpo", False, 512, True, False),
        ("ppo", True, 48, False, True),
    ],
)
def test_prefixes_are_cached_where_samples_share_them(algorithm, prefix_caching, max_length, on_gpu, expected):
    config = rl().model_copy(update={"algorithm": algorithm})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"prefix_caching": prefix_caching})})
    assert config.rollout.max_new_tokens == 32
    assert config.caches_prefixes(max_length, on_gpu=on_gpu) is expected


def test_an_engine_larger_than_every_node_is_refused():
    with pytest.raises(
        ValueError, match=r"rl\.rollout\.tensor_parallel_size: expected at most the 4 GPUs of the largest node, got 8; lower"
    ):
        place(rl(tensor_parallel_size=8), 16, [4, 4, 4, 4])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("beside", r"rl\.placement: expected together, two_groups, apart or a list of groups, got 'beside'"),
        (
            [{"roles": ["policy", "critic"]}],
            r"rl\.placement: expected a group for each role of the run, got none for \['reference', 'reward",
        ),
        ([{"roles": ["policy", "reference"]}, {"roles": ["critic", "policy", "reward_models"]}], r"got \['policy'\] in several"),
        ([{"roles": ["actor"]}], r"rl\.placement\.0\.roles\.0: expected 'policy', .* got 'actor'"),
        (
            [{"roles": ["policy", "reference"]}, {"roles": ["critic", "reward_models"], "ranks": 3}],
            r"rl\.minibatch_size: expected a multiple of placement\.ranks=3, got 256",
        ),
    ],
)
def test_each_role_of_a_run_has_one_group(groups, message):
    params = read_yaml(CLERK_PARAMS)
    set_key(params, "rl.placement", groups)
    with pytest.raises(ConfigError, match=message):
        parse_params(params)


def test_a_placement_leaves_out_roles_that_the_run_does_not_have():
    apart = rl("apart")
    assert [group.name for group in apart.role_groups] == ["policy", "critic", "reference", "reward_models"]
    grpo = apart.model_copy(update={"algorithm": "grpo", "kl": apart.kl.model_copy(update={"coef": 0.0, "measure": False})})
    assert [(group.name, group.ranks) for group in grpo.role_groups] == [("policy", 1), ("reward_models", 1)]
    assert [group.name for group in grpo.learning_groups] == ["policy"]


def turning(turns, **changes) -> RlConfig:
    max_lag = changes.pop("max_lag", 0)
    config = rl(**changes)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"take_turns": turns, "max_lag": max_lag})})


@pytest.mark.parametrize(
    ("changes", "gpus", "taken", "share"),
    [
        ({}, 0, False, 1.0),
        ({}, 1, True, 0.5),  # two engines divide the GPU in their turn
        ({"engines": 1}, 1, True, 1.0),
        ({"ranks": 8, "engines": 8}, 8, True, 1.0),
        ({"engines": 3}, 2, False, 0.3333),  # on a GPU without a rank
        ({"ranks": 4, "engines": 4}, 8, False, 1.0),
        ({"engines": 1, "max_lag": 1}, 1, False, 0.4),
    ],
)
def test_engines_and_ranks_take_turns_where_they_share_a_gpu(changes, gpus, taken, share):
    found = place(turning("auto", **changes), gpus)
    assert found.takes_turns(turning("auto", **changes)) is taken
    assert found.engine_share(turning("auto", **changes)) == share


def test_what_is_set_decides_whether_they_take_turns():
    apart, together = place(rl(), 3), place(rl(), 1)
    assert apart.takes_turns(turning(True)) and not together.takes_turns(turning(False))
    assert together.engine_share(turning(False)) == together.per_engine == 0.2


def ways(engines: tuple[int, ...], *, ranks: tuple[int, ...] = (0, 1), **rollout) -> list[str]:
    config = rl(ranks=len(ranks), engines=len(engines))
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})
    return transfer_ways(config, GpuPlacement(4, 1.0, 1.0, (ranks,), engines, config.rollout.tensor_parallel_size))


def test_weights_stay_on_a_gpu_or_go_to_another_one_or_through_the_host():
    assert ways((0, 1, 2)) == ["ipc", "ipc", "nccl"]
    assert ways((0, 1, 2), weight_transfer="gloo") == ["gloo"] * 3
    assert ways((1, 2), weight_transfer="nccl") == ["nccl"] * 2
    assert ways((0, 2), backend="pytorch") == ["gloo"] * 2
    assert ways((0, 1, 2), max_lag=1) == ["gloo", "nccl", "nccl"]
    assert ways((0, 2), tensor_parallel_size=2) == ["ipc", "nccl"]
    assert ways((0, 2), ranks=(0,), tensor_parallel_size=2) == ["gloo", "nccl"]  # the rank is on one of the engine's GPUs only
    assert transfer_ways(rl(), place(rl(), 0)) == ["gloo", "gloo"]


def test_fp8_is_refused_without_gpus():
    config = rl()
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"quantization": "fp8"})})
    assert place(config, 2).gpus == 2
    with pytest.raises(ValueError, match=r"rl\.rollout\.quantization: expected null on a cluster without GPUs, got fp8; change it"):
        place(config, 0)


def test_changes_without_an_engine_that_gets_weights_by_gloo_are_refused():
    assert ways((0, 1, 2), max_lag=1, send_changes=True) == ["gloo", "nccl", "nccl"]
    with pytest.raises(ValueError, match=r"rl\.rollout\.send_changes: expected false where no rollout engine gets weights by gloo"):
        ways((0, 2), send_changes=True)


@pytest.mark.parametrize(("way", "engine", "possible"), [("nccl", 0, ["gloo", "ipc"]), ("ipc", 2, ["gloo", "nccl"])])
def test_a_way_that_the_gpus_do_not_allow_is_refused(way: str, engine: int, possible: list[str]):
    with pytest.raises(
        ValueError, match=f"rl.rollout.weight_transfer: expected auto or one of .* on GPU .{engine}., .*got {way}"
    ) as refused:
        ways((engine,), weight_transfer=way)
    assert str(possible) in str(refused.value)


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_without_gpus_no_way_between_gpus_is_accepted(way: str):
    config = rl()
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"weight_transfer": way})})
    with pytest.raises(ValueError, match=f"rl.rollout.weight_transfer: expected auto or gloo on a cluster without GPUs, got {way}"):
        transfer_ways(config, place(config, 0))
