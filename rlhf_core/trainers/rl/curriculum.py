"""Which prompts are drawn, by the policy's measured success on each: those it always or never solves rarely (rl.curriculum)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf_core.config import CurriculumConfig, RlConfig
from rlhf_core.sampling.rewards import weighted_score
from rlhf_core.types import Prompt, RewardComponents, Rollout

PRIOR = 0.5  # of successes and of failures: Jeffreys' prior of a share
Seen = dict[str, tuple[float, float, int]]  # prompt's id -> successes and failures, as they counted after this step


class Curriculum:
    """The chance that a prompt's next group of samples has a success and a failure, and so teaches something.

    A prompt's success has a Beta posterior, whose counts lose half their weight in `half_life` steps: what is long ago says little of
    today's policy. A prompt that comes up is drawn with its chance over that of one that was never seen (at most 1, at least `floor`), by a
    random number of its position. Between two calls of `learn` nothing changes, and the choice depends on the seed, the position and what
    was learned only.

    seen: the state, which is in checkpoints.
    """

    def __init__(self, config: CurriculumConfig, rl: RlConfig, *, seed: int):
        self._config, self._seed, self._size = config, seed, rl.group_size
        self._group_size = max(2, rl.group_size)  # of a single sample: the chance that two differ
        self._scorers = rl.reward.scorers
        self._unseen = mixed_chance(PRIOR, PRIOR, self._group_size)
        self.seen: Seen = {}
        self.step = 0  # steps done

    def draws(self, prompt: Prompt, position: int) -> bool:
        """Return whether the prompt at this position of the stream is drawn, and not passed over."""
        return prompt.id not in self.seen or np.random.default_rng([self._seed, 3, position]).random() < self.share(prompt.id)

    def share(self, prompt_id: str) -> float:
        """Return the share of its turns in which the prompt is drawn."""
        chance = mixed_chance(*(PRIOR + count for count in self._counts(prompt_id)), self._group_size)
        return min(1.0, max(self._config.floor, chance / self._unseen))

    def learn(self, rounds: Sequence[tuple[Sequence[Rollout], RewardComponents]], *, step: int) -> dict[str, float]:
        """Count the successes of a step's samples, of all rounds of generation. Responses without a score say nothing.

        Args:
            step: steps done with this one.
        Returns:
            success_fraction: successes among the scored responses. mixed_fraction: groups with a success and a failure.
            drawn_share: mean of `share` over all prompts seen so far.
        """
        self.step, groups = step, [group for rollouts, components in rounds for group in self._groups(rollouts, components)]
        for prompt_id, solved in groups:
            successes, failures = self._counts(prompt_id)
            self.seen[prompt_id] = (successes + sum(solved), failures + len(solved) - sum(solved), step)
        known = [solved for _, solved in groups if solved]
        return {
            "success_fraction": float(np.mean([x for solved in known for x in solved])),
            "mixed_fraction": float(np.mean([0 < sum(solved) < len(solved) for solved in known])),
            "drawn_share": float(np.mean([self.share(prompt_id) for prompt_id in self.seen])),
        }

    def _groups(self, rollouts: Sequence[Rollout], components: RewardComponents) -> list[tuple[str, list[bool]]]:
        """Return each group's prompt, and of its scored responses whether they succeed."""
        scores = weighted_score(components, self._scorers) if self._config.scorer == "score" else components[self._config.scorer]
        pairs = list(zip(rollouts, scores.tolist(), strict=True))
        groups = [pairs[i : i + self._size] for i in range(0, len(pairs), self._size)]
        return [(g[0][0].prompt.id, [score >= self._config.threshold for _, score in g if np.isfinite(score)]) for g in groups]

    def _counts(self, prompt_id: str) -> tuple[float, float]:
        """Successes and failures as they count now."""
        successes, failures, step = self.seen.get(prompt_id, (0.0, 0.0, self.step))
        weight = 0.5 ** ((self.step - step) / self._config.half_life)
        return weight * successes, weight * failures


def mixed_chance(successes: float, failures: float, group_size: int) -> float:
    """Return the chance that a group of samples isn't all successes or all failures, with success ~ Beta(successes, failures).

    1 - E[s^n] - E[(1 - s)^n],   E[s^n] = prod over i < n of (a + i) / (a + b + i)
    """
    i, total = np.arange(group_size), successes + failures
    return float(1.0 - np.prod((successes + i) / (total + i)) - np.prod((failures + i) / (total + i)))
