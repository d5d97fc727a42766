"""What prepared data must satisfy, as Great Expectations: a list of checks for each use, most of them on rows.

Only the validation stages import this module: importing great_expectations takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import great_expectations.expectations as gxe
import pandas as pd
from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations.expectation import BatchExpectation, ColumnPairMapExpectation
from great_expectations.expectations.metrics.map_metric_provider import ColumnPairMapMetricProvider, column_pair_condition_partial
from great_expectations.expectations.row_conditions import Column

from rlhf_core.config import ValidationConfig
from rlhf_core.data.control import VISIBLE
from rlhf_core.data.schema import SPLITS
from rlhf_core.preparation.validation.texts import TEXT_COLUMNS
from rlhf_core.preparation.values import ROLE_ORDER

Bound = Literal["at most", "at least"]


class ColumnPairValuesDiffer(ColumnPairMapMetricProvider):
    condition_metric_name = "column_pair_values.differ_by_more_than_white_space"
    condition_domain_keys = ("batch_id", "table", "column_A", "column_B", "row_condition", "condition_parser", "ignore_row_if")
    condition_value_keys = ()

    @column_pair_condition_partial(engine=PandasExecutionEngine)
    def _pandas(cls, column_A: pd.Series, column_B: pd.Series, **_) -> pd.Series:
        return column_A.str.strip() != column_B.str.strip()


class ExpectColumnPairValuesToDiffer(ColumnPairMapExpectation):
    """Two texts of a row differ by more than white space at their ends."""

    map_metric = "column_pair_values.differ_by_more_than_white_space"
    success_keys = ("column_A", "column_B", "ignore_row_if", "mostly")
    ignore_row_if: str = "either_value_is_missing"


class ColumnPairValuesDetermined(ColumnPairMapMetricProvider):
    condition_metric_name = "column_pair_values.a_determines_b"
    condition_domain_keys = ("batch_id", "table", "column_A", "column_B", "row_condition", "condition_parser", "ignore_row_if")
    condition_value_keys = ()

    @column_pair_condition_partial(engine=PandasExecutionEngine)
    def _pandas(cls, column_A: pd.Series, column_B: pd.Series, **_) -> pd.Series:
        return column_B.groupby(column_A).transform("nunique") <= 1


class ExpectColumnAToDetermineColumnB(ColumnPairMapExpectation):
    """Rows with the same value in column A have the same value in column B; every row of a group that doesn't is unexpected."""

    map_metric = "column_pair_values.a_determines_b"
    success_keys = ("column_A", "column_B", "ignore_row_if", "mostly")
    ignore_row_if: str = "either_value_is_missing"


@dataclass(frozen=True)
class Check:
    """One expectation about one use.

    limit, bound, unit: of the number that is compared; for a check on rows, the share of rows that may break it.
    of_observed: None for a check on rows; else computes that number from what Great Expectations observed on the whole table.
    advice: what to do when the check fails.
    """

    name: str
    expectation: BatchExpectation
    meaning: str
    limit: float
    advice: str
    bound: Bound = "at most"
    unit: str = "share of rows"
    of_observed: Callable[[float], float] | None = None


def checks_for(use: str, frame: pd.DataFrame, config: ValidationConfig, *, max_length: int, pairs: bool = True) -> list[Check]:
    """Return the checks for one use's measured rows: checks on pairs and on unpaired rows if there are any, on the number of pairs if
    `pairs`.
    """
    checks = [*_rows(use), *_texts(use, config, max_length)]
    if use != "pretrain":
        checks += _conversations(use, config)
    if "picture_tokens" in frame.columns:
        checks += [_pictures()]
    if use == "preference":
        checks += _pairs(config, any_pairs=bool(frame["chosen_is_longer"].notna().any()))
        checks += [_enough_pairs(config.min_pairs)] if pairs and config.min_pairs else []
        checks += _unpaired(config) if frame["is_chosen"].notna().any() else []
    if use == "stepwise":
        checks += _steps(config)
    return checks


def _pictures() -> Check:
    expectation = gxe.ExpectColumnPairValuesToBeEqual(
        column_A="picture_tokens", column_B="due_picture_tokens", ignore_row_if="either_value_is_missing"
    )
    meaning = "each prompt has as many tokens of pictures as its pictures take"
    return Check("picture_tokens", expectation, meaning, 0.0, "make the processor's image token a special token of the tokenizer")


def schema_checks() -> list[Check]:
    """Return the checks for the table `schema_frame`."""
    expectation = gxe.ExpectColumnPairValuesToBeEqual(column_A="expected", column_B="found")
    meaning = "the file has the columns of the canonical schema, with their types"
    return [Check("schema", expectation, meaning, 0.0, "write it with rlhf_core.data.schema.write_rows; the use's other checks didn't run")]


def presence_checks() -> list[Check]:
    """Return the checks for a table with id (`<use>:<split>`) and rows."""
    expectation = gxe.ExpectColumnValuesToBeBetween(column="rows", min_value=1)
    meaning = "the stages find rows in every use and split they read"
    advice = (
        "add a source with that use to data.sources, or more rows; a chat model needs no use sft: set sft.enabled to false; conversations "
        "with the same first message of the user are in one split, so make a fixed instruction the system message"
    )
    return [Check("rows_present", expectation, meaning, 0.0, advice, unit="share of uses and splits")]


def leakage_checks() -> list[Check]:
    """Return the checks for the table `across_uses`."""
    expectation = ExpectColumnAToDetermineColumnB(column_A="beginning", column_B="split")
    meaning = "no beginning of a conversation is in two splits, in any use"
    return [Check("split_leakage", expectation, meaning, 0.0, "split by the first message of the user, as prepare_data does")]


def repeat_checks(groups: Iterable[str], config: ValidationConfig) -> list[Check]:
    """Return the checks for the table `prompts_repeated_in_training`, whose groups are named."""
    aside = "take these prompts out of the training data or of the held-out ones, or raise validation.{} knowingly".format
    checks = []
    for group in groups:
        of_group = Column("group") == group
        near = gxe.ExpectColumnValuesToBeNull(column="near", row_condition=of_group, mostly=_mostly(config.max_near_duplicate_fraction))
        inside = gxe.ExpectColumnValuesToBeNull(column="contained", row_condition=of_group, mostly=_mostly(config.max_contained_fraction))
        checks += [
            Check(
                f"near_duplicates.{group}",
                near,
                f"training has no prompt of {group} again, with other marks, a system message or text around it",
                config.max_near_duplicate_fraction,
                aside("max_near_duplicate_fraction"),
                unit="share of prompts",
            ),
            Check(
                f"contained_prompts.{group}",
                inside,
                f"no short prompt of {group} is part of a longer training prompt",
                config.max_contained_fraction,
                aside("max_contained_fraction"),
                unit="share of prompts",
            ),
        ]
    return checks


def _rows(use: str) -> list[Check]:
    required = ["id", "source", "split", *([] if use == "pretrain" else ["conversation"])]
    required += [] if use == "preference" else TEXT_COLUMNS[use]
    labels = {"conversation": "messages"}
    nulls = [
        Check(
            f"nulls.{labels.get(column, column)}",
            gxe.ExpectColumnValuesToNotBeNull(column=column),
            f"every row has {labels.get(column, column)}",
            0.0,
            "fill it or drop the row",
        )
        for column in required
    ]
    unique = gxe.ExpectColumnValuesToBeUnique(column="id")
    splits = gxe.ExpectColumnValuesToBeInSet(column="split", value_set=list(SPLITS))
    return [
        *nulls,
        Check("ids_unique", unique, "no two rows have the same id", 0.0, "make ids of the rows' content and source"),
        Check("split_names", splits, f"split is one of {', '.join(SPLITS)}", 0.0, "correct the column split"),
    ]


def _texts(use: str, config: ValidationConfig, max_length: int) -> list[Check]:
    columns = {text: text for text in TEXT_COLUMNS[use]} | ({} if use == "pretrain" else {"messages": "shortest_message"})
    empty = [
        Check(
            f"empty.{name}",
            gxe.ExpectColumnValuesToMatchRegex(column=column, regex=VISIBLE, mostly=_mostly(config.max_empty_fraction)),
            f"{name} has more than white space and characters without width",
            config.max_empty_fraction,
            "let their source drop them (`drop: [empty]`), or raise validation.max_empty_fraction",
        )
        for name, column in columns.items()
    ]
    fits = gxe.ExpectColumnValuesToBeBetween(column="tokens", max_value=max_length, mostly=_mostly(config.max_too_long_fraction))
    too_long = Check(
        "too_long",
        fits,
        f"the row fits in model.max_length={max_length} tokens",
        config.max_too_long_fraction,
        "later stages drop such rows: raise model.max_length, shorten the texts, let their source drop them (`drop: [too_long]`), or "
        "accept the loss with validation.max_too_long_fraction",
    )
    return [*empty, too_long]


def _conversations(use: str, config: ValidationConfig) -> list[Check]:
    roles = gxe.ExpectColumnValuesToMatchRegex(column="roles", regex=ROLE_ORDER)
    renders = gxe.ExpectColumnValuesToBeNull(column="template_error")
    round_trips = [
        Check(
            f"template_round_trip.{text}",
            gxe.ExpectColumnPairValuesToBeEqual(column_A=text, column_B=f"{text}_decoded", ignore_row_if="either_value_is_missing"),
            f"{text} comes back unchanged from template, encoding and decoding",
            0.0,
            "the tokenizer lacks a character or writes it otherwise (NFKC, lower case), or the template changes it: use others that keep "
            "the text, or rewrite or leave out such rows (characters that are merely composed, Unicode's NFC, pass)",
        )
        for text in TEXT_COLUMNS[use]
    ]
    templated = Check(
        "templated",
        gxe.ExpectColumnValuesToBeNull(column="control_token", mostly=_mostly(config.max_templated_fraction)),
        "no text holds tokens that a chat template writes around turns",
        config.max_templated_fraction,
        "the template would write them twice: give the conversation as messages, or in exactly the layout of a well-known template "
        "(docs/data.md), or raise validation.max_templated_fraction if the texts are about such tokens",
    )
    ended = [
        Check(
            f"end_token.{text}",
            gxe.ExpectColumnValuesToBeNull(column=f"{text}_end_token", mostly=_mostly(config.max_end_token_fraction)),
            f"{text} doesn't end in an end token written as text",
            config.max_end_token_fraction,
            "the policy would learn its characters: set strip_end_tokens: true in their source, or raise validation.max_end_token_fraction",
        )
        for text in TEXT_COLUMNS[use]
    ]
    order = "system at most once and first, then user and assistant in turn, tools behind an assistant's call; user or tool last"
    return [
        Check("role_order", roles, f"roles are in order: {order}", 0.0, "correct the conversation"),
        Check("template_renders", renders, "the chat template accepts the conversation", 0.0, "change the conversation or the template"),
        *round_trips,
        templated,
        *ended,
    ]


def _pairs(config: ValidationConfig, *, any_pairs: bool) -> list[Check]:
    either = gxe.ExpectColumnValuesToNotBeNull(column="chosen", row_condition=Column("rejected").is_null())
    differ = ExpectColumnPairValuesToDiffer(column_A="chosen", column_B="rejected", mostly=_mostly(config.max_identical_fraction))
    once = gxe.ExpectCompoundColumnsToBeUnique(
        column_list=["pair", "preference"], ignore_row_if="any_value_is_missing", mostly=_mostly(config.max_duplicate_fraction)
    )
    agree = ExpectColumnAToDetermineColumnB(column_A="pair", column_B="preference", mostly=_mostly(config.max_contradictory_fraction))
    fix = "let their source drop them (`drop: [{}]`), or raise validation.{}".format
    return [
        Check("nulls.chosen_and_rejected", either, "a row has chosen, rejected or both", 0.0, "fill one of them or drop the row"),
        Check(
            "identical_pairs",
            differ,
            "chosen differs from rejected",
            config.max_identical_fraction,
            fix("identical", "max_identical_fraction"),
        ),
        Check(
            "duplicate_pairs",
            once,
            "no other row is the same pair",
            config.max_duplicate_fraction,
            fix("duplicate", "max_duplicate_fraction"),
        ),
        Check(
            "contradictory_pairs",
            agree,
            "no other row of the conversation prefers the opposite",
            config.max_contradictory_fraction,
            fix("contradictory", "max_contradictory_fraction"),
        ),
        *([_length_bias(config.max_length_bias)] if any_pairs else []),
    ]


def _steps(config: ValidationConfig) -> list[Check]:
    one_each = gxe.ExpectColumnPairValuesToBeEqual(column_A="steps", column_B="labels")
    labels = gxe.ExpectColumnValuesToBeNull(column="bad_label")
    checks = [
        Check("labels_of_steps", one_each, "there is one label for each step", 0.0, "label every step, or correct reward.step_separator"),
        Check("label_values", labels, "labels of steps are 1 (right), 0 (neutral) and -1 (wrong)", 0.0, "run prepare_data again"),
    ]
    for column, what in (("right_steps", "right"), ("wrong_steps", "wrong")):
        some = gxe.ExpectColumnSumToBeBetween(column=column, min_value=1)
        advice = f"add responses with {what} steps: from labels that are all the same nothing is learned"
        checks.append(Check(column, some, f"some steps are {what}", 1, advice, "at least", f"number of {what} steps", float))
    return [*checks, *([_enough_solutions(config.min_pairs)] if config.min_pairs else [])]


def _enough_solutions(least: int) -> Check:
    return Check(
        "min_pairs",
        gxe.ExpectTableRowCountToBeBetween(min_value=least),
        "there are enough responses with labelled steps to learn from",
        least,
        "add such responses, or lower validation.min_pairs",
        "at least",
        "number of responses with labelled steps",
        float,
    )


def _enough_pairs(least: int) -> Check:
    return Check(
        "min_pairs",
        gxe.ExpectColumnSumToBeBetween(column="is_pair", min_value=least),
        "there are enough pairs to learn from",
        least,
        "add preference data, or lower validation.min_pairs (of a round: iterative.min_pairs); single responses with a label are for "
        "alignment.method kto without a reward model",
        "at least",
        "number of pairs",
        float,
    )


def _length_bias(limit: float) -> Check:
    return Check(
        "length_bias",
        gxe.ExpectColumnMeanToBeBetween(column="chosen_is_longer", min_value=0.5 - limit, max_value=0.5 + limit),
        "chosen is the longer response about as often as the shorter one, in tokens",
        limit,
        "training would learn length: balance the pairs, or raise validation.max_length_bias knowingly",
        unit="distance from 0.5 of the share of pairs whose chosen is longer",
        of_observed=lambda share: abs(share - 0.5),
    )


def _unpaired(config: ValidationConfig) -> list[Check]:
    least = config.min_label_balance
    check = Check(
        "label_balance",
        gxe.ExpectColumnMeanToBeBetween(column="is_chosen", min_value=least, max_value=1.0 - least),
        "among unpaired rows neither label is rare",
        least,
        "add rows with the rarer label, or lower validation.min_label_balance",
        "at least",
        "share of the rarer label",
        lambda share: min(share, 1.0 - share),
    )
    return [check]


def _mostly(max_fraction: float) -> float:
    """Return the share of rows that must pass; rounded, so that 1 - 0.02 equals 98 / 100."""
    return round(1.0 - max_fraction, 12)
