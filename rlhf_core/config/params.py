"""The whole of params.yaml, and what must fit together across its sections."""

from __future__ import annotations

from pydantic import Field, model_validator

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
from rlhf_core.config.scorers import ScorerConfig
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

    @model_validator(mode="after")
    def _responses_fit(self):
        for key, new in (
            ("rl.rollout", self.rl.rollout.max_new_tokens),
            ("rejection_sampling.sampling", self.rejection_sampling.sampling.max_new_tokens),
            ("iterative.sampling", self.iterative.sampling.max_new_tokens),
            ("evaluation", self.evaluation.max_new_tokens),
        ):
            if new >= self.model.max_length:
                raise ValueError(
                    f"{key}.max_new_tokens: expected less than model.max_length={self.model.max_length}, got {new}; "
                    "no token would be left for the prompt"
                )
        return self

    @model_validator(mode="after")
    def _samples_have_a_model(self):
        for source in self.data.sources:
            if source.kind != "samples":
                continue
            if self.model.path is None:
                raise ValueError(
                    f"model.path: expected a pretrained model, which source {source.name} of kind samples draws from, got null; set it"
                )
            new = source.samples.opening_tokens + source.samples.max_new_tokens
            if new >= self.model.max_length:
                raise ValueError(
                    f"data.sources.{source.name}.samples: expected opening_tokens and max_new_tokens of less than "
                    f"model.max_length={self.model.max_length} together, got {new}; no token would be left for the opening"
                )
        return self

    @model_validator(mode="after")
    def _scorers_exist(self):
        self.check_scorers("rl.reward.scorers", self.rl.reward.scorers)
        if self.alignment.method == "rejection_sampling":
            self.check_scorers("rejection_sampling.scorers", self.rejection_sampling.scorers)
        prompted = [s.name for s in self.data.sources if "prompt" in s.uses]
        if unknown := set(self.rl.prompt_weights) - set(prompted):
            raise ValueError(f"rl.prompt_weights: expected sources of prompts, {prompted}, got {sorted(unknown)}; correct the names")
        return self

    @model_validator(mode="after")
    def _own_reward_model_exists(self):
        if self.reward.enabled:
            return self
        if self.alignment.method == "rl" and self.rl.algorithm == "ppo" and self.rl.ppo.starts_from_reward_model:
            raise ValueError(
                f"rl.ppo.critic_init: expected sft while reward.enabled is false, got {self.rl.ppo.critic_init}; there is no reward model "
                "to start from"
            )
        if self.alignment.method == "conditional_sft" and self.conditional_sft.label_by == "scores":
            raise ValueError(
                "conditional_sft.label_by: expected preference while reward.enabled is false, got scores; they are the reward model's"
            )
        return self

    def check_scorers(self, key: str, scorers: list[ScorerConfig]) -> None:
        """What a list of scorers at `key` asks for is there: the chain's own reward model, data that the judge knows.

        For every section that is in use; whoever reads `iterative` asks for that one.

        Raises:
            ValueError: it isn't.
        """
        own = [s.name for s in scorers if s.kind == "reward_model" and s.path is None]
        if own and not self.reward.enabled:
            raise ValueError(f"{key}: expected none of kind reward_model without a path while reward.enabled is false, got {own}")
        for scorer in scorers:
            if scorer.name in own and scorer.members != self.reward.ensemble:
                raise ValueError(
                    f"{key}: expected members={self.reward.ensemble} of {scorer.name}, as reward.ensemble (the gate judges it as a whole), "
                    f"got {scorer.members}; set both to the same"
                )
        others = [s.name for s in self.data.sources if "prompt" in s.uses and s.judge_name is None]
        if others and any(s.kind == "judge" for s in scorers):
            raise ValueError(f"{key}: expected no judge for prompts of sources {others}, which have none; give them a rule as `judge`")
