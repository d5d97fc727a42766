"""Loads language models that the chain takes as they are: not rounded, adapters merged, and compared with the chain's own model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from rlhf_core.config import ModelConfig, number_of, shown
from rlhf_core.models.attention import fix_frequencies
from rlhf_core.models.build import check_weights, load_language_model, vocabulary_size
from rlhf_core.models.folder import (
    ADAPTERS,
    base_of_adapters,
    check_model_folder,
    locate_model,
    quantization,
    read_headers,
    read_settings,
    refusals,
)
from rlhf_core.models.rows import check_rows
from rlhf_core.models.tokenizer import Unrenderable, encode_prompt, load_tokenizer
from rlhf_core.models.weights import frozen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "external.path"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_TORCH = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Settings that change no output of a frozen model, or that are compared elsewhere.
_NO_OUTPUT = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "quantization_config", "id2label", "label2id", "output_router_logits"),
)
_USER, _ANSWER = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}
_SYSTEM = {"role": "system", "content": "Be brief."}
_CONVERSATIONS = ([_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _USER])


def load_as_given(path: str | Path, config: ModelConfig) -> PreTrainedModel:
    """Return the language model in a folder with exactly the weights of its files, in their own dtype; quantized ones in `config.dtype`."""
    load_options = {"trust_remote_code": config.trust_remote_code, "max_length": config.max_length, "vision": config.vision}
    return load_language_model(path, training_dtype=files_dtype(path, default=config.dtype), **load_options)


def files_dtype(path: str | Path, *, default: str) -> str:
    """Return the narrowest dtype that represents all of a folder's weights; `default` if the files are quantized or have no floats."""
    found = {_TORCH[tensor["dtype"]] for tensor in read_headers(path) if tensor["dtype"] in _TORCH}
    if not found or quantization(read_settings(Path(path), "config.json")) is not None:
        return default
    if found == {"bfloat16", "float16"}:
        return "float32"
    return next(name for name in _TORCH.values() if name in found)


def load_policy_from_elsewhere(path: str, config: ModelConfig) -> PreTrainedModel:
    """Return the policy at `external.path`: a whole model as it is, or LoRA adapters merged into the base model that they name.

    Raises:
        ValueError: there is no such model, its adapters are of another kind or incomplete, or their base model isn't there.
    """
    folder = Path(locate_model(path, key=KEY))
    if (place := base_for_adapters(folder)) is None:
        return load_as_given(folder, config)
    model = load_language_model(place, trust_remote_code=config.trust_remote_code, max_length=config.max_length)
    with refusals(folder):
        merged = _merged(model, folder)
    return frozen(merged, device=torch.device("cpu"), dtype=getattr(torch, config.dtype))


def base_for_adapters(folder: Path) -> str | None:
    """Return the folder of the model into which a folder's adapters are merged; None if it has no adapters.

    Raises:
        ValueError: the adapters are of another kind, in another form than safetensors, or their base model isn't there.
    """
    if (base := base_of_adapters(folder)) is None:
        return None
    remedy, kind = (
        "merge them with PEFT (merge_and_unload) and give the folder of the whole model",
        read_settings(folder, ADAPTERS).get("peft_type"),
    )
    if kind != "LORA":
        raise ValueError(f"{KEY}: expected adapters of type LORA in {folder}, got {shown(str(kind))}; {remedy}")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"{KEY}: expected {ADAPTER_WEIGHTS} in {folder}, got none; save the adapters in safetensors, or {remedy}")
    return locate_model(*base, key=f"the base model of {KEY}")


def _merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return a float32 model with a folder's adapters added to its weights.

    Raises:
        ValueError: the adapters lack a weight, or have one that the model has no place for.
    """
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict

    adapted = PeftModel(model, PeftConfig.from_pretrained(folder))
    loaded = set_peft_model_state_dict(adapted, load_file(folder / ADAPTER_WEIGHTS))
    missing = [name for name in loaded.missing_keys if ".lora_" in name or "modules_to_save" in name]
    if missing or loaded.unexpected_keys:
        raise ValueError(f"adapters that lack {missing[:3] or 'nothing'} and have {loaded.unexpected_keys[:3] or 'nothing'} besides")
    return adapted.merge_and_unload(safe_merge=True)


def check_same_architecture(given: PretrainedConfig, own: PretrainedConfig) -> None:
    """Check that two models compute alike but for their weights: evaluate swaps weights in one engine and compares their logits.

    Raises:
        ValueError: names the settings that differ.
    """
    one, other = (dict(_settings(config.to_dict())) for config in (given, own))
    if differing := sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)):
        some = ", ".join(f"{key} {shown(repr(one.get(key)))} in place of {shown(repr(other.get(key)))}" for key in differing[:3])
        raise ValueError(
            f"{KEY}: expected a policy with the architecture of the model that it is compared with, got another in "
            f"{number_of(len(differing), 'setting')}: {some}; set model.path to the model that the policy was trained from"
        )


def _settings(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if key in _NO_OUTPUT or "dropout" in key or "pdrop" in key or value is None:
            continue
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def config_of(path: str | Path, config: ModelConfig) -> PretrainedConfig:
    """Return the configuration with which the model in a folder is loaded."""
    with refusals(path):
        found = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    fix_frequencies(found, config.max_length)
    return found


def tokenizer_of_policy(path: str, own: PreTrainedTokenizerBase, config: ModelConfig, *, own_template: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer to save with a policy from elsewhere: the chain's, or with `own_template` the policy's.

    Raises:
        ValueError: the policy's tokenizer has other tokens, its template writes conversations otherwise and `own_template` is false, or
            there is a template without a tokenizer.
    """
    folder = Path(locate_model(path, key=KEY))
    has_template = any((folder / name).exists() for name in ("chat_template.jinja", "additional_chat_templates")) or (
        (folder / "tokenizer_config.json").is_file() and read_settings(folder, "tokenizer_config.json").get("chat_template")
    )
    if own_template and not has_template:
        raise ValueError(f"external.own_template: expected a chat template in {folder}, got none; set it to false, or add one")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        if has_template:
            raise ValueError(
                f"{KEY}: expected a tokenizer beside the chat template in {folder}, got none; add the tokenizer files that the policy was "
                "trained with, or remove the template if it was trained with that of models/sft"
            )
        return own
    options = {"template_date": config.template_date, "template_options": config.template_options}
    theirs = load_tokenizer(str(folder), trust_remote_code=config.trust_remote_code, **options)
    check_tokens(
        theirs,
        own,
        key=KEY,
        why="by which the KL between the two is measured",
        remedy="set model.path to the model that the policy was trained from, or save the policy with that model's tokenizer",
    )
    if own_template:
        return theirs
    for messages in _CONVERSATIONS if has_template else ():
        got, wanted = _rendered(theirs, messages), _rendered(own, messages)
        if got != wanted:
            texts = [None if ids is None else shown(repr(own.decode(ids)), 200) for ids in (wanted, got)]
            raise ValueError(
                f"{KEY}: expected the chat template of models/sft, which writes {texts[0]}, got one that writes {texts[1]}; set "
                "external.own_template to true if the policy was trained with its own template, or model.chat_template to the policy's, "
                "so that both are asked alike"
            )
    return own


def check_tokens(theirs: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, *, key: str, why: str, remedy: str) -> None:
    """Check that two tokenizers have the same tokens and split texts alike.

    Args:
        key, why, remedy: for the message: the key of params.yaml, why the tokens must be the same, and what to do.
    Raises:
        ValueError: names a token that differs.
    """
    one, other = theirs.get_vocab(), own.get_vocab()
    differing = sorted(token for token in one.keys() | other.keys() if one.get(token) != other.get(token))
    found = f"{number_of(len(differing), 'token')}, such as {shown(repr(differing[0]))}" if differing else "the way it splits texts"
    if differing or _splitting(theirs) != _splitting(own):
        raise ValueError(f"{key}: expected the tokens of models/sft, {why}, got another tokenizer: {found}; {remedy}")


def teacher_folder(path: str, own: PreTrainedTokenizerBase, config: ModelConfig, *, key: str) -> Path:
    """Return the folder of a teacher of rl.distillation, whose files are checked; no weight is read.

    Args:
        own: tokenizer of the policy.
        key: key of params.yaml that names the teacher.
    Raises:
        ValueError: there is no such model, its weights aren't those of its config.json, or it has other tokens than the policy.
    """
    folder = Path(locate_model(path, key=key))
    check_model_folder(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"{key}: expected the teacher's tokenizer in {folder}, got none; add its files, which are compared with the policy's"
        )
    theirs = load_tokenizer(str(folder), trust_remote_code=config.trust_remote_code)
    check_tokens(
        theirs,
        own,
        key=key,
        why="at which the teacher is asked for its distribution",
        remedy="choose a teacher of the policy's family, or train one from the same base model",
    )
    check_weights(folder, trust_remote_code=config.trust_remote_code)
    check_rows(own, vocabulary_size(folder, trust_remote_code=config.trust_remote_code), subject=f"{key}: teacher {folder}")
    return folder


def _splitting(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the settings that decide how a fast tokenizer splits a text; None if it isn't a fast one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    tree = {} if backend is None else json.loads(backend.to_str())
    return {key: tree.get(key) for key in ("normalizer", "pre_tokenizer", "model")} if tree else None


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int] | None:
    """Return the token ids of a conversation; None if the template refuses it."""
    try:
        return encode_prompt(tokenizer, messages)
    except Unrenderable:
        return None
