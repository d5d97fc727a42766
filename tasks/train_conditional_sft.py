"""Stage train_policy: SFT on the preference data's responses with their quality in the prompt.

The policy's own chat template asks for the wanted quality.
"""

from __future__ import annotations

import collections
import logging

from rlhf_core.data.schema import read_rows
from rlhf_core.paths import METRICS, PREPARED, REWARD_MODEL, SFT_MODEL
from rlhf_core.stage.files import read_json
from rlhf_core.stage.run import Stage, check_gate, no_arguments, publish_policy

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("train_policy") as stage:
        config = stage.params.conditional_sft
        gate = read_json(METRICS / "gate.json") if config.label_by == "scores" else None
        override = None if gate is None else check_gate(gate)
        from rlhf_core.models.tokenizer import load_tokenizer
        from rlhf_core.trainers.conditional import asking_tokenizer

        stage.use_threads()
        tokenizer = load_tokenizer(str(SFT_MODEL), trust_remote_code=stage.params.model.trust_remote_code)
        trained, metrics = train(stage, tokenizer)
        asking = asking_tokenizer(tokenizer, levels=config.levels, wanted=config.wanted)
        publish_policy(stage, trained.model, trained.engine.state_dict(), asking, {**metrics, "override": override}, gate=gate)


def train(stage: Stage, tokenizer):
    """Returns what was trained and the stage's metrics."""
    from rlhf_core.engines.deepspeed_engine import join_world
    from rlhf_core.trainers.conditional import rated_responses
    from rlhf_core.trainers.sft import COLUMNS, finetune

    params, config = stage.params, stage.params.conditional_sft
    responses = {split: rated_responses(read_rows(PREPARED, "preference", split)) for split in ("train", "validation")}
    levels, borders = quality_levels(stage, responses)
    examples, too_long = encode(stage, tokenizer, responses["train"], levels["train"])
    heldout, _ = encode(stage, tokenizer, responses["validation"], levels["validation"])
    counts = collections.Counter(levels["train"])
    per_level = {str(level): counts[level] for level in range(config.levels)}
    log.info("train_policy: responses per quality level %s, without one %d", per_level, counts[None])
    join_world()
    trained = finetune(
        SFT_MODEL,
        examples,
        heldout,
        config,
        pad_id=tokenizer.pad_token_id,
        model=params.model,
        loop=stage.loop(config, COLUMNS, first_step=0),
    )
    made = {"responses": len(examples), "per_level": per_level, "without_level": counts[None], "dropped_too_long": too_long}
    return trained, {"method": "conditional_sft", "borders": borders, **made, "loss": stage.recent_mean("loss"), **trained.metrics}


def quality_levels(stage: Stage, responses: dict[str, list]) -> tuple[dict[str, list[int | None]], list[float]]:
    """Each response's level (None: it has none), by split, and the scores at which a level ends, which are the training split's."""
    from rlhf_core.trainers.conditional import preference_level, quantile_borders, reward_scores, score_level

    params, config = stage.params, stage.params.conditional_sft
    if config.label_by == "preference":
        return {split: [preference_level(r) for r in rated] for split, rated in responses.items()}, []
    scores = {
        split: reward_scores(
            REWARD_MODEL,
            rated,
            max_length=params.model.max_length,
            trust_remote_code=params.model.trust_remote_code,
            dtype=params.model.dtype,
            template_date=params.model.template_date,
            stop_requested=lambda: stage.stop_requested,
        )
        for split, rated in responses.items()
    }
    borders = quantile_borders(scores["train"], config.levels)
    return {split: [score_level(s, borders) for s in found] for split, found in scores.items()}, borders


def encode(stage: Stage, tokenizer, responses: list, levels: list[int | None]):
    """Demonstrations of the responses that have a level, and how many of them were too long."""
    from rlhf_core.trainers.conditional import with_quality
    from rlhf_core.trainers.demonstrations import encode_demonstrations

    rows = [
        {"messages": with_quality(r.messages, level), "response": r.text}
        for r, level in zip(responses, levels, strict=True)
        if level is not None
    ]
    # The response alone: earlier turns have no level. Its thoughts are trained on where those of SFT are.
    thoughts = stage.params.sft.train_on_thoughts
    return encode_demonstrations(rows, tokenizer, max_length=stage.params.model.max_length, train_on_thoughts=thoughts)


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
