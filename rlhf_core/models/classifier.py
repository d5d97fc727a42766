"""Sequence classifiers of architectures for which transformers has none: the trunk with a linear `score` layer, as it makes them itself.

What is saved of one is a folder as any other, which this library loads again. transformers alone doesn't know the class that its
`config.json` names.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification


class _Classifier(GenericForSequenceClassification):
    @classmethod
    def from_config(cls, config: PretrainedConfig, *, trust_remote_code: bool = False, **how: Any) -> PreTrainedModel:
        """With random weights, as `AutoModelForSequenceClassification.from_config` makes it; none of its code is remote."""
        return cls._from_config(config, **how)


@cache
def classifier(config: type[PretrainedConfig]) -> type:
    """What to load a sequence classifier with, for a class of configurations: transformers' own choice, or one of ours."""
    language_models = AutoModelForCausalLM._model_mapping
    if config in AutoModelForSequenceClassification._model_mapping or config not in language_models:
        return AutoModelForSequenceClassification
    language_model = language_models[config]
    family = next(kind for kind in reversed(language_model.__mro__) if issubclass(kind, PreTrainedModel) and kind is not PreTrainedModel)
    name = language_model.__name__.removesuffix("ForCausalLM") + "ForSequenceClassification"
    # Of the family's module: in code of others transformers leaves a part uninitialized whose own weights are all loaded, such as none,
    # and with it the buffers of its layers (Falcon-H1's multipliers).
    return type(name, (_Classifier, family), {"__module__": family.__module__, "config_class": config})
