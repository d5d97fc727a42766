"""Predicts the seconds of each stage of a chain on a machine from the rows and tokens of its data, within a factor of about two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_core.config import LoraConfig, Params
from rlhf_core.planning.memory import element_bytes
from rlhf_core.planning.shape import ModelShape
from rlhf_core.planning.speed import Speed
from rlhf_core.planning.timing import forward_flops, update_flops

TRIALS = 30.0  # seconds of check_model beside its start
AT_ONCE = 256  # responses of an engine in the evaluation
ANSWERS = 2  # of each model to a prompt of the evaluation: sampled and greedy


@dataclass(frozen=True)
class Rows:
    """Training data for one use: counts and mean lengths in tokens.

    train, heldout: numbers of rows. tokens: all sequences of a row, with a pair's prompt counted twice. sequence: one sequence. response:
    one response.
    """

    train: int
    heldout: int
    tokens: float
    sequence: float
    response: float

    @property
    def responses(self) -> float:
        """Number of responses of a row."""
        return self.tokens / self.sequence if self.sequence else 0.0

    def computed(self, *, shares_prompts: bool) -> float:
        """Return the tokens of a row that are computed: a shared prompt once, otherwise all."""
        again = (self.responses - 1) * max(0.0, self.sequence - self.response)
        return self.tokens - again if shares_prompts else self.tokens


@dataclass(frozen=True)
class StageTime:
    """Predicted time of a stage.

    steps: optimizer steps, in RL rollout batches; None: the stage has none. seconds: all of the stage, with its start. parts: seconds of
    one step of RL by phase.
    """

    steps: int | None
    seconds: float
    parts: Mapping[str, float] | None = None


def stage_times(params: Params, shape: ModelShape, rows: Mapping[str, Rows], speed: Speed) -> dict[str, StageTime]:
    """Return the time of each stage that computes with the model, by the stage's name."""
    method, found = params.alignment.method, {"check_model": StageTime(None, speed.start + TRIALS)}
    if params.sft.enabled and "sft" in rows:
        found["train_sft"] = supervised_time("sft", params, shape, rows["sft"], speed)
    if method in ("dpo", "kto") and "preference" in rows:
        found["train_policy"] = supervised_time(method, params, shape, rows["preference"], speed, reference=True)
    if method == "rl" and "prompt" in rows:
        found["train_policy"] = rl_time(params, shape, rows["prompt"], speed)
    if "prompt" in rows:
        found["evaluate"] = evaluation_time(params, shape, rows["prompt"], speed if params.cluster.inference_ranks > 1 else speed.of_one)
    return found


def row_flops(shape: ModelShape, rows: Rows, *, shares_prompts: bool = False) -> float:
    """Return the FLOP of a forward pass over a row; the head is computed at the tokens of responses."""
    trunk = forward_flops(shape, rows.computed(shares_prompts=shares_prompts), rows.sequence, head=False)
    return trunk + rows.responses * rows.response * 2 * shape.embedding


def update_factor(lora: LoraConfig | None, *, checkpointing: bool) -> float:
    """Return the FLOP of an update divided by those of its forward pass. Adapters save the frozen weights' gradients, half of a backward
    pass.
    """
    whole = update_flops(1.0, checkpointing=checkpointing)
    return whole if lora is None else whole - 1


def supervised_time(key: str, params: Params, shape: ModelShape, rows: Rows, speed: Speed, *, reference: bool = False) -> StageTime:
    """Return the time of a supervised stage: training, evaluations on held-out rows, and with a reference a forward pass over all rows."""
    section = getattr(params, key)
    steps = section.steps_over(rows.train, per_step=section.batch_size)
    one = row_flops(shape, rows, shares_prompts=speed.shares_prompts)
    updated = steps * section.batch_size * one * update_factor(section.lora, checkpointing=section.gradient_checkpointing)
    evaluations = math.ceil(steps / section.eval_every)
    scored = evaluations * rows.heldout + (rows.train + rows.heldout if reference else 0)
    return StageTime(steps, speed.start + updated / speed.update + scored * one / speed.forward)


def decode_seconds(shape: ModelShape, responses: float, tokens: float, context: float, at_once: float, dtype: str, speed: Speed) -> float:
    """Return the seconds to decode responses: FLOP or, if the bandwidth is known and slower, reading the weights in each step.

    Args:
        responses: their number. tokens: of each response. at_once: responses decoded at a time.
    """
    computing = forward_flops(shape, responses * tokens, context, head=True) / speed.decode
    if speed.bandwidth is None:
        return computing
    steps = math.ceil(responses / max(1.0, at_once)) * tokens
    return max(computing, steps * shape.parameters * element_bytes(dtype) / speed.bandwidth)


def rl_time(params: Params, shape: ModelShape, rows: Rows, speed: Speed) -> StageTime:
    """Return the time of an RL run. Responses are assumed to have half of rl.rollout.max_new_tokens, or after SFT the demonstrations'
    length.
    """
    rl = params.rl
    steps = rl.steps_over(rows.train, per_step=rl.rollout_batch_size)
    new = min(rl.rollout.max_new_tokens, rows.response) if params.sft.enabled and rows.response else rl.rollout.max_new_tokens / 2
    prompt, samples = rows.sequence, rl.samples_per_step
    sequence = prompt + new
    forward = forward_flops(shape, samples * sequence, sequence, head=False) + samples * new * 2 * shape.embedding
    passes = rl.kl.keeps_reference + (rl.old_logprobs_source(0) == "recompute")
    at_once = rl.rollout.max_concurrent_sequences * rl.rollout.engines
    prefill = forward_flops(shape, rl.rollout_batch_size * prompt, prompt, head=False) / speed.forward
    factor = update_factor(rl.lora, checkpointing=rl.trainer.gradient_checkpointing)
    waiting = speed.decode_step * rl.rollout.max_new_tokens * math.ceil(samples / at_once)
    parts = {
        "generate": prefill + waiting + decode_seconds(shape, samples, new, sequence, at_once, params.model.dtype, speed),
        "score": passes * forward / speed.forward,
        "update": rl.ppo_epochs * factor * forward / speed.update,
    }
    return StageTime(steps, 2 * speed.start + steps * sum(parts.values()), parts)


def evaluation_time(params: Params, shape: ModelShape, rows: Rows, speed: Speed) -> StageTime:
    """Return the time of the evaluation: answers of both models to held-out prompts, and the answers' log-probabilities."""
    prompts = min(params.evaluation.prompts, rows.heldout) or params.evaluation.prompts
    new = min(params.evaluation.max_new_tokens, rows.response or math.inf)
    answers = ANSWERS * 2 * prompts
    sequence = rows.sequence + new
    decoding = decode_seconds(shape, answers, new, sequence, AT_ONCE, params.model.dtype, speed)
    decoding += speed.decode_step * params.evaluation.max_new_tokens * math.ceil(answers / AT_ONCE)
    passes = forward_flops(shape, 2 * answers * sequence, sequence, head=True) / speed.forward
    return StageTime(None, 2 * speed.start + decoding + passes)
