"""Stage train_round of a round of iterative DPO: train by DPO on the round's pairs; the round's policy is both start and reference.

    python -m tasks.rounds.train_round <number of the round>

If the pairs were refused, nothing is trained, and rounds/<n>/policy holds a note with the reason.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rlhf_core.paths import round_folder
from rlhf_core.rounds.pins import read_round
from rlhf_core.stage.files import publish, publish_model, read_json, write_json
from rlhf_core.stage.run import Stage, round_argument
from rlhf_core.stage.training import TrainRun, train

log = logging.getLogger("rlhf")


def main() -> None:
    number = round_argument(__doc__)
    folder = round_folder(number)
    with Stage("train_round", round_number=number) as stage:
        entry = read_round(number)
        entry.check(number)
        aside = stage.scratch / "model"
        if read_json(folder / "metrics" / "validation.json")["passed"]:
            metrics = {"trained": True, **train(stage, stage.params.dpo, train_round, folder, Path(entry.policy.path))}
            publish_model(aside, folder / "policy", stage.card("policy", f"dpo, round {number} of iterative DPO", metrics))
        else:
            metrics = {"trained": False, "reason": "the round's pairs were refused"}
            write_json(aside / "not_trained.json", metrics)
            (stage.scratch / "curves.csv").write_text("step,loss\n")
            log.info("train_round@%d: nothing to train: %s", number, metrics["reason"])
            publish(aside, folder / "policy")
        publish(stage.scratch / "curves.csv", folder / "plots" / "train.csv")
        write_json(folder / "metrics" / "train.json", metrics)


def train_round(run: TrainRun, folder: Path, start: Path) -> dict[str, Any]:
    """Train by DPO on the pairs in a round's folder. Every rank calls this."""
    from rlhf_core.trainers.preference.train import COLUMNS, PreferenceRun, train_on_pairs
    from rlhf_core.trainers.supervised.loop import hold_out, train_loop

    params = run.params
    own = {key: getattr(params.iterative, key) for key in ("epochs", "steps", "learning_rate")}
    config = params.dpo.model_copy(update=own)
    loop = train_loop(run, params.dpo, COLUMNS, first_step=0)
    preference = PreferenceRun(start=start, model=params.model, scratch=run.scratch, loop=loop)
    rows = pq.read_table(folder / "data" / "preference.parquet").to_pylist()
    pairs, heldout = hold_out(rows) if config.keep_best else (rows, [])
    trained = train_on_pairs(pairs, heldout, config, preference)
    run.save_model(trained.model, trained.engine.state_dict(), trained.tokenizer)
    return trained.metrics


if __name__ == "__main__":
    main()
