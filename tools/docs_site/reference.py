"""The page that lists every key of params.yaml with its values, its default and what it does."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_core.config import Params, SharedTrainingConfig, parse_yaml, read_text
from rlhf_core.config.base import Section, subsection

INTRODUCTION = """# Keys of params.yaml

Every section and key, made from the configuration's types and the comments of [params.yaml](../params.yaml).
A default is what a run has that doesn't write the key. Items of a list have `[]` in their name.
`python -m tools.params KEY` prints the values of a run."""
BOUNDS = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
UNHELPFUL = ("decisions", "coming_from", "comparison", "results", "performance")  # pages that name keys without explaining them
CONTINUED = 20  # a comment line from this column on continues the comment of the key above it


class Key(NamedTuple):
    name: str
    values: str
    default: str
    meaning: str


def params_page(root: Path) -> str:
    """The page as Markdown, with links as from a file of docs/."""
    text = read_text(root / "params.yaml")
    written, keys = parse_yaml(text, "params.yaml"), Keys(comments_of(text), codes_of_pages(root / "docs"))
    parts = [INTRODUCTION]
    for name, field in Params.model_fields.items():
        section, _ = subsection(field.annotation)
        rows = list(keys.below(section, name, written[name])) if section else [keys.one(Params, name, name, written)]
        shared = "It also has every key of [training](#training)." if _takes_training(section) else ""
        parts.append("\n\n".join(filter(None, [f"## {name}", _linked(keys.comments.get(name, "")), shared, _table(rows)])))
    return "\n\n".join(parts) + "\n"


class Keys:
    """Collects the keys of sections; a kind of section that was listed before is referred to."""

    def __init__(self, comments: dict[str, str], codes: dict[str, set[str]]) -> None:
        self.comments, self.codes = comments, codes
        self.listed: dict[type[Section], str] = {}

    def below(self, section: type[Section], path: str, written: Any) -> Iterator[Key]:
        """The keys of a section and of the sections within it; keys that it takes over from `training` are left out."""
        for name, field in section.model_fields.items():
            dotted = f"{path}.{name}"
            if _takes_training(section) and name in SharedTrainingConfig.model_fields and dotted not in self.comments:
                continue
            found = self.one(section, name, dotted, written)
            below, is_list = subsection(field.annotation)
            if below is not None and (first := self.listed.setdefault(below, dotted)) != dotted:
                yield found._replace(meaning=f"{found.meaning} Its keys are those of `{first}`.".strip())
                continue
            yield found
            if below is not None:
                inner = written.get(name) if isinstance(written, dict) else None
                yield from self.below(below, f"{dotted}[]" if is_list else dotted, inner[0] if is_list and inner else inner)

    def one(self, section: type[Section], name: str, dotted: str, written: Any) -> Key:
        field = section.model_fields[name]
        meaning = self.comments.get(dotted) or meaning_in_class(section, name) or self._pages_of(dotted)
        given = written.get(name, ...) if isinstance(written, dict) else ...
        return Key(dotted, _values(section, name, field), _default(field, given), re.sub(r"^\w+( \| \w+)+$", "", meaning))

    def _pages_of(self, dotted: str) -> str:
        """The pages that name a key, for one that nothing else explains."""
        words = dotted.replace("[]", "").split(".")
        ends = [".".join(words[start:]) for start in range(len(words))]
        for end in ends:
            pages = [page for page, codes in self.codes.items() if end in codes]
            if pages and ("." in end or len(pages) == 1):
                return "see " + ", ".join(f"docs/{page}.md" for page in pages[:3])
        return ""


def codes_of_pages(docs: Path) -> dict[str, set[str]]:
    """Words in backticks on each page, by the page's name."""
    pages = [page for page in sorted(docs.glob("**/*.md")) if page.stem not in UNHELPFUL]
    return {
        str(page.relative_to(docs).with_suffix("")): {
            word.rstrip(":") for code in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")) for word in re.split(r"[\s,=]+", code)
        }
        for page in pages
    }


def comments_of(text: str) -> dict[str, str]:
    """The comment of each dotted key of a params.yaml, from above its line and behind it; empty for a key without one."""
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    above: list[str] = []
    for line in text.splitlines():
        key = re.match(r"( *(?:- )?)(\w+):", line)
        _, _, comment = line.partition("# ") if "# " in line else ("", "", "")
        if key:
            parents = [(indent, name) for indent, name in parents if indent < len(key[1])]
            parents.append(
                (len(key[1]), f"{parents[-1][1]}[].{key[2]}" if "- " in key[1] else ".".join([*(n for _, n in parents[-1:]), key[2]]))
            )
            found[parents[-1][1]] = " ".join([*above, comment]).strip()
            above = []
        elif comment and len(line) - len(line.lstrip()) >= CONTINUED:
            found[parents[-1][1]] += f" {comment}"
        else:
            above = [*above, comment] if comment else []
    return found


def meaning_in_class(section: type[BaseModel], name: str) -> str:
    """What the section's class says of a field, in its docstring (`name: text`) or behind the field; empty: nothing."""
    for owner in section.__mro__:
        if name not in getattr(owner, "__annotations__", {}):
            continue
        names = "|".join(section.model_fields)
        parts = re.split(rf"(?:^|(?<=[.;] ))((?:{names})(?:, (?:{names}))*): ", inspect.cleandoc(owner.__doc__ or ""), flags=re.MULTILINE)
        told = {one: text for many, text in zip(parts[1::2], parts[2::2], strict=True) for one in many.split(", ")}
        behind = re.search(rf"^    {name}: .*?  # (.*)$", _source(owner), re.MULTILINE)
        return " ".join((told.get(name) or (behind[1] if behind else "")).split())
    return ""


def _source(owner: type) -> str:
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):  # made by pydantic's create_model
        return ""


def _takes_training(section: type | None) -> bool:
    return section is not None and issubclass(section, SharedTrainingConfig) and section is not SharedTrainingConfig


def _default(field: FieldInfo, given: Any) -> str:
    """The default as YAML in one line; empty for a section, whose keys follow."""
    if given is ... and field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True) if given is ... else given
    if isinstance(value, BaseModel) or (isinstance(value, dict) and value and subsection(field.annotation)[0]):
        return ""
    if isinstance(value, list) and value and subsection(field.annotation)[0]:
        return ""
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _values(section: type[Section], name: str, field: FieldInfo) -> str:
    if subsection(field.annotation)[0] is not None:
        return "list of sections" if subsection(field.annotation)[1] else "section"
    return _shown(section.model_json_schema()["properties"][name])


def _shown(schema: dict[str, Any]) -> str:
    """A JSON schema in words, such as "integer above 0 or null"."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_shown, schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        return ", ".join(
            f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")])
        )
    if "$ref" in schema:
        return "mapping"
    bounds = " and ".join(f"{word} {json.dumps(schema[key])}" for key, word in BOUNDS.items() if key in schema)
    if schema.get("type") == "array":
        return f"list of {_shown(schema['items'])}"
    kind = {"object": "mapping", "boolean": "true or false", "string": "text"}.get(schema.get("type", ""), schema.get("type", "any"))
    return f"{kind} {bounds}".strip()


def _table(rows: list[Key]) -> str:
    lines = ["| key | values | default | what it does |", "|---|---|---|---|"]
    for row in rows:
        cells = [f"`{row.name}`", row.values, row.default, _linked(row.meaning)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _linked(text: str) -> str:
    """A comment with links to the pages that it names, and Markdown's characters escaped outside code."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([<*_\[\]])", r"\\\1", part) for part in parts[::2]]
    return re.sub(r"docs/([\w/\\]+)\.md", lambda found: (page := found[1].replace("\\", "")) and f"[{page}]({page}.md)", "".join(parts))
