"""A rule for stories: the recipe stories.yaml labels its pairs with it, and its judge is the same rule.

A rule takes a prompt and one response to it, and says of each of its aspects whether the response meets it.
"""

import re

KIND = r"help(s|ed|ing)?|shar(e|es|ed|ing)|hug(s|ged|ging)?|thank(s|ed)?|g[ai]ve|kind|nice|friends?|friendly|together"
HAPPY = r"happy|happily|smil(e|es|ed|ing)|laugh(s|ed|ing)?|fun|joy|glad|proud|loved?"
SAD = r"sad|sadly|cr(y|ied|ying)|scared|afraid|angry|mad|mean|hurt|broken?|lost|bad|upset|worried|cold|dark"


def kind(prompt: str, response: str) -> dict[str, bool]:
    """Somebody is kind, somebody is happy, and nothing sad happens."""
    return {"kind": _says(KIND, response), "happy": _says(HAPPY, response), "gentle": not _says(SAD, response)}


def _says(words: str, text: str) -> bool:
    return re.search(rf"\b({words})\b", text, re.IGNORECASE) is not None
