"""Prompts drawn by measured success: the posterior by hand, forgetting, what the stream passes over, and what a resume needs."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from clerk_params import CLERK_PARAMS
from gate_pairs import write_slices
from tiny_models import tiny_params

from rlhf_core.config import ConfigError, curve_columns, load_params, parse_params, read_yaml, set_key
from rlhf_core.sampling.prompts import difficulties
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.ahead import Admitted
from rlhf_core.trainers.rl.collect import resample_groups
from rlhf_core.trainers.rl.curriculum import Curriculum, mixed_chance
from rlhf_core.trainers.rl.data import PromptStream
from rlhf_core.trainers.rl.state import Progress
from rlhf_core.types import Prompt, Rollout, Span

PROMPTS = [Prompt(f"p{i}", "even" if i % 2 == 0 else "odd", [], [i], None) for i in range(40)]
RIGHT = {"name": "right", "kind": "regex", "pattern": "x"}


def rl(group_size: int = 4, **changes):
    plain = {"rl.algorithm": "grpo", "rl.grpo.group_size": group_size, "rl.reward.scorers": [RIGHT], "rl.samples_per_step": 4 * group_size}
    plain |= {"rl.minibatch_size": 4 * group_size, "rl.curriculum": {"by": "success", "scorer": "right"}}
    return tiny_params(**plain | changes).rl


def curriculum(config=None, **own) -> Curriculum:
    config = config or rl()
    return Curriculum(config.curriculum.model_copy(update=own), config, seed=5)


def drawn(prompt: Prompt, scores: list[float]) -> tuple[list[Rollout], dict[str, torch.Tensor]]:
    """A group and its scores."""
    return [Rollout(prompt, [Span([1], [0.0], 0)], True, group_id=0) for _ in scores], {"right": torch.tensor(scores)}


def learn(of: Curriculum, scores: dict[int, list[float]], *, step: int = 1) -> dict[str, float]:
    return of.learn([drawn(PROMPTS[i], values) for i, values in scores.items()], step=step)


def test_the_chance_of_a_mixed_group_by_hand():
    # Success ~ Beta(1, 2), two samples: E[s^2] = 1/3 * 2/4 = 1/6, E[(1 - s)^2] = 2/3 * 3/4 = 1/2: 1 - 1/6 - 1/2 = 1/3
    assert mixed_chance(1, 2, 2) == pytest.approx(1 / 3, abs=1e-15)
    # Sampled: a million draws
    generator = torch.Generator().manual_seed(0)
    s = torch.distributions.Beta(2.5, 0.5)
    torch.manual_seed(int(torch.randint(1000, (1,), generator=generator)))
    p = s.sample((1_000_000,)).double()
    assert mixed_chance(2.5, 0.5, 4) == pytest.approx(float((1 - p**4 - (1 - p) ** 4).mean()), abs=2e-3)


def test_always_and_never_solved_prompts_come_rarely_and_mixed_ones_and_unseen_ones_always():
    of = curriculum()
    for step in range(1, 5):
        learn(of, {0: [1, 1, 1, 1], 1: [0, 0, 0, 0], 2: [1, 0, 0, 0], 3: [1, 1, 0, 0]}, step=step)
    shares = [of.share(f"p{i}") for i in range(5)]
    assert shares[2:] == [1.0, 1.0, 1.0]
    assert shares[0] == pytest.approx(shares[1]) and shares[0] < 0.3
    # After one group of four successes: Beta(4.5, 0.5): E[s^4] = 4.5/5 * 5.5/6 * 6.5/7 * 7.5/8, E[(1-s)^4] = .5/5 * 1.5/6 * 2.5/7 * 3.5/8
    once = curriculum()
    learn(once, {0: [1, 1, 1, 1]})
    mixed = 1 - 4.5 * 5.5 * 6.5 * 7.5 / (5 * 6 * 7 * 8) - 0.5 * 1.5 * 2.5 * 3.5 / (5 * 6 * 7 * 8)
    unseen = 1 - 2 * 0.5 * 1.5 * 2.5 * 3.5 / 24
    assert once.share("p0") == pytest.approx(mixed / unseen, abs=1e-12)


def test_a_success_loses_half_its_weight_in_the_half_life():
    of = curriculum(half_life=10.0)
    learn(of, {0: [1, 1, 1, 1]}, step=1)
    learn(of, {1: [1, 0, 1, 0]}, step=11)
    halved = curriculum(half_life=10.0)
    halved.seen, halved.step = {"p0": (2.0, 0.0, 11)}, 11
    assert of.share("p0") == halved.share("p0") > 0
    learn(of, {0: [0, 0, 0, 0]}, step=11)
    assert of.seen["p0"] == (2.0, 4.0, 11)
    learn(of, {1: [1, 0, 1, 0]}, step=1000)
    assert of.share("p0") == 1.0, "all is forgotten"


def test_unscored_responses_say_nothing_and_figures_count_groups():
    of = curriculum()
    found = learn(of, {0: [1, math.nan, 1, math.nan], 1: [math.nan] * 4, 2: [0, 0.4, 0.5, 1]})
    assert of.seen == {"p0": (2.0, 0.0, 1), "p1": (0.0, 0.0, 1), "p2": (2.0, 2.0, 1)}
    assert found["success_fraction"] == pytest.approx(4 / 6) and found["mixed_fraction"] == pytest.approx(1 / 2)
    assert of.share("p1") == 1.0 and found["drawn_share"] == pytest.approx((of.share("p0") + 2) / 3)


def test_before_anything_is_learned_the_stream_is_the_uniform_one():
    plain, with_curriculum = PromptStream(PROMPTS, {}, seed=3), PromptStream(PROMPTS, {}, seed=3, curriculum=curriculum())
    assert with_curriculum.take(7, 33) == plain.take(7, 33) and with_curriculum.after(7, 33) == plain.after(7, 33) == 40
    weights = {"even": 3.0, "odd": 1.0}
    expected = PromptStream(PROMPTS, weights, seed=3).take(0, 12)
    assert len(set(p.id for p in expected)) == 12  # else a repeated one would be passed over
    assert PromptStream(PROMPTS, weights, seed=3, curriculum=curriculum()).take(0, 12) == expected


def solved_but_for_ten(floor: float = 0.05) -> Curriculum:
    of = curriculum(floor=floor)
    for step in range(1, 9):
        learn(of, {i: [1, 1, 1, 1] if i >= 10 else [1, 0, 1, 0] for i in range(40)}, step=step)
    return of


def test_the_stream_passes_over_by_share_and_never_gives_a_prompt_twice_in_a_step():
    stream = PromptStream(PROMPTS, {}, seed=3, curriculum=solved_but_for_ten())
    position, counts = 0, Counter()
    for _ in range(500):
        batch, position = stream.take(position, 4), stream.after(position, 4)
        assert len({p.id for p in batch}) == 4
        counts.update(int(p.id[1:]) for p in batch)
    passes = position / 40
    mixed, solved = sum(counts[i] for i in range(10)) / 10 / passes, sum(counts[i] for i in range(10, 40)) / 30 / passes
    share = stream.curriculum.share("p20")
    assert share < 0.2 and mixed == pytest.approx(1.0, abs=0.06) and solved == pytest.approx(share, abs=0.03)


def test_what_is_drawn_follows_from_seed_position_and_state_alone():
    one, other = (PromptStream(PROMPTS, {}, seed=3, curriculum=solved_but_for_ten()) for _ in range(2))
    other.take(0, 30)
    assert [one.take(s, 5) for s in (90, 17, 90)] == [other.take(s, 5) for s in (90, 17, 90)]
    assert one.take(17, 3) + one.take(one.after(17, 3), 2) == one.take(17, 5) or len({p.id for p in one.take(17, 5)}) == 5
    reseeded = solved_but_for_ten()
    reseeded._seed = 6
    assert PromptStream(PROMPTS, {}, seed=3, curriculum=reseeded).take(0, 40) != one.take(0, 40)


def test_more_prompts_than_there_are_come_again_and_a_floor_of_one_is_uniform():
    few = PromptStream(PROMPTS[:3], {}, seed=1, curriculum=curriculum())
    assert len(few.take(0, 10)) == 10 and few.after(0, 10) == 10
    uniform = PromptStream(PROMPTS, {}, seed=3, curriculum=solved_but_for_ten(floor=1.0))
    assert uniform.take(5, 30) == PromptStream(PROMPTS, {}, seed=3).take(5, 30)


def test_the_state_survives_a_checkpoint_and_draws_the_same(tmp_path: Path):
    of, config = solved_but_for_ten(), rl()
    progress = Progress(8, 77, 0.1, None, curriculum=dict(of.seen))
    normalizer = RewardNormalizer(config.reward)
    progress.write(tmp_path / "driver.json", normalizer)
    read = Progress.read(tmp_path / "driver.json", normalizer)
    assert read == progress
    again = curriculum()
    again.seen, again.step = dict(read.resumed(config).curriculum), read.step
    first, second = (PromptStream(PROMPTS, {}, seed=3, curriculum=c) for c in (of, again))
    assert first.take(77, 40) == second.take(77, 40) and first.after(77, 40) == second.after(77, 40)


def test_success_that_means_something_else_is_measured_anew(caplog: pytest.LogCaptureFixture):
    progress = Progress(8, 77, 0.1, None, curriculum={"p0": (1.0, 2.0, 3)})
    assert progress.resumed(rl(), ["curriculum"]).curriculum == {}
    assert "measured anew" in caplog.text
    assert progress.resumed(rl(**{"rl.curriculum": None})).curriculum == {}


def test_rollouts_ahead_are_admitted_behind_what_was_passed_over():
    stream, config = PromptStream(PROMPTS, {}, seed=3, curriculum=solved_but_for_ten()), rl(**{"rl.rollout.max_lag": 1, "rl.steps": 20})
    admitted = Admitted(0).admit(stream, config, version=0)
    expected, position = [], 0
    for _ in range(2):
        expected.append([p.id for p in stream.take(position, 4)])
        position = stream.after(position, 4)
    assert [[r.prompt.id for r in admitted.rollouts[step][::4]] for step in (0, 1)] == expected
    assert admitted.position == position > 8


def test_rounds_of_dynamic_sampling_go_on_behind_what_was_passed_over():
    stream = PromptStream(PROMPTS, {}, seed=3, curriculum=solved_but_for_ten())
    config = rl(**{"rl.dynamic_sampling.enabled": True})
    asked = []

    def sample_groups(start: int, count: int, turn: int):
        asked.append([p.id for p in stream.take(start, count)])
        rollouts = [Rollout(p, [Span([i], [0.0], 0)], True, group_id=0) for p in stream.take(start, count) for i in range(4)]
        return rollouts, {"right": torch.tensor([1.0, 0.0, 0.0, 0.0] * count if turn else [1.0] * 4 * count)}, {}

    _, position, metrics = resample_groups(sample_groups, config, RewardNormalizer(config.reward), start=0, after=stream.after)
    expected_start = stream.after(0, 4)
    assert asked == [[p.id for p in stream.take(0, 4)], [p.id for p in stream.take(expected_start, 4)]]
    assert position == stream.after(expected_start, 4) and metrics["dropped_groups"] == 4


UNCLEAR = "expected one whose scores say success, got score, with the reward model reward_model; name a scorer that verifies"


@pytest.mark.parametrize(
    ("own", "message"), [({"scorer": "wrong"}, "expected one of ['reward_model', 'score'], got 'wrong'; "), ({}, UNCLEAR)]
)
def test_a_scorer_that_says_no_success_is_refused(own: dict, message: str):
    tree = read_yaml(CLERK_PARAMS)
    set_key(tree, "rl.curriculum", {"by": "success", **own})
    with pytest.raises(ConfigError) as refused:
        parse_params(tree)
    assert f"rl.curriculum.scorer: {message}" in str(refused.value)


def test_a_curriculum_in_a_run_without_a_second_turn_of_a_prompt_is_refused():
    config = load_params(CLERK_PARAMS).rl
    scorers = [*config.reward.scorers, RIGHT | {"weight": 0.0}]
    changed = tiny_params(**{"rl.reward.scorers": scorers, "rl.curriculum": {"by": "success", "scorer": "right"}, "rl.steps": 10}).rl
    prompts = 10 * changed.rollout_batch_size
    with pytest.raises(ValueError, match=rf"rl\.curriculum: expected more draws than the {prompts} training prompts, got {prompts}; "):
        changed.over_prompts(prompts)
    assert changed.over_prompts(prompts - 1).steps == 10


# By column

LEVELS = {prompt.id: float(i * 7 % 4) for i, prompt in enumerate(PROMPTS)}


def test_each_pass_goes_from_the_easiest_to_the_hardest_and_equal_ones_are_shuffled():
    stream = PromptStream(PROMPTS, {}, seed=3, difficulties=LEVELS)
    first, second = ([p.id for p in stream.take(start, 40)] for start in (0, 40))
    for order in (first, second):
        assert sorted(order) == sorted(LEVELS) and [LEVELS[i] for i in order] == sorted(LEVELS.values())
    assert first != second
    assert [p.id for p in stream.take(35, 30)] == [*first[35:], *second[:25]] and stream.after(35, 30) == 65


def test_sources_with_weights_each_go_by_difficulty():
    taken = PromptStream(PROMPTS, {"even": 3.0, "odd": 1.0}, seed=3, difficulties=LEVELS).take(0, 20)
    for source in ("even", "odd"):
        own = [LEVELS[p.id] for p in taken if p.source == source]
        assert own == sorted(own) and own


def by_column(**own):
    return rl(**{"rl.curriculum": {"by": "column", "column": "level", **own}})


def test_difficulties_are_read_from_the_prepared_slices_and_numbers_only(tmp_path: Path):
    assert difficulties(tmp_path, PROMPTS, rl()) is None
    write_slices(tmp_path, {p.id: {"level": str(i / 2), "topic": "x"} for i, p in enumerate(PROMPTS)})
    assert difficulties(tmp_path, PROMPTS, by_column()) == {p.id: i / 2 for i, p in enumerate(PROMPTS)}
    wanted = (
        r"rl\.curriculum\.column: expected a number in 'topic' for every training prompt, got 'x' for 40 of 40, the first from source e"
    )
    with pytest.raises(ValueError, match=wanted):
        difficulties(tmp_path, PROMPTS, by_column(column="topic"))
    write_slices(tmp_path, {p.id: {"level": "nan" if i == 3 else "1"} for i, p in enumerate(PROMPTS) if i})
    with pytest.raises(ValueError, match="got 'none' for 2 of 40"):
        difficulties(tmp_path, PROMPTS, by_column())


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"by": "column"}, "column: expected a name in the slices of the prompts' sources with by column, got null; "),
        ({"by": "success", "scorer": "right", "column": "level"}, "column: expected null with by success, got level; "),
    ],
)
def test_a_column_goes_with_by_column(own: dict, message: str):
    tree = read_yaml(CLERK_PARAMS)
    set_key(tree, "rl.curriculum", own)
    with pytest.raises(ConfigError) as refused:
        parse_params(tree)
    assert f"rl.curriculum.{message}" in str(refused.value)


def test_by_column_measures_nothing_and_one_pass_is_enough():
    config = by_column()
    assert not {"success_fraction", "drawn_share"} & set(curve_columns(config))
    assert config.over_prompts(10_000).steps == config.steps
