"""Two ranks that share each sequence compute the log-probabilities and gradients of one, for every family that isn't refused."""

from __future__ import annotations

from typing import Any

import pytest
from model_families import FAMILIES
from sequence_ranks import run_families
from transformers import LlamaConfig
from whole_matrix import cells, is_chosen

from rlhf_core.engines.deepspeed.sequence_parallel import check_heads

TOLERANCE = 1e-5  # of log-probabilities, absolute; of the gradient, relative to its norm
QUICK = ("llama_tied", "gemma3", "mistral", "mixtral", "gpt2")  # every kind of attention and position
REFUSED = {"gpt_oss": "attention eager", "falcon_h1": "layers of attention"}  # which sdpa doesn't compute; with a state


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return run_families(tmp_path_factory.mktemp("families"), [*(FAMILIES if is_chosen(request) else QUICK), *REFUSED])


@pytest.mark.parametrize("name", cells([name for name in FAMILIES if name not in REFUSED], QUICK))
def test_parts_of_sequences_have_logprobs_and_gradients_of_the_whole(ranks, name: str):
    for rank in ranks:
        assert rank[name].keys() == {"plain", "shared"}
        for difference in rank[name].values():
            assert max(difference) < TOLERANCE


@pytest.mark.parametrize("name", [*REFUSED, "eager"])
def test_a_model_that_differs_in_parts_is_refused_on_every_rank(ranks, name: str):
    for rank in ranks:
        assert rank[name]["refused"].startswith(
            "sequence_parallel: expected a model that computes parts of a sequence as it does the whole"
        )
        assert REFUSED.get(name, "got other numbers from LlamaForCausalLM with attention eager") in rank[name]["refused"]


def test_scores_that_are_all_0_hide_no_difference(ranks):
    for rank in ranks:
        assert "got other numbers from LlamaForSequenceClassification" in rank["eager, new head"]["refused"]


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "message"),
    [(6, 6, 4, "the model's 6 attention heads, got 4"), (12, 3, 2, "the model's 3 heads of keys and values, got 2")],
)
def test_heads_that_ranks_cannot_divide_are_refused(heads: int, key_heads: int, size: int, message: str):
    config = LlamaConfig(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=key_heads)
    with pytest.raises(ValueError, match="sequence_parallel: expected a divisor") as error:
        check_heads(config, size)
    assert message in str(error.value)
    check_heads(config, 3)
    check_heads(config, key_heads)
