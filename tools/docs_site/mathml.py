"""Markdown extension that renders `$...$` as MathML, which browsers draw without scripts or fonts of ours."""

from __future__ import annotations

import re

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor

EQUATION = r"(?<![\\$])\$(?![\s$])([^$\n]*[^$\s\\])\$(?!\d)"  # as GitHub reads it
AFTER_CODE, BEFORE_ESCAPES = 190, 180  # priorities of Python-Markdown's own patterns


class Equations(InlineProcessor):
    """Replaces an equation in LaTeX by MathML; a pipe in a table's cell is written `\\vert`."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        spaced = convert(m[1]).replace("<mi>log</mi>", '<mi>log</mi><mspace width="0.17em"/>')
        return self.md.htmlStash.store(spaced), m.start(0), m.end(0)


class MathMl(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.register(Equations(EQUATION, md), "mathml", (AFTER_CODE + BEFORE_ESCAPES) / 2)


def makeExtension(**options: object) -> MathMl:
    return MathMl(**options)
