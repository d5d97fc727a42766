"""Chat templates that params.yaml names, and what a template would take from outside (the day, whether to think) written into it.

The template travels with the tokenizer, so every stage and whoever serves the policy see the same prompt.
"""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Any

from rlhf_core.config import shown

# For a base model that goes on with a text: no roles, the response directly after the prompt, and the end token.
CONTINUATION = (
    "{{ bos_token if bos_token else '' }}"
    "{% for message in messages %}{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '' }}{% endfor %}"
)
NAMED = {"continuation": CONTINUATION}
DEFAULT_DATE = "2024-07-26"  # what several templates fall back to where they can't ask for the day
_ASKS_FOR_DAY = re.compile(r"\bstrftime_now\s*\(")
_FORMAT = re.compile(r"\bstrftime_now\s*\(\s*(?:'([^'\\]*)'|\"([^\"\\]*)\")\s*\)")
_PINNED = "{%- set strftime_now = "
# What apply_chat_template always passes itself.
_TAKEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "strftime_now", "raise_exception"}


def named_template(wanted: str) -> str:
    """What `model.chat_template` means: a name among NAMED, a file that ends in .jinja, or the template itself.

    Raises:
        ValueError: it is none of these.
    """
    from rlhf_core.data.places import locate

    if wanted in NAMED:
        return NAMED[wanted]
    if "{{" in wanted or "{%" in wanted:
        return wanted
    try:
        if wanted.endswith(".jinja"):
            return locate(wanted).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"model.chat_template: expected a readable file, got {wanted} ({error}); correct the path") from error
    raise ValueError(
        f"model.chat_template: expected one of {list(NAMED)}, a .jinja file, or a template with {{{{ }}}} in it, "
        f"got {shown(repr(wanted))}; correct it"
    )


def with_date(template: str, day: str) -> str:
    """A template for which it is always that day (ISO 8601); as it is where it doesn't ask for the day, or has one already.

    `strftime_now` becomes a look-up of the formats that the template asks for. `date_string`, where a template makes it of that, follows.

    Raises:
        ValueError: the template asks for the day in a format that isn't written out.
    """
    if _PINNED in template or not _ASKS_FOR_DAY.search(template):
        return template
    formats = [a or b for a, b in _FORMAT.findall(template)]
    if len(formats) < len(_ASKS_FOR_DAY.findall(template)):
        raise ValueError('chat template: expected dates written as strftime_now("<format>"), got another call of it; write the format out')
    written = {form: date.fromisoformat(day).strftime(form) for form in formats}
    return f"{_PINNED}{_literal(written)}.get %}}\n{template}"


def with_options(template: str, options: dict[str, Any]) -> str:
    """A template for which these variables have these values unless whoever renders it says otherwise.

    Raises:
        ValueError: the template reads no such variable.
    """
    for name in options:
        if name in _TAKEN or not name.isidentifier() or not re.search(rf"\b{name}\b", template):
            raise ValueError(
                f"model.template_options: expected variables that the chat template reads, got {shown(repr(name))}; see its chat_template"
            )
    defaults = (
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}\n" for name, value in options.items()
    )
    return "".join(defaults) + template


def _literal(value: Any) -> str:
    """A value as a template writes it: as in JSON, but for null, and with `}` apart lest two of them end something."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
