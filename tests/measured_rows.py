"""Prepared rows measured as prepare_data does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pyarrow.parquet as pq

from rlhf_core.data.schema import open_tables, read_batches
from rlhf_core.preparation.validation.measures import MeasuredWriter, measure, measure_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def measured(tables: dict[str, pq.ParquetFile], tokenizer: PreTrainedTokenizerBase) -> Callable[[str], pd.DataFrame]:
    return lambda use: measure_table(use, tables[use], tokenizer)


def write_measures(prepared: Path, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the measures of all tables in the folder `prepared`."""
    for use, table in open_tables(prepared).items():
        with MeasuredWriter(folder, use, tokenizer) as file:
            for batch in read_batches(table):
                file.write_measured(measure(use, batch.to_pylist(), tokenizer))
