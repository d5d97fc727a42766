"""What a version was made of, read from dvc.lock; and which version a history of promotions and rollbacks leaves in use."""

from __future__ import annotations

from typing import get_args

import pytest
from clerk_params import CLERK_PARAMS

from flows.registry.state import Event, Registry, Version, why_not
from rlhf_core.config import ConfigError, load_params
from rlhf_core.provenance.lineage import (
    CRITIC_FROM_REWARD_MODEL,
    evaluated_by_reward_model,
    history,
    learned_from_reward_model,
    lineage,
    package_versions,
    trained_from,
)


def stage(deps: dict[str, str], outs: dict[str, str]) -> dict:
    return {
        key: [{"path": p, "md5": m, "size": 7, "nfiles": 2} for p, m in entries.items()]
        for key, entries in (("deps", deps), ("outs", outs))
    }


LOCK = {
    "stages": {  # DVC sorts by name, not by order
        "gate_reward": stage({"models/reward": "r.dir"}, {"metrics/gate.json": "g"}),
        "prepare_data": stage({"work.py": "w"}, {"data/prepared": "d.dir", "models/tokenizer": "t.dir"}),
        "train_policy": stage({"models/reward": "r.dir", "metrics/gate.json": "g", "data/prepared": "d.dir"}, {"models/policy": "p.dir"}),
        "train_reward": stage({"models/sft": "s.dir", "data/prepared": "d.dir"}, {"models/reward": "r.dir", "data/heldout": "h"}),
        "train_sft": stage({"data/prepared": "d.dir", "models/tokenizer": "t.dir"}, {"models/sft": "s.dir"}),
    }
}


def test_the_stages_behind_a_model_in_order_and_no_others():
    assert history(LOCK, "models/reward") == ["prepare_data", "train_sft", "train_reward"]
    assert history(LOCK, "models/policy") == ["prepare_data", "train_sft", "train_reward", "gate_reward", "train_policy"]
    with pytest.raises(ValueError, match=r"models/other: expected a stage of dvc\.lock that made it, got none"):
        history(LOCK, "models/other")


def test_lineage_of_a_reward_model_and_of_a_policy():
    given = {"commit": "c", "run": "run/a", "params": {"seed": 1}, "lock": LOCK, "gate": {"passed": True}}
    given["decided"] = {"by": "gate_reward", "split": "test"}
    reward = lineage("models/reward", **given)
    assert (reward["md5"], reward["size"], reward["files"], reward["data"]) == ("r.dir", 7, 2, "d.dir")
    assert reward["parents"] == {"models/sft": "s.dir"}
    assert reward["stages"]["train_sft"] == {
        "deps": {"data/prepared": "d.dir", "models/tokenizer": "t.dir"},
        "outs": {"models/sft": "s.dir"},
    }
    assert (
        reward["params"] == {"seed": 1}
        and reward["gate"] == {"passed": True}
        and reward["decided"]["split"] == "test"
        and reward["packages"] == package_versions()
    )
    assert reward["inputs"] == {}  # a lock from before they were recorded
    policy = lineage("models/policy", **given)
    assert policy["parents"] == {"models/sft": "s.dir", "models/reward": "r.dir"} and "train_policy" in policy["stages"]


def test_the_lineage_of_a_policy_says_what_a_service_said_of_itself():
    given = {"commit": "c", "run": "run/a", "params": {}, "lock": LOCK, "gate": None, "decided": None}
    services = {"judge": {"url": "http://judge/", "name": "judge", "version": "7"}}
    assert lineage("models/policy", **given, check={"services": services})["services"] == services
    for path, check in (
        ("models/policy", None),
        ("models/policy", {"checks": {}}),
        ("models/policy", []),
        ("models/reward", {"services": services}),
    ):
        assert "services" not in lineage(path, **given, check=check)


@pytest.mark.parametrize(
    ("used", "params"),
    [
        (False, {"alignment": {"method": "dpo"}}),
        (True, {"alignment": {"method": "conditional_sft"}, "conditional_sft": {"label_by": "scores"}}),
        (False, {"alignment": {"method": "conditional_sft"}, "conditional_sft": {"label_by": "preference"}}),
        (True, {"alignment": {"method": "rejection_sampling"}, "rejection_sampling": {"scorers": [{"kind": "reward_model"}]}}),
        (
            False,
            {"alignment": {"method": "rejection_sampling"}, "rejection_sampling": {"scorers": [{"kind": "reward_model", "path": "x"}]}},
        ),
        (True, {"alignment": {"method": "rl"}, "rl": {"algorithm": "ppo", "ppo": {"critic_init": "reward_model_trunk"}}}),
        (False, {"alignment": {"method": "rl"}, "rl": {"algorithm": "grpo", "ppo": {"critic_init": "reward_model"}}}),
        (False, {"alignment": {"method": "rl"}, "rl": None}),
    ],
)
def test_the_params_tell_whether_a_policy_learned_from_the_reward_model(used, params):
    parents = {"models/sft": "s.dir", "models/reward": "r.dir"}
    policy = {"path": "models/policy", "params": params, "parents": parents}
    assert learned_from_reward_model(policy) == used
    assert ("models/reward" in trained_from(policy)) == used


def test_models_from_elsewhere_were_trained_from_no_model_of_the_chain():
    parents = {"models/sft": "1", "models/reward": "2"}
    params = {"alignment": {"method": "external"}, "reward": {"enabled": True, "path": "../theirs"}}
    for path in ("models/policy", "models/reward"):
        assert trained_from({"path": path, "params": params, "parents": parents}) == {}
        own = params | {"alignment": {"method": "dpo"}, "reward": {"enabled": True, "path": None}}
        assert "models/sft" in trained_from({"path": path, "params": own, "parents": parents})


def test_a_round_learned_from_its_own_scorers_and_from_the_policy_it_started_from():
    chain = {"alignment": {"method": "rl"}, "rl": {"reward": {"scorers": [{"kind": "reward_model"}]}}}
    for start, scorer, used in (("sft", "reward_model", True), ("sft", "judge", False), ("policy", "judge", True)):
        params = chain | {"iterative": {"start": start, "scorers": [{"kind": scorer}]}}
        assert learned_from_reward_model({"path": "rounds/1/policy", "params": params}) == used


@pytest.mark.parametrize(
    ("own", "enabled", "used"),
    [
        (None, True, True),
        (None, False, False),
        ([], True, False),
        ([{"kind": "judge"}], True, False),
        ([{"kind": "reward_model"}], True, True),
    ],
)
def test_the_evaluation_is_scored_by_its_own_scorers_or_those_of_rl(own, enabled, used):
    params = {"rl": {"reward": {"scorers": [{"kind": "reward_model"}]}}, "evaluation": {"scorers": own}, "reward": {"enabled": enabled}}
    assert evaluated_by_reward_model({"params": params}) is used


def test_critics_that_start_from_the_reward_model_are_those_of_the_config():
    fields = load_params(CLERK_PARAMS).rl.ppo
    for start in get_args(type(fields).model_fields["critic_init"].annotation):
        assert (start in CRITIC_FROM_REWARD_MODEL) == fields.model_copy(update={"critic_init": start}).starts_from_reward_model


def test_versions_of_packages_are_those_installed():
    import torch

    assert package_versions()["torch"] == torch.__version__


def registry(*events: tuple[str, str | None], gate: dict | None = None) -> Registry:
    """v1 to v3, and events as (action, version that is in use since then)."""
    versions = {
        v: Version("reward-model", v, v, "x", "t", {"gate": gate or {"passed": True, "message": "fine."}}) for v in ("v1", "v2", "v3")
    }
    found, before = [], None
    for number, (action, version) in enumerate(events, 1):
        found.append(Event(number, action, version, before, "Ann", f"reason {number}", None, "t"))
        before = version
    return Registry("reward-model", versions, found, 0)


def states(found: Registry) -> list[str]:
    return [found.state(version) for version in found.versions]


def test_what_a_history_leaves_in_use():
    assert states(registry()) == ["registered"] * 3 and registry().current is None
    assert states(registry(("promote", "v1"), ("promote", "v2"))) == ["superseded", "promoted", "registered"]
    back = registry(("promote", "v1"), ("promote", "v2"), ("rollback", "v1"))
    assert states(back) == ["promoted", "rolled back", "registered"] and back.rolled_back["v2"].reason == "reason 3"
    again = registry(("promote", "v1"), ("promote", "v2"), ("rollback", "v1"), ("promote", "v2"))
    assert states(again) == ["superseded", "promoted", "registered"] and again.rolled_back == {}
    nothing = registry(("promote", "v1"), ("rollback", None))
    assert states(nothing) == ["rolled back", "registered", "registered"] and nothing.current is None


def test_a_rollback_goes_to_the_last_version_that_was_not_taken_back():
    assert registry(("promote", "v1"), ("promote", "v2"), ("promote", "v3")).before() == "v2"
    assert registry(("promote", "v1"), ("promote", "v2"), ("rollback", "v1"), ("promote", "v3")).before() == "v1"
    assert registry(("promote", "v1"), ("promote", "v2"), ("rollback", "v1")).before() is None
    assert registry(("promote", "v1")).before() is None


def test_which_versions_may_not_be_promoted():
    fine = registry(("promote", "v1"), ("promote", "v2"), ("rollback", "v1"))
    assert why_not(fine, fine.versions["v3"]) is None
    assert why_not(fine, fine.versions["v2"]) == "expected a version that was not rolled back, got one that was, stated by Ann: reason 3"
    rejected = registry(gate={"passed": False, "message": "rejected: too few pairs."})
    assert "got one that didn't: rejected: too few pairs" in why_not(rejected, rejected.versions["v1"])


def test_asking_for_a_version():
    found = registry(("promote", "v1"))
    assert found.get(None).version == "v1" and found.get("v3").version == "v3"
    with pytest.raises(ConfigError, match=r"expected a registered version, got v9 \(registered: v1, v2, v3\)"):
        found.get("v9")
    with pytest.raises(ConfigError, match=r"expected a promoted version, got none .*promote one"):
        registry().get(None)


def test_lineage_has_the_hashes_of_what_the_stages_behind_a_model_read():
    sources, rule = {"data.sources.mine": {"path": "../mine.csv", "size": 7, "sha256": "a"}}, {"rl.reward.scorers.rule": {"sha256": "b"}}
    read = {"prepare_data": {"sources": sources, "model": {}}, "train_sft": {"model": None}, "train_policy": {"scorers": rule}}
    lock = {"stages": {name: {**entry, "params": {"data/inputs.json": read.get(name)}} for name, entry in LOCK["stages"].items()}}
    given = {"commit": "c", "run": "run/a", "params": {}, "lock": lock, "gate": None, "decided": None}
    assert lineage("models/reward", **given)["inputs"] == {"sources": sources}
    assert lineage("models/policy", **given)["inputs"] == {"sources": sources, "scorers": rule}
