"""Formats numbers and untrusted texts for pages and Markdown."""

from __future__ import annotations

import math
import re
import unicodedata

from rlhf_core.config import reordering_shown

MAX_TEXT = 2000  # characters of one text in the table of samples
JOINERS = "\u200c\u200d"  # invisible parts of ordinary words and emoji
DECIMALS = {"share": 1, "score": 2, "length": 1}


def visible(text: str, limit: int | None = MAX_TEXT) -> str:
    """Text with control characters, and those that change the reading direction, shown by number; truncated at `limit` with a note."""
    hidden = {c for c in text[:limit] if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t" + JOINERS}
    shown = "".join(f"⟨U+{ord(c):04X}⟩" if c in hidden else c for c in text[:limit])
    return shown if limit is None or len(text) <= limit else f"{shown} […{len(text) - limit:,} more characters]"


_MARKDOWN = re.compile(r"[\\`\[\]<>|&~]|(?<=:)(?=//)|(?<=www)(?=\.)|@", re.IGNORECASE)


def markdown_text(text: str) -> str:
    """Untrusted text for Markdown: on one line, with links, images, HTML and code escaped."""
    return _MARKDOWN.sub(lambda found: f"\\{found[0]}", reordering_shown(" ".join(text.split())))


def markdown_block(text: str) -> str:
    """Untrusted lines as a code block with a fence longer than any in them."""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=2) + 1)
    fence = fence if len(fence) >= 3 else "```"
    return f"{fence}\n{reordering_shown(text)}\n{fence}"


def share(value: float | None) -> str:
    """Return a share as a percentage; an en dash for None."""
    return "–" if value is None else f"{value:.1%}".replace("-", "−")


def number(value: float | None) -> str:
    """Return a number with three digits, or with thousands separated; an en dash for None."""
    if value is None:
        return "–"
    shown = f"{value:.2e}" if 0 < abs(value) < 1e-4 else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return shown.replace("-", "−", 1) if value < 0 else shown


def measured(value: float | None, form: str) -> str:
    """Format a figure of the evaluation as a share, score or length."""
    if value is None or math.isnan(value):
        return "–"
    return share(value) if form == "share" else f"{value:.{DECIMALS[form]}f}".replace("-", "−")


def signed(value: float | None, form: str) -> str:
    """Format a change; for shares, in points."""
    if value is None or math.isnan(value):
        return "–"
    shown = f"{100 * value if form == 'share' else value:+.{DECIMALS[form]}f}".replace("-", "−")
    return shown if shown.strip("+−0.") else shown[1:]


def count(value: float | None) -> str:
    """Return a rounded count with thousands separated; an en dash for None."""
    return "–" if value is None else f"{value:,.0f}"
