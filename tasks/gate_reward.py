"""Stage gate_reward: the reward model must earn its place before a policy is trained on it.

The verdict is always in metrics/gate.json. A rejection ends the stage with an error after the file is written. Where no reward model is
trained (`reward.enabled: false`), the file says that none had to pass. docs/gate.md says what is measured and how it is judged.
"""

from __future__ import annotations

import logging

from rlhf_core.gate.checks import explain
from rlhf_core.gate.looks import write_result
from rlhf_core.gate.run import judge_model, unjudged, with_registry
from rlhf_core.paths import GATE_METRICS, PREPARED, REWARD_HELDOUT, REWARD_MODEL
from rlhf_core.stage.files import source_judges, write_json
from rlhf_core.stage.run import Stage, StageFailed, no_arguments

NOT_NEEDED = "not needed: no reward model was trained, for reward.enabled is false."

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("gate_reward", resumable=False) as stage:
        config, needed = stage.params.gate, stage.params.reward.enabled
        where = {"heldout": REWARD_HELDOUT, "prepared": PREPARED, "reward_model": REWARD_MODEL, "scratch": stage.scratch}
        try:
            judged = judge_model(stage.params, source_judges=source_judges(), **where) if needed else None
            gate = judged or unjudged(config, NOT_NEEDED, needed=False)
        except (ValueError, FileNotFoundError) as error:  # nothing can be judged without scores, promoted models and external pairs
            gate = unjudged(config, str(error), needed=True)
        gate = with_registry(gate, config, REWARD_MODEL)
        if (look := gate["look"]) is not None:
            write_result(look["split"], look["model"], **{key: gate[key] for key in ("passed", "accuracy", "confidence")})
        write_json(GATE_METRICS, gate)
        for line in explain(gate):
            log.info("gate_reward: %s", line)
        if needed and not gate["passed"] and gate["override"] is None:
            raise StageFailed(gate["message"])


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
