"""Stage prepare_data: turn sources into canonical rows, their split and the tokenizer.

Writes data/prepared/<use>.parquet for the uses that have rows, data/prepared/slices.parquet where sources name columns for the
gate's slices, data/prepared/sources.json (origin and rows of each source), data/measured/<use>.parquet (what validate_data judges the
rows by), models/tokenizer/, metrics/prepare_data.json and plots/token_lengths.csv. The same parameters give the same bytes.
"""

from __future__ import annotations

import csv
import logging
import shutil

from rlhf_core.models.tokenizer import pretrained_tokenizer
from rlhf_core.models.vision import save_tokenizer
from rlhf_core.paths import MEASURED, METRICS, PLOTS, PREPARED, TOKENIZER
from rlhf_core.preparation.prepare import LENGTH_COLUMNS, check_judges, length_histograms, prepare
from rlhf_core.stage.files import publish, write_json
from rlhf_core.stage.run import Stage, no_arguments

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("prepare_data", resumable=False) as stage:
        params, (folder, measured, scratch) = stage.params, (stage.scratch / name for name in ("prepared", "measured", "sources"))
        for leftover in (folder, measured, scratch):
            shutil.rmtree(leftover, ignore_errors=True)
        check_judges(params.data)
        tokenizer, writer = pretrained_tokenizer(params.model), None
        if any(source.kind == "samples" for source in params.data.sources):
            from rlhf_core.models.folder import locate_model
            from rlhf_core.sampling.own_samples import ModelWriter

            writer = ModelWriter(locate_model(params.model.path, params.model.revision), tokenizer, params.model, seed=params.seed)
        prepared = prepare(
            params.data,
            params.model,
            folder,
            measured,
            scratch=scratch,
            seed=params.seed,
            tokenizer=tokenizer,
            writer=writer,
            max_dropped_fraction=params.validation.max_dropped_fraction,
            step_separator=params.reward.step_separator,
        )
        write_json(folder / "sources.json", prepared.sources())
        save_tokenizer(prepared.tokenizer, stage.scratch / "tokenizer")
        publish(folder, PREPARED)
        publish(measured, MEASURED)
        publish(stage.scratch / "tokenizer", TOKENIZER)
        write_json(METRICS / "prepare_data.json", prepared.metrics())
        PLOTS.mkdir(exist_ok=True)
        with (PLOTS / "token_lengths.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([LENGTH_COLUMNS, *length_histograms(prepared.lengths)])
        for line in prepared.accounts():
            log.info("%s", line)


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
