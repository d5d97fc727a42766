"""params.yaml and overrides, broken in every way: accepted whole, or refused with the file or the key's path."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from clerk_params import CLERK_PARAMS
from hypothesis import example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))
from hostile import NASTY_VALUES, NESTED, is_clear, mangled

from flows.chain.overrides import check
from rlhf_core.config import ConfigError, Params, apply_overrides, parse_assignment, parse_params, read_yaml, set_key

DEFAULT = CLERK_PARAMS
TREE = read_yaml(DEFAULT)
NASTY = st.sampled_from(NASTY_VALUES) | st.floats() | st.text(max_size=9)
SMALL = b"""\
# a comment
seed: 1
data: &anchor
  validation_fraction: 0.1
  sources:
    - {name: clerk, uses: [sft, prompt], weight: 1.0}
gate:
  slices: *anchor
  override: "a reason, with \\u00e9"
rl: |
  text
"""


def paths(node: Any, here: tuple[str, ...] = ()) -> list[str]:
    """Dotted keys of a tree, of its lists too."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    found = [".".join(here)] if here else []
    return found + [path for key, child in children for path in paths(child, (*here, str(key)))]


def refusal(do) -> str | None:
    """The message with which something was refused; None: it was not."""
    try:
        do()
    except ConfigError as error:
        assert is_clear(str(error)), str(error)[:500]
        return str(error)
    return None


@settings(max_examples=100)
@given(content=mangled(SMALL))
def test_any_file_is_read_or_refused_by_name(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(content)
    message = refusal(lambda: json.dumps(read_yaml(path), default=str).encode())
    assert message is None or "fuzzed.yaml" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a mapping of sections, got NoneType"),
        (b"seed: 1\nseed: 2\n", "expected YAML, got found duplicate key .* in line 2, column 1"),
        ("seed: ä".encode("latin-1"), r"expected UTF-8, got byte 0xe4 at byte 6"),
        (b"\xff\xfes\x00", "expected UTF-8, got byte 0xff at byte 0"),
        (b"seed:\n\t1", "expected YAML, got .*line 2, column 1"),
        (b"a: " + b"[" * 2000, "expected YAML, got more than 200 nested brackets"),
        (b"a: &a [*a]\n", "expected at most 60 levels, got more"),
        (b"a: " + b"9" * 5000, "expected YAML, got "),
        (b"a: 2026-99-99", "expected YAML, got "),
        (b"a: !!python/object/apply:os.system [id]", "expected YAML, got .*could not determine a constructor"),
        (b"#" * (1 << 21), "expected at most 1048576 bytes, got 2097152"),
        # Nine lists of nine aliases each: a billion values from 300 bytes.
        (b"a0: &a0 [1]\n" + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 10)), "aliases"),
    ],
)  # fmt: skip
def test_known_ways_to_break_a_yaml_reader(tmp_path, content, message):
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_yaml(path)
    assert is_clear(str(error.value)) and str(path) in str(error.value)


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("link")
    for name in ("none", "folder", "link"):
        assert f"{name}: expected a readable parameter file" in refusal(lambda name=name: read_yaml(tmp_path / name))


@settings(max_examples=100)
@given(key=st.sampled_from([key for key in paths(TREE) if not key.startswith("training.")]), value=NASTY)
@example(key="reward.margin", value=float("nan"))
@example(key="model.path", value="\ud800")
@example(key="seed", value=2**64)
@example(key="rl.prompt_weights", value={"clerk": float("inf")})
def test_any_value_of_any_key_is_accepted_or_refused_by_its_path(key, value):
    tree = copy.deepcopy(TREE)
    set_key(tree, key, value)
    found: list[Params] = []
    message = refusal(lambda: found.append(parse_params(tree)))
    if message is None:
        json.dumps(found[0].model_dump(), allow_nan=False, ensure_ascii=False).encode()
    else:
        assert key.split(".")[0] in message or "params: " in message


@settings(max_examples=100)
@given(text=st.text(max_size=20) | mangled(b"rl.algorithm=grpo").map(lambda b: b.decode("utf-8", "surrogateescape")))
@example(text="seed=" + "[" * 2000)
@example(text="seed=2026-99-99")
def test_any_assignment_on_the_command_line_is_read_or_refused(text):
    refusal(lambda: parse_assignment(text))


@settings(max_examples=40)
@given(
    key=st.text(max_size=12) | st.sampled_from(["data.sources.-1", "data.sources.99", "data.sources.²", "rl..steps", "rl.", ".", "seed.a"])
)
def test_any_key_of_an_override_is_known_or_refused(key):
    assert key in TREE or "expected a key of params.yaml" in refusal(lambda: set_key(copy.deepcopy(TREE), key, 1))


def test_a_refused_override_leaves_the_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_bytes(DEFAULT.read_bytes())
    for overrides in ({"gate.override": "\ud800"}, {"seed": float("nan")}, {"gate.slices": NESTED}, {"report.title": "\x00"}):
        assert refusal(lambda overrides=overrides: apply_overrides(path, overrides)) is not None
        assert refusal(lambda overrides=overrides: check(path, overrides)) is not None
    assert path.read_bytes() == DEFAULT.read_bytes() and [p.name for p in tmp_path.iterdir()] == ["params.yaml"]
