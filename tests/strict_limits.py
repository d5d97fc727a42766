"""Limits of validation that allow no faulty row."""

from __future__ import annotations

from typing import Any

from rlhf_core.config import ValidationConfig

LIMITS = {
    **{f"max_{name}_fraction": 0.0 for name in ("empty", "identical", "duplicate", "contradictory", "too_long", "templated", "end_token")},
    "max_dropped_fraction": 0.1,
    "max_length_bias": 0.5,
    "min_label_balance": 0.0,
    "min_pairs": 0,
    "max_reported_ids": 5,
}


def strict_limits(**changes: Any) -> ValidationConfig:
    return ValidationConfig(**LIMITS | changes)
