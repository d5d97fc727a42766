"""Griffe extension that sets the parts of a docstring apart, which the house writes without blank lines between them."""

from __future__ import annotations

import re
from typing import Any

import griffe

PARTS = re.compile(r"\n+(?=(?:Sources?|Args|Returns|Raises):)")


class Docstrings(griffe.Extension):
    """Puts a blank line before the source, the arguments, the result and the errors."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = PARTS.sub("\n\n", obj.docstring.value)
