"""How many actors may be replaced in a run."""

from __future__ import annotations

from rlhf_core.engines.ray.actors import RoleLost
from rlhf_core.trainers.rl.recovery import Replacements


def test_replacements_are_counted_by_rank_and_end_at_the_limit(caplog):
    replacements = Replacements(3)
    assert replacements.allow(RoleLost("rollout rank 0", [0])) and replacements.allow(RoleLost("rollout rank 0, 2", [0, 2]))
    assert replacements.count == 3
    assert not replacements.allow(RoleLost("scorer rank 0", [0])) and replacements.count == 3
    assert "rollout rank 0, 2; to be replaced (3 of at most rl.max_replacements=3), and the call is repeated" in caplog.text
    assert "scorer rank 0; 3 actors were replaced before, and rl.max_replacements=3 allows no more" in caplog.text


def test_all_of_a_call_or_none_are_replaced(caplog):
    replacements = Replacements(1)
    assert not replacements.allow(RoleLost("rollout rank 0, 1", [0, 1])) and replacements.count == 0
    assert not Replacements(0).allow(RoleLost("rollout rank 0", [0]))
