"""A weight transfer that is held in the middle: what an engine's stack tells from outside."""

from __future__ import annotations

import time

import psutil
import pytest
import torch
from torch import nn
from transfers import ReceiverPeer, new_sender, source_of

from rlhf_core.engines.transfer.sender import Target
from tools.faults.transfer import held_transfer, settled_layer, unavailable


@pytest.mark.long
@torch.no_grad()
def test_an_engine_waits_for_the_first_layer_that_was_not_sent():
    if (reason := unavailable()) is not None:
        pytest.skip(f"stacks of other processes: {reason}")
    source = source_of(nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))}))
    peer = ReceiverPeer()
    try:
        engine = psutil.Process(peer.process.pid)
        assert settled_layer(engine) is None
        transfer = new_sender().begin([Target(0, peer, "gloo", 1)], source, version=1, ids=[])
        for number, layer in enumerate(source.layers()):
            assert waits_for(number, engine)
            transfer.send(layer)
            transfer.flush()
        assert transfer.answers()[1] == {} and settled_layer(engine) is None
    finally:
        peer.close()


def waits_for(number: int, engine: psutil.Process) -> bool:
    """Whether an engine waits for this layer after some seconds at most, in which it takes up its call."""
    until = time.monotonic() + 20.0
    while (found := settled_layer(engine)) != number and time.monotonic() < until:
        time.sleep(0.01)
    return found == number


def test_a_job_without_a_transfer_is_no_success():
    held = held_transfer(lambda role: [], ended=lambda: False, deadline=0.1)
    with pytest.raises(RuntimeError, match="expected an engine in the middle of a transfer, got none in 0 transfers"), held:
        pass
