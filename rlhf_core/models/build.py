"""Makes and loads models: causal language models, and the same trunk with a scalar head."""

from __future__ import annotations

import importlib.util
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    FineGrainedFP8Config,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from rlhf_core.config import ModelConfig, VisionTraining, number_of, shown
from rlhf_core.models.attention import fix_frequencies
from rlhf_core.models.folder import check_model_folder, locate_model, quantization, refusals
from rlhf_core.models.small_vision import new_seeing_model
from rlhf_core.models.tokenizer import stop_ids, turn_end, write_ends
from rlhf_core.models.vision import freeze_vision, save_tokenizer
from rlhf_core.models.weights import FolderWeights

log = logging.getLogger(__name__)
Module = TypeVar("Module", bound=torch.nn.Module)
FLASH = "flash_attention_2"
_HEADS = ("score.weight", "classifier.weight")  # of the heads that a sequence classifier may have
# Weights that models are published with and that a causal language model's forward pass doesn't read: frequencies, masks and positions that
# older versions of transformers saved, heads of further tokens for speculative decoding, the value head of a PPO trainer, and what reads
# pictures and sound.
_UNREAD = re.compile(
    r"(\binv_freq|position_ids|\b(attn|attention)\.((masked_)?bias|causal_mask))$"
    r"|^v_head\.|(^|\.)(mtp\w*|vision_model|vision_tower|visual|multi_modal_projector|audio_tower)\."
)
_UNREAD_BY_CLASSIFIERS = re.compile(rf"{_UNREAD.pattern}|^(lm_head|embed_out|output_projection)\.")


def new_language_model(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PreTrainedModel:
    """Return the model that SFT starts from.

    Its weights come from `config.path` in `config.dtype`, or are random ones of `config.architecture` in float32, which the engine casts
    for training.
    """
    if config.path is not None:
        load_options = {"trust_remote_code": config.trust_remote_code, "training_dtype": config.dtype, "vision": config.vision}
        return load_language_model(locate_model(config.path, config.revision), max_length=config.max_length, **load_options)
    shape = config.architecture
    torch.manual_seed(seed)
    language = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=config.max_length,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(language) if config.vision is None else new_seeing_model(language, shape, tokenizer)


def load_language_model(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    training_dtype: str = "float32",
    max_length: int | None = None,
    vision: VisionTraining | None = None,
) -> PreTrainedModel:
    """Load a causal language model, or one that sees, from a Hugging Face name or folder (safetensors only).

    Args:
        training_dtype: dtype of the weights, whatever dtype the files have. Buffers keep transformers' dtype.
        max_length: tokens of the chain's longest sequence, if the chain starts from this model: see `fix_frequencies`.
        vision: of a model that sees, whose vision tower is frozen or trained.
    Raises:
        ValueError: the folder holds no such model, or an incomplete one.
    """
    load_options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "training_dtype": training_dtype}
    if max_length is not None:
        load_options["config"] = _config(path, trust_remote_code=trust_remote_code)
        fix_frequencies(load_options["config"], max_length)
    model = _load(language_class(vision), path, **load_options)
    if vision == "frozen":
        freeze_vision(model)
    return model


def language_class(vision: VisionTraining | None) -> type:
    """Return the class that loads language models that see, or others."""
    return AutoModelForCausalLM if vision is None else AutoModelForImageTextToText


def check_weights(path: str | Path, *, trust_remote_code: bool = False, scalar: bool = False, vision: VisionTraining | None = None) -> None:
    """Check by the names and shapes of a folder's weights that `load_language_model`, or `load_scalar_model`, will load it.

    Raises:
        ValueError: it won't.
    """
    load_options = {"trust_remote_code": trust_remote_code, "training_dtype": "float32", "device_map": {"": "meta"}}
    if scalar:
        _load_scalar(path, unread=_UNREAD_BY_CLASSIFIERS, **_labels(path), **load_options)
    else:
        _load(language_class(vision), path, **load_options)


def _load(
    kind: type,
    path: str | Path,
    *,
    trust_remote_code: bool,
    training_dtype: str,
    new: tuple[str, ...] = (),
    unread: re.Pattern = _UNREAD,
    **load_options: Any,
):
    """Load a model of a class from a folder, and check that its weights are all there and all read.

    Args:
        new: names of weights that the folder may lack and that the caller initializes.
        unread: names of weights that the folder may have though the model doesn't read them.
    """
    check_model_folder(path)
    if kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        _check_sight(path, sees=kind is AutoModelForImageTextToText)
    with refusals(path):
        load_options |= _dequantizing(path)
        model, info = kind.from_pretrained(
            path,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            dtype=getattr(torch, training_dtype),  # float32 first would take twice the memory
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **load_options,
        )
    if "quantization_config" in load_options:
        del model._weight_conversions  # by which saving would quantize again
    _check_loaded(path, model, info, new=new, unread=unread)
    if model.can_generate():
        _make_savable(path, model)
    return _with_flash_attention(model) if flash_attention_wanted(training_dtype) else model


def _check_sight(path: str | Path, *, sees: bool) -> None:
    """Check that a model of transformers that sees is loaded as one, and no other."""
    with refusals(path):
        model_type = PretrainedConfig.get_config_dict(path)[0].get("model_type")
    can_see = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if sees and not can_see:
        raise ValueError(f"model.vision: expected null with {path}, whose model_type {model_type} doesn't see, got a value; set it to null")
    if not sees and can_see and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"model.vision: expected frozen or trained with {path}, which is loaded with its vision tower alone ({model_type}), got null; "
            "set it, and see docs/vision.md for what works"
        )


def _dequantizing(path: str | Path) -> dict[str, Any]:
    """Return arguments for from_pretrained that load a folder without the quantization of its files."""
    method = quantization(PretrainedConfig.get_config_dict(path)[0])
    config = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}.get(method)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _check_loaded(path: str | Path, model: PreTrainedModel, info: dict[str, Any], *, new: tuple[str, ...], unread: re.Pattern) -> None:
    """Check that the folder's weights are those that its config.json describes.

    Raises:
        ValueError: the folder's weights aren't those that its config.json describes: others, more or fewer.
    """
    if other := sorted(info["mismatched_keys"]):
        name, found, expected = other[0]
        raise ValueError(f"model {path}: expected {name} of shape {tuple(expected)}, as config.json says, got {tuple(found)}; restore it")
    unexpected = sorted(name for name in info["unexpected_keys"] if not unread.search(name))
    also = f", and {', '.join(unexpected[:3])}, which config.json doesn't describe" if unexpected else ""
    if missing := sorted(set(info["missing_keys"]) - set(new)):
        got = f"none for {', '.join(missing[:3])}{also}"
        raise ValueError(f"model {path}: expected all of its weights, got {got}; restore it, or choose another")
    if unexpected:
        raise ValueError(
            f"model {path}: expected only weights that {type(model).__name__} reads as config.json describes it, got "
            f"{number_of(len(unexpected), 'other')}, such as {', '.join(unexpected[:3])}, without which it is another model; correct "
            "config.json (layers, biases, experts), or remove these weights"
        )
    for tied, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        found = FolderWeights(path).read([tied, source]) if Path(path).is_dir() else {}
        if tied not in model.all_tied_weights_keys or (len(found) == 2 and not torch.equal(*found.values())):
            raise ValueError(
                f"model {path}: expected {tied} to equal {source}, since config.json ties them (tie_word_embeddings), got two matrices; "
                f"set tie_word_embeddings to false if the model was trained with both, or else remove {tied}"
            )


def _make_savable(path: str | Path, model: PreTrainedModel) -> None:
    """Remove everything but the token ids from a generation configuration that transformers reads but refuses to write.

    An example is a temperature without sampling. Samplers here have settings of their own.
    """
    given = model.generation_config
    try:
        given.validate(strict=True)
    except ValueError as error:
        log.info("model %s: only token ids of its generation_config.json are saved: %s", path, shown(" ".join(str(error).split())))
        ids = {name: getattr(given, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**{name: None if isinstance(i, int) and i < 0 else i for name, i in ids.items()})


def new_scalar_model(
    language_model_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    trust_remote_code: bool,
    training_dtype: str = "float32",
    vision: VisionTraining | None = None,
) -> PreTrainedModel:
    """Return a language model's trunk with a fresh scalar head; the head starts at zero, so every score starts at 0.

    Transformers reads a classifier's score before padding at the end. If the same token pads and ends a conversation, the model is saved
    without an id for padding. Then the score is read at the end token, which distinguishes a complete response from a truncated one.

    Args:
        vision: of a model that sees, whose vision tower is frozen or trained.
    Raises:
        ValueError: the architecture's score head has more layers than a linear one; a language model has no weights for them.
    """
    _check_linear_score(language_model_path, trust_remote_code=trust_remote_code)
    every_name = re.compile("")  # the language model was checked as it was loaded
    load_options = {"trust_remote_code": trust_remote_code, "training_dtype": training_dtype, "num_labels": 1}
    model = _load_scalar(language_model_path, new=_HEADS, unread=every_name, **load_options)
    end = turn_end(tokenizer)
    pads_otherwise = tokenizer.pad_token_id not in (*end.trained, *end.after)[-1:]
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.pad_token_id = tokenizer.pad_token_id if pads_otherwise else None
    torch.nn.init.zeros_(scalar_head(model).weight)
    if vision == "frozen":
        freeze_vision(model)
    return model


def _check_linear_score(path: Path, *, trust_remote_code: bool) -> None:
    check_model_folder(path)
    with refusals(path), torch.device("meta"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, num_labels=1)
        model = classifier(type(config)).from_config(config, trust_remote_code=trust_remote_code)
    new = {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
    if more := sorted(new - {*_HEADS}):
        raise ValueError(
            f"reward model: expected an architecture with a linear score layer, got {type(model).__name__} with {', '.join(more)}; set "
            "reward.enabled to false and take a reward model from elsewhere (docs/scorers.md)"
        )


def load_scalar_model(path: str | Path, *, trust_remote_code: bool = False, training_dtype: str = "float32") -> PreTrainedModel:
    """Return a reward model or critic in training_dtype from a Hugging Face sequence classifier (safetensors only).

    It has one label if the folder names none.

    Raises:
        ValueError: the folder holds no such model, or an incomplete one.
    """
    load_options = {"trust_remote_code": trust_remote_code, "training_dtype": training_dtype, "unread": _UNREAD_BY_CLASSIFIERS}
    return _load_scalar(path, **_labels(path), **load_options)


def _labels(path: str | Path) -> dict[str, int]:
    """Return arguments for from_pretrained of a sequence classifier whose folder may not say how many labels it has."""
    check_model_folder(path)
    with refusals(path):
        settings, _ = PretrainedConfig.get_config_dict(path)
    return {} if {"num_labels", "id2label"} & settings.keys() else {"num_labels": 1}


def _load_scalar(path: str | Path, *, trust_remote_code: bool, **load_options: Any) -> PreTrainedModel:
    kind = classifier(type(_config(path, trust_remote_code=trust_remote_code)))
    return _load(kind, path, trust_remote_code=trust_remote_code, **load_options)


def _config(path: str | Path, *, trust_remote_code: bool) -> PretrainedConfig:
    check_model_folder(path)
    with refusals(path):
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def vocabulary_size(path: str | Path, *, trust_remote_code: bool) -> int:
    """Return the number of rows in a model's embedding; its tokenizer may have fewer or more tokens."""
    return _config(path, trust_remote_code=trust_remote_code).get_text_config().vocab_size


def flash_attention_wanted(training_dtype: str) -> bool:
    """Return whether there is a GPU, flash-attn is installed and training runs in bfloat16."""
    return training_dtype == "bfloat16" and torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None


def _with_flash_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with FlashAttention, or unchanged if the architecture doesn't support it, like GPT-OSS with its attention sinks."""
    kinds = model._compatible_flash_implementations
    try:
        if not model._supports_flash_attn or (kinds and FLASH not in kinds):
            raise ValueError("the architecture doesn't work with it")
        model.set_attn_implementation(FLASH)
    except (ValueError, ImportError) as error:
        implementation = model.config._attn_implementation
        log.info("model: %s computes attention by %s, not by FlashAttention: %s", type(model).__name__, implementation, error)
    return model


def trunk(model: PreTrainedModel) -> torch.nn.Module:
    """Return the model without its head: token ids in, hidden states out."""
    inner = model.base_model
    # Llama 4's base_model_prefix names a module that its text model lacks.
    return getattr(model, "model", model) if inner is model else inner


def scalar_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Return the linear layer from hidden state to score.

    Raises:
        ValueError: the architecture's classifier has no plain `score` layer.
    """
    head = find_scalar_head(model)
    if head is None:
        raise ValueError(
            f"reward model: expected an architecture with a linear score layer, got {type(model).__name__}; use a decoder-only model"
        )
    return head


def find_scalar_head(model: PreTrainedModel) -> torch.nn.Linear | None:
    """Return the last layer of a sequence classifier, if it is a linear layer of its own; None: it is something else."""
    parts = dict(model.named_children())
    heads = (parts.get(name.partition(".")[0]) for name in _HEADS)
    return next((head for head in heads if isinstance(head, torch.nn.Linear)), None)


def save_model(model: PreTrainedModel, state_dict: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face folder: config, safetensors, tokenizer with its chat template; for a language model also its stop tokens.

    A tied head isn't written. transformers finds ties by the tensors' memory, and `state_dict` may hold copies.
    """
    if model.config.model_type == "deepseek_v3":  # vLLM tells its router from DeepSeek-V2's by these keys
        model.config.update({"topk_method": "noaux_tc", "scoring_func": "sigmoid"})
    own = {name: tensor for name, tensor in state_dict.items() if name not in model.all_tied_weights_keys}
    model.save_pretrained(folder, state_dict=own, safe_serialization=True)
    save_tokenizer(tokenizer, folder)
    if model.can_generate():
        write_ends(folder, stop_ids(tokenizer, folder))


def kv_cache_bytes(config: PretrainedConfig, *, element_bytes: int) -> int:
    """Return the number of bytes for a token's keys and values in all layers."""
    shape = config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return 2 * element_bytes * shape.num_hidden_layers * heads * width


def disable_dropout(module: torch.nn.Module) -> None:
    """Put a module into evaluation mode for training without dropout; adapters keep their own rate (lora.dropout). Gradients flow.

    The model then computes in training what it computes as a reference or in a rollout engine. Rates aren't set to 0, since they come from
    attributes (Llama, GPT-NeoX), uncalled modules (GPT-2) or the configuration (Falcon), and router noise and layer drop have other names.
    All of them depend on training mode. The saved configuration doesn't change.
    """
    module.eval()
    for name, part in module.named_modules():
        if name.endswith(".lora_dropout"):
            part.train()


class _Classifier(GenericForSequenceClassification):
    @classmethod
    def from_config(cls, config: PretrainedConfig, *, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
        """Return a model with random weights, like `AutoModelForSequenceClassification.from_config`; no remote code is involved."""
        return cls._from_config(config, **options)


@cache
def classifier(config: type[PretrainedConfig]) -> type:
    """Return the class that loads a sequence classifier of a configuration's class.

    transformers has none for some architectures. For these it is made here as transformers makes its own, the trunk with a linear `score`
    layer. This library loads the saved folder again; transformers alone doesn't know the class that its `config.json` names.
    """
    mappings = [kind._model_mapping for kind in (AutoModelForCausalLM, AutoModelForImageTextToText)]
    language_models = next((mapping for mapping in mappings if config in mapping), None)
    if config in AutoModelForSequenceClassification._model_mapping or language_models is None:
        return AutoModelForSequenceClassification
    language_model = language_models[config]
    family = next(kind for kind in reversed(language_model.__mro__) if issubclass(kind, PreTrainedModel) and kind is not PreTrainedModel)
    name = language_model.__name__.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration") + "ForSequenceClassification"
    renamed = get_checkpoint_conversion_mapping(language_model.__name__)
    if renamed is not None and get_checkpoint_conversion_mapping(name) is None:  # names of weights in files, by the class's name
        register_checkpoint_conversion_mapping(name, renamed)
    # __module__ is the family's: transformers skips the initialization of buffers (Falcon-H1's multipliers) in modules that it takes for
    # remote code.
    return type(name, (_Classifier, family), {"__module__": family.__module__, "config_class": config})
