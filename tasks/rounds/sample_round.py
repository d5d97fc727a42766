"""Stage sample_round of a round of iterative DPO: responses of the round's policy, their scores, and pairs of them.

    python -m tasks.rounds.sample_round <number of the round>

Writes rounds/<n>/data: preference.parquet, pairs in the canonical schema, and samples.parquet, every response with its scores.
"""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config import IterativeConfig
from rlhf_core.data.schema import read_rows, write_rows
from rlhf_core.paths import METRICS, PREPARED, REWARD_MODEL
from rlhf_core.rounds.pins import Round, prompts_hash, read_round, round_folder
from rlhf_core.stage.files import publish, read_json, source_judges, write_json
from rlhf_core.stage.run import Stage, StageStopped, check_gate, round_argument


def main() -> None:
    number = round_argument(__doc__)
    with Stage("sample_round", round_number=number) as stage:
        entry = read_round(number)
        entry.check(number)
        rows = prompts_of(entry, number, stage)
        judges = source_judges()
        override = check_inputs(stage.params.iterative, rows, judges)
        check_promotion(stage, entry, number, judges)
        groups, dropped = sample(stage, entry, rows, judges)
        aside = stage.scratch / "data"
        figures = write_data(aside, groups, stage.params.iterative.min_margin)
        publish(aside, round_folder(number) / "data")
        figures |= {"prompts": len(rows), "dropped_too_long": dropped, "policy": entry.policy.path, "override": override}
        write_json(round_folder(number) / "metrics" / "sample.json", figures)


def prompts_of(entry: Round, number: int, stage: Stage) -> list[dict]:
    """The rows of the round's prompts, in its order.

    Raises:
        ValueError: they aren't those that the round began with.
    """
    from rlhf_core.rounds.pool import prompts_of_round

    rows = {row["id"]: row for row in read_rows(PREPARED, "prompt", "train")}
    ids = prompts_of_round(rows, number, stage.params.iterative.sampling.prompts, seed=stage.params.seed)
    if prompts_hash(ids) != entry.prompts.sha256:
        raise ValueError(
            f"prompts: expected those that round {number} began with, sha256 {entry.prompts.sha256}, got {prompts_hash(ids)}; seed, "
            "iterative.sampling.prompts or data/prepared have changed: undo that, or begin another series"
        )
    return [rows[i] for i in ids]


def check_inputs(config: IterativeConfig, rows: list[dict], judges: dict[str, str]) -> str | None:
    """What labels and compares is there and fits; nothing expensive has started.

    Returns:
        As check_gate.
    Raises:
        StageFailed: the chain's own reward model is asked and did not pass its gate.
        ValueError: a scorer lacks what it needs.
    """
    from rlhf_core.scorers.needs import check_scorers, uses_own_reward_model

    override = check_gate(read_json(METRICS / "gate.json")) if uses_own_reward_model(config.scorers) else None
    check_scorers(
        config.scorers,
        reward_model=REWARD_MODEL,
        source_judges=judges,
        has_labels=lambda: any(row["label"] is not None for row in rows),
    )
    return override


def check_promotion(stage: Stage, entry: Round, number: int, judges: dict[str, str]) -> None:
    """The round can be compared when it is done: the promotion split has the prompts for it, and their judges if one decides.

    Raises:
        ValueError: it hasn't.
    """
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.rounds.pool import check_promotion_rows
    from rlhf_core.sampling.drawing import promotion_prompts

    params = stage.params
    tokenizer = load_tokenizer(entry.policy.path, trust_remote_code=params.model.trust_remote_code)
    longest = params.model.max_length - params.evaluation.max_new_tokens
    rows, count = read_rows(PREPARED, "prompt", "promotion"), params.iterative.promotion.prompts
    check_promotion_rows(rows, params.iterative.promotion, judged=judges)
    promotion_prompts(rows, tokenizer, longest=longest, count=count, seed=params.seed, number=number)


def sample(stage: Stage, entry: Round, rows: list[dict], judges: dict[str, str]):
    """Scored responses of each prompt that leaves room for one, and how many prompts don't."""
    from rlhf_core.models.tokenizer import load_tokenizer, stop_ids
    from rlhf_core.sampling.drawing import SamplingStopped, choose_prompts, sample_responses
    from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer

    params, config = stage.params, stage.params.iterative
    stage.use_threads()
    tokenizer = load_tokenizer(entry.policy.path, trust_remote_code=params.model.trust_remote_code)
    longest = params.model.max_length - config.sampling.max_new_tokens
    prompts = choose_prompts(rows, tokenizer, longest=longest, count=None, seed=params.seed)
    try:
        samples = sample_responses(
            entry.policy.path,
            prompts,
            config.sampling,
            model=params.model,
            threads=params.cluster.threads,
            seed=params.seed,
            draw=entry.prompts.first,  # differs from round to round, as the prompts do
            stop_requested=lambda: stage.stop_requested,
        )
    except SamplingStopped as stop:
        raise StageStopped from stop
    scorers = LocalScorers(config.scorers, reward_model=REWARD_MODEL, source_judges=judges, model=params.model)
    scorer = ResponseScorer(scorers, tokenizer, stops=stop_ids(tokenizer, entry.policy.path))
    return scorer.score_groups(prompts, samples), len(rows) - len(prompts)


def write_data(folder: Path, groups: list, min_margin: float) -> dict:
    """Pairs and samples as files; returns the stage's figures."""
    import pandas as pd

    from rlhf_core.rounds.pairs import Group, build_pairs

    pairs = build_pairs([Group(g[0].prompt.source, g[0].prompt.messages, g) for g in groups], min_margin=min_margin)
    write_rows(folder, "preference", pairs.rows)
    frame = pd.DataFrame(
        {
            "id": response.prompt.id,
            "source": response.prompt.source,
            "prompt": response.prompt.messages[-1]["content"],
            "response": response.text,
            "finished": response.finished,
            "score": response.score,
            **{f"score_{name}": value for name, value in response.components.items()},
            "used_as": {chosen: "chosen", rejected: "rejected"}.get(position, ""),
        }
        for group, chosen, rejected in zip(groups, pairs.chosen, pairs.rejected, strict=True)
        for position, response in enumerate(group)
    )
    frame.to_parquet(folder / "samples.parquet", index=False)
    score = {use: float(frame["score"][frame["used_as"] == use].mean()) for use in ("chosen", "rejected")}
    return {
        **pairs.counts,
        "responses": len(frame),
        "unscored_fraction": float(frame["score"].isna().mean()),
        "truncated_fraction": float((~frame["finished"]).mean()),
        "score_mean": float(frame["score"].mean()),
        **{f"score_{use}_mean": value for use, value in score.items()},
    }


if __name__ == "__main__":
    main()
