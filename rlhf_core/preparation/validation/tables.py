"""Measured rows without the texts that no check needs: what prepare_data writes to data/measured and validate_data reads.

Only the texts in which a check may find a fault are kept. Stand-ins, which every check treats the same way, replace the others: all counts
and messages are those of the full texts. Repeated rows are found by hashes, then compared by their texts: a hash collision changes no
verdict.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.data.control import VISIBLE
from rlhf_core.data.schema import SCHEMAS, read_batches
from rlhf_core.preparation.validation.texts import TEXT_COLUMNS, pair_columns, read_texts, strings
from rlhf_core.preparation.values import ROLE_ORDER

ANY, OTHER = "a", "b"  # two valid texts
DISTINCT = ("id", "pair")  # columns whose values hardly ever repeat
STAND_INS = {
    **dict.fromkeys(("text", "response", "response_decoded", "chosen", "chosen_decoded", "preference"), ANY),
    **dict.fromkeys(("rejected", "rejected_decoded"), OTHER),
    **dict.fromkeys(("conversation", "shortest_message"), ANY),
    "roles": "user",
}


def schema_frame(use: str, found: dict[str, str]) -> pd.DataFrame:
    """Return a row for each column of a use: id (the column and what is wrong with it), and its expected and found type, as text."""
    wanted = {field.name: str(field.type) for field in SCHEMAS[use]}
    nothing = "no such column"
    columns = [(name, wanted.get(name, nothing), found.get(name, nothing)) for name in sorted({*wanted, *found})]
    ids = [name if want == got else f"{name} (expected {want}, got {got})" for name, want, got in columns]
    return pd.DataFrame({"id": strings(ids), "expected": strings(c[1] for c in columns), "found": strings(c[2] for c in columns)})


def read_measured(folder: Path, use: str, table: pq.ParquetFile) -> pd.DataFrame:
    """Return a use's measured rows, as prepare_data wrote them.

    Args:
        table: the prepared rows.
    Raises:
        ValueError: they are of other rows, or missing, or damaged.
    """
    path = folder / f"{use}.parquet"
    try:
        frame = pd.read_parquet(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: expected the measures of the prepared rows, got: {error}; run prepare_data again") from error
    if not frame["id"].equals(strings(table.read(["id"])["id"].to_pylist())):
        raise ValueError(f"{path}: expected the measures of the prepared rows, got those of others; run prepare_data again")
    return with_repeated_pairs(frame, table)


def across_uses(tables: dict[str, pq.ParquetFile], places: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return all conversations of all uses: id (`<use>:<id>`), beginning, split; stand-ins unless a beginning is in two splits.

    Args:
        places: use -> each row's conversation (hash of its beginning) and split, as categories.
    """
    places = {use: of_use for use, of_use in places.items() if len(of_use)}
    if not places:
        return pd.DataFrame(columns=["id", "beginning", "split"])
    splits = pd.CategoricalDtype(sorted(set().union(*(of_use["split"].cat.categories for of_use in places.values()))))
    rows = pd.concat({use: of_use.astype({"split": splits}) for use, of_use in places.items()})
    distinct = rows.dropna().drop_duplicates()["conversation"]
    leaked = rows["conversation"].isin(distinct[distinct.duplicated()]) & rows["split"].notna()
    texts = [read_texts(use, _rows_at(tables[use], leaked[use])) for use in places]
    found = pd.concat(of_use.assign(id=f"{use}:" + of_use["id"]) for use, of_use in zip(places, texts, strict=True))
    present = {"id": slice(None), "beginning": rows["conversation"].notna(), "split": rows["split"].notna()}
    columns = {name: _mostly_blank(found[name], leaked.to_numpy(), present[name]) for name in present}
    return pd.DataFrame(columns)


def _mostly_blank(found: pd.Series, where: np.ndarray, present: pd.Series | slice) -> pd.Categorical:
    """Return categories, one byte a row: the texts `found` at the rows of the mask `where`, a stand-in at other rows that are `present`."""
    texts = pd.Categorical([ANY, *found])
    codes = np.full(len(where), -1, dtype=np.int8 if len(texts.categories) < 128 else np.int32)
    codes[present] = texts.codes[0]
    codes[where] = texts.codes[1:]
    return pd.Categorical.from_codes(codes, dtype=texts.dtype)


def narrow(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table with texts as categories, which take one byte for a stand-in; the same categories in all columns, so that columns
    can be compared.
    """
    texts = [name for name in frame.select_dtypes("str") if name not in DISTINCT]
    categories = sorted(set().union(*(frame[name].dropna().unique() for name in texts)))
    kind = pd.CategoricalDtype(pd.Index(categories, dtype="str"))
    columns = {}
    for name in list(frame):  # one by one: only one column is in memory twice
        column = frame.pop(name)
        columns[name] = column.astype(kind) if name in texts else column
    return pd.DataFrame(columns)


def without_sound_texts(use: str, measured: pd.DataFrame) -> pd.DataFrame:
    """Return rows of `measure` with stand-ins for texts without faults, and hashes in place of pairs and of beginnings."""
    sound = _sound(use, measured)
    columns = {name: measured[name].mask(sound & measured[name].notna(), text) for name, text in STAND_INS.items() if name in measured}
    if "pair" in measured:
        columns["pair"] = _hashes(measured["pair"]).astype("str")
    if "beginning" in measured:
        columns["beginning"] = _hashes(measured["beginning"])
    unused = ["joined", "composed", *(f"{text}_tokens" for text in (*TEXT_COLUMNS[use], "messages"))]
    return measured.drop(columns=unused, errors="ignore").assign(**columns)


def _sound(use: str, measured: pd.DataFrame) -> pd.Series:
    """Return which rows' texts pass every check on single rows. A missing text passes and stays missing."""
    sound = pd.Series(True, index=measured.index)
    for text in TEXT_COLUMNS[use]:
        sound &= measured[text].str.contains(VISIBLE) | measured[text].isna()
        if (decoded := f"{text}_decoded") in measured:
            sound &= measured[text].eq(measured[decoded]) | measured[decoded].isna()
    if use != "pretrain":
        sound &= measured["roles"].str.fullmatch(ROLE_ORDER).eq(True) & measured["shortest_message"].str.strip().ne("")
    if use == "preference":
        sound &= measured["chosen"].str.strip().ne(measured["rejected"].str.strip())
    return sound


def _hashes(texts: pd.Series) -> pd.Series:
    """Return a 64-bit hash of each text; missing where the text is."""
    hashes = pd.util.hash_array(texts.fillna("").to_numpy(object), categorize=False)
    return pd.Series(hashes, index=texts.index, dtype="UInt64").mask(texts.isna())


def with_repeated_pairs(frame: pd.DataFrame, table: pq.ParquetFile) -> pd.DataFrame:
    """Return measured rows with the texts of pair and preference where several rows have the same pair. Changes `frame`.

    Args:
        table: the prepared rows.
    """
    if "pair" in frame:
        repeated = frame["pair"].duplicated(keep=False) & frame["pair"].notna()
        for name, column in pair_columns(read_texts("preference", _rows_at(table, repeated))).items():
            frame.loc[repeated, name] = column.to_numpy()
    return frame


def _rows_at(table: pq.ParquetFile, wanted: pd.Series) -> list[dict]:
    """Return the rows where a mask, [rows] bool, is true."""
    found: list[dict] = []
    start = 0
    for batch in read_batches(table) if wanted.any() else ():
        found += batch.filter(pa.array(wanted.iloc[start : start + batch.num_rows])).to_pylist()
        start += batch.num_rows
    return found
