"""params.yaml as frozen typed models: the only reader of that file.

A stage receives its own section and never the whole tree. Unknown keys, wrong types and values that don't fit together
are refused here, before anything expensive starts, with the key's path, what was expected and what to do.
"""

from __future__ import annotations

from rlhf_core.config.alignment import (
    REFERENCE_FREE,
    ConditionalSftConfig,
    DpoConfig,
    IterativeConfig,
    KtoConfig,
    Method,
    PromotionConfig,
    RejectionSamplingConfig,
    SamplingConfig,
)
from rlhf_core.config.base import ConfigError, RolloutBackend, Section, reordering_shown, shown
from rlhf_core.config.conflicts import conflicts
from rlhf_core.config.data import CLERK_JUDGE, ClerkConfig, DataConfig, SamplesConfig, SourceConfig, ValidationConfig
from rlhf_core.config.gate import ExternalPairsConfig, GateConfig, IncumbentConfig, RolledBackConfig
from rlhf_core.config.in_use import keys_in_use, needs_pairs, rows_needed
from rlhf_core.config.model import ArchitectureConfig, LoraConfig, ModelConfig
from rlhf_core.config.nearest import did_you_mean
from rlhf_core.config.overrides import apply_overrides, load_overlaid, read_recipe, set_key, set_keys
from rlhf_core.config.params import Params
from rlhf_core.config.reading import MAX_BYTES, load_params, parse_json, parse_params, parse_yaml, read_yaml, read_yaml_text
from rlhf_core.config.rl import Algorithm, RlConfig, curve_columns
from rlhf_core.config.rl_parts import CorrectionConfig, KlConfig, LimitAction, LimitConfig
from rlhf_core.config.run import CheckpointsConfig, EvaluationConfig, FlowConfig, RegistryConfig, TrackingConfig
from rlhf_core.config.scorers import LABEL_SCORERS, ScoreConfig, ScorerConfig
from rlhf_core.config.stages import INPUT_SECTIONS, ROUND_STAGE_SECTIONS, STAGE_SECTIONS, UNTRACKED_SECTIONS, fill_in, read_stages
from rlhf_core.config.training import SftConfig, TrainingConfig

__all__ = [
    "CLERK_JUDGE",
    "INPUT_SECTIONS",
    "LABEL_SCORERS",
    "MAX_BYTES",
    "REFERENCE_FREE",
    "ROUND_STAGE_SECTIONS",
    "STAGE_SECTIONS",
    "UNTRACKED_SECTIONS",
    "Algorithm",
    "ArchitectureConfig",
    "CheckpointsConfig",
    "ClerkConfig",
    "ConditionalSftConfig",
    "ConfigError",
    "CorrectionConfig",
    "DataConfig",
    "DpoConfig",
    "EvaluationConfig",
    "ExternalPairsConfig",
    "FlowConfig",
    "GateConfig",
    "IncumbentConfig",
    "IterativeConfig",
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
    "RlConfig",
    "RolledBackConfig",
    "RolloutBackend",
    "SamplesConfig",
    "SamplingConfig",
    "ScoreConfig",
    "ScorerConfig",
    "Section",
    "SftConfig",
    "SourceConfig",
    "TrackingConfig",
    "TrainingConfig",
    "ValidationConfig",
    "apply_overrides",
    "conflicts",
    "curve_columns",
    "did_you_mean",
    "fill_in",
    "keys_in_use",
    "load_overlaid",
    "load_params",
    "needs_pairs",
    "parse_json",
    "parse_params",
    "parse_yaml",
    "read_recipe",
    "read_stages",
    "read_yaml",
    "read_yaml_text",
    "reordering_shown",
    "rows_needed",
    "set_key",
    "set_keys",
    "shown",
]
