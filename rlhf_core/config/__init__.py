"""Reads params.yaml into frozen typed models; nothing else reads that file.

Unknown keys, wrong types and values that don't fit together are refused here, before anything expensive starts, with the key's path, what
was expected and what to do.
"""

from __future__ import annotations

from rlhf_core.config.alignment import (
    REFERENCE_FREE,
    ConditionalSftConfig,
    DpoConfig,
    KtoConfig,
    Method,
    PromotionConfig,
    RejectionSamplingConfig,
    SamplingConfig,
)
from rlhf_core.config.base import ConfigError, RolloutBackend, Section, bytes_shown, keys_of, number_of, reordering_shown, shown
from rlhf_core.config.credentials import credential_in
from rlhf_core.config.curves import DEFAULT_LIMITS, KL_COLUMNS, LimitAction, LimitConfig, curve_columns
from rlhf_core.config.data import CLERK_JUDGE, ClerkConfig, DataConfig, SamplesConfig, SourceConfig, ValidationConfig
from rlhf_core.config.gate import ExternalPairsConfig, GateConfig, IncumbentConfig, RolledBackConfig
from rlhf_core.config.model import (
    ArchitectureConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    SftConfig,
    SharedTrainingConfig,
    TrainingConfig,
    VisionTraining,
)
from rlhf_core.config.overrides import apply_overrides, load_overlaid, overridden, parse_assignment, read_recipe, set_key, with_recipes
from rlhf_core.config.params import Params, needs_pairs, rows_needed, unusual
from rlhf_core.config.placement import RoleGroup, TrainerConfig
from rlhf_core.config.reading import (
    MAX_BYTES,
    load_params,
    parse_json,
    parse_params,
    parse_yaml,
    read_text,
    read_yaml,
    read_yaml_text,
)
from rlhf_core.config.rl import RlConfig
from rlhf_core.config.rl_parts import CorrectionConfig, CurriculumConfig, DistillationConfig, KlConfig, TeacherConfig
from rlhf_core.config.rollout import EnvironmentConfig
from rlhf_core.config.run import CheckpointsConfig, EvaluationConfig, FlowConfig, HarnessConfig, RegistryConfig, TrackingConfig
from rlhf_core.config.scorers import LABEL_SCORERS, ScoreConfig, ScorerConfig, TeacherService
from rlhf_core.config.stages import INPUT_SECTIONS, ROUND_STAGE_SECTIONS, STAGE_SECTIONS, UNTRACKED_SECTIONS, fill_in, read_stages
from rlhf_core.config.usual import with_usual_rates

__all__ = [
    "CLERK_JUDGE",
    "DEFAULT_LIMITS",
    "INPUT_SECTIONS",
    "KL_COLUMNS",
    "LABEL_SCORERS",
    "MAX_BYTES",
    "REFERENCE_FREE",
    "ROUND_STAGE_SECTIONS",
    "STAGE_SECTIONS",
    "UNTRACKED_SECTIONS",
    "ArchitectureConfig",
    "CheckpointsConfig",
    "ClerkConfig",
    "ConditionalSftConfig",
    "ConfigError",
    "CorrectionConfig",
    "CurriculumConfig",
    "DataConfig",
    "DistillationConfig",
    "DpoConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "ExternalPairsConfig",
    "FlowConfig",
    "GateConfig",
    "HarnessConfig",
    "IncumbentConfig",
    "KlConfig",
    "KtoConfig",
    "LimitAction",
    "LimitConfig",
    "LoraConfig",
    "Method",
    "ModelConfig",
    "Params",
    "PromotionConfig",
    "RegistryConfig",
    "RejectionSamplingConfig",
    "RewardConfig",
    "RlConfig",
    "RoleGroup",
    "RolledBackConfig",
    "RolloutBackend",
    "SamplesConfig",
    "SamplingConfig",
    "ScoreConfig",
    "ScorerConfig",
    "Section",
    "SftConfig",
    "SharedTrainingConfig",
    "SourceConfig",
    "TeacherConfig",
    "TeacherService",
    "TrackingConfig",
    "TrainerConfig",
    "TrainingConfig",
    "ValidationConfig",
    "VisionTraining",
    "apply_overrides",
    "bytes_shown",
    "credential_in",
    "curve_columns",
    "fill_in",
    "keys_of",
    "load_overlaid",
    "load_params",
    "needs_pairs",
    "number_of",
    "overridden",
    "parse_assignment",
    "parse_json",
    "parse_params",
    "parse_yaml",
    "read_recipe",
    "read_stages",
    "read_text",
    "read_yaml",
    "read_yaml_text",
    "reordering_shown",
    "rows_needed",
    "set_key",
    "shown",
    "unusual",
    "with_recipes",
    "with_usual_rates",
]
