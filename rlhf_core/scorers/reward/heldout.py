"""Scores the held-out pairs with a ready-made reward model, for the gate, in the table that train_reward writes when it trains a model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhf_core.config import RewardConfig, ScorerConfig
from rlhf_core.data.hashing import prompt_name
from rlhf_core.data.schema import read_rows
from rlhf_core.engines.deepspeed.ranks import threads_of_rank
from rlhf_core.models.folder import check_model_folder, locate_model
from rlhf_core.models.steps import check_kept_steps
from rlhf_core.models.tokenizer import encode_prompts
from rlhf_core.provenance.dvc_cache import checkout
from rlhf_core.scorers.reward.loaded import LoadedModel, reward_options
from rlhf_core.scorers.reward.members import check_ready_made, check_separator, member_folders

if TYPE_CHECKING:
    from rlhf_core.stage.training import TrainRun

KEY = "reward.path"
HELDOUT_SPLITS = ("validation", "test")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5", ".onnx", ".gguf", ".index.json")
_INDEX = "model.safetensors.index.json"


def copy_ready_made(config: RewardConfig, folder: Path) -> None:
    """Copy the ready-made reward model at `config.path` to a folder, file by file, or check out a version of the registry from DVC's cache.

    Raises:
        ValueError: there is no model, it doesn't score a conversation with one number, or it is an ensemble.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if not config.is_registered:
        place = Path(locate_model(config.path, key=KEY))
        check_reward_folder(place, config.step_separator)
        folder.mkdir(parents=True)
        for path in place.rglob("*"):
            if path.is_file() and _belongs(path.relative_to(place)):
                copy = folder / path.relative_to(place)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        return
    if config.pinned is None:
        raise ValueError(
            f"{KEY}: expected a run that the flow started, which looks {config.path} up in the registry, got none; start it with `rlhf run`"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    checkout(config.pinned.md5, folder, root=Path(), sha256=config.pinned.sha256)
    check_reward_folder(folder, config.step_separator)


def _belongs(name: Path) -> bool:
    """Return whether a file is part of the model: neither hidden, nor a copy of the weights in a form that nothing here reads."""
    hidden = any(part.startswith(".") for part in name.parts)
    return not hidden and (name.name == _INDEX or not name.name.endswith(_OTHER_WEIGHTS))


def check_reward_folder(folder: Path, separator: str | None) -> None:
    """Check a ready-made reward model by its files; loading it checks the rest.

    Args:
        separator: `reward.step_separator`.
    Raises:
        ValueError: it has several labels, no chat template or no weights in safetensors, or is an ensemble or an encoder-decoder, or has
            another step separator.
    """
    check_model_folder(folder)
    check_ready_made(ScorerConfig(name="reward_model", kind="reward_model"), folder)
    check_separator(folder, separator)
    if (found := len(member_folders(folder))) > 1:
        raise ValueError(f"{KEY}: expected one model in {folder}, got an ensemble of {found}; name another, or a folder with one of them")


def score_heldout_steps(run: TrainRun, folder: Path, prepared: Path) -> dict[str, Any]:
    """Score the steps of the held-out responses on each rank; as `score_heldout_pairs`, with the rows of a process reward model.

    Raises:
        ValueError: the model's chat template changes a response's steps.
    """
    torch.set_num_threads(threads_of_rank(run.params.cluster.threads))
    loaded, rows, left_out = LoadedModel.load(folder, prepared=prepared, **reward_options(run.params.model)), [], 0
    for split in HELDOUT_SPLITS:
        of_split = read_rows(prepared, "stepwise", split)
        found = loaded.score_steps([(row["messages"], row["response"]) for row in of_split])
        known = [(row, scores) for row, scores in zip(of_split, found, strict=True) if scores is not None]
        check_kept_steps([row["id"] for row, scores in known if len(scores[0]) != len(row["labels"])], len(of_split))
        left_out += len(of_split) - len(known)
        rows += [(row["id"], row["source"], split, prompt_name(row["messages"]), row["labels"], *scores) for row, scores in known]
    return {"rows": rows, "left_out": left_out}


def score_heldout_pairs(run: TrainRun, folder: Path, prepared: Path) -> dict[str, Any]:
    """Score the held-out pairs on each rank. Return `rows` of the table's values (rlhf_core/data/heldout.py), and `left_out`, the number of
    pairs without a score.

    Args:
        prepared: folder of the prepared data.
    """
    torch.set_num_threads(threads_of_rank(run.params.cluster.threads))
    loaded, rows, left_out = LoadedModel.load(folder, prepared=prepared, **reward_options(run.params.model)), [], 0
    for split in HELDOUT_SPLITS:
        pairs = [row for row in read_rows(prepared, "preference", split) if row["chosen"] is not None and row["rejected"] is not None]
        chosen, rejected = (loaded.score_texts([(row["messages"], row[side]) for row in pairs]) for side in ("chosen", "rejected"))
        known = np.isfinite(chosen) & np.isfinite(rejected)
        left_out += int((~known).sum())
        kept = [row for row, is_known in zip(pairs, known, strict=True) if is_known]
        prompts = encode_prompts(loaded.tokenizer, [row["messages"] for row in kept])
        for row, scores, prompt in zip(kept, zip(chosen[known].tolist(), rejected[known].tolist(), strict=True), prompts, strict=True):
            tokens = [len(loaded.encode(row["messages"], row[side]) or ()) for side in ("chosen", "rejected")]
            rows.append((row["id"], row["source"], split, *scores, *tokens, prompt_name(row["messages"]), len(prompt), 0.0, 0.0))
    return {"rows": rows, "left_out": left_out}
