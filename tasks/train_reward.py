"""Stage train_reward: a scalar head on the SFT model, and its scores of the held-out pairs for the gate to judge.

With `reward.enabled: false` there is no reward model; the stage then writes that, in the place of all that it makes.
"""

from __future__ import annotations

import functools
import logging
import math
import shutil

from rlhf_core.checkpoint import CheckpointStore
from rlhf_core.data.schema import read_rows
from tasks.stage import METRICS, PLOTS, PREPARED, REWARD_HELDOUT, REWARD_MODEL, SFT_MODEL, Stage, StageStopped, publish, write_json

log = logging.getLogger("rlhf")

COLUMNS = ("step", "phase", "loss", "accuracy", "heldout_loss", "heldout_accuracy", "learning_rate", "grad_norm")
HELDOUT_COLUMNS = {
    "id": "str",
    "source": "str",
    "split": "str",
    "chosen_score": "float64",
    "rejected_score": "float64",
    "chosen_tokens": "int64",
    "rejected_tokens": "int64",
}
NOT_TRAINED = {"trained": False, "reason": "reward.enabled is false"}


def main() -> None:
    with Stage("train_reward") as stage:
        if not stage.params.reward.enabled:
            write_nothing(stage)
            return
        from rlhf_core.engines.deepspeed_engine import join_world
        from rlhf_core.models.build import new_scalar_model, save_model
        from rlhf_core.models.tokenizer import load_tokenizer
        from rlhf_core.trainers.supervised import Interrupted

        stage.use_threads()
        join_world()
        trust = stage.params.model.trust_remote_code
        tokenizer = load_tokenizer(str(SFT_MODEL), trust_remote_code=trust)
        model = new_scalar_model(SFT_MODEL, tokenizer, trust_remote_code=trust, training_dtype=stage.params.model.dtype)
        encoder = comparison_encoder(stage, model, tokenizer)
        try:
            engine, metrics = train(stage, model, encoder)
        except Interrupted as stop:
            raise StageStopped from stop
        metrics["heldout_pairs"] = write_heldout_scores(stage, engine, encoder)
        aside = stage.scratch / "model"
        save_model(model, engine.state_dict(), tokenizer, aside)
        publish(aside, REWARD_MODEL)
        PLOTS.mkdir(exist_ok=True)
        shutil.copy(stage.scratch / "curves.csv", PLOTS / "train_reward.csv")
        write_json(METRICS / "train_reward.json", metrics)


def write_nothing(stage: Stage) -> None:
    """Outputs that say that there is no reward model: later stages and DVC find every file, and none that could be taken for one."""
    aside = stage.scratch / "model"
    write_json(aside / "not_trained.json", NOT_TRAINED)
    publish(aside, REWARD_MODEL)
    PLOTS.mkdir(exist_ok=True)
    (PLOTS / "train_reward.csv").write_text(",".join(COLUMNS) + "\n")
    write_heldout([])
    write_json(METRICS / "train_reward.json", NOT_TRAINED)


def comparison_encoder(stage: Stage, model, tokenizer):
    """From a split's rows of pairs to comparisons and the number of pairs that were too long; a common prompt is computed once if the
    model can.
    """
    from rlhf_core.models.branches import can_share_prefixes
    from rlhf_core.trainers.reward import encode_comparisons

    shares_prefix = can_share_prefixes(model)
    if not shares_prefix:
        log.info("train_reward: this model's attention takes no mask of ours, so that prompts are computed again for each response")
    return functools.partial(encode_comparisons, tokenizer=tokenizer, max_length=stage.params.model.max_length, shares_prefix=shares_prefix)


def train(stage: Stage, model, encoder):
    """Returns the engine and the stage's metrics."""
    from rlhf_core.engines.deepspeed_engine import TrainEngine
    from rlhf_core.models.lora import add_adapters
    from rlhf_core.models.wrappers import ScalarModule
    from rlhf_core.trainers.reward import reward_phase
    from rlhf_core.trainers.supervised import engine_settings, evaluate, train_phase

    params, config = stage.params, stage.params.reward
    comparisons, dropped = encoder(read_rows(PREPARED, "preference", "train"))
    heldout, _ = encoder(read_rows(PREPARED, "preference", "validation"))
    phase = reward_phase(
        comparisons,
        heldout,
        steps=math.ceil(config.epochs * len(comparisons) / config.batch_size),
        batch_size=config.batch_size,
        pad_id=model.config.pad_token_id,
        microbatch_tokens=config.microbatch_tokens,
        margin=config.margin,
        centering_coef=config.centering_coef,
    )
    settings = engine_settings(config, steps=phase.steps, learning_rate=config.learning_rate, dtype=params.model.dtype, seed=params.seed)
    add_adapters(model, config.lora, seed=params.seed)
    engine = TrainEngine(ScalarModule(model), settings)
    train_phase(engine, phase, checkpoints=CheckpointStore(stage.scratch / "reward"), **stage.loop(config, COLUMNS, first_step=0))
    metrics = {"trained": True, "pairs": sum(len(c.pairs) for c in comparisons), "dropped_too_long": dropped, "steps": phase.steps}
    if phase.evaluate is not None:
        metrics |= evaluate(engine, phase.evaluate)
    return engine, metrics


def write_heldout_scores(stage: Stage, engine, encoder) -> int:
    """Score every validation and test pair into data/reward_heldout.parquet. Returns how many there are."""
    from rlhf_core.trainers.reward import score_heldout

    engine.eval()
    rows = []
    for split in ("validation", "test"):
        pairs = read_rows(PREPARED, "preference", split)
        sources = {row["id"]: row["source"] for row in pairs}
        comparisons, _ = encoder(pairs)
        if not comparisons:
            continue
        chosen, rejected = score_heldout(
            engine, comparisons, pad_id=engine.module.model.config.pad_token_id, microbatch_tokens=stage.params.reward.microbatch_tokens
        )
        positions = ((c, a, b, row_id) for c in comparisons for (a, b), row_id in zip(c.pairs, c.row_ids, strict=True))
        for (c, a, b, row_id), chosen_score, rejected_score in zip(positions, chosen.tolist(), rejected.tolist(), strict=True):
            rows.append((row_id, sources[row_id], split, chosen_score, rejected_score, len(c.sequences[a]), len(c.sequences[b])))
    write_heldout(rows)
    return len(rows)


def write_heldout(rows: list[tuple]) -> None:
    import pandas as pd

    REWARD_HELDOUT.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=list(HELDOUT_COLUMNS)).astype(HELDOUT_COLUMNS).to_parquet(REWARD_HELDOUT, index=False)


if __name__ == "__main__":
    main()
