"""A rule for stories: the recipe stories.yaml labels its pairs with it, and its judge is the same rule.

A rule takes a prompt and one response to it, and says of each of its aspects whether the response meets it.
"""

import re

KIND = r"help(s|ed|ing)?|shar(e|es|ed|ing)|hug(s|ged|ging)?|thank(s|ed)?|g[ai]ve|kind|nice|friends?|friendly|together|love[sd]?"
HAPPY = r"happy|happily|smil(e|es|ed|ing)|laugh(s|ed|ing)?|fun|joy|glad|proud|excited"
SENTENCES = 3


def kind(prompt: str, response: str) -> dict[str, bool]:
    """Whether somebody is kind, whether somebody is happy, and whether at least three different sentences say so."""
    sentences = {s for s in re.split(r"(?<=[.!?])[\"\s]+", response.strip()) if s}
    return {"kind": _says(KIND, response), "happy": _says(HAPPY, response), "told": len(sentences) >= SENTENCES}


def _says(words: str, text: str) -> bool:
    return re.search(rf"\b({words})\b", text, re.IGNORECASE) is not None
