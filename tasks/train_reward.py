"""Stage train_reward: train the SFT model with a scalar head on preference pairs, and score the held-out pairs for the gate.

With `reward.path` a ready-made model takes its place and scores the pairs. With `reward.enabled: false` there is no model, and the outputs
have the reason.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlhf_core.data.heldout import as_heldout_table, as_step_table
from rlhf_core.data.schema import read_rows
from rlhf_core.paths import PREPARED, REWARD_HELDOUT, REWARD_MODEL, SFT_MODEL, STAGE_METRICS
from rlhf_core.stage.files import publish, write_json
from rlhf_core.stage.run import Stage, no_arguments, publish_training, write_curves
from rlhf_core.stage.training import TrainRun, infer, train

COLUMNS = ("step", "phase", "loss", "accuracy", "heldout_loss", "heldout_accuracy", "learning_rate", "grad_norm")  # of the curves
NOT_TRAINED = {"trained": False, "given": False, "reason": "reward.enabled is false"}
METHODS = {"preference": "Bradley-Terry on pairs", "stepwise": "cross-entropy on labelled steps"}
HELDOUT = "heldout.parquet"  # in the stage's scratch folder


def main() -> None:
    with Stage("train_reward") as stage:
        if stage.params.reward.is_trained:
            train_members(stage)
        elif stage.params.reward.enabled:
            take_given(stage)
        else:
            write_nothing(stage)


def train_members(stage: Stage) -> None:
    metrics = train(stage, stage.params.reward, train_on_rank)
    publish(stage.scratch / HELDOUT, REWARD_HELDOUT)
    card = stage.card("reward", METHODS[stage.params.reward.rows_use], metrics)
    publish_training(stage, stage.scratch / "model", REWARD_MODEL, card, metrics)


def train_on_rank(run: TrainRun) -> dict[str, Any]:
    """Train the reward model, with all members of an ensemble. Every rank calls this."""
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.models.vision import sight
    from rlhf_core.trainers.reward.ensemble import train_ensemble
    from rlhf_core.trainers.supervised.loop import train_loop

    params, model = run.params, run.params.model
    tokenizer = load_tokenizer(str(SFT_MODEL), trust_remote_code=model.trust_remote_code, vision=model.vision)
    metrics, heldout = train_ensemble(
        SFT_MODEL,
        lambda split: read_rows(PREPARED, params.reward.rows_use, split),
        tokenizer,
        params.reward,
        model=model,
        seed=params.seed,
        loop=partial(train_loop, run, params.reward, COLUMNS),
        save=run.save_model,
        sight=sight(tokenizer, PREPARED),
    )
    if heldout is not None:
        heldout.to_parquet(run.scratch / HELDOUT, index=False)
    return metrics


def take_given(stage: Stage) -> None:
    """Publish the model at `reward.path` as it is, so that a version of the registry keeps its hash; a card is added if it has none."""
    from rlhf_core.models.card import has_card, write_card
    from rlhf_core.scorers.reward.heldout import copy_ready_made, score_heldout_pairs, score_heldout_steps

    folder = stage.scratch / "model"
    copy_ready_made(stage.params.reward, folder)
    of_steps = stage.params.reward.step_separator is not None
    found = infer(stage, score_heldout_steps if of_steps else score_heldout_pairs, folder, PREPARED)
    (as_step_table if of_steps else as_heldout_table)(found["rows"]).to_parquet(stage.scratch / HELDOUT, index=False)
    counted = {"heldout_solutions" if of_steps else "heldout_pairs": len(found["rows"])}
    metrics = {"trained": False, "reason": "reward.path names a ready-made one", "given": True, **counted}
    if not has_card(folder):
        write_card(folder, stage.card("reward", "none", metrics))
    publish(folder, REWARD_MODEL)
    publish(stage.scratch / HELDOUT, REWARD_HELDOUT)
    write_curves(stage, COLUMNS)
    write_json(STAGE_METRICS["train_reward"], metrics | {"dropped_too_long": found["left_out"]})


def write_nothing(stage: Stage) -> None:
    """Write outputs without a model: DVC and later stages find every file, and none looks like a model."""
    write_json(stage.scratch / "model" / "not_trained.json", NOT_TRAINED)
    publish(stage.scratch / "model", REWARD_MODEL)
    write_curves(stage, COLUMNS)
    as_heldout_table([]).to_parquet(REWARD_HELDOUT, index=False)
    write_json(STAGE_METRICS["train_reward"], NOT_TRAINED)


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
