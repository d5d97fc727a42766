"""Measured rows of tables of any size: numbers of all rows, and the texts of those alone in which a check may find a fault.

In place of the other texts are stand-ins that every check takes the same way, so that it counts and shows what it would of all texts.
Which rows repeat others is told by hashes, and then looked at in their texts: a hash that two texts share changes no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.data.measures import ROLE_ORDER, TEXT_COLUMNS, measure, pair_columns, read_texts
from rlhf_core.data.schema import read_batches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANY, OTHER = "a", "b"  # two texts without fault
DISTINCT = ("id", "pair")  # columns of which hardly two rows are alike
STAND_INS = {
    **dict.fromkeys(("text", "response", "response_decoded", "chosen", "chosen_decoded", "preference"), ANY),
    **dict.fromkeys(("rejected", "rejected_decoded"), OTHER),
    **dict.fromkeys(("conversation", "shortest_message"), ANY),
    "roles": "user",
}


def measure_table(use: str, table: pq.ParquetFile, tokenizer: PreTrainedTokenizerBase) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What `measure` makes of the rows of one use, with stand-ins; and of each its conversation (a hash of the canonical one) and split.

    The latter has no rows where the use has no conversations.
    """
    frames, places = [], [pd.DataFrame()]
    for rows in _parts(table):
        measured = measure(use, rows, tokenizer)
        frames.append(_without_sound_texts(use, measured))
        if "canonical_conversation" in measured:
            places.append(pd.DataFrame({"conversation": _hashes(measured["canonical_conversation"]), "split": measured["split"]}))
    frame = pd.DataFrame({name: pd.concat([part.pop(name) for part in frames], ignore_index=True) for name in list(frames[0])})
    if "pair" in frame:
        _show_repeated_pairs(frame, table)
    place = pd.concat(places, ignore_index=True)
    return _narrow(frame), place.astype({"split": "category"}) if len(place) else place


def across_uses(tables: dict[str, pq.ParquetFile], places: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """All conversations of all uses: id (`<use>:<id>`), canonical_conversation, split; as they are where one is in two splits.

    Args:
        places: of the uses, the second of what `measure_table` returns.
    """
    places = {use: of_use for use, of_use in places.items() if len(of_use)}
    if not places:
        return pd.DataFrame(columns=["id", "canonical_conversation", "split"])
    splits = pd.CategoricalDtype(sorted(set().union(*(of_use["split"].cat.categories for of_use in places.values()))))
    rows = pd.concat({use: of_use.astype({"split": splits}) for use, of_use in places.items()})
    distinct = rows.dropna().drop_duplicates()["conversation"]
    leaked = rows["conversation"].isin(distinct[distinct.duplicated()]) & rows["split"].notna()
    texts = [read_texts(use, _rows_at(tables[use], leaked[use])) for use in places]
    found = pd.concat(of_use.assign(id=f"{use}:" + of_use["id"]) for use, of_use in zip(places, texts, strict=True))
    present = {"id": slice(None), "canonical_conversation": rows["conversation"].notna(), "split": rows["split"].notna()}
    columns = {name: _mostly_blank(found[name], leaked.to_numpy(), present[name]) for name in present}
    return pd.DataFrame(columns)


def _mostly_blank(found: pd.Series, where: np.ndarray, present: pd.Series | slice) -> pd.Categorical:
    """A stand-in for each row that is `present`, and at the places of a mask what was found: a byte for each row, as categories."""
    texts = pd.Categorical([ANY, *found])
    codes = np.full(len(where), -1, dtype=np.int8 if len(texts.categories) < 128 else np.int32)
    codes[present] = texts.codes[0]
    codes[where] = texts.codes[1:]
    return pd.Categorical.from_codes(codes, dtype=texts.dtype)


def _narrow(frame: pd.DataFrame) -> pd.DataFrame:
    """With texts as categories, a byte for each row that has a stand-in; the same for all columns, so that their texts can be compared."""
    texts = [name for name in frame.select_dtypes("str") if name not in DISTINCT]
    categories = sorted(set().union(*(frame[name].dropna().unique() for name in texts)))
    kind = pd.CategoricalDtype(pd.Index(categories, dtype="str"))
    columns = {}
    for name in list(frame):  # one after the other: both are in memory only of one
        column = frame.pop(name)
        columns[name] = column.astype(kind) if name in texts else column
    return pd.DataFrame(columns)


def _parts(table: pq.ParquetFile) -> Iterator[list[dict]]:
    """The rows, some at a time; an empty part where there are none."""
    parts = (batch.to_pylist() for batch in read_batches(table))
    yield next(parts, [])
    yield from parts


def _without_sound_texts(use: str, measured: pd.DataFrame) -> pd.DataFrame:
    """In place of a pair its hash, as text."""
    sound = _sound(use, measured)
    columns = {name: measured[name].mask(sound & measured[name].notna(), text) for name, text in STAND_INS.items() if name in measured}
    if "pair" in measured:
        columns["pair"] = _hashes(measured["pair"]).astype("str")
    unused = ["canonical_conversation", *(f"{text}_tokens" for text in TEXT_COLUMNS[use])]
    return measured.drop(columns=unused, errors="ignore").assign(**columns)


def _sound(use: str, measured: pd.DataFrame) -> pd.Series:
    """Rows whose texts every check on rows takes as they are. A missing one is as good as any: it stays missing."""
    sound = pd.Series(True, index=measured.index)
    for text in TEXT_COLUMNS[use]:
        sound &= measured[text].str.strip().ne("")
        if (decoded := f"{text}_decoded") in measured:
            sound &= measured[text].eq(measured[decoded]) | measured[decoded].isna()
    if use != "pretrain":
        sound &= measured["roles"].str.fullmatch(ROLE_ORDER).eq(True) & measured["shortest_message"].str.strip().ne("")
    if use == "preference":
        sound &= measured["chosen"].str.strip().ne(measured["rejected"].str.strip())
    return sound


def _hashes(texts: pd.Series) -> pd.Series:
    """64 bits of each; missing where there is no text."""
    hashes = pd.util.hash_array(texts.fillna("").to_numpy(object), categorize=False)
    return pd.Series(hashes, index=texts.index, dtype="UInt64").mask(texts.isna())


def _show_repeated_pairs(frame: pd.DataFrame, table: pq.ParquetFile) -> None:
    """Pair and preference of the rows whose pair comes again, as they are."""
    repeated = frame["pair"].duplicated(keep=False) & frame["pair"].notna()
    columns = pair_columns(read_texts("preference", _rows_at(table, repeated)))
    for name, column in columns.items():
        frame.loc[repeated, name] = column.to_numpy()


def _rows_at(table: pq.ParquetFile, wanted: pd.Series) -> list[dict]:
    """The rows of a mask, [rows] bool."""
    found: list[dict] = []
    start = 0
    for batch in read_batches(table) if wanted.any() else ():
        found += batch.filter(pa.array(wanted.iloc[start : start + batch.num_rows])).to_pylist()
        start += batch.num_rows
    return found
