"""Stage train_round of a round of iterative DPO: the round's policy learns from the round's pairs; start and reference are itself.

    python -m tasks.rounds.train_round <number of the round>

Where the pairs were refused nothing is trained, and the stage writes that, in the place of all that it makes.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pyarrow.parquet as pq

from rlhf_core.paths import round_folder
from rlhf_core.rounds.pins import Round, read_round
from rlhf_core.stage.files import publish, publish_model, read_json, write_json
from rlhf_core.stage.run import Stage, round_argument

log = logging.getLogger("rlhf")


def main() -> None:
    number = round_argument(__doc__)
    folder = round_folder(number)
    with Stage("train_round", round_number=number) as stage:
        entry = read_round(number)
        entry.check(number)
        aside = stage.scratch / "model"
        if read_json(folder / "metrics" / "validation.json")["passed"]:
            metrics = {"trained": True, **train(stage, entry, folder, aside)}
            publish_model(aside, folder / "policy", stage.card("policy", f"dpo, round {number} of iterative DPO", metrics))
        else:
            metrics = {"trained": False, "reason": "the round's pairs were refused"}
            write_json(aside / "not_trained.json", metrics)
            (stage.scratch / "curves.csv").write_text("step,loss\n")
            log.info("train_round@%d: nothing to train: %s", number, metrics["reason"])
            publish(aside, folder / "policy")
        publish(stage.scratch / "curves.csv", folder / "plots" / "train.csv")
        write_json(folder / "metrics" / "train.json", metrics)


def train(stage: Stage, entry: Round, folder: Path, output: Path) -> dict:
    """The model into `output`; returns the figures."""
    from rlhf_core.engines.deepspeed_engine import join_world
    from rlhf_core.models.build import save_model
    from rlhf_core.trainers.preference.train import COLUMNS, PreferenceRun, train_on_pairs

    params = stage.params
    stage.use_threads()
    join_world()
    run = PreferenceRun(
        start=Path(entry.policy.path),
        steps=params.iterative.steps,
        model=params.model,
        scratch=stage.scratch,
        loop=stage.loop(params.dpo, COLUMNS, first_step=0),
    )
    rows = pq.read_table(folder / "data" / "preference.parquet").to_pylist()
    config = params.dpo.model_copy(update={"learning_rate": params.iterative.learning_rate})
    trained = train_on_pairs(rows, [], config, run)
    shutil.rmtree(output, ignore_errors=True)
    save_model(trained.model, trained.engine.state_dict(), trained.tokenizer, output)
    return trained.metrics


if __name__ == "__main__":
    main()
