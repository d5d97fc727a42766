"""Matrices of which `make test` runs cells that cover every value, and `make test-long` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def is_chosen(request: pytest.FixtureRequest) -> bool:
    """Whether a long test of the requesting module was chosen, so that its fixture computes all cells."""
    return any(item.module is request.module and item.get_closest_marker("long") for item in request.session.items)


def cells(every: Iterable, quick: Collection) -> list:
    """Parameters of a test, those outside `quick` marked long. A cell with several values is a tuple."""
    chosen = []
    for cell in every:
        values = cell if isinstance(cell, tuple) else (cell,)
        chosen.append(pytest.param(*values, marks=[] if cell in quick else [pytest.mark.long]))
    return chosen
