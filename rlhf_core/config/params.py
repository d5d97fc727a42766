"""The whole of params.yaml, and what must fit together across its sections."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rlhf_core.config.alignment import (
    AlignmentConfig,
    ConditionalSftConfig,
    DpoConfig,
    IterativeConfig,
    KtoConfig,
    RejectionSamplingConfig,
)
from rlhf_core.config.base import Section
from rlhf_core.config.data import DataConfig, ValidationConfig
from rlhf_core.config.gate import GateConfig
from rlhf_core.config.model import ModelConfig
from rlhf_core.config.rl import RlConfig
from rlhf_core.config.run import (
    CheckpointsConfig,
    ClusterConfig,
    EvaluationConfig,
    FlowConfig,
    RegistryConfig,
    ReportConfig,
    TrackingConfig,
)
from rlhf_core.config.scorers import ScorerConfig, weight_conflicts
from rlhf_core.config.training import RewardConfig, SftConfig


class Params(Section):
    """The whole of params.yaml."""

    seed: int = Field(ge=0, lt=2**32)  # what vLLM and numpy take
    model: ModelConfig
    data: DataConfig
    validation: ValidationConfig
    sft: SftConfig
    reward: RewardConfig
    gate: GateConfig
    alignment: AlignmentConfig
    rl: RlConfig
    dpo: DpoConfig
    kto: KtoConfig
    rejection_sampling: RejectionSamplingConfig
    conditional_sft: ConditionalSftConfig
    iterative: IterativeConfig
    evaluation: EvaluationConfig
    report: ReportConfig
    checkpoints: CheckpointsConfig
    cluster: ClusterConfig
    tracking: TrackingConfig
    flow: FlowConfig
    promotion: RegistryConfig

    @property
    def evaluation_scorers(self) -> list[ScorerConfig]:
        """What scores the answers of the evaluation: rl.reward.scorers that there are. Without a reward model its scorers are left out."""
        return [s for s in self.rl.reward.scorers if self.reward.enabled or not s.is_own_reward_model]

    @property
    def method_scorers(self) -> tuple[str, list[ScorerConfig]] | None:
        """Key and list of the scorers that the way to the policy learns from; None: it learns from data."""
        lists = {
            "rl": ("rl.reward.scorers", self.rl.reward.scorers),
            "rejection_sampling": ("rejection_sampling.scorers", self.rejection_sampling.scorers),
        }
        return lists.get(self.alignment.method)

    def conflicts(self) -> Iterator[str]:
        """Across sections. Those about what isn't read don't count: `rlhf_core.config.in_use` says what is."""
        yield from self._length_conflicts()
        yield from self._sample_conflicts()
        if self.alignment.method == "rl":
            yield from (f"rl.reward.{conflict}" for conflict in weight_conflicts(self.rl.reward.scorers))
        lists = [("rl.reward.scorers", self.evaluation_scorers), ("iterative.scorers", self.iterative.scorers)]
        for key, scorers in dict([*lists, *filter(None, [self.method_scorers])]).items():
            yield from self._scorer_conflicts(key, scorers)
        prompted = [s.name for s in self.data.sources if "prompt" in s.uses]
        if unknown := set(self.rl.prompt_weights) - set(prompted):
            yield f"rl.prompt_weights: expected sources of prompts, {prompted}, got {sorted(unknown)}; correct the names"
        if not self.reward.enabled:
            yield from self._reward_model_conflicts()

    def _length_conflicts(self) -> Iterator[str]:
        for key, new in (
            ("rl.rollout", self.rl.rollout.max_new_tokens),
            ("rejection_sampling.sampling", self.rejection_sampling.sampling.max_new_tokens),
            ("iterative.sampling", self.iterative.sampling.max_new_tokens),
            ("evaluation", self.evaluation.max_new_tokens),
        ):
            if new >= self.model.max_length:
                yield (
                    f"{key}.max_new_tokens: expected less than model.max_length={self.model.max_length}, got {new}; "
                    "no token would be left for the prompt"
                )

    def _sample_conflicts(self) -> Iterator[str]:
        sources = [source for source in self.data.sources if source.kind == "samples"]
        if sources and self.model.path is None:
            yield (f"model.path: expected a pretrained model, which source {sources[0].name} of kind samples draws from, got null; set it")
        for source in sources:
            new = 0 if source.samples is None else source.samples.opening_tokens + source.samples.max_new_tokens
            if new >= self.model.max_length:
                yield (
                    f"data.sources.{source.name}.samples: expected opening_tokens and max_new_tokens of less than "
                    f"model.max_length={self.model.max_length} together, got {new}; no token would be left for the opening"
                )

    def _reward_model_conflicts(self) -> Iterator[str]:
        """Of what starts from the reward model that isn't there."""
        if self.rl.algorithm == "ppo" and self.rl.ppo.starts_from_reward_model:
            yield (
                f"rl.ppo.critic_init: expected sft while reward.enabled is false, got {self.rl.ppo.critic_init}; there is no reward model "
                "to start from: set it to sft"
            )
        if self.conditional_sft.label_by == "scores":
            yield (
                "conditional_sft.label_by: expected preference while reward.enabled is false, got scores; they are the reward model's: set "
                "it to preference, levels to 2 and wanted to 1"
            )

    def _scorer_conflicts(self, key: str, scorers: list[ScorerConfig]) -> Iterator[str]:
        """What a list of scorers at `key` lacks: the chain's own reward model, data that the judge knows."""
        own = [s for s in scorers if s.is_own_reward_model]
        if own and not self.reward.enabled:
            yield (
                f"{key}: expected none of kind reward_model without a path while reward.enabled is false, got {[s.name for s in own]}; put "
                "other scorers in their place, or set reward.enabled to true"
            )
        for scorer in own:
            if scorer.members != self.reward.ensemble:
                yield (
                    f"{key}: expected members={self.reward.ensemble} of {scorer.name}, as reward.ensemble (the gate judges it as a whole), "
                    f"got {scorer.members}; set both to the same"
                )
        others = [s.name for s in self.data.sources if "prompt" in s.uses and s.judge_name is None]
        if others and any(s.kind == "judge" for s in scorers):
            yield f"{key}: expected no judge for prompts of sources {others}, which have none; give them a rule as `judge`"
