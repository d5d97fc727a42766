"""The table data/reward_heldout.parquet: the reward model's scores of held-out pairs, written by train_reward, read by gate_reward."""

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


def as_heldout_table(rows: list[tuple]) -> pd.DataFrame:
    """Return the table with these rows, whose values are in the order of HELDOUT_COLUMNS."""
    return pd.DataFrame(rows, columns=list(HELDOUT_COLUMNS)).astype(HELDOUT_COLUMNS)
