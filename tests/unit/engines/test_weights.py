"""Weights on their way between processes."""

from __future__ import annotations

import pickle
import warnings

import torch

from rlhf_core.engines.transfer.weights import pack, unpack


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(3, 5, generator=generator),
        "turned": torch.randn(4, 6, generator=generator).T,
        "half": torch.randn(2, 3, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
    }


def test_they_arrive_as_they_were():
    shipped = pickle.loads(pickle.dumps(pack(weights()), protocol=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrived = unpack(shipped)
    assert arrived.keys() == weights().keys()
    for name, tensor in weights().items():
        assert arrived[name].dtype == tensor.dtype and arrived[name].shape == tensor.shape
        assert torch.equal(arrived[name], tensor)


def test_their_bytes_stay_out_of_the_pickle():
    """Which is what lets Ray put them into shared memory at once."""
    buffers: list[pickle.PickleBuffer] = []
    state = {"matrix": torch.randn(300, 300)}
    stream = pickle.dumps(pack(state), protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 1000
    assert [len(b.raw()) for b in buffers] == [300 * 300 * 4]


def test_packing_copies_nothing_on_the_cpu():
    matrix = torch.zeros(4, 4)
    packed = pack({"matrix": matrix})
    matrix[0, 0] = 1.0
    assert unpack(packed)["matrix"][0, 0] == 1.0


def test_a_read_only_array_is_no_matter():
    """Ray's shared memory can't be written to."""
    packed = pack(weights())
    for tensor in packed.values():
        tensor.data.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(unpack(packed)["matrix"], weights()["matrix"])
