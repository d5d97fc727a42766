"""Figures of the harness's tasks for two models, with the harness's standard errors and the difference over the same documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.statistics.intervals import paired_difference, paired_means

Results = Mapping[str, Any]  # what `lm_eval.evaluator.evaluate` returns
SAME = 1e-9  # a figure that is so near to the mean over documents is that mean


def compared(sft: Results, policy: Results, truncated: Mapping[str, Mapping[str, int]], *, confidence: float) -> dict[str, Any]:
    """Return each task and group, by name: version, examples, documents, and its figures by the harness's names, `metric,filter`.

    The difference is that of means over documents, with `low`, `high` and `p_value`, or None for these where a figure isn't such a mean.

    Args:
        truncated: model's name -> task -> documents whose context lost its beginning.
    """
    found = {}
    for name, metrics in sft["results"].items():
        leaves = list(_leaves(policy, name))
        keys = [key for key, value in metrics.items() if "," in key and "_stderr," not in key and _is_number(value)]
        figures = {key: _figure(key, name, leaves, sft, policy, confidence) for key in keys}
        found[name] = {
            "version": policy["versions"].get(name),
            "num_fewshot": policy["n-shot"].get(name, 0),
            "documents": sum(policy["n-samples"][leaf]["original"] for leaf in leaves),
            "n": sum(policy["n-samples"][leaf]["effective"] for leaf in leaves),
            "group": leaves != [name],
            "truncated": {model: sum(of.get(leaf, 0) for leaf in leaves) for model, of in truncated.items()},
            "figures": figures,
        }
    return found


def _leaves(results: Results, name: str) -> Iterator[str]:
    """The tasks of a group, also of groups in it; of a task the task."""
    if name in results["samples"]:
        yield name
    for child in results["group_subtasks"].get(name, []):
        yield from _leaves(results, child)


def _figure(key: str, name: str, leaves: list[str], sft: Results, policy: Results, confidence: float) -> dict[str, Any]:
    metric, _, kept = key.partition(",")
    values = {model: of["results"][name][key] for model, of in (("sft", sft), ("policy", policy))}
    errors = {model: of["results"][name].get(f"{metric}_stderr,{kept}") for model, of in (("sft", sft), ("policy", policy))}
    documents = [_documents(of, leaves, metric, kept) for of in (sft, policy)]
    return {
        "higher_is_better": policy["higher_is_better"].get(name, {}).get(metric),
        **{model: {"value": value, "stderr": errors[model] if _is_number(errors[model]) else None} for model, value in values.items()},
        "difference": _difference(values, *documents, confidence),
    }


def _difference(values: Mapping[str, Any], sft: dict[Any, Any], policy: dict[Any, Any], confidence: float) -> dict[str, Any]:
    """Return the policy's value less the SFT model's, with its interval if both are means over the same documents."""
    plain = {"value": values["policy"] - values["sft"], "low": None, "high": None, "p_value": None, "n": 0}
    means = ((values["sft"], sft), (values["policy"], policy))
    if sft.keys() != policy.keys() or not all(_is_mean(value, of) for value, of in means):
        return plain
    first, second = ([of[document] for document in policy] for of in (policy, sft))
    binary = {*first, *second} <= {0, 1}
    found = vars((paired_difference if binary else paired_means)(first, second, confidence))
    return {key: found[key] for key in ("value", "low", "high", "p_value")} | {"n": len(first)}


def _is_mean(value: float, documents: Mapping[Any, Any]) -> bool:
    numbers = list(documents.values())
    known = bool(numbers) and all(_is_number(number) and math.isfinite(number) for number in numbers)
    return known and abs(math.fsum(numbers) / len(numbers) - value) <= SAME * max(1.0, abs(value))


def _documents(results: Results, leaves: list[str], metric: str, kept: str) -> dict[Any, Any]:
    """The value of each document, by task, number and hash."""
    return {
        (leaf, sample["doc_id"], sample["doc_hash"]): sample[metric]
        for leaf in leaves
        for sample in results["samples"][leaf]
        if sample["filter"] == kept and metric in sample
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
