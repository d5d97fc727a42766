"""Stage gate_reward: check the reward model, and language models that judge, before a policy is trained on them (docs/gate.md).

The verdicts are always in metrics/gate.json. A rejection ends the stage with an error after the file is written. Without a reward model
(`reward.enabled: false`) the file says that none is needed, and has the judges' verdicts alone.
"""

from __future__ import annotations

import logging
from functools import partial

from rlhf_core.gate.checks import explain
from rlhf_core.gate.llm_judges import JudgeUnavailable, judge_judges
from rlhf_core.gate.looks import write_result
from rlhf_core.gate.run import judge_model
from rlhf_core.gate.verdict import unjudged, with_registry
from rlhf_core.paths import GATE_METRICS, PREPARED, REWARD_HELDOUT, REWARD_MODEL, TOKENIZER
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.stage.files import source_judges, write_json
from rlhf_core.stage.run import JobCrashed, Stage, StageRefused, no_arguments
from rlhf_core.stage.training import infer

NOT_NEEDED = "not needed: no reward model was trained, since reward.enabled is false."

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("gate_reward", resumable=False) as stage:
        config, needed = stage.params.gate, stage.params.reward.enabled
        where = {"heldout": REWARD_HELDOUT, "prepared": PREPARED, "reward_model": REWARD_MODEL, "infer": partial(infer, stage)}
        try:
            judged = judge_model(stage.params, source_judges=source_judges(), **where) if needed else None
            gate = judged or unjudged(config, NOT_NEEDED, needed=False)
        except (ValueError, FileNotFoundError) as error:  # scores, promoted models or external pairs can't be read
            gate = unjudged(config, str(error), needed=True)
        look = gate["look"]
        model = look["model"] if look is not None else dvc_md5(REWARD_MODEL) if needed and config.rolled_back else ""
        try:
            gate["llm_judges"] = judge_judges(stage.params, prepared=PREPARED, tokenizer=TOKENIZER)
        except JudgeUnavailable as error:
            raise JobCrashed(str(error)) from error
        gate = with_registry(gate, config, model)
        if look is not None:
            write_result(look["split"], look["model"], **{key: gate[key] for key in ("passed", "accuracy", "confidence")})
        write_json(GATE_METRICS, gate)
        for line in explain(gate):
            log.info("gate_reward: %s", line)
        rejected = [gate["message"]] * (needed and not gate["passed"])
        rejected += [f"judge {judge['key']}: {judge['message']}" for judge in gate["llm_judges"] if not judge["passed"]]
        if rejected and gate["override"] is None:
            raise StageRefused("\n".join(rejected))


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
