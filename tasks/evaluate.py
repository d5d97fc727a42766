"""Stage evaluate: compare the SFT model with the policy on prompts of the test split, greedy and sampled."""

from __future__ import annotations

from rlhf_core.data.hashing import conversation_text
from rlhf_core.data.schema import read_rows
from rlhf_core.paths import (
    EVALUATION_METRICS,
    EVALUATION_PROMPTS,
    EVALUATION_SAMPLES,
    INPUTS,
    POLICY_MODEL,
    PREPARED,
    REWARD_MODEL,
    SFT_MODEL,
)
from rlhf_core.stage.files import source_judges, write_json
from rlhf_core.stage.run import Stage, no_arguments
from rlhf_core.stage.training import infer

MODELS = {"sft": SFT_MODEL, "policy": POLICY_MODEL}
SPLIT = "test"


def main() -> None:
    with Stage("evaluate", resumable=False) as stage:
        import pandas as pd

        from rlhf_core.evaluation.policy import evaluate

        judged = [use for use in ("preference", "stepwise") if (PREPARED / f"{use}.parquet").exists()]
        gate_texts = {conversation_text(row["messages"]) for use in judged for row in read_rows(PREPARED, use, SPLIT)}
        found = infer(stage, evaluate, read_rows(PREPARED, "prompt", SPLIT), MODELS, REWARD_MODEL, source_judges(), gate_texts)
        pd.DataFrame(found["samples"]).to_parquet(EVALUATION_SAMPLES, index=False)
        prompts = pd.DataFrame(found["prompts"]).convert_dtypes()
        prompts.to_csv(EVALUATION_PROMPTS, index=False, float_format="%.6g", lineterminator="\n")
        if task_files := stage.inputs.params.get(f"{INPUTS}:harness"):
            found["metrics"]["harness"]["task_files"] = task_files["evaluation.harness.include_path"]["sha256"]
        write_json(EVALUATION_METRICS, found["metrics"] | {"split": SPLIT})


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
