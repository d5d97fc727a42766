"""What a tag of the registry holds, for tests that need no model behind it."""

from __future__ import annotations

from typing import Any


def sound_lineage(commit: str, **changes: Any) -> dict[str, Any]:
    """As rlhf_core.lineage makes it, of a model that nobody has."""
    gate = {"needed": True, "passed": True, "message": "passed: it did", "override": None}
    return {
        **{"commit": commit, "md5": "0" * 32 + ".dir", "path": "models/reward", "run": "main", "gate": gate, "size": 1, "files": 2},
        **{"data": None, "parents": {}, "packages": {}, "reward_model_version": None, "previous_version": None},
        "params": {"seed": 1, "alignment": {"method": "rl"}},
        **changes,
    }
