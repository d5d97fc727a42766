"""The preflight's prediction beside the peak memory of real training processes; docs/tables/memory.csv has more cases."""

from __future__ import annotations

import pytest

from tools.memory import Case, measure


@pytest.mark.parametrize("case", [Case("sft", "20M", "float32"), Case("sft", "20M", "bfloat16", zero_stage=2)], ids=lambda c: c.dtype)
def test_a_training_process_takes_what_is_predicted(case):
    row = measure(case)
    assert float(row["ratio"]) == pytest.approx(1.0, abs=0.1), row
