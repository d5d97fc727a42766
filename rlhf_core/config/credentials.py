"""Recognises credentials by their shape, so that none is committed, reported or stored.

The shapes of many vendors are detect-secrets'. Added here are those that it lacks, or matches only in one kind of file or in a time that
grows with the square of a text's length. What looks like a hash, a model's name or words isn't a credential: without a name beside it a
password that is a word isn't recognised, nor is a key of 40 hexadecimal digits, which is a commit's form too.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise

# Kind of credential -> its shape, with the prefixes that issuers document. Every part has a greatest length or starts at a rare word, so
# that the time doesn't grow with the square of a text's length.
_SHAPES = {
    "a password in an address": r"(?i)[a-z][a-z0-9+.-]{0,20}://[^/\s?#@:]{0,200}:[^/\s?#@]{1,1000}@|https?://[^/\s?#@]{1,1000}@",
    "a key in an address": r"(?i)[?&](?:access_token|token|api_?key|key|secret|password|sig|signature|X-Amz-Signature)=[^&\s]{8,}",
    "a private key": r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY",
    "a token of Hugging Face": r"\bhf_[A-Za-z0-9]{20,}",
    # "sk-" also begins words, so letters and digits must be mixed after it.
    "a key of OpenAI's or Anthropic's form": r"\bsk-(?=[\w-]{20})(?:[\w-]{0,80}[_-])?(?=[A-Za-z]{0,15}[0-9]{1,15}[A-Za-z])[A-Za-z0-9]{16}",
    "a key of a model's API": r"\b(?:gsk_|xai-|pplx-|nvapi-|r8_)(?=[A-Za-z_-]{0,60}[0-9])[A-Za-z0-9_-]{32,}",
    "a token of GitHub": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "a token of GitLab": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "a token of Slack": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "a key of Google": r"\b(?:AIza[A-Za-z0-9_-]{35}|GOCSPX-[A-Za-z0-9_-]{28})",
    "a token of npm": r"\bnpm_[A-Za-z0-9]{36}\b",
    "a token of DigitalOcean": r"\bdo[oprt]_v1_[a-f0-9]{64}\b",
    "a key of W&B": r"\bwandb_v1_[A-Za-z0-9_]{40,}|\blocal-[0-9a-f]{40}\b|(?i:wandb)[^\n]{0,40}?(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])",
    "a signed token": r"\beyJ[A-Za-z0-9_-]{10,1000}\.eyJ[A-Za-z0-9_-]{10,4000}\.",
    "a token after Bearer": r"(?i)\bbearer +(?=[A-Za-z._~+/-]{0,60}[0-9])[A-Za-z0-9._~+/-]{20,}",
}
# A name that ends like a secret's, then = or :, then a value with letters and digits. A template, a variable or a special token isn't one.
_NAMED = (
    r"(?i)(?:password|passwd|passphrase|\bpwd|token|secret|api[_-]?key|(?:access|account|private|secret|auth)[_-]?key)['\"]?\s{0,3}[:=]\s{0,3}"
    r"(?!['\"]?[<{$\[%])['\"]?(?=[^\s'\",;]{0,60}[0-9])(?=[^\s'\",;]{0,60}[A-Za-z])[^\s'\",;]{6,}"
)
# A secret key of AWS has no prefix. 999 of 1,000 random ones change at least 16 times between upper case, lower case, digits and marks.
_AWS_SECRET = r"(?<![\w./+=-])[A-Za-z0-9/+]{40}(?![\w./+=-])"
AWS_CHANGES, AWS_DISTINCT = 16, 22


def credential_in(text: str, key: str = "") -> str | None:
    """Return the kind of credential in a text, recognised by its shape; None: there is none.

    Args:
        key: name of the text, such as its path in params: `api_key` or `tracking.wandb_project` make more shapes credentials.
    """
    named = f"{key}: {text}" if key else text
    for kind, pattern in _patterns():
        if pattern.search(named):
            return kind
    return "a secret key of AWS's form" if any(map(_is_mixed, _aws().findall(text))) else None


def _is_mixed(word: str) -> bool:
    kinds = ["A" if c.isupper() else "a" if c.islower() else "0" if c.isdigit() else "/" for c in word]
    return sum(a != b for a, b in pairwise(kinds)) >= AWS_CHANGES and len(set(word)) >= AWS_DISTINCT


@lru_cache(maxsize=1)
def _aws() -> re.Pattern[str]:
    return re.compile(_AWS_SECRET)


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Kinds and shapes: ours, then those of detect-secrets, which is imported at first use."""
    from detect_secrets.plugins import (
        aws,
        azure_storage_key,
        discord,
        gitlab_token,
        mailchimp,
        pypi_token,
        sendgrid,
        slack,
        square_oauth,
        stripe,
        telegram_token,
        twilio,
    )

    detectors = (
        *(aws.AWSKeyDetector, azure_storage_key.AzureStorageKeyDetector, discord.DiscordBotTokenDetector, gitlab_token.GitLabTokenDetector),
        *(mailchimp.MailchimpDetector, pypi_token.PypiTokenDetector, sendgrid.SendGridDetector, slack.SlackDetector),
        *(square_oauth.SquareOAuthDetector, stripe.StripeDetector, telegram_token.TelegramBotTokenDetector, twilio.TwilioKeyDetector),
    )
    ours = [(kind, re.compile(shape)) for kind, shape in _SHAPES.items()]
    theirs = [(f"a credential ({detector.secret_type})", pattern) for detector in detectors for pattern in detector.denylist]
    return [*ours, *theirs, ("a value that its name calls secret", re.compile(_NAMED))]
