"""Inputs of fuzz tests, and the form of an acceptable error."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NASTY_BYTES = [
    *(b"\x00", b"\xff\xfe", b"\x80", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\t", b"\r", b"\x1b[2J", "\u2028\x85".encode()),
    *(b"{", b"}", b"[", b"]", b'"', b"'", b",", b":", b": ", b"- ", b"? ", b"#", b"|\n", b">\n", b"\\", b'"\\ud800"', b'"\\u0000"'),
    *(b"NaN", b"-Infinity", b"1e999", b"null", b"true", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"- " * 300),
    *(b"&a ", b"*a", b"&a [*a]", b"<<: *a", b"<<: 1", b"%YAML 9.9\n", b"---\n", b"...\n", b"@", b"`", b"%"),
    *(b"!!python/object/apply:os.system [id]", b"!!timestamp 2026-99-99", b"2026-13-45", b"!!int x", b"!!float y", b"!!binary ?"),
    *(b"!!omap 1", b"!!set [1]", b"!!pairs {a: 1}", b"!!null x", b"!!bool x", b"!!int ''", b"0o", b"0x", b"1:99:99", b"=", b"!", b"!!"),
]
NESTED: Any = []
for _ in range(500):
    NESTED = [NESTED]
NASTY_VALUES = [
    *(float("nan"), float("inf"), -float("inf"), 1e308, 10**40, -(10**5000), 2**64, -1, 0, True, None),
    *("", "\x00", "\ud800", "\x1b[2J", "../../etc/passwd", "/dev/zero", "x" * 100_000, "$(id)", "{{ 1 }}", "${seed}"),
    *([], {}, [None], {"": 1}, {1: 2}, {"__class__": 1}, {None: None}, NESTED, b"bytes", {1, 2}),
]


@st.composite
def mangled(draw: st.DrawFn, original: bytes) -> bytes:
    """A file with one to three places cut, repeated, or replaced by hostile bytes."""
    content = original
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        until = min(len(content), at + draw(st.sampled_from([0, 0, 1, 3, 20])))
        content = content[:at] + draw(st.sampled_from([b"", content[:40], *NASTY_BYTES])) + content[until:]
    return content


def is_clear(message: str) -> bool:
    """Whether an error is readable: it has expected and got, is short, and has no terminal control characters."""
    lines = message.split("\n")
    return "expected" in message and "got" in message and len(message) <= 4000 and all(line.isprintable() for line in lines)
