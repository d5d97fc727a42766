"""Saves the rollouts of some steps: what was sampled, how it was rewarded, and each token's log-probabilities and advantage.

Without limits the tables of a long run would outgrow its model. A step keeps the whole groups of some prompts, evenly spaced in the
batch: a run that is killed and resumed keeps the same ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import RlConfig
from rlhf_core.files import replacing
from rlhf_core.models.pieces import token_pieces
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.sampling.rewards import weighted_score
from rlhf_core.stage.rollouts import COMPRESSION, step_file, step_files
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.types import Rollout, RolloutBatch, TrainBatch

STEP_ROLLOUTS = 512
STEP_TOKENS = 2**18  # of prompts and responses
RUN_BYTES = 2**26  # of the whole run's files; each saved step may use an equal share

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class TrainedRollouts:
    """The rollouts of a step after its update.

    old_logprobs: [B, R], of the policy before the update (`UpdateResult`).
    rewards: [B], normalised, clipped and less the length penalties, before any KL; NaN = not trained on.
    """

    rollouts: Sequence[Rollout]
    batch: RolloutBatch
    train_batch: TrainBatch
    old_logprobs: torch.Tensor
    rewards: torch.Tensor


class SavedRollouts:
    """Writes the rollouts of a step into the job's folder.

    Args:
        first_step: the step at which the run begins or resumes; files of later steps, which it will repeat, are removed.
    """

    def __init__(self, job: RlJob, *, first_step: int):
        self._rl, self._folder = job.rl, Path(job.work)
        self._tokenizer = load_tokenizer(job.sft_model, **job.load_options)
        for step, path in step_files(self._folder).items():
            if step >= first_step:
                path.unlink()

    def write(self, step: int, trained: TrainedRollouts) -> None:
        """Write a step's rollouts, as many as the limits allow."""
        rows = kept_rows(trained.batch.group_ids.tolist(), trained.batch.sequences.lengths.tolist())
        table = rollout_table(step, trained, rows, self._rl, self._tokenizer)
        limit = RUN_BYTES // self._rl.saved_steps
        while len(content := _as_parquet(table)) > limit and len(table):
            table = table.take(pa.array(_half(table["group"].to_pylist()), pa.int64()))
        with replacing(step_file(self._folder, step)) as aside:
            aside.write_bytes(content)
        if not len(table):
            log.warning("rl: step %d: no rollout is saved, since one of them alone passes the limits on size (docs/rl.md)", step)


def kept_rows(group_ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Rows of as many whole groups as the limits of a step allow, evenly spaced; of the first group alone if that is too large.

    Args:
        group_ids, tokens: of each row its group and its number of tokens.
    """
    by_group: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids):
        by_group.setdefault(group, []).append(row)
    groups = list(by_group.values())
    for count in range(min(len(groups), STEP_ROLLOUTS), 0, -1):
        rows = [row for i in range(count) for row in groups[i * len(groups) // count]]
        if len(rows) <= STEP_ROLLOUTS and sum(tokens[row] for row in rows) <= STEP_TOKENS:
            return rows
    first = groups[0][:STEP_ROLLOUTS]
    return [row for i, row in enumerate(first) if sum(tokens[r] for r in first[: i + 1]) <= STEP_TOKENS]


def _half(groups: list[int]) -> list[int]:
    """Rows of every second group; of a single group every second row, and of a single row none."""
    names = list(dict.fromkeys(groups))
    if len(names) > 1:
        kept = set(names[::2])
        return [row for row, group in enumerate(groups) if group in kept]
    return list(range(0, len(groups), 2)) if len(groups) > 1 else []


def rollout_table(step: int, trained: TrainedRollouts, rows: list[int], rl: RlConfig, tokenizer: PreTrainedTokenizerBase) -> pa.Table:
    """One row for each of these rollouts, in order (docs/rl.md has the columns)."""
    batch, rollouts = trained.batch, [trained.rollouts[row] for row in rows]
    score = weighted_score(batch.components, rl.reward.scorers, count=len(batch.lengths))
    prompts = [rollout.prompt for rollout in rollouts]
    pieces = [token_pieces(tokenizer, rollout.prompt.prompt_ids, rollout.response_ids) for rollout in rollouts]
    texts = {ids: tokenizer.decode(list(ids), skip_special_tokens=False) for ids in {tuple(p.prompt_ids) for p in prompts}}
    return pa.table(
        {
            "step": pa.array([step] * len(rows), pa.int32()),
            "rollouts": pa.array([len(trained.rollouts)] * len(rows), pa.int32()),
            "group": pa.array([rollout.group_id for rollout in rollouts], pa.int64()),
            "prompt_id": pa.array([prompt.id for prompt in prompts], pa.string()),
            "source": pa.array([prompt.source for prompt in prompts], pa.string()),
            "label": pa.array([prompt.label for prompt in prompts], pa.string()),
            "prompt": pa.array([texts[tuple(prompt.prompt_ids)] for prompt in prompts], pa.string()),
            "response": pa.array(["".join(of_one) for of_one in pieces], pa.string()),
            "finished": pa.array([rollout.finished for rollout in rollouts], pa.bool_()),
            "score": _per_rollout(score, rows),
            **{f"score_{name}": _per_rollout(scores, rows) for name, scores in batch.components.items()},
            "reward": _per_rollout(trained.rewards, rows),
            "token_ids": pa.array([rollout.response_ids for rollout in rollouts], pa.list_(pa.int32())),
            "tokens": pa.array(pieces, pa.list_(pa.string())),
            **_token_columns(trained, rows, rl),
        }
    )


def _token_columns(trained: TrainedRollouts, rows: list[int], rl: RlConfig) -> dict[str, pa.Array]:
    """Lists with a value for each token of the response; null where a token has none, or it wasn't computed."""
    batch, learned = trained.batch, trained.train_batch.response_mask
    sampled = batch.policy_versions >= 0
    known = sampled & _recomputed(trained, rl)
    columns = {
        "trained": (learned, None),
        "version": (batch.policy_versions, sampled),
        "engine_logprob": (batch.rollout_logprobs, sampled),
        "old_logprob": (trained.old_logprobs, known),
        "ref_logprob": (batch.ref_logprobs, sampled),
        "advantage": (trained.train_batch.advantages, learned),
    }
    if not rl.rollout.samples_any_token:
        columns["sampler_logprob"] = (batch.sampler_logprobs, known)
    lengths = [trained.rollouts[row].num_tokens for row in rows]
    return {name: _per_token(values, mask, rows, lengths) for name, (values, mask) in columns.items()}


def _recomputed(trained: TrainedRollouts, rl: RlConfig) -> torch.Tensor:
    """[B, R] bool, tokens whose old log-probabilities are the trainer's own; those of the others are the engine's."""
    batch = trained.batch
    if batch.old_logprobs_source == "from_update":
        return trained.train_batch.response_mask
    if batch.old_logprobs_source == "from_engine":
        return torch.zeros_like(batch.response_mask)
    if rl.rollout.recomputed_fraction == 1:
        return torch.ones_like(batch.response_mask)
    return (trained.old_logprobs != batch.rollout_logprobs).any(1, keepdim=True).expand_as(batch.response_mask)


def _per_rollout(values: torch.Tensor, rows: list[int]) -> pa.Array:
    return pa.array(values[rows].double().numpy(), pa.float64(), from_pandas=True)


def _per_token(values: torch.Tensor | None, mask: torch.Tensor | None, rows: list[int], lengths: list[int]) -> pa.Array:
    """Return the responses' values as a list for each of `rows`.

    Args:
        values: [B, R]; None: there are none.
        mask: [B, R]; None: all values are valid.
        lengths: tokens of each response of `rows`.
    """
    offsets = pa.array([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], pa.int32())
    if values is None:
        return pa.ListArray.from_arrays(offsets, pa.nulls(sum(lengths), pa.float32()))
    present = torch.arange(values.shape[1]) < torch.tensor(lengths)[:, None]
    flat = values[rows][present]
    flat = flat.int() if flat.dtype == torch.int64 else flat if flat.dtype == torch.bool else flat.float()
    missing = None if mask is None else ~mask[rows][present].numpy()
    return pa.ListArray.from_arrays(offsets, pa.array(flat.numpy(), mask=missing))


def _as_parquet(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression=COMPRESSION)
    return memoryview(sink.getvalue())
