"""The arithmetic of the GPU check: what goes through a model, its FLOP, the planner's bytes, and whose memory is whose."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.config import LoraConfig
from rlhf_core.models.batch import Branches, collate_branches, collate_tokens
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.tokenizer import encode_conversation
from rlhf_core.planning.memory import adapter_parameters
from rlhf_core.planning.timing import forward_flops, update_flops
from tools.bench.gpu.flops import PEAKS, Passed, step_flops, utilization
from tools.bench.gpu.memory import ON_GPU, PASSES, planned_parts
from tools.bench.gpu.roles import by_place, storage_bytes
from tools.bench.gpu.shapes import SHAPES, TINY, Lengths, configuration, demonstrations, pairs, tokenizer
from tools.bench.gpu.steps import count
from tools.bench.gpu.training import LORA, adapted_bytes, step_bytes, trained_bytes


def test_plain_sequences_are_counted_without_their_padding():
    # Lengths 3 and 5 in rows of 5: 8 tokens of 10; 9 / 2 + 25 / 2 = 17 visible pairs; after the first 1 and 2 tokens 2 + 3 are predicted.
    batch = collate_tokens([[7, 7, 7], [7, 7, 7, 7, 7]], [1, 2], pad_id=0)
    assert count(batch, pad_id=0) == Passed(tokens=8, padded=10, sequences=8, visible=17.0, predicted=5)


def test_a_shared_prefix_is_computed_once_and_counted_in_each_sequence():
    # A prefix of 4 with branches of 2 and 3: 9 tokens; sequences of 6 and 7. Visible: 16 / 2 + (2 * 4 + 4 / 2) + (3 * 4 + 9 / 2) = 34.5.
    # The second row is one plain sequence of 1 + 2, filled up to 9: 1 / 2 + (2 * 1 + 4 / 2) = 4.5.
    rows = [Branches([7] * 4, [[7] * 2, [7] * 3]), Branches([7], [[7] * 2])]
    batch = collate_branches(rows, pad_id=0, every_token=True)
    assert count(batch, pad_id=0) == Passed(tokens=12, padded=18, sequences=16, visible=39.0, predicted=7)


def test_a_steps_flop_are_the_planners_where_sequences_are_plain_and_all_is_predicted():
    shape, lengths = SHAPES["1.5B"], 64 * [512]
    tokens = sum(lengths)
    passed = Passed(tokens, tokens, tokens, sum(n * n / 2 for n in lengths), tokens)
    expected = update_flops(forward_flops(shape, tokens, 512, head=True), checkpointing=False)
    assert step_flops(shape, passed) == pytest.approx(expected, rel=1e-12)


def test_with_adapters_frozen_matrices_have_no_weight_gradient():
    # Tiny shape: a layer's matrices have 2 * 64 * (64 + 32) + 3 * 64 * 128 = 36,864 elements, two layers 73,728; head 2048 * 64 = 131,072.
    # 10 tokens, 4 predicted, 50 pairs: matrices 2 * 73,728 * 10 + 2 * 131,072 * 4 = 2,523,136; attention 4 * 2 * 64 * 50 = 25,600.
    passed = Passed(10, 10, 10, 50.0, 4)
    assert step_flops(SHAPES[TINY], passed) == 3 * 2_523_136 + 3 * 25_600
    assert step_flops(SHAPES[TINY], passed, adapters=True) == 2 * 2_523_136 + 3 * 25_600


def test_utilization_is_known_for_the_exact_device_only():
    assert utilization(989.4e12, 2.0, "NVIDIA H100 80GB HBM3") == pytest.approx(50.0)
    assert utilization(1e12, 1.0, "NVIDIA H200 NVL") is None and "NVIDIA H200" in PEAKS  # another board, another peak
    assert utilization(1e12, 1.0, "CPU") is None


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_of_the_models_that_transformers_builds(name):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(name, tokenizer()), dtype=torch.bfloat16)
    built = sum(p.numel() for p in model.parameters())
    assert SHAPES[name].parameters == pytest.approx(built, rel=2e-3)  # biases of queries, keys and values are left out
    if name != TINY:
        millions = {"0.5B": 494, "1.5B": 1544}  # as the models' pages have it
        assert built / 1e6 == pytest.approx(millions[name], rel=1e-3)


def test_adapters_have_the_parameters_that_peft_gives_them():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(configuration(TINY, tokenizer()), dtype=torch.float32)
    add_adapters(model, LoraConfig(**LORA), seed=0)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == adapter_parameters(SHAPES[TINY], LORA["rank"])


def test_planned_bytes_of_full_training_and_of_adapters():
    """By hand for the tiny shape and 10 tokens."""
    shape, parameters = SHAPES[TINY], 205_120
    assert shape.parameters == parameters
    # A layer's activations: (8 * 64 + 2 * 64 + 2 * 32 + 4 * 128) * 2 bytes = 2,432 a token; two layers, 10 tokens: 48,640; and in its
    # backward pass 3 * 128 * 2 * 10 = 7,680. The bucket of ZeRO 2: 10^9.
    # Head: states 10 * 64 * 2 and probabilities 10 * 2048 * 4 are kept. Its backward pass has the gradient of 10 * 2048 logits in 4 and 2
    # bytes, and that of its weight, 2048 * 64 * (4 + 2); without the latter the forward pass takes more, 8 bytes a logit.
    trunk, kept, backward, forward = 48_640 + 7_680 + 10**9, 1_280 + 81_920, 122_880 + 786_432, 163_840
    assert trained_bytes(shape, tokens=10) == 16 * parameters + trunk + kept + backward
    assert step_bytes(shape) == 22 * parameters  # gradients flat, and in float32
    assert trained_bytes(shape, tokens=10, scalar=True) == 16 * shape.scalar_parameters + trunk
    plain = adapted_bytes(shape, tokens=10, rank=16, quantized=False)
    assert plain == 2 * parameters + 16 * adapter_parameters(shape, 16) + trunk + kept + forward
    # 73,728 elements of the linear layers at 0.5625 bytes in place of 2.
    assert plain - adapted_bytes(shape, tokens=10, rank=16, quantized=True) == 73_728 * 1.4375


def test_planned_parts_name_what_is_measured():
    names = {f"{role}: {kind}" for role in ("policy", "critic") for kind in ("weights", "gradients", "optimizer")}
    assert set(planned_parts(dict(ON_GPU))) == names | {"reference: weights", "reward: weights", PASSES}


def test_storages_count_once_whatever_shares_them():
    flat = torch.zeros(100)
    seen: set[int] = set()
    assert storage_bytes([flat[:50], flat[50:], torch.zeros(3, dtype=torch.bfloat16)], seen) == 400 + 6
    assert storage_bytes([flat], seen) == 0


def test_live_memory_goes_to_the_innermost_function_outside_of_torch():
    ours = {"filename": "/x/site-packages/transformers/models/qwen2/modeling_qwen2.py", "name": "forward", "line": 1}
    torchs = {"filename": "/x/site-packages/torch/nn/functional.py", "name": "linear", "line": 2}
    blocks = [
        {"state": "active_allocated", "size": 512, "requested_size": 500, "frames": [torchs, ours]},
        {"state": "active_allocated", "size": 1024, "requested_size": 1000, "frames": [ours]},
        {"state": "active_allocated", "size": 2048, "frames": [torchs]},
        {"state": "inactive", "size": 4096, "frames": [ours]},
    ]
    assert by_place({"segments": [{"blocks": blocks}]}) == [
        ("torch itself, no Python caller", 2048.0),
        ("models/qwen2/modeling_qwen2.py, forward", 1500.0),
    ]


def test_rows_have_the_requested_lengths_and_are_deterministic():
    lengths, own = Lengths((20, 40), (60, 80)), tokenizer()
    assert demonstrations(8, lengths) == demonstrations(8, lengths)
    for row in demonstrations(8, lengths):
        ids, start = encode_conversation(own, row["messages"], row["response"])
        assert 20 <= start <= 45 and 60 <= len(ids) - start <= 84  # the template's own tokens, and few words that take two
    rows = pairs(8, lengths)
    assert len({row["messages"][0]["content"] for row in rows}) == 8 and all(row["chosen"] != row["rejected"] for row in rows)
