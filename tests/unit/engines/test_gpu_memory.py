"""The cache of an engine that shares a GPU, by numbers that can be followed."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.engines.memory.gpu_memory import OWN_BYTES, cache_bytes, pass_bytes
from rlhf_core.models.folder import count_parameters


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


# 2 x 1,000 x 64 of embedding and head; a layer's 64 x (64 + 32 + 32 + 64) and 3 x 64 x 256 and norms of 2 x 64; a norm of 64
PARAMETERS = 128_000 + 2 * (12_288 + 49_152 + 128) + 64
PASS = 8192 * (8 * 64 + 3 * 256) * 2 + 16 * 1000 * 4 * 4
SEQUENCE = 2 * 2 * 2 * 2 * 16 * 128 * 5  # keys and values, bytes, layers, heads, width; 5 blocks of 128 tokens hold 512 wherever they begin


def ask(folder, share: int, **changes) -> int:
    how = {"dtype": torch.bfloat16, "max_length": 512, "sequences": 16, "batched_tokens": 8192, "trust_remote_code": False}
    return cache_bytes(str(folder), share=share, **how | changes)


def test_parameters_are_counted_by_the_files_headers(folder):
    assert count_parameters(folder) == PARAMETERS


def test_the_cache_is_what_weights_and_a_pass_leave(folder):
    share = OWN_BYTES + PASS + 2 * PARAMETERS + SEQUENCE + 1000
    assert ask(folder, share) == SEQUENCE + 1000


def test_of_several_gpus_each_has_a_part_of_weights_layers_and_heads(folder):
    inner = 8192 * (8 * 64 + 3 * 256 // 4) * 2 + 16 * 1000 * 4 * 4
    share = OWN_BYTES + inner + 2 * PARAMETERS // 4 + SEQUENCE // 2 + 1000  # two heads of keys and values: each on two GPUs
    assert ask(folder, share, tensor_parallel_size=4) == SEQUENCE // 2 + 1000


def test_the_cache_is_no_larger_than_all_sequences_can_fill(folder):
    assert ask(folder, 8 << 30) == 16 * SEQUENCE


def test_a_share_without_room_for_a_sequence_is_refused_with_what_to_set(folder):
    with pytest.raises(
        ValueError, match=r"gpu_memory_fraction: expected a share of the GPU of at least 1\.5 GiB, .*got 1\.0 GiB; raise it or"
    ):
        ask(folder, 1 << 30)
    needed = OWN_BYTES + PASS + 2 * PARAMETERS + SEQUENCE
    assert ask(folder, needed) == SEQUENCE
    with pytest.raises(ValueError, match="expected a share"):
        ask(folder, needed - 1)


def test_a_larger_vocabulary_takes_more_of_a_pass():
    small, large = (LlamaConfig(vocab_size=v, hidden_size=64, intermediate_size=256, num_attention_heads=4) for v in (1000, 101_000))
    sizes = [pass_bytes(config, element_bytes=2, tokens=8192, sequences=256) for config in (small, large)]
    assert sizes[1] - sizes[0] == 256 * 100_000 * 16
