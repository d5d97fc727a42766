"""Stage train_policy with method rejection_sampling: SFT on the best of several sampled responses to each prompt, by the scorers."""

from __future__ import annotations

from functools import partial

from rlhf_core.config import ScorerConfig
from rlhf_core.data.schema import read_rows
from rlhf_core.paths import GATE_METRICS, PREPARED, REWARD_MODEL, SFT_MODEL
from rlhf_core.stage.files import has_labels, read_json, source_judges
from rlhf_core.stage.run import Stage, check_gate, check_gate_of_judges, no_arguments, publish_policy
from rlhf_core.stage.training import infer, train


def main() -> None:
    with Stage("train_policy") as stage:
        params, config = stage.params, stage.params.rejection_sampling
        override, gate = check_inputs(config.scorers)
        from rlhf_core.models.tokenizer import load_tokenizer
        from rlhf_core.trainers.sft.rejection_sampling import best_demonstrations, heldout_demonstrations, scored_responses
        from rlhf_core.trainers.sft.train import finetune
        from rlhf_core.trainers.supervised.loop import hold_out

        stage.use_threads()
        tokenizer = load_tokenizer(str(SFT_MODEL), trust_remote_code=params.model.trust_remote_code)
        groups, too_long = scored_responses(
            read_rows(PREPARED, "prompt", "train"),
            tokenizer,
            config,
            policy=SFT_MODEL,
            reward_model=REWARD_MODEL,
            source_judges=source_judges(),
            model=params.model,
            seed=params.seed,
            scratch=stage.scratch,
            infer=partial(infer, stage),
        )
        examples, metrics = best_demonstrations(groups, tokenizer, config)
        if config.keep_best:  # by what the policy is trained towards; the data's demonstrations only show how far it moves from them
            examples, heldout = hold_out(examples)
        else:
            rows = read_rows(PREPARED, "sft", "validation") if (PREPARED / "sft.parquet").exists() else []
            heldout = heldout_demonstrations(rows, tokenizer, params.sft, max_length=params.model.max_length)
        metrics |= train(stage, config, finetune, SFT_MODEL, examples, heldout, config, tokenizer)
        metrics["dropped"]["too_long"] = too_long
        publish_policy(stage, metrics | {"loss": stage.recent_mean("loss"), "override": override}, gate=gate)


def check_inputs(scorers: list[ScorerConfig]) -> tuple[str | None, dict | None]:
    """Refuse missing inputs of the scorers before anything expensive starts.

    Returns the reason of the gate's override, and gate.json, None if no scorer is the chain's own reward model.
    """
    from rlhf_core.scorers.needs import check_scorers, uses_own_reward_model

    gate = read_json(GATE_METRICS)
    override = check_gate_of_judges(gate, "rejection_sampling.scorers", scorers)
    if uses_own_reward_model(scorers):
        override = check_gate(gate) or override
    else:
        gate = None
    check_scorers(scorers, reward_model=REWARD_MODEL, source_judges=source_judges(), has_labels=has_labels)
    return override, gate


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
