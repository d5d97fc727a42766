"""The model card, README.md of a model's folder: what the model is, how it was trained and on which data, and how to use it.

DVC hashes the folder, so the card is reproducible byte for byte: params, counts and hashes of the stage's inputs, but no date, commit,
machine or path outside the project. `rlhf export` adds what is known only later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from rlhf_core.algorithms.online import ALGORITHMS
from rlhf_core.config import shown
from rlhf_core.data.places import is_hub_name, locate
from rlhf_core.data.schema import SPLITS

CARD = "README.md"
KINDS = {
    "given": ("Given model", "The language model that alignment starts from, with its own weights.", "text-generation"),
    "sft": ("SFT model", "A language model fine-tuned on demonstrations.", "text-generation"),
    "reward": ("Reward model", "A sequence classifier whose one score says how good a response is.", "text-classification"),
    "policy": ("Policy", "A language model aligned with preferences or rewards.", "text-generation"),
}
GATE_HEADING = "## Gate of the reward model"
# Intervals, deadlines and limits, which change no weights.
NO_RESULT = ("checkpoint_every", "eval_every", "save_rollouts_every", "deadlines", "max_replacements")
_USE_LANGUAGE_MODEL = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModelForCausalLM.from_pretrained(".")  # this folder
asked = [{"role": "user", "content": "..."}]
prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**prompt, max_new_tokens=64)[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
```
"""
_USE_REWARD_MODEL = """\
```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModelForSequenceClassification.from_pretrained(".")  # this folder
conversation = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]
print(model(**tokenizer.apply_chat_template(conversation, return_tensors="pt", return_dict=True)).logits)
```
"""


@dataclass(frozen=True)
class CardFacts:
    """Facts about a model that a stage made.

    kind: one of KINDS. method: how it was trained, such as dpo or rl. base: `model.path`; None: weights from nothing.
    params: the part of params.yaml on which the stage depends. sources: content of data/prepared/sources.json.
    inputs: md5 in dvc.lock of each input that counts, by its path. gate: content of metrics/gate.json, if the method uses the reward model.
    judges: entries of its `llm_judges`, with its `override`, of those that the policy learned from.
    figures: metrics of the stage that describe the model. notes: further sentences.
    """

    kind: str
    method: str
    base: str | None
    params: Mapping[str, Any]
    sources: Mapping[str, Mapping[str, Any]]
    inputs: Mapping[str, str]
    gate: Mapping[str, Any] | None = None
    judges: Sequence[Mapping[str, Any]] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()


def write_card(folder: Path, facts: CardFacts) -> None:
    """Write the card into a model's folder."""
    (folder / CARD).write_text(render_card(facts), encoding="utf-8", newline="\n")


def has_card(folder: Path) -> bool:
    """Return whether a folder has a card with metadata, as Hugging Face and this library write it."""
    path = folder / CARD
    return path.is_file() and re.match(r"---\n.*?---\n", path.read_text(encoding="utf-8", errors="replace"), re.DOTALL) is not None


def render_card(facts: CardFacts) -> str:
    """Return the card's text, which begins with Hugging Face's metadata."""
    title, what, _ = KINDS[facts.kind]
    use = _USE_REWARD_MODEL if facts.kind == "reward" else _USE_LANGUAGE_MODEL
    base = "trained from nothing" if facts.base is None else f"started from {_named(facts.base)}"
    sections = [
        f"# {title}\n\n{what} Method: {facts.method}; {base}.\n",
        *(f"{note}\n" for note in facts.notes),
        f"## Use\n\n{use}",
        f"## Training\n\n```yaml\n{as_yaml(counting(facts.params))}```\n",
        f"## Data\n\n{data_table(facts.sources)}",
        "## Inputs\n\nBy DVC's md5, as in `dvc.lock`.\n\n" + table(("input", "md5"), facts.inputs.items()),
    ]
    if facts.figures:
        rows = [(name, f"{value:.4f}") for name, value in facts.figures.items()]
        sections.append("## Figures of the training\n\nOn the validation split.\n\n" + table(("figure", "value"), rows))
    if facts.gate is not None:
        sections.append(f"{GATE_HEADING}\n\n{verdict(facts.gate)}\n")
    sections += [f"## Gate of the judge {judge['name']}\n\nModel: {_named(judge['model'])}. {verdict(judge)}\n" for judge in facts.judges]
    return with_metadata(metadata(facts), "\n".join(sections))


def metadata(facts: CardFacts) -> dict[str, Any]:
    """Metadata for Hugging Face, https://huggingface.co/docs/hub/model-cards. It names models and data sets on the hub only."""
    found: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": KINDS[facts.kind][2]}
    found["tags"] = {
        "given": ["rlhf"],
        "sft": ["rlhf", "sft"],
        "reward": ["rlhf", "reward-model"],
        "policy": ["rlhf", "policy", re.split(r"[ ,]", facts.method)[0]],
    }[facts.kind]
    if facts.base is not None and _is_on_the_hub(facts.base):
        found["base_model"] = facts.base
    datasets = [s["path"] for s in facts.sources.values() if s["kind"] == "huggingface" and _is_on_the_hub(s["path"])]
    return found | ({"datasets": sorted(set(datasets))} if datasets else {})


def with_metadata(head: Mapping[str, Any], body: str) -> str:
    """Return a card's text: metadata, then body."""
    return f"---\n{as_yaml(head)}---\n\n{body}"


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """Return the metadata and the body of a card.

    Raises:
        ValueError: it doesn't begin with metadata.
    """
    parts = re.match(r"---\n(.*?)---\n\n?(.*)", text, re.DOTALL)
    if parts is None:
        raise ValueError(f"{CARD}: expected a model card with metadata between lines of ---, got none; restore it or train again")
    return YAML(typ="safe", pure=True).load(parts[1]) or {}, parts[2]


def _is_on_the_hub(path: str) -> bool:
    """Return whether a path is the name of a model or data set on Hugging Face, not a folder."""
    return is_hub_name(path) and not locate(path).exists()


def verdict(gate: Mapping[str, Any]) -> str:
    outcome, message = ("Passed:" if gate["passed"] else "Not passed:"), _line(gate["message"])
    reason = (
        ""
        if gate["passed"] or gate.get("override") is None
        else f"\n\nUsed although it was rejected, for this reason: {_line(gate['override'])}"
    )
    return f"{outcome} {message.removeprefix('passed: ').removeprefix('rejected: ')}{reason}"


def data_table(sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown table with the number of rows by source, use and split."""
    rows = [
        (name, source["kind"], use, *(counts.get(split, 0) for split in SPLITS))
        for name, source in sources.items()
        for use, counts in source["rows"].items()
    ]
    return table(("source", "kind", "use", *SPLITS), rows)


def table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_line(cell).replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def counting(params: Mapping[str, Any]) -> dict[str, Any]:
    """Params that change weights, without sections of unused algorithms and without paths on a machine."""
    algorithm = params.get("rl", {}).get("algorithm") if isinstance(params.get("rl"), Mapping) else None
    unused = ALGORITHMS.keys() - {algorithm}

    def kept(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: kept(value) for key, value in node.items() if key not in NO_RESULT}
        if isinstance(node, list | tuple):
            return [kept(value) for value in node]
        return _named(node) if isinstance(node, str) and node.startswith(("/", "~")) else node

    found = kept(params)
    if isinstance(found.get("model"), dict) and found["model"].get("path") is not None:
        found["model"].pop("architecture", None)  # of a model from nothing
    if algorithm is not None:
        found["rl"] = {key: value for key, value in found["rl"].items() if key not in unused}
    return found


def as_yaml(content: Mapping[str, Any]) -> str:
    yaml, text = YAML(typ="safe", pure=True), StringIO()
    yaml.default_flow_style = False
    yaml.width = 10_000
    yaml.dump(dict(content), text)
    return text.getvalue()


def _named(path: str) -> str:
    """Return the name of a model or file without a path on a machine."""
    return shown(Path(path).name if path.startswith(("/", "~", ".")) else path)


def _line(value: Any) -> str:
    return shown(" ".join(str(value).split()), 4000)
