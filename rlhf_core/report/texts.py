"""Figures and untrusted texts as the page shows them."""

from __future__ import annotations

import math
import re
import unicodedata

from rlhf_core.config import reordering_shown

MAX_TEXT = 2000  # characters of one text in the table of samples
JOINERS = "\u200c\u200d"  # invisible, and part of ordinary words and emoji
DECIMALS = {"share": 1, "score": 2, "length": 1}


def visible(text: str, limit: int | None = MAX_TEXT) -> str:
    """Text as a reader can trust it: control characters and those that change the reading direction are shown by number.

    Cut at `limit` characters, saying so.
    """
    shown = "".join(_visible_character(c) for c in text[:limit])
    return shown if limit is None or len(text) <= limit else f"{shown} […{len(text) - limit:,} more characters]"


def _visible_character(c: str) -> str:
    hidden = unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t" + JOINERS
    return f"⟨U+{ord(c):04X}⟩" if hidden else c


_MARKDOWN = re.compile(r"[\\`\[\]<>|&~]|(?<=:)(?=//)|(?<=www)(?=\.)|@", re.IGNORECASE)


def markdown_text(text: str) -> str:
    """Text of others inside Markdown: on one line, without links, images, HTML and code, and read as it stands."""
    return _MARKDOWN.sub(lambda found: f"\\{found[0]}", reordering_shown(" ".join(text.split())))


def markdown_block(text: str) -> str:
    """Lines of others as a block of code that nothing in them ends."""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=2) + 1)
    fence = fence if len(fence) >= 3 else "```"
    return f"{fence}\n{reordering_shown(text)}\n{fence}"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    if value is None:
        return "–"
    shown = f"{value:.2e}" if 0 < abs(value) < 1e-4 else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return shown.replace("-", "−", 1) if value < 0 else shown


def measured(value: float | None, form: str) -> str:
    """A figure of the evaluation in its form: share, score or length."""
    if value is None or math.isnan(value):
        return "–"
    return share(value) if form == "share" else f"{value:.{DECIMALS[form]}f}".replace("-", "−")


def signed(value: float | None, form: str) -> str:
    """A change, in points where it is one of shares."""
    if value is None or math.isnan(value):
        return "–"
    shown = f"{100 * value if form == 'share' else value:+.{DECIMALS[form]}f}".replace("-", "−")
    return shown if shown.strip("+−0.") else shown[1:]


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
