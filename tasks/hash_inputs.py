"""Stage hash_inputs: write the hashes of a run's external inputs to data/inputs.json, for DVC to track (rlhf_core/provenance/inputs.py).

DVC runs this stage every time. Stages that depend on a hash in its file rerun if that hash has changed.
"""

from __future__ import annotations

import logging
from pathlib import Path

from rlhf_core.provenance.inputs import INPUTS, changes_since, input_problems, read_inputs, summary
from rlhf_core.stage.files import write_json
from rlhf_core.stage.run import Stage, StageRefused, no_arguments

LOCK = Path("dvc.lock")

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("hash_inputs", resumable=False) as stage:
        if problems := input_problems(stage.params):
            raise StageRefused("\n".join(problems))
        inputs = read_inputs(stage.params)
        for line in changes_since(LOCK, inputs):
            log.info("%s", line)
        write_json(INPUTS, inputs)
        log.info("hash_inputs: %s", summary(inputs))


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
