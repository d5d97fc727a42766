from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.algorithms.advantages import overlong_penalty


def test_overlong_penalty_by_hand():
    # Limit 20, buffer 4: it starts after 16 tokens. 17: 1/4, 18: 2/4, 20: all, of a penalty of 2.
    lengths = torch.tensor([0, 1, 15, 16, 17, 18, 20])
    penalty = overlong_penalty(lengths, max_new_tokens=20, buffer=4, penalty=2.0)
    torch.testing.assert_close(penalty, torch.tensor([0, 0, 0, 0, 0.5, 1.0, 2.0]), rtol=0, atol=0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(limit=st.integers(1, 200), share=st.floats(0, 1), penalty=st.floats(0.1, 5), length=st.integers(0, 199))
def test_overlong_penalty_never_falls_with_length_and_stays_within_its_bounds(limit, share, penalty, length):
    buffer = max(1, round(share * limit))
    here, next_one, full = overlong_penalty(
        torch.tensor([length, length + 1, limit]).double(), max_new_tokens=limit, buffer=buffer, penalty=penalty
    ).tolist()
    assert 0 <= here <= next_one <= penalty
    assert (here == 0) == (length <= limit - buffer)
    assert full == pytest.approx(penalty, abs=1e-12)
