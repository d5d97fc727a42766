"""Stage train_reward: a scalar head on the SFT model, and its scores of the held-out pairs, which the gate judges by.

With `reward.enabled: false` there is no reward model, and each output of the stage says so.
"""

from __future__ import annotations

from functools import partial

from rlhf_core.data.schema import read_rows
from rlhf_core.paths import CURVES, PLOTS, PREPARED, REWARD_HELDOUT, REWARD_MODEL, SFT_MODEL, STAGE_METRICS
from rlhf_core.stage.files import publish, write_json
from rlhf_core.stage.run import Stage, no_arguments, publish_training

NOT_TRAINED = {"trained": False, "reason": "reward.enabled is false"}


def main() -> None:
    with Stage("train_reward") as stage:
        if stage.params.reward.enabled:
            train_members(stage)
        else:
            write_nothing(stage)


def train_members(stage: Stage) -> None:
    from rlhf_core.engines.deepspeed_engine import join_world
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.trainers.ensemble import COLUMNS, train_ensemble

    params = stage.params
    stage.use_threads()
    join_world()
    tokenizer = load_tokenizer(str(SFT_MODEL), trust_remote_code=params.model.trust_remote_code)
    metrics, heldout = train_ensemble(
        SFT_MODEL,
        lambda split: read_rows(PREPARED, "preference", split),
        tokenizer,
        params.reward,
        stage.scratch / "model",
        model=params.model,
        seed=params.seed,
        loop=partial(stage.loop, params.reward, COLUMNS),
    )
    REWARD_HELDOUT.parent.mkdir(parents=True, exist_ok=True)
    heldout.to_parquet(REWARD_HELDOUT, index=False)
    publish_training(stage, stage.scratch / "model", REWARD_MODEL, stage.card("reward", "Bradley-Terry on pairs", metrics), metrics)


def write_nothing(stage: Stage) -> None:
    """Outputs without a model: DVC and later stages find every file, and none that could be taken for a model."""
    from rlhf_core.trainers.ensemble import COLUMNS, as_heldout_table

    write_json(stage.scratch / "model" / "not_trained.json", NOT_TRAINED)
    publish(stage.scratch / "model", REWARD_MODEL)
    PLOTS.mkdir(exist_ok=True)
    CURVES["train_reward"].write_text(",".join(COLUMNS) + "\n")
    as_heldout_table([]).to_parquet(REWARD_HELDOUT, index=False)
    write_json(STAGE_METRICS["train_reward"], NOT_TRAINED)


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
