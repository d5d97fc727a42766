"""Which version of the registry is the gate's fixed point."""

from __future__ import annotations

from typing import Any

import pytest
from registry_tags import sound_lineage

from flows.registry.state import Registry
from flows.registry.tags import Event, Tag, Version, as_version
from rlhf_core.config import ConfigError


def registry(accuracies: list[float | None], *events: tuple[str, str | None, str | None]) -> Registry:
    """Versions v1.0.0 and so on, and events: action, version, previous."""
    versions = {}
    for number, accuracy in enumerate(accuracies, start=1):
        lineage = sound_lineage("c" * 40, md5=f"{number:032x}.dir")
        lineage["gate"] = lineage["gate"] | ({} if accuracy is None else {"accuracy": accuracy})
        name = f"v{number}.0.0"
        versions[name] = Version("reward-model", name, "c" * 40, "ann", "2026-01-01", lineage)
    decisions = [
        Event(k, action, version, previous, "ann", "so", None, "2026-01-01") for k, (action, version, previous) in enumerate(events)
    ]
    return Registry("reward-model", versions, decisions, 0)


V1, V2, V3, V4 = (f"v{k}.0.0" for k in range(1, 5))


@pytest.mark.parametrize(
    ("accuracies", "events", "anchor"),
    [
        ([0.9], [], None),  # never promoted
        ([0.88, 0.875, 0.87, 0.95], [("promote", V1, None), ("promote", V2, V1), ("promote", V3, V2)], V1),
        ([0.88, 0.89], [("promote", V1, None), ("promote", V2, V1)], V2),
        ([0.88, 0.88], [("promote", V2, None), ("promote", V1, V2)], V1),  # of equal ones the oldest
        ([0.88, 0.99], [("promote", V1, None), ("promote", V2, V1), ("rollback", V1, V2)], V1),  # rolled back
        ([0.88, 0.99], [("promote", V1, None), ("promote", V2, V1), ("rollback", V1, V2), ("promote", V2, V1)], V2),
        ([None, 0.7], [("promote", V1, None), ("promote", V2, V1)], V2),  # a tag without the figure
        ([None], [("promote", V1, None)], None),
    ],
)
def test_the_anchor_is_the_most_accurate_that_was_promoted_and_not_taken_back(accuracies, events, anchor):
    found = registry(accuracies, *events).anchor
    assert (found and found.version) == anchor


@pytest.mark.parametrize("change", [{"accuracy": "0.9"}, {"accuracy": 7.0}, {"look": {"number": "1", "level": 0.1}}, {"look": 3}])
def test_a_tag_with_another_figure_is_refused(change: dict[str, Any]):
    lineage = sound_lineage("c" * 40)
    lineage["gate"] = lineage["gate"] | change
    with pytest.raises(ConfigError, match=r"tag reward-model@v1\.0\.0: expected one made by .*another value of gate\."):
        as_version("reward-model", Tag("reward-model@v1.0.0", "0" * 40, "c" * 40, "ann", "2026-01-01", 0, lineage))


def test_a_tag_with_figures_is_taken():
    lineage = sound_lineage("c" * 40)
    lineage["gate"] = lineage["gate"] | {"accuracy": 1, "look": {"number": 2, "level": 0.0125, "earlier": []}}
    assert as_version("reward-model", Tag("reward-model@v1.0.0", "0" * 40, "c" * 40, "ann", "2026-01-01", 0, lineage)).gate_accuracy == 1
