"""Credentials among the values of params.yaml, which git keeps, reports show and Prefect stores: told by their shape."""

from __future__ import annotations

import re

# What it is -> what it looks like. Prefixes are those that their issuers document; "sk-" is Slovak's too, so letters and digits have to be
# mixed after it. Each part has a longest length: without one the time would grow with the square of a long word's.
_SHAPES = {
    "a password in an address": r"[a-zA-Z][a-zA-Z0-9+.-]{0,20}://[^/\s?#@:]{0,200}:[^/\s?#@]{1,1000}@|https?://[^/\s?#@]{1,1000}@",
    "a key in an address": r"[?&](?:access_token|token|api_?key|key|secret|password|sig|signature|X-Amz-Signature)=[^&\s]{8,}",
    "a private key": r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY",
    "a token of Hugging Face": r"\bhf_[A-Za-z0-9]{20,}",
    "a key of OpenAI's or Anthropic's form": r"\bsk-(?=[\w-]{20})(?:[\w-]{0,80}[_-])?(?=[A-Za-z]{0,15}[0-9]{1,15}[A-Za-z])[A-Za-z0-9]{16}",
    "a key of AWS": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a token of GitHub": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "a token of GitLab": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "a token of Slack": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "a key of Google": r"\bAIza[A-Za-z0-9_-]{35}",
    "a signed token": r"\beyJ[A-Za-z0-9_-]{10,1000}\.eyJ[A-Za-z0-9_-]{10,4000}\.",
}
_PATTERNS = {what: re.compile(shape, re.IGNORECASE if "address" in what else 0) for what, shape in _SHAPES.items()}


def credential_in(text: str) -> str | None:
    """What kind of credential a text holds; None where none is seen. Nothing tells a password that is only a word."""
    return next((what for what, pattern in _PATTERNS.items() if pattern.search(text)), None)
