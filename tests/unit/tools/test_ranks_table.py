"""docs/tables/ranks.csv has every cell of the matrix, within its limits."""

from __future__ import annotations

import csv
from dataclasses import asdict
from itertools import product

from tools.ranks_matrix import FURTHER, METHODS, TABLE, Setting, within


def test_the_table_has_each_method_on_each_number_of_ranks_with_each_setting_within_the_limits():
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    expected = [
        {"method": method, "ranks": ranks, **asdict(setting)}
        for ranks in (1, 2, 4)
        for setting, method in product([*map(Setting, range(4)), *FURTHER.get(ranks, ())], METHODS)
    ]
    assert [{name: row[name] for name in expected[0]} for row in rows] == [{k: str(v) for k, v in cell.items()} for cell in expected]
    assert [row for row in rows if not within(row)] == []
