"""Stage train_policy with method rl: online RL by a Ray job, on a configured cluster or a local Ray head."""

from __future__ import annotations

import shutil

from rlhf_core.paths import METRICS, PLOTS, POLICY_MODEL
from rlhf_core.stage.files import publish_model, read_json, write_json
from rlhf_core.stage.rollouts import publish_rollouts
from rlhf_core.stage.run import Stage, no_arguments
from rlhf_core.trainers.rl.submit import check_rewards, final_figures, run_rl, uses_chain_reward_model


def main() -> None:
    with Stage("train_policy") as stage:
        rl, gate = stage.params.rl, read_json(METRICS / "gate.json")
        override = check_rewards(rl, gate)
        output = stage.scratch / "policy"
        rl = run_rl(stage, output)
        figures = final_figures(stage.scratch, rl)
        facts = stage.card("policy", f"rl ({rl.title})", figures, gate=gate if uses_chain_reward_model(rl) else None)
        publish_model(output, POLICY_MODEL, facts)
        publish_rollouts(stage.scratch)
        PLOTS.mkdir(exist_ok=True)
        shutil.copy(stage.scratch / "curves.csv", PLOTS / "train_policy.csv")
        write_json(METRICS / "train_policy.json", figures | {"override": override})


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
