"""Stage sample_round of a round of iterative DPO: sample responses of the round's policy, score them, and make pairs of them.

    python -m tasks.rounds.sample_round <number of the round>

Writes to rounds/<n>/data: preference.parquet has pairs in the canonical schema, and samples.parquet every response with its scores.
"""

from __future__ import annotations

from functools import partial

from rlhf_core.config import ScorerConfig
from rlhf_core.data.schema import read_rows
from rlhf_core.paths import GATE_METRICS, PREPARED, REWARD_MODEL, round_folder
from rlhf_core.rounds.data import check_promotion_rows, rows_of_round
from rlhf_core.rounds.pins import read_round
from rlhf_core.stage.files import publish, read_json, source_judges, write_json
from rlhf_core.stage.run import Stage, check_gate, check_gate_of_judges, round_argument
from rlhf_core.stage.training import infer


def main() -> None:
    number = round_argument(__doc__)
    folder = round_folder(number)
    with Stage("sample_round", round_number=number) as stage:
        params, judges = stage.params, source_judges()
        entry = read_round(number)
        entry.check(number)
        rows = rows_of_round(read_rows(PREPARED, "prompt", "train"), entry, number, params)
        override = check_inputs(params.iterative.scorers, rows, judges)
        from rlhf_core.models.tokenizer import load_tokenizer
        from rlhf_core.rounds.sample import promotion_prompts, sample_groups, write_data

        promotion = read_rows(PREPARED, "prompt", "promotion")  # for the round's comparison
        check_promotion_rows(promotion, params.iterative.promotion, judged=judges)
        tokenizer = load_tokenizer(entry.policy.path, trust_remote_code=params.model.trust_remote_code)
        promotion_prompts(promotion, tokenizer, params, number=number)
        stage.use_threads()
        groups, too_long = sample_groups(params, entry, rows, reward_model=REWARD_MODEL, source_judges=judges, infer=partial(infer, stage))
        aside = stage.scratch / "data"
        figures = write_data(aside, groups, min_margin=params.iterative.min_margin)
        publish(aside, folder / "data")
        figures |= {"prompts": len(rows), "dropped_too_long": too_long, "policy": entry.policy.path, "override": override}
        write_json(folder / "metrics" / "sample.json", figures)


def check_inputs(scorers: list[ScorerConfig], rows: list[dict], judges: dict[str, str]) -> str | None:
    """Refuse missing inputs of the scorers before anything expensive starts. Return the reason of the gate's override, or None."""
    from rlhf_core.scorers.needs import check_scorers, uses_own_reward_model

    uses_reward_model, uses_judge = uses_own_reward_model(scorers), any(scorer.is_rewarded_judge for scorer in scorers)
    gate = read_json(GATE_METRICS) if uses_reward_model or uses_judge else None
    override = check_gate(gate) if uses_reward_model else None
    override = (check_gate_of_judges(gate, "iterative.scorers", scorers) if uses_judge else None) or override
    has_labels = any(row["label"] is not None for row in rows)
    check_scorers(scorers, reward_model=REWARD_MODEL, source_judges=judges, has_labels=lambda: has_labels)
    return override


if __name__ == "__main__":
    main()
