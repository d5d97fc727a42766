"""Each decision of a proposal: method, SFT, lengths, schedule and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_core.config import Params, parse_params, read_yaml
from rlhf_core.look import fit
from rlhf_core.look.facts import DataFacts, ModelFacts, machine_facts
from rlhf_core.look.fit import device_settings, propose_fit
from rlhf_core.look.lengths import propose_lengths, round_up
from rlhf_core.look.methods import choose
from rlhf_core.look.rows import UseCounts, label_kind
from rlhf_core.look.schedule import every, nice, power_of_two, propose_schedule, supervised_schedule
from rlhf_core.planning.machine import Machine
from rlhf_core.planning.models import of_shape
from rlhf_core.planning.remedy import changed
from rlhf_core.planning.shape import SIZES, ModelShape

GIB = 2**30
SMALL = ModelShape(30, 576, 1536, 9, 3, 64, 49152, tied=True)  # SmolLM2-135M
CHAT = ModelFacts("m", of_shape(SIZES["qwen2.5-1.5b"]), 32768, is_chat=True, has_weights=True)
BASE = replace(CHAT, is_chat=False)


def params_yaml() -> Params:
    return parse_params(read_yaml(Path(__file__).parents[3] / "params.yaml"), complete=False)


def counts(use: str, lengths: dict[int, int], **further) -> UseCounts:
    """Counts of rows by length in tokens, half of them responses."""
    rows = sum(lengths.values())
    found = UseCounts(use, rows=rows, lengths=Counter(lengths), responses=Counter({n // 2: of for n, of in lengths.items()}))
    found.sequences, found.tokens = rows, sum(n * of for n, of in lengths.items())
    for name, value in further.items():
        setattr(found, name, value)
    return found


def facts(*uses: UseCounts, scale: float = 1.0) -> DataFacts:
    return DataFacts({found.use: found for found in uses}, scale, at_least=False)


LENGTHS = {100: 900, 400: 80, 1300: 20}  # 98% have at most 400 tokens
PAIRS = facts(counts("sft", LENGTHS), counts("preference", LENGTHS, found=Counter(pairs=1000)), counts("prompt", {50: 1000}))
MARKED = facts(counts("preference", LENGTHS), counts("prompt", {50: 1000}))
DEMONSTRATIONS = facts(counts("sft", LENGTHS), counts("prompt", {50: 1000}))
SOLVED = facts(counts("sft", LENGTHS), counts("prompt", {50: 1000}, labels=Counter(number=1000)))


def labelled(**labels: int) -> DataFacts:
    return facts(counts("prompt", {50: 1000}, labels=Counter(labels)))


@pytest.mark.parametrize(
    ("data", "method"),
    [(PAIRS, "dpo"), (MARKED, "kto"), (SOLVED, "grpo"), (DEMONSTRATIONS, "sft"), (labelled(), ""), (labelled(text=1000), "")],
)
def test_the_data_decides_the_method(data, method):
    assert choose(data, CHAT).name == method


@pytest.mark.parametrize(
    ("labels", "kind"),
    [({"number": 1000}, "number"), ({"number": 500, "math": 500}, "math"), ({"exact_match": 950, "text": 50}, "exact_match")],
)
def test_the_scorer_is_the_strictest_that_reads_nearly_all_labels(labels, kind):
    assert choose(labelled(**labels), CHAT).settings["rl.reward.scorers"] == [{"name": "correct", "kind": kind}]


def test_labels_have_the_kind_of_scorer_that_can_compare_them():
    kinds = {"72": "number", "$1,234": "number", "1/2": "math", "\\frac{1}{2}": "math", "x = 3": "math", "Paris": "exact_match"}
    assert {label: label_kind(label) for label in kinds} == kinds
    assert label_kind("because it is the capital of France") == "text"


def test_sft_comes_first_for_a_base_model_and_not_for_a_chat_model():
    assert not choose(PAIRS, CHAT).sft and choose(PAIRS, CHAT).uses == ("preference", "prompt")
    assert choose(PAIRS, BASE).sft and choose(PAIRS, BASE).uses == ("sft", "preference", "prompt")
    assert not choose(labelled(number=1000), BASE).sft  # there is nothing to learn it from
    assert choose(DEMONSTRATIONS, CHAT).sft


def test_a_chat_model_too_small_to_solve_tasks_learns_from_solutions_first():
    assert choose(SOLVED, replace(CHAT, sizes=of_shape(SMALL))).sft and not choose(SOLVED, CHAT).sft


def test_max_length_keeps_98_percent_of_the_rows_and_says_what_is_left_out():
    found = propose_lengths(PAIRS, choose(PAIRS, CHAT), 8192, given=None, on_gpu=True)
    assert (found.max_length, found.forced) == (576, False)  # more than 400 tokens: 512 of a response and 32 of a prompt, in 64s
    assert found.left_out == {"preference": 0.02, "prompt": 0.0}
    on_cpu = propose_lengths(PAIRS, choose(PAIRS, CHAT), 8192, given=None, on_gpu=False)
    assert (on_cpu.max_length, on_cpu.new_tokens) == (448, 256)  # 400 tokens, rounded up
    short = facts(counts("preference", {100: 999, 900: 1}, found=Counter(pairs=1000)), counts("prompt", {50: 1000}))
    kept = propose_lengths(short, choose(short, CHAT), 8192, given=None, on_gpu=False)
    assert (kept.max_length, kept.left_out["preference"]) == (960, 0.0)  # none is dropped where the longest has at most 1,024
    long = facts(counts("preference", {330: 1000}, found=Counter(pairs=1000)), counts("prompt", {300: 1000}))
    asked = propose_lengths(long, choose(long, CHAT), 8192, given=None, on_gpu=False)
    assert (asked.max_length, asked.new_tokens) == (576, 256)  # the evaluation's answers fit behind 300 tokens of a prompt


def test_positions_that_leave_out_many_rows_are_said_and_not_hidden():
    short = propose_lengths(PAIRS, choose(PAIRS, CHAT), 256, given=None, on_gpu=True)
    assert (short.max_length, short.worst, short.forced) == (256, (0.1, "preference"), True)
    assert not propose_lengths(PAIRS, choose(PAIRS, CHAT), 512, given=None, on_gpu=True).forced
    chosen = propose_lengths(PAIRS, choose(PAIRS, CHAT), 8192, given=96, on_gpu=True)
    assert (chosen.max_length, chosen.forced) == (96, True)


def test_rl_leaves_room_for_a_response_behind_the_prompt():
    """A chat model's own solutions get 512 tokens; after SFT on solutions of up to 200 tokens, 1.25 times as many, rounded up: 256."""
    own = propose_lengths(SOLVED, choose(SOLVED, CHAT), 32768, given=None, on_gpu=True)
    assert (own.new_tokens, own.max_length) == (512, 576)  # prompts have 50
    taught = propose_lengths(SOLVED, choose(SOLVED, BASE), 32768, given=None, on_gpu=True)
    assert (taught.new_tokens, taught.max_length) == (256, 448)  # demonstrations have up to 400
    assert propose_lengths(SOLVED, choose(SOLVED, CHAT), 512, given=None, on_gpu=True).new_tokens == 256  # half of the positions


def test_round_numbers():
    assert [round_up(n) for n in (1, 64, 65, 1024, 1025, 5000)] == [64, 64, 128, 1024, 1280, 5120]
    assert [nice(n) for n in (0.5, 1, 4.9, 5, 19, 20, 79, 640)] == [1, 1, 4, 5, 10, 20, 70, 600]
    assert [power_of_two(n) for n in (0.3, 1, 31, 32, 100)] == [1, 1, 16, 32, 64]
    assert every(3, 10) == 5 and every(797, 10) == 70


def test_small_data_has_more_epochs_and_smaller_batches():
    """DPO of 1,960 pairs: 2 epochs, and 2 x 1,960 / 100 = 39 rows a step for a hundred steps, 32 as a power of two: 122 steps."""
    small = supervised_schedule("dpo", 1960, 1)
    assert (small["dpo.epochs"], small["dpo.batch_size"], small["dpo.eval_every"], small["dpo.checkpoint_every"]) == (2.0, 32, 10, 20)
    large = supervised_schedule("dpo", 51_000, 1)
    assert (large["dpo.epochs"], large["dpo.batch_size"], large["dpo.steps"]) == (1.0, 128, None)
    assert supervised_schedule("sft", 800, 1)["sft.epochs"] == 3.0
    assert supervised_schedule("dpo", 51_000, 24)["dpo.batch_size"] == 144  # a multiple of the ranks


def test_few_prompts_are_held_out_in_larger_shares_and_rl_judges_by_all_of_them():
    few = facts(*SOLVED.uses.values(), scale=0.4)
    found = propose_schedule(few, choose(few, BASE), machine_facts("h100", 1), params_yaml()).settings
    assert (found["data.validation_fraction"], found["data.test_fraction"], found["evaluation.prompts"]) == (0.1, 0.2, 80)
    assert found["sft.epochs"] == 2.0  # before RL, which needs different samples


def test_rows_are_those_of_the_whole_data():
    data = facts(*PAIRS.uses.values(), scale=60.0)
    rows = propose_schedule(data, choose(data, CHAT), machine_facts("h100", 1), params_yaml()).rows
    assert data.pairs == 60_000 and rows["preference"].train == 58_200  # 1% and 2% are held out, 600 and 1,200 prompts
    assert rows["preference"].heldout == 600 and rows["prompt"].heldout == 1200
    few = propose_schedule(PAIRS, choose(PAIRS, CHAT), machine_facts("h100", 1), params_yaml()).rows
    assert few["preference"].train == 850  # 5% and 10%, as in params.yaml


def fit_of(size: str, count: int, *, length: int = 1280, method: str = "dpo") -> dict:
    changes = {"model.dtype": "bfloat16", "model.max_length": length, "alignment.method": method, "dpo.batch_size": 64}
    found = propose_fit(
        "train_policy", changed(params_yaml(), changes), replace(CHAT, sizes=of_shape(SIZES[size])), machine_facts("h100", count)
    )
    assert not found.lacks
    return found.settings


def test_a_model_that_fits_is_trained_in_full_and_recomputes_nothing():
    one, eight = fit_of("qwen2.5-1.5b", 1), fit_of("qwen2.5-1.5b", 8)
    assert (one["dpo.lora"], one["dpo.gradient_checkpointing"], one["dpo.zero_stage"], one["dpo.ranks"]) == (None, False, 0, 1)
    assert (eight["dpo.lora"], eight["dpo.gradient_checkpointing"], eight["dpo.zero_stage"], eight["dpo.ranks"]) == (None, False, 1, 8)
    assert eight["dpo.microbatch_tokens"] >= one["dpo.microbatch_tokens"] >= 1280


def test_a_model_that_lacks_memory_is_divided_first_and_then_gets_adapters():
    """Full training of 7.6B parameters takes 16 bytes each, 114 GiB, without activations: too much for a GPU of 79 GiB."""
    assert fit_of("qwen2.5-7b", 1)["dpo.lora"]["rank"] == 16
    divided = fit_of("qwen2.5-7b", 8)
    assert divided["dpo.lora"] is None and divided["dpo.zero_stage"] >= 1


def test_rl_shares_each_gpu_between_a_rank_and_an_engine():
    found = fit_of("qwen2.5-1.5b", 8, method="rl")
    assert (found["rl.trainer.ranks"], found["rl.rollout.engines"], found["rl.lora"]) == (8, 8, None)


def test_what_fits_nowhere_is_said():
    shape = replace(CHAT, sizes=of_shape(SIZES["qwen2.5-72b"]))
    params = changed(params_yaml(), {"model.dtype": "bfloat16", "alignment.method": "dpo"})
    assert "GiB" in propose_fit("train_policy", params, shape, machine_facts("rtx4090", 1)).lacks


def test_a_cpu_lowers_the_micro_batch_before_it_recomputes():
    params = changed(params_yaml(), {"model.dtype": "float32", "alignment.method": "dpo", "model.max_length": 640})
    small, cpu = replace(CHAT, sizes=of_shape(SMALL)), machine_facts(None, None)
    settings = [propose_fit("train_policy", params, small, replace(cpu, memory=Machine(host * GIB))).settings for host in (24.0, 7.5)]
    assert [s["dpo.lora"] for s in settings] == [None, None] and not any(s["dpo.gradient_checkpointing"] for s in settings)
    assert settings[0]["dpo.microbatch_tokens"] > settings[1]["dpo.microbatch_tokens"] >= 1024
    starved = propose_fit("train_policy", params, small, replace(cpu, memory=Machine(2.5 * GIB)))
    assert starved.settings["dpo.lora"] is not None and "full training lacks memory" in starved.why


@pytest.mark.parametrize("amx", [False, True])
def test_gpus_and_amx_train_in_bfloat16_and_tiny_models_generate_without_vllm(amx: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fit, "has_amx", lambda: amx)
    assert device_settings(CHAT, machine_facts("h100", 1), rl=True) == {"model.dtype": "bfloat16"}
    tiny = replace(CHAT, sizes=of_shape(ModelShape(5, 64, 172, 8, 4, 8, 512, tied=True)))
    cpu = replace(machine_facts(None, None), memory=Machine(16.0 * GIB))
    for rl, key in ((True, "rl.rollout.backend"), (False, "evaluation.backend")):
        settings = {"model.dtype": "float32", key: "pytorch", "cluster.threads": 0}
        assert device_settings(tiny, cpu, rl=rl) | {"cluster.threads": 0} == settings
    dtype = "bfloat16" if amx else "float32"
    assert device_settings(CHAT, cpu, rl=False) | {"cluster.threads": 0} == {"model.dtype": dtype, "cluster.threads": 0}
