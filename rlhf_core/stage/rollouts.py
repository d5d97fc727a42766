"""The table of an RL run's saved rollouts: one file a step while the run works, one table at its end (trainers/rl/saved_rollouts.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.files import replacing
from rlhf_core.paths import ROLLOUTS

if TYPE_CHECKING:
    import pyarrow as pa

COMPRESSION = "zstd"


def step_file(folder: Path, step: int) -> Path:
    """Where a job's folder has the rollouts of a step."""
    return folder / f"rollouts-{step:06d}.parquet"


def step_files(folder: Path) -> dict[int, Path]:
    """Return the saved steps of a job's folder, in order."""
    return {int(path.stem.removeprefix("rollouts-")): path for path in sorted(folder.glob("rollouts-*.parquet"))}


def read_rollouts(folder: Path) -> pa.Table:
    """Return all saved rollouts in a job's folder; without any, a table without rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [pq.read_table(path) for path in step_files(folder).values()]
    return pa.concat_tables(tables, promote_options="default") if tables else pa.table({"step": pa.array([], pa.int32())})


def publish_rollouts(folder: Path) -> None:
    """Write the saved rollouts in a job's folder as one table, an output of train_policy with every method."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = read_rollouts(folder)
    with replacing(ROLLOUTS) as aside, pq.ParquetWriter(aside, table.schema, compression=COMPRESSION) as writer:
        for step in table.column("step").unique().to_pylist():  # a reader of one step needs one row group
            writer.write_table(table.filter(pc.equal(table["step"], step)))
