"""Colours and thinning of curves, for figures drawn with and without Bokeh, whose import takes half a second.

The colours are those of the light scheme; the page's script replaces them by DARK if the reader prefers a dark scheme.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

INK, MUTED, GRID = "#3d4451", "#6b7280", "#e4e7ec"
# Told apart with every kind of colour blindness, by lightness where not by hue, and at least 3:1 against the page (tests/unit/report).
BLUE, ORANGE, GREEN, RED, PURPLE, TEAL = "#2f6fdb", "#d9730d", "#1ea567", "#a80805", "#4f0078", "#083c40"
DARK = {
    INK: "#cfd6e1",
    MUTED: "#98a2b3",
    GRID: "#2b313c",
    BLUE: "#6ea8ff",
    ORANGE: "#ffa657",
    GREEN: "#b9f3c0",
    RED: "#ca375d",
    PURPLE: "#9d23e6",
    TEAL: "#28f9f6",
}
MAX_POINTS = 1000  # of one curve; longer ones are thinned evenly


def thin(rows: pd.DataFrame) -> pd.DataFrame:
    """At most MAX_POINTS rows, evenly spaced, always with the first and the last."""
    if len(rows) <= MAX_POINTS:
        return rows
    return rows.iloc[np.unique(np.linspace(0, len(rows) - 1, MAX_POINTS).round().astype(int))]
