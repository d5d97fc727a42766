"""Chat templates that params.yaml can name."""

from __future__ import annotations

from rlhf_core.config import shown
from rlhf_core.data.sources import locate

# For a base model that goes on with a text: no roles, the response directly after the prompt, and the end token.
CONTINUATION = (
    "{{ bos_token if bos_token else '' }}"
    "{% for message in messages %}{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '' }}{% endfor %}"
)
NAMED = {"continuation": CONTINUATION}


def chat_template(wanted: str) -> str:
    """What `model.chat_template` means: a name among NAMED, a file that ends in .jinja, or the template itself.

    Raises:
        ValueError: it is none of these.
    """
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
