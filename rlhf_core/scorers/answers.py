"""Does a response give the expected answer? As text, or as the last number in it."""

from __future__ import annotations

import re
from decimal import Decimal

_FINAL = "####"  # GSM8K puts the answer after it
# A number with sign, dollar sign, thousands separators, decimals and exponent, not the end of a word; with a slash behind it, a
# fraction or a date.
_NUMBER = re.compile(
    r"""(?<![\w.])(?P<sign>(?<![\w)])[-+\u2212])?(?:\$[ ]?)?(?P<inner>-)?
    (?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?P<exponent>[eE][-+]?[0-9]{1,4}(?![0-9]))?
    (?P<fraction>\s?/\s?[-+]?\$?[0-9][0-9.,/]*)?""",
    re.VERBOSE,
)


def same_text(response: str, label: str) -> bool:
    """Equal but for white space at the ends and its amount within."""
    return response.split() == label.split()


def same_number(response: str, label: str) -> bool:
    """The response's number equals that of the label, exactly: 1,234 is 1234.0.

    Raises:
        ValueError: there is no number in the label.
    """
    expected = final_number(label)
    if expected is None:
        raise ValueError(f"the label has no number to compare with: {label!r}")
    return final_number(response) == expected


def final_number(text: str) -> Decimal | None:
    """The number after the last ####, or where there is no #### the last one in the text; None: there is none.

    Signs, dollar signs, thousands separators, decimals and exponents are understood. Fractions and dates such as 1/2 are left alone:
    they count neither as their value nor as their parts.
    """
    _, marked, rest = text.rpartition(_FINAL)
    matches = [match for match in _NUMBER.finditer(rest) if not match["fraction"]]
    if not matches:
        return None
    match = matches[0] if marked else matches[-1]
    negative = (match["sign"] or match["inner"] or "+") in "-\u2212"
    return Decimal(("-" if negative else "") + match["digits"].replace(",", "") + (match["exponent"] or ""))
