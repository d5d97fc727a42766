"""Rollouts ahead of the trainer: who is admitted when, spans of several policies, and runs that are killed."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_here import Dies, EnginesHere, Killed, differences, rl_job_here, running, same, whole
from tiny_models import rl_job, tiny_params
from whole_matrix import cells

from rlhf_core.engines.rollout.requests import Request, Sample, SamplingSettings
from rlhf_core.process import StepAbandoned
from rlhf_core.trainers.rl.ahead import SAVED, Admitted, RolloutsAhead, begun, extended, request
from rlhf_core.trainers.rl.credit import correct
from rlhf_core.trainers.rl.data import PromptStream, collate, pack
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.trainers.rl.rollouts import RolloutEngines
from rlhf_core.trainers.rl.turns import GpuTimeSharing
from rlhf_core.types import Prompt, Rollout, Span

PROMPT = Prompt("p", "made", [], [5, 6], None)
# Stop strings make responses of 1 to 24 tokens of the tiny model.
MIXED = {"rl.rollout.max_lag": 2, "rl.rollout.stop": ["o", "s", "i"]}


# Spans


def test_tokens_of_one_version_in_a_row_are_one_span():
    first = extended(begun([PROMPT], 1)[0], Sample([7, 8], [-0.1, -0.2], False, 3))
    again = extended(extended(first, Sample([9], [-0.3], False, 3)), Sample([], [], False, 4))
    assert again.spans == [Span([7, 8, 9], [-0.1, -0.2, -0.3], 3)] and not again.finished
    last = extended(again, Sample([1], [-0.4], True, 5))
    assert last.spans == [*again.spans, Span([1], [-0.4], 5)] and last.finished and last.num_sampled == 4


def test_a_rollout_is_continued_after_its_tokens_with_another_seed_each_time():
    rollout = Rollout(PROMPT, [Span([7, 8], [0.0, 0.0], 1), Span([9], [0.0], 2)], False, 0)
    asked = request(rollout, 17, 21)
    assert (asked.prompt_ids, asked.given, asked.ids, asked.limit) == ([5, 6], [7, 8, 9], [5, 6, 7, 8, 9], 21)
    seeds = {request(replace(rollout, spans=rollout.spans[:count]), seed, 21).seed for count in range(3) for seed in (17, 18)}
    assert len(seeds) == 6 and asked == request(rollout, 17, 21)


def test_each_token_is_corrected_by_the_probability_under_which_it_was_sampled():
    rl = tiny_params(**{"rl.algorithm": "rloo", "rl.rollout.max_lag": 2, "rl.correction.kind": "tis", "rl.correction.high": 1.5}).rl
    rollout = Rollout(PROMPT, [Span([7, 8], [-1.0, -2.5], 3), Span([9], [-2.0], 4)], True, 0)
    outputs = {"old_logprobs": torch.tensor([-1.5, -1.5, -1.8])}
    batch = collate([rollout], pack([rollout]), {}, outputs, None, old_logprobs_source="recompute")
    assert batch.policy_versions.tolist() == [[3, 3, 4]]
    weights, _ = correct(batch.sampler_logprobs, batch.rollout_logprobs, batch.response_mask, rl)
    assert weights[0].tolist() == pytest.approx([math.exp(-0.5), 1.5, math.exp(0.2)])  # of e^-0.5, e^1 and e^0.2 at most 1.5


# Admission


class Scripted:
    """An engine with `room` places, whose responses have the lengths that their prompts' last id says, and log-probabilities that say how
    many tokens were before.
    """

    def __init__(self, room: int):
        self.room, self.version, self.seeds, self.steps = room, 0, [], 0

    def advance(
        self, requests: list[Request], sampling: SamplingSettings, due: int, *, stop_ids: tuple[int, ...], least: int
    ) -> list[Sample]:
        ids: list[list[int]] = [[] for _ in requests]

        def grows(i: int) -> bool:
            return len(requests[i].given) + len(ids[i]) < requests[i].prompt_ids[-1] and len(ids[i]) < requests[i].limit

        steps = 0
        while any(map(grows, range(due))) or (steps < least and any(map(grows, range(len(requests))))):
            for i in [i for i in range(len(requests)) if grows(i)][: self.room]:
                ids[i].append(100)
            steps += 1
        self.steps = steps
        self.seeds += [r.seed for r, new in zip(requests, ids, strict=True) if new and r.limit > 4]
        found = []
        for r, new in zip(requests, ids, strict=True):
            finished = len(r.given) + len(new) == r.prompt_ids[-1]
            found.append(Sample(new, [-float(len(r.given) + k) for k in range(len(new))], finished, self.version))
        return found


def ahead_of(job: RlJob, actors: list[Scripted]) -> RolloutsAhead:
    turns = GpuTimeSharing(None, None, on=False, deadline=1.0)
    how = {"stop_ids": (1,), "replacements": Replacements(0), "transfer": None, "turns": turns, "renew": None, "vocabulary": 300}
    return RolloutsAhead(job, RolloutEngines(job, EnginesHere(actors), check_trainers=lambda: None, **how))


def job_of(folders: tuple[Path, Path], *, max_lag: int, prompts: int, group_size: int, steps: int, **changes) -> RlJob:
    job = rl_job(*folders, **{"rl.algorithm": "reinforce_pp", "rl.rollout.max_lag": max_lag, "rl.rollout.max_new_tokens": 40, **changes})
    rl = job.rl.model_copy(update={"samples_per_step": prompts * group_size, "steps": steps})
    return job.model_copy(update={"rl": rl.model_copy(update={"reinforce_pp": rl.own.model_copy(update={"group_size": group_size})})})


@settings(max_examples=60, deadline=None)
@given(
    max_lag=st.integers(1, 4),
    prompts=st.integers(1, 4),
    group_size=st.integers(1, 2),
    steps=st.integers(2, 9),
    engines=st.integers(1, 3),
    room=st.integers(1, 12),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_no_token_is_older_than_the_lag_and_each_group_is_trained_on_once(
    model_folders: tuple[Path, Path], max_lag, prompts, group_size, steps, engines, room, lengths
):
    job = job_of(model_folders, max_lag=max_lag, prompts=prompts, group_size=group_size, steps=steps)
    actors = [Scripted(room) for _ in range(engines)]
    made = ahead_of(job, actors)
    stream = PromptStream([Prompt(f"p{i}", "made", [], [5, n], None) for i, n in enumerate(lengths)], {}, seed=3)
    trained = []
    for step in range(steps):
        rollouts = made.draw(stream, 0, prompts, step=step)
        assert [r.prompt.id for r in rollouts[::group_size]] == [p.id for p in stream.take(step * prompts, prompts)]
        assert all(r.finished and r.num_sampled == r.prompt.prompt_ids[-1] for r in rollouts)
        assert all(r.rollout_logprobs == [-float(k) for k in range(r.num_sampled)] for r in rollouts)  # no token twice, none left out
        lags = [step - span.version for r in rollouts for span in r.spans]
        assert min(lags) >= 0 and max(lags) <= max_lag
        versions = [[span.version for span in r.spans] for r in rollouts]
        assert all(v == sorted(set(v)) for v in versions)
        trained += rollouts
        made.begin(step=step)
        made.short_rollouts()
        made.end()
        made._engines.recovery.version += 1
        for actor in actors:
            actor.version += 1
    assert max(Counter(seed for actor in actors for seed in actor.seeds).values()) == 1
    assert made._admitted.rollouts.keys() <= {steps - 1}  # nothing is left in flight


def test_a_step_is_admitted_when_its_lag_allows(model_folders: tuple[Path, Path]):
    rl = job_of(model_folders, max_lag=2, prompts=3, group_size=2, steps=6).rl
    stream = PromptStream([replace(PROMPT, id=f"p{i}") for i in range(5)], {}, seed=0)
    state = Admitted(4).admit(stream, rl, version=1)
    assert list(state.rollouts) == [1, 2, 3] and state.position == 13  # three steps of three prompts from position 4 on
    assert [r.prompt.id for r in state.rollouts[2][::2]] == [p.id for p in stream.take(7, 3)]
    assert state.admit(stream, rl, version=1) == state
    later = state.admit(stream, rl, version=3)
    assert list(later.rollouts) == [3, 4, 5] and later.rollouts[3] == state.rollouts[3]  # steps are counted from 0: 5 is the last
    assert list(later.admit(stream, rl, version=5).rollouts) == [5]


@pytest.mark.parametrize(("room", "expected"), [(64, [506, 266, 189, 157]), (32, [622, 347, 313, 312])])
def test_an_update_waits_for_a_part_of_the_longest_response(model_folders: tuple[Path, Path], room: int, expected: list[int]):
    """Steps of the engine between two updates: the figures of docs/rl.md. With 32 places 312 steps sample the mean batch."""
    lengths = np.random.default_rng(0).lognormal(np.log(120), 0.8, 4000).round().clip(8, 512).astype(int)
    stream = PromptStream([Prompt(f"p{i}", "made", [], [5, int(n)], None) for i, n in enumerate(lengths)], {}, seed=3)
    found = []
    for max_lag in (1, 2, 3, 4):
        changes = {"model.max_length": 600, "rl.rollout.max_new_tokens": 512}
        job = job_of(model_folders, max_lag=max_lag, prompts=64, group_size=1, steps=50, **changes)
        made, steps = ahead_of(job, [actor := Scripted(room)]), []
        for step in range(49):
            made.draw(stream, 0, 64, step=step)
            made.begin(step=step)
            steps.append(actor.steps)
            made.short_rollouts()
            made.end()
            made._engines.recovery.version = actor.version = step + 1
        found.append(round(float(np.mean(steps[5 : 49 - max_lag]))))
    assert found == expected


def test_a_response_past_its_last_tokens_is_cut_off(model_folders: tuple[Path, Path]):
    changes = {"rl.rollout.last_tokens": 3}
    made = ahead_of(job_of(model_folders, max_lag=2, prompts=1, group_size=1, steps=9, **changes), actors := [Scripted(8)])
    # Step 2 begins under version 0 beside step 0, whose response has 4 tokens.
    lengths = [4, 2, 40, 5, 30, 6, 6, 6, 6]
    stream = PromptStream([Prompt(f"p{i}", "made", [], [5, n], None) for i, n in enumerate(lengths)], {}, seed=3)
    found = {}
    for step in range(6):
        (rollout,) = made.draw(stream, 0, 1, step=step)
        found[rollout.prompt.prompt_ids[-1]] = (rollout.num_sampled, rollout.finished)
        made.begin(step=step)
        made.short_rollouts()
        made.end()
        made._engines.recovery.version = actors[0].version = step + 1
    assert all(finished == (sampled == length) for length, (sampled, finished) in found.items())
    cut = {length: sampled for length, (sampled, finished) in found.items() if not finished}
    assert cut and all(3 <= sampled < length for length, sampled in cut.items())


# State in a checkpoint


def drawn_ahead(job: RlJob) -> RolloutsAhead:
    made = ahead_of(job, [Scripted(8)])
    stream = PromptStream(
        [Prompt(f"p{i}", "made", [{"role": "user", "content": "Sort."}], [5, 9 + 7 * i], None) for i in range(5)], {}, seed=0
    )
    made.draw(stream, 0, 2, step=0)
    made.begin(step=0)
    made.end()
    return made


def test_it_comes_back_from_a_checkpoint_as_it_was(model_folders: tuple[Path, Path], tmp_path: Path):
    job = job_of(model_folders, max_lag=2, prompts=2, group_size=2, steps=6)
    (before := drawn_ahead(job)).save(tmp_path, step=1)
    (after := ahead_of(job, [Scripted(8)])).load(tmp_path)
    kept = {step: rollouts for step, rollouts in before._admitted.rollouts.items() if step >= 1}
    assert after._admitted == replace(before._admitted, rollouts=kept) and len(kept) == 2
    assert any(r.finished for r in kept[1])


@pytest.mark.parametrize(
    ("max_lag", "changes", "taken"),
    [
        (3, {}, True),
        (1, {}, False),
        (0, {}, False),
        (2, {"rl.rollout.temperature": 0.5}, False),
        (2, {"rl.rollout.max_new_tokens": 50}, False),
    ],
)
def test_a_run_that_samples_in_another_way_begins_anew(model_folders: tuple[Path, Path], tmp_path: Path, max_lag, changes, taken):
    drawn_ahead(job_of(model_folders, max_lag=2, prompts=2, group_size=2, steps=6)).save(tmp_path, step=1)
    other = ahead_of(job_of(model_folders, max_lag=max_lag, prompts=2, group_size=2, steps=6, **changes), [Scripted(8)])
    other.load(tmp_path)
    assert (other._admitted is not None) == taken
    (after := ahead_of(job_of(model_folders, max_lag=2, prompts=3, group_size=2, steps=6), [Scripted(8)])).load(tmp_path)
    assert after._admitted is None and json.loads((tmp_path / SAVED).read_text())["position"] == 6


def test_prompts_that_have_changed_are_drawn_anew(model_folders: tuple[Path, Path], tmp_path: Path):
    job = rl_job_here(model_folders, tmp_path, **MIXED)
    with running(job) as run:
        run.step()
        run.save()
    with running(job) as run:
        ahead, found = run.workers.ahead, run.workers.store.of_step(1)
        for begun_anew, taken in (({"best"}, True), ({"ahead"}, False)):
            ahead._admitted = None
            run.workers._load_ranks(replace(found, begun_anew=frozenset(begun_anew)))
            assert (ahead._admitted is not None) == taken
        run.step()
        assert run.rows[-1]["policy_lag_max"] == 0 and run.results[-1].collected.rollouts[0].prompt == run.run.prompts.take(4, 1)[0]


# Whole runs with the tiny model


@pytest.mark.parametrize("max_lag", cells([1, 2, 3], [3]))
def test_every_span_is_of_the_policy_of_its_version(model_folders: tuple[Path, Path], tmp_path: Path, max_lag: int):
    run = whole(rl_job_here(model_folders, tmp_path, **MIXED | {"rl.rollout.max_lag": max_lag}), 8)
    rollouts = [r for result in run.results for r in result.collected.rollouts]
    assert len({r.num_sampled for r in rollouts}) > 10 and max(differences(run, rollouts)) < 1e-4
    moved = [[r.spans[0].version for r in rollouts], run.rank.weights[0], run.rank.weights[8]]
    assert max(float((moved[1][name] - moved[2][name]).abs().max()) for name in moved[1]) > 0.01  # the comparison can tell
    assert [row["policy_lag_max"] for row in run.rows] == [min(step, max_lag) for step in range(8)]
    assert all(row["cut_off"] == 0 and row["logprob_difference"] < 1e-4 for row in run.rows)
    assert max(len(r.spans) for r in rollouts) == max_lag
    prompts = [r.prompt.id for r in rollouts[::2]]
    assert prompts == [p.id for p in run.run.prompts.take(0, 32)]  # each once, in the stream's order


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"rl.rollout.engines": 2, "rl.correction.kind": "tis", "rl.rollout.min_new_tokens": 3},
        pytest.param({"rl.algorithm": "ppo", "rl.rollout.max_lag": 1}, marks=pytest.mark.long),
        pytest.param({"rl.algorithm": "remax", "rl.rollout.max_concurrent_sequences": 5}, marks=pytest.mark.long),
        {"rl.algorithm": "grpo", "rl.grpo.group_size": 2, "rl.dynamic_sampling.enabled": True, "rl.reward.clip": 0.1},
    ],
    ids=["plain", "two engines", "ppo", "remax", "dynamic sampling"],
)
def test_a_killed_run_ends_with_the_same_bits(model_folders: tuple[Path, Path], tmp_path: Path, changes: dict):
    changes = MIXED | changes
    undisturbed = whole(rl_job_here(model_folders, tmp_path / "whole", **changes), 8)
    job = rl_job_here(model_folders, tmp_path / "killed", **changes)
    done = 0
    for method, call in (("advance", 6), ("receive_weights", 3), ("advance", 4), ("advance", 3)):
        with pytest.raises(Killed), running(job, wrap=lambda actor, m=method, c=call: Dies(actor, m, c)) as run:
            for _ in range(8):
                run.step()
                run.save()
        assert run.progress.step > done or method == "advance"
        done = max(done, run.progress.step)
    with running(job) as run:
        assert 1 <= run.progress.step == done < 8
        while run.progress.step < 8:
            run.step()
        assert same(undisturbed, run, since=done)


def test_a_step_that_is_abandoned_changes_nothing(model_folders: tuple[Path, Path], tmp_path: Path):
    """With dynamic sampling a step has drawn further groups when SIGTERM comes."""
    changes = {**MIXED, "rl.algorithm": "grpo", "rl.grpo.group_size": 2, "rl.dynamic_sampling.enabled": True, "rl.reward.clip": 0.1}
    undisturbed = whole(rl_job_here(model_folders, tmp_path / "whole", **changes), 8)
    assert any(row["dynamic_rounds"] > 1 for row in undisturbed.rows[3:])
    job = rl_job_here(model_folders, tmp_path / "stopped", **changes)
    with running(job) as run:
        for _ in range(3):
            run.step()
        score = run.workers.score

        def told_to_stop(*args):
            if run.workers.ahead._drawn.position > run.workers.ahead._admitted.position + 4:  # beside the groups of the admitted step
                raise StepAbandoned
            return score(*args)

        run.workers.score = told_to_stop
        with pytest.raises(StepAbandoned):
            while True:
                run.step()
        abandoned = run.progress.step
        run.save()
    with running(job) as run:
        assert run.progress.step == abandoned < 8
        while run.progress.step < 8:
            run.step()
        assert same(undisturbed, run, since=abandoned)
