"""Checks a model's folder before any library loads it, and without loading anything.

transformers takes weights from wherever the folder's index says, unpickles some of them, fills missing ones with random numbers, and gives
a traceback for a truncated file. So the files are checked first: weights must be safetensors, inside the folder and complete; settings must
be JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlhf_core.config import shown
from rlhf_core.data.places import ADAPTERS, fetch_model, hub_is_online, is_hub_name, locate, model_commit, model_snapshot

SEPARATOR_KEY = "step_separator"  # in the config.json of a process reward model
INDEX = "model.safetensors.index.json"
UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")  # files of weights that may run code when they are read
WEIGHTS = (".safetensors", *UNSAFE)
MAX_HEADER = 100 << 20  # bytes; the limit of safetensors itself
DEQUANTIZED = ("fp8", "mxfp4")  # methods whose weights transformers turns into plain ones as it loads them, on any device
_WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F16": 2, "BF16": 2, "I16": 2, "F32": 4, "I32": 4, "F64": 8, "I64": 8}


def locate_model(path: str, revision: str | None = None, *, key: str = "model.path") -> str:
    """Return the folder of a model.

    A local folder is found as `locate` does. For a Hugging Face name it is the one in the hub's cache, fetched if the hub may be used.

    Args:
        revision: revision of the Hugging Face name; None: the cached one, or else the newest.
        key: key of params.yaml that names the model.
    Returns:
        The folder; or the unchanged name if it isn't cached and the hub may not be used, which the library then refuses.
    Raises:
        ValueError: the path can only be a folder, and there is none; or the cache lacks the revision.
        OSError: the hub doesn't provide it.
    """
    folder = locate(path)
    if folder.is_dir():
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        got = "a file" if folder.exists() else "nothing"
        raise ValueError(
            f"{key}: expected a folder with a pretrained model, got {shown(path)} with {got} there "
            f"(relative to the project's folder); put one there, or set {key} to another folder, or to a Hugging Face name, which is "
            "downloaded with HF_HUB_OFFLINE=0"
        )
    if (snapshot := model_snapshot(path, revision)) is not None:
        return str(snapshot)
    if hub_is_online() and is_hub_name(path):
        return fetch_model(path, model_commit(path, revision))
    if revision is not None:
        raise ValueError(
            f"{key}: expected revision {shown(revision)} of {shown(path)} in the hub's cache, got none; set HF_HUB_OFFLINE=0 to fetch it"
        )
    return path


def base_of_adapters(folder: Path) -> tuple[str, str | None] | None:
    """Return path or name, and revision, of the model to which a folder's adapters (PEFT) belong; None if it has no adapters.

    Raises:
        ValueError: the adapters' settings name no model, or a revision that is no text.
    """
    if not (folder / ADAPTERS).is_file():
        return None
    settings = read_settings(folder, ADAPTERS)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{folder / ADAPTERS}: expected base_model_name_or_path, got none; merge the adapters and save the whole model")
    if revision is not None and not isinstance(revision, str):
        raise ValueError(f"{folder / ADAPTERS}: expected a text or null as revision, got {shown(repr(revision))}; correct it")
    return name, revision or None


def has_weights(folder: Path) -> bool:
    """Return whether the folder has a file of weights, or an index of several, of any kind that models are published in."""
    return any(p.suffix in WEIGHTS or p.name == INDEX for p in folder.iterdir())


def check_model_folder(path: str | Path, *, weights: bool = True) -> None:
    """Check a folder with a model. The name of a model on a hub isn't checked here, but by the library that loads it.

    Args:
        weights: whether the folder must have weights; otherwise only those that it has are checked.
    Raises:
        ValueError: naming the file that is missing, truncated, outside the folder or not a safetensors file; or the method by which the
            weights are quantized.
    """
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_absolute() or folder.exists():
            raise ValueError(f"model {shown(str(path))}: expected a folder, got {'a file' if folder.exists() else 'nothing'} there")
        return
    settings = read_settings(folder, "config.json")
    if not isinstance(settings.get("model_type"), str):
        raise ValueError(f"model {folder}: expected a model_type in config.json, got none; save it with save_pretrained")
    if (folder / ADAPTERS).exists():  # transformers would load the model that it names, from anywhere
        raise ValueError(f"model {folder}: expected a whole model in safetensors, got adapters of another one; merge and save them")
    if (method := quantization(settings)) is not None and method not in DEQUANTIZED:
        raise ValueError(
            f"model {folder}: expected weights in full precision, which can be trained, got some quantized by {method}; choose the model "
            "that they were made from (`lora: {quantize: nf4}` of a training section keeps it in 4 bits), or dequantize and save them"
        )
    for file in weight_files(folder) if weights or has_weights(folder) else ():
        _check_safetensors(file)


def quantization(settings: dict[str, Any]) -> str | None:
    """Return the method by which the weights of a folder with this config.json are quantized; None if they aren't."""
    parts = [settings, *(part for part in settings.values() if isinstance(part, dict))]  # or of the text model's part alone
    found = next((part[key] for part in parts for key in ("quantization_config", "compression_config") if part.get(key)), None)
    if found is None:
        return None
    return str(found.get("quant_method", "bitsandbytes")) if isinstance(found, dict) else str(found)


def read_settings(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file in a model's folder.

    Raises:
        ValueError: the file is missing or doesn't hold a JSON object.
    """
    path = folder / name
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"model {folder}: expected a {name}, got none; is that a model's folder?") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got: {shown(str(error))}; restore or fetch it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}; restore or fetch it again")
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up a model: one, or those that its index names.

    Raises:
        ValueError: there are none, or the index names other files.
    """
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if (folder / INDEX).is_file():
        places = read_settings(folder, INDEX).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
            raise ValueError(f"{folder / INDEX}: expected a weight_map from weights to files, got none; restore or fetch it again")
        names = sorted(set(places.values()))
        for name in names:
            if not name.isprintable() or Path(name).name != name or not name.endswith(".safetensors") or not (folder / name).is_file():
                got = "one that isn't there or is of another kind"
                raise ValueError(f"{folder / INDEX}: expected names of safetensors files beside it, got {shown(name)}, {got}; don't use it")
        return [folder / name for name in names]
    others = sorted(p.name for p in folder.iterdir() if p.suffix in UNSAFE)
    got = f"only {', '.join(others[:5])}, which may run code when it is read; convert it" if others else "none"
    raise ValueError(f"model {folder}: expected weights in model.safetensors, got {got}")


def check_kind(subject: str, own: str | None, *, of_steps: bool) -> None:
    """Check that a promoted reward model is of the kind that is judged.

    Args:
        own: its `step_separator`.    of_steps: a process reward model is judged.
    Raises:
        ValueError: it scores steps where whole responses are judged, or the other way round.
    """
    if of_steps != (own is not None):
        kinds = ("a reward model of whole responses", "a process reward model")
        raise ValueError(
            f"{subject}: expected {kinds[of_steps]} to compare with, got {kinds[not of_steps]}; keep the two kinds in registries of "
            "their own, or roll that version back"
        )


def count_members(files: Iterable[str]) -> int:
    """Return the number of models in a reward model's folder, from the names of its files with slashes: its own, and one in each
    `member_*`.
    """
    return 1 + sum(name.startswith("member_") and name.count("/") == 1 and name.endswith("/config.json") for name in files)


def count_parameters(path: str | Path) -> int:
    """Return the number of parameters in a model's folder, from the headers of its files.

    Raises:
        ValueError: a file is missing or truncated.
    """
    return sum(numbers_in(tensor) for tensor in read_headers(path))


def numbers_in(tensor: dict[str, Any]) -> int:
    """Return how many numbers a tensor holds, by its header.

    In mxfp4, tensors of four dimensions have two numbers in a byte; the others are their scales.
    """
    count = math.prod(tensor["shape"])
    return count if tensor["dtype"] != "U8" else 2 * count if len(tensor["shape"]) == 4 else 0


def read_headers(path: str | Path) -> Iterator[dict[str, Any]]:
    """Return the header of each tensor in a model's folder: shape, dtype and data_offsets.

    Raises:
        ValueError: a file is missing or truncated.
    """
    check_model_folder(path)
    return (tensor for file in weight_files(Path(path)) for name, tensor in _header(file)[0].items() if name != "__metadata__")


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the header's length in bytes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(MAX_HEADER, path.stat().st_size):
            raise ValueError(f"a header of {length} bytes")
        return json.loads(file.read(length)), length


def _check_safetensors(path: Path) -> None:
    """Check that a file's header fits its size.

    Raises:
        ValueError: the file is truncated, or not a safetensors file.
    """
    try:
        size = path.stat().st_size
        header, length = _header(path)
        ends = [_end(tensor) for name, tensor in header.items() if name != "__metadata__"]
        if not ends or 8 + length + max(ends) != size:
            raise ValueError(f"{size} bytes in place of {8 + length + max(ends, default=0)}")
    except (OSError, ValueError, RecursionError, struct.error, TypeError, LookupError, AttributeError) as error:
        got = shown(str(error)) or type(error).__name__
        raise ValueError(f"{path}: expected a whole safetensors file, got one with: {got}; restore or fetch it again") from error


def _end(tensor: dict[str, Any]) -> int:
    """Return the end of a tensor, in bytes after the header."""
    begin, end = tensor["data_offsets"]
    count = 1
    for dimension in tensor["shape"]:
        count *= dimension
    width = _WIDTHS.get(tensor["dtype"])
    if not 0 <= begin <= end or (width is not None and end - begin != count * width):
        raise ValueError(f"a tensor of {end - begin} bytes in place of {count * (width or 0)}")
    return end


@contextlib.contextmanager
def refusals(path: str | Path) -> Iterator[None]:
    """Turns any exception of a library that loads a model into a ValueError that names the folder, because its content is the user's."""
    try:
        yield
    except Exception as error:  # libraries raise anything on damaged files
        lines = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"model {shown(str(path))}: expected one that can be loaded, got {type(error).__name__}: {shown(lines[0], 600)}; restore it, "
            "or choose another one"
        ) from error


def step_separator(folder: Path) -> str | None:
    """Return the text between steps on which the reward model in a folder was trained; None: the model scores whole responses."""
    return read_settings(folder, "config.json").get(SEPARATOR_KEY)
