"""Short answers to questions of fact: the rule and the measure of recipes/smollm2.yaml.

The rule labels pairs of the model's own answers. The measure compares an answer with the question's label, which the rule doesn't see.
"""

import re

MAX_WORDS = 12


def brief(prompt: str, response: str) -> dict[str, bool]:
    """Whether the response is one sentence of at most twelve words."""
    text = response.strip()
    return {"short": len(text.split()) <= MAX_WORDS, "one": "\n" not in text and len(re.findall(r"[.!?](?=\s|$)", text)) == 1}


def right(prompts, responses, labels, metadata):
    """1 for a finished answer that contains one of the label's alternatives, which are separated by |; else 0."""
    scores = [
        None if label is None else float(meta["finished"] and any(_says(words, response) for words in label.split("|")))
        for response, label, meta in zip(responses, labels, metadata, strict=True)
    ]
    return scores


def _says(words, text):
    """Whether a response contains an alternative. Symbols and letters must stand alone; longer words may have an ending, numbers none."""
    whole = len(words) <= 2 and not words.isdigit()
    end = r"(?!\w)" if whole else r"(?![\d.,]*\d)"
    return re.search(rf"(?<![\w.,]){re.escape(words)}{end}", text, 0 if whole else re.IGNORECASE) is not None
