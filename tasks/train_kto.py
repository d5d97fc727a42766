"""Stage train_policy with method kto: train on single responses marked good or bad, without reward model and gate."""

from __future__ import annotations

from typing import Any

from rlhf_core.data.schema import read_rows
from rlhf_core.paths import PREPARED, SFT_MODEL
from rlhf_core.stage.run import Stage, no_arguments, publish_policy
from rlhf_core.stage.training import TrainRun, train


def main() -> None:
    with Stage("train_policy") as stage:
        publish_policy(stage, train(stage, stage.params.kto, train_kto))


def train_kto(run: TrainRun) -> dict[str, Any]:
    """Train by KTO on the prepared responses. Every rank calls this."""
    from rlhf_core.trainers.preference.train import COLUMNS, PreferenceRun, train_on_examples
    from rlhf_core.trainers.supervised.loop import train_loop

    params = run.params
    loop = train_loop(run, params.kto, COLUMNS, first_step=0)
    trained = train_on_examples(
        read_rows(PREPARED, "preference", "train"),
        read_rows(PREPARED, "preference", "validation"),
        params.kto,
        PreferenceRun(SFT_MODEL, params.model, run.scratch, loop, prepared=PREPARED),
    )
    run.save_model(trained.model, trained.engine.state_dict(), trained.tokenizer)
    return {"method": "kto", **trained.metrics}


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
