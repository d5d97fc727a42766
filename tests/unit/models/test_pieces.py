"""How many rows are multiplied together."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.models.head import CACHED_BYTES, pieces


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(96, 96), (390, 96), (512, 96), (390, 256), (200_000, 1)], ids=str)
@pytest.mark.parametrize("count", [1, 2], ids="{} threads".format)
def test_products_of_a_piece_fit_the_cache_of_each_thread_and_nearly_fill_it(threads, shape: tuple[int, int], count: int):
    threads(count)
    found = pieces(5000, torch.empty(shape), at_most=1)
    assert [i for piece in found for i in range(5000)[piece]] == list(range(5000))
    rows = found[0].stop // count
    assert rows == 32 or 0.9 * CACHED_BYTES < rows * shape[0] * 4 <= CACHED_BYTES


@pytest.mark.parametrize(
    "weight", [torch.empty(1376, 256), torch.empty(64, 32, device="meta")], ids=["larger than the cache", "not on a CPU"]
)
def test_other_devices_use_all_rows_or_the_requested_number(weight: torch.Tensor):
    assert pieces(5000, weight) == [slice(0, 5000)]
    assert pieces(5000, weight, at_most=4096) == [slice(0, 4096), slice(4096, 8192)]


@pytest.mark.parametrize("width", [8, 5000])
def test_of_nothing_there_are_none(width: int):
    assert pieces(0, torch.empty(width, 256)) == []
