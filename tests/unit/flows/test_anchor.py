"""Which version of the registry is the gate's fixed point."""

from __future__ import annotations

from typing import Any

import pytest
from registry_tags import sound_lineage

from flows.registry.state import Registry
from flows.registry.tags import Event, Tag, as_version
from rlhf_core.config import ConfigError


def md5(number: int) -> str:
    return f"{number:032x}.dir"


def registry(gates: list[dict[str, Any]], *events: tuple[str, str | None, str | None]) -> Registry:
    """Versions v1.0.0 and so on, with keys of their gate.json, and events: action, version, previous."""
    versions = {}
    for number, gate in enumerate(gates, start=1):
        lineage = sound_lineage("c" * 40, md5=md5(number))
        lineage["gate"] = lineage["gate"] | gate
        name = f"v{number}.0.0"
        versions[name] = as_version("reward-model", Tag(f"reward-model@{name}", "0" * 40, "c" * 40, "ann", "2026-01-01", 0, lineage))
    decisions = [
        Event(k, action, version, previous, "ann", "so", None, "2026-01-01") for k, (action, version, previous) in enumerate(events)
    ]
    return Registry("reward-model", versions, decisions, 0)


def than(accuracy: float | None, **lows: tuple[int, float | None]) -> dict[str, Any]:
    """A gate's figures: accuracy, and by role the number of the other version and the lower end of the difference to it."""
    return {"accuracy": accuracy} | {role: {"md5": md5(other), "low": low} for role, (other, low) in lows.items()}


V1, V2, V3, V4 = (f"v{k}.0.0" for k in range(1, 5))
IN_TURN = [("promote", V1, None), ("promote", V2, V1), ("promote", V3, V2)]
BACK = [("rollback", V2, V3), ("rollback", V1, V2), ("promote", V3, V1)]  # both, and v3 is promoted again


@pytest.mark.parametrize(
    ("gates", "events", "anchor"),
    [
        ([than(0.9)], [], None),  # never promoted
        ([than(0.88), than(0.875, incumbent=(1, -0.015)), than(0.87, anchor=(1, -0.019)), than(0.95)], IN_TURN, V1),
        ([than(0.88), than(0.89, incumbent=(1, -0.002))], IN_TURN[:2], V1),  # more accurate, but not clearly
        ([than(0.88), than(0.95)], IN_TURN[:2], V1),  # on other pairs: nothing compared the two
        ([than(0.88), than(0.9, incumbent=(1, 0.001))], IN_TURN[:2], V2),
        ([than(0.88), than(0.9, incumbent=(1, 0.001)), than(0.95, incumbent=(2, 0.01))], IN_TURN, V3),
        ([than(0.88), than(0.89, incumbent=(1, -0.002)), than(0.9, incumbent=(2, -0.001), anchor=(1, 0.002))], IN_TURN, V3),
        ([than(0.88), than(0.9, incumbent=(1, 0.001)), than(0.95, incumbent=(1, 0.05))], IN_TURN, V2),  # better than the one before
        ([than(0.88), than(0.88)], [("promote", V2, None), ("promote", V1, V2)], V2),  # in the order of promotion
        ([than(0.88), than(0.99, incumbent=(1, 0.1))], [*IN_TURN[:2], ("rollback", V1, V2)], V1),
        ([than(0.88), than(0.99, incumbent=(1, 0.1))], [*IN_TURN[:2], ("rollback", V1, V2), ("promote", V2, V1)], V2),
        # v3 knows v1 by way of v2, which was rolled back: by at least 0.06 - 0.005 better, by less than 0, by way of two, and not compared
        ([than(0.8), than(0.9, incumbent=(1, 0.06)), than(0.92, incumbent=(2, -0.005))], [*IN_TURN, *BACK], V3),
        ([than(0.8), than(0.81, incumbent=(1, 0.001)), than(0.81, incumbent=(2, -0.019))], [*IN_TURN, *BACK], V1),
        (
            [than(0.8), than(0.9, incumbent=(1, 0.06)), than(0.89, incumbent=(2, -0.02)), than(0.88, incumbent=(3, -0.02))],
            [*IN_TURN, ("promote", V4, V3), ("rollback", V3, V4), ("rollback", V2, V3), ("rollback", V1, V2), ("promote", V4, V1)],
            V4,
        ),
        ([than(0.8), than(0.9, incumbent=(1, 0.06)), than(0.92)], [*IN_TURN, *BACK], V1),
        ([than(0.9), than(0.8, incumbent=(1, -0.2)), than(0.9, incumbent=(2, 0.05))], [*IN_TURN, *BACK], V1),
        ([than(0.8), than(0.9, incumbent=(1, 0.06))], [("promote", V1, None), ("rollback", None, V1), ("promote", V2, None)], V2),
        ([than(None), than(0.7, incumbent=(1, None))], IN_TURN[:2], V2),  # the first gate judged no model
        ([than(0.8), than(0.7, incumbent=(1, None))], IN_TURN[:2], V1),  # of one prompt: no interval
        ([than(None)], IN_TURN[:1], None),
    ],
)
def test_the_anchor_is_the_first_promoted_until_one_clearly_beats_it(gates, events, anchor):
    found = registry(gates, *events).anchor
    assert (found and found.version) == anchor


@pytest.mark.parametrize(
    "change",
    [
        {"accuracy": "0.9"},
        {"accuracy": 7.0},
        {"look": {"number": "1", "level": 0.1}},
        {"look": 3},
        {"anchor": {"md5": "1.dir", "low": "0.1"}},
    ],
)
def test_a_tag_with_another_figure_is_refused(change: dict[str, Any]):
    lineage = sound_lineage("c" * 40)
    lineage["gate"] = lineage["gate"] | change
    with pytest.raises(ConfigError, match=r"tag reward-model@v1\.0\.0: expected one made by .*another value of gate\."):
        as_version("reward-model", Tag("reward-model@v1.0.0", "0" * 40, "c" * 40, "ann", "2026-01-01", 0, lineage))


def test_a_tag_with_figures_is_taken():
    lineage = sound_lineage("c" * 40)
    lineage["gate"] = lineage["gate"] | {"accuracy": 1, "look": {"number": 2, "level": 0.0125, "earlier": []}}
    assert as_version("reward-model", Tag("reward-model@v1.0.0", "0" * 40, "c" * 40, "ann", "2026-01-01", 0, lineage)).gate_accuracy == 1
