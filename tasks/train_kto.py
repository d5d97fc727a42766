"""Stage train_policy with method kto: the policy learns from single responses marked good or bad; reward model and gate play no part."""

from __future__ import annotations

from rlhf_core.data.schema import read_rows
from rlhf_core.paths import PREPARED, SFT_MODEL
from rlhf_core.stage.run import Stage, no_arguments, publish_policy


def main() -> None:
    with Stage("train_policy") as stage:
        from rlhf_core.engines.deepspeed_engine import join_world
        from rlhf_core.trainers.preference.train import COLUMNS, PreferenceRun, train_on_examples

        params = stage.params
        stage.use_threads()
        join_world()
        loop = stage.loop(params.kto, COLUMNS, first_step=0)
        run = PreferenceRun(SFT_MODEL, params.kto.steps, params.model, stage.scratch, loop)
        rows = {split: read_rows(PREPARED, "preference", split) for split in ("train", "validation")}
        trained = train_on_examples(rows["train"], rows["validation"], params.kto, run)
        publish_policy(stage, trained.model, trained.engine.state_dict(), trained.tokenizer, {"method": "kto", **trained.metrics})


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
