"""Text without what a reader overlooks: case, white space, punctuation, invisible characters and compatibility forms."""

from __future__ import annotations

import re
import unicodedata

_APOSTROPHES = "'\u2018\u2019\u02bc`\u00b4"  # deleted: "don't" and "dont" are one word
_DASHES = "\u2010\u2011\u2012\u2013\u2212"  # written as the ASCII minus
_KEPT = "+*/%#@&\\-.,:()[]!"  # signs that Unicode counts as punctuation; from the minus on those that belong to a number or a formula
# Characters that draw nothing though their category doesn't say so: fillers and variation selectors (Default_Ignorable_Code_Point in
# https://www.unicode.org/Public/UCD/latest/ucd/DerivedCoreProperties.txt).
_DRAWS_NOTHING = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]")
_NO_NUMBER = re.compile(r"(?<!\d)[.,:]|[.,:](?!\d)|-(?!\s*\d)")
# Brackets group the parts of a formula: a text with a digit and an operator. A mark is a factorial's, or of "unequal".
_OPERATOR, _BRACKETS = re.compile(r"[+*/=<>^]|-(?=\s*\d)"), re.compile(r"[()\[\]]")
_NO_FACTORIAL = re.compile(r"(?<![\d)])!(?!=)")


class _Table(dict[int, str | None]):
    """A table for str.translate that is filled as characters occur."""

    def __missing__(self, code: int) -> str | None:
        self[code] = self.replacement(chr(code))
        return self[code]

    def replacement(self, character: str) -> str | None:
        raise NotImplementedError


class _Visible(_Table):
    def replacement(self, character: str) -> str | None:
        if character in _DASHES:
            return "-"
        invisible = unicodedata.category(character) in ("Cf", "Cc") and not character.isspace()
        return None if invisible or character in _APOSTROPHES or _DRAWS_NOTHING.match(character) else character


class _Words(_Table):
    def replacement(self, character: str) -> str | None:
        return " " if unicodedata.category(character)[0] == "P" and character not in _KEPT else character


_VISIBLE, _WORDS = _Visible(), _Words()


def normalised_text(text: str) -> str:
    """Return a text's words with one space between them: texts that differ only in what a reader overlooks become equal.

    Unicode's NFKC and case folding; then without invisible characters and punctuation. Digits, signs of numbers and operators stay:
    "2-2?" isn't "2+2?", and "1.5" isn't "15"; so do the brackets of formulas, "5!" and "!=". Of a text of punctuation alone the
    punctuation stays.
    """
    seen = unicodedata.normalize("NFKC", text).casefold().translate(_VISIBLE)
    seen = unicodedata.normalize("NFKC", seen)  # deletions and case folding may leave a letter apart from its accent
    marked = _NO_NUMBER.sub(" ", seen)
    if not (_OPERATOR.search(marked) and any(map(str.isdigit, marked))):
        marked = _BRACKETS.sub(" ", marked)
    words = _NO_FACTORIAL.sub(" ", marked).translate(_WORDS).split()
    return " ".join(words or seen.split())
