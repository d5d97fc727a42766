"""The table data/reward_heldout.parquet: the reward model's scores of held-out rows, written by train_reward, read by gate_reward."""

from __future__ import annotations

import pandas as pd

HELDOUT_COLUMNS = {
    **dict.fromkeys(("id", "source", "split"), "str"),
    **dict.fromkeys(("chosen_score", "rejected_score"), "float64"),
    **dict.fromkeys(("chosen_tokens", "rejected_tokens"), "int64"),
    "prompt": "str",
    "prompt_tokens": "int64",
    **dict.fromkeys(("chosen_std", "rejected_std"), "float64"),
}
# Of a process reward model: a row for each response, with lists of each step's label, score and its std over the members.
STEP_COLUMNS = {**dict.fromkeys(("id", "source", "split", "prompt"), "str"), **dict.fromkeys(("labels", "scores", "stds"), "object")}


def as_heldout_table(rows: list[tuple]) -> pd.DataFrame:
    """Return the table with these rows, whose values are in the order of HELDOUT_COLUMNS."""
    return pd.DataFrame(rows, columns=list(HELDOUT_COLUMNS)).astype(HELDOUT_COLUMNS)


def as_step_table(rows: list[tuple]) -> pd.DataFrame:
    """Return the table of a process reward model with these rows, whose values are in the order of STEP_COLUMNS."""
    return pd.DataFrame(rows, columns=list(STEP_COLUMNS)).astype(STEP_COLUMNS)
