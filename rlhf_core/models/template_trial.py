"""Renders a chat template once in a child process with limits of time and memory, before this process does.

A template is a program of its folder, and Jinja's sandbox limits neither: `{{ 'a' * 3000000000 }}` is built when it is compiled. The child
imports Jinja alone, so that it starts in some 0.1 s, and renders short and long conversations. What a template does to one row only isn't
seen here; `rlhf_core.models.template.render` limits the length of each row's text.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

CPU_SECONDS = 5  # all trials together take some milliseconds
DEADLINE = 120.0  # seconds, on a machine that is busy
MEMORY = 1 << 30  # bytes of address space
SPARE = 1 << 20  # characters that a template may add to any conversation
GROWTH = 16  # times the characters of a conversation; JSON's escapes take 6
TOO_LONG, NO_MEMORY = 3, 4  # exit codes


def too_long(text: str, messages: Any) -> bool:
    """Return whether a rendered conversation is longer than any template should make it. A short text costs one comparison."""
    return len(text) > SPARE and len(text) > SPARE + GROWTH * len(str(messages))


def check_limits(path: str, template: str, special_tokens: Mapping[str, Any]) -> None:
    """Check that a template renders conversations within the limits. Other faults of the template aren't checked here.

    Raises:
        ValueError: it doesn't; names the limit.
    """
    tokens = json.dumps({name: str(token) for name, token in special_tokens.items() if isinstance(token, str)}, sort_keys=True)
    if (got := _problem(template, tokens)) is not None:
        raise ValueError(f"tokenizer {path}: expected a chat template for conversations, got {got}; don't use it")


@lru_cache(maxsize=64)
def _problem(template: str, tokens: str) -> str | None:
    command = [sys.executable, "-P", __file__]
    content = json.dumps({"template": template, "tokens": json.loads(tokens), "seconds": CPU_SECONDS, "memory": MEMORY})
    try:
        done = subprocess.run(command, input=content, capture_output=True, text=True, timeout=DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        return f"one that renders for more than {DEADLINE:.0f} s"
    if done.returncode == TOO_LONG:
        return f"one that writes {done.stdout.strip()} characters for a short conversation"
    if done.returncode == NO_MEMORY:
        return f"one that takes more than {MEMORY >> 20} MiB of memory"
    if done.returncode < 0:
        return f"one that takes more than {CPU_SECONDS} s of computing or {MEMORY >> 20} MiB"
    if done.returncode:
        raise RuntimeError(f"chat template's trial: expected an end, got exit code {done.returncode}: {done.stderr[-600:]}")
    return None


# The child's side


def _conversations() -> list[list[dict[str, Any]]]:
    question, answer = {"role": "user", "content": "Which one?"}, {"role": "assistant", "content": "<think>\na\n</think>\n\nThat one."}
    system, parts = {"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Which?"}]}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}
    used = [question, call, {"role": "tool", "name": "f", "content": "{}"}, answer]
    long = {"role": "user", "content": "word " * 20_000}
    return [[question], [question, answer], [system, question], [parts], used, [question, answer] * 100 + [question], [long]]


def _environment() -> Any:
    """Return a Jinja environment as transformers makes it: sandboxed, with the tag `generation`, `tojson` without escapes and two
    functions.
    """
    from datetime import datetime

    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = frozenset({"generation"})

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def fail(message: str) -> None:
        raise TemplateError(message)

    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    found.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    found.globals |= {"raise_exception": fail, "strftime_now": datetime.now().strftime}
    return found


def _try() -> int:
    asked = json.load(sys.stdin)
    environment = _environment()
    resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"], asked["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory"], asked["memory"]))
    for messages in _conversations():
        for waits in (True, False):
            try:
                text = environment.from_string(asked["template"]).render(messages=messages, add_generation_prompt=waits, **asked["tokens"])
            except MemoryError:
                return NO_MEMORY
            except Exception:  # of a template, which is a program and may refuse a conversation
                continue
            if too_long(text, messages):
                print(len(text))
                return TOO_LONG
    return 0


if __name__ == "__main__":
    sys.exit(_try())
