"""Stage train_round of a round of iterative DPO: DPO on the round's pairs; the round's policy is both start and reference.

    python -m tasks.rounds.train_round <number of the round>

Where the pairs were refused, nothing is trained, and rounds/<n>/policy holds a note that says why.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pyarrow.parquet as pq

from rlhf_core.paths import round_folder
from rlhf_core.rounds.pins import read_round
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
            from rlhf_core.engines.deepspeed_engine import join_world
            from rlhf_core.models.build import save_model
            from rlhf_core.trainers.preference.train import COLUMNS, PreferenceRun, train_on_pairs

            params = stage.params
            stage.use_threads()
            join_world()
            loop, start = stage.loop(params.dpo, COLUMNS, first_step=0), Path(entry.policy.path)
            run = PreferenceRun(start=start, steps=params.iterative.steps, model=params.model, scratch=stage.scratch, loop=loop)
            config = params.dpo.model_copy(update={"learning_rate": params.iterative.learning_rate})
            trained = train_on_pairs(pq.read_table(folder / "data" / "preference.parquet").to_pylist(), [], config, run)
            shutil.rmtree(aside, ignore_errors=True)
            save_model(trained.model, trained.engine.state_dict(), trained.tokenizer, aside)
            metrics = {"trained": True, **trained.metrics}
            publish_model(aside, folder / "policy", stage.card("policy", f"dpo, round {number} of iterative DPO", metrics))
        else:
            metrics = {"trained": False, "reason": "the round's pairs were refused"}
            write_json(aside / "not_trained.json", metrics)
            (stage.scratch / "curves.csv").write_text("step,loss\n")
            log.info("train_round@%d: nothing to train: %s", number, metrics["reason"])
            publish(aside, folder / "policy")
        publish(stage.scratch / "curves.csv", folder / "plots" / "train.csv")
        write_json(folder / "metrics" / "train.json", metrics)


if __name__ == "__main__":
    main()
