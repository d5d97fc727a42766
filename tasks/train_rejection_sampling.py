"""Stage train_policy: of several responses to each training prompt the best by the scorers, and SFT on those.

Source: RAFT, Dong et al. 2023, https://arxiv.org/abs/2304.06767; rejection sampling fine-tuning in Touvron et al. 2023,
https://arxiv.org/abs/2307.09288, section 3.2.3.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_core.data.schema import read_rows
from rlhf_core.paths import METRICS, PREPARED, REWARD_MODEL, SFT_MODEL
from rlhf_core.stage.files import has_labels, read_json, source_judges
from rlhf_core.stage.run import Stage, StageFailed, StageStopped, check_gate, no_arguments, publish_policy

log = logging.getLogger("rlhf")

SCORED_AT_ONCE = 1024  # prompts; between them the stage can be told to stop


def main() -> None:
    with Stage("train_policy") as stage:
        override = check_inputs(stage)
        from rlhf_core.models.tokenizer import load_tokenizer
        from rlhf_core.scorers.needs import uses_own_reward_model
        from rlhf_core.trainers.supervised import Interrupted

        stage.use_threads()
        tokenizer = load_tokenizer(str(SFT_MODEL), trust_remote_code=stage.params.model.trust_remote_code)
        groups, too_long = label(stage, tokenizer)
        try:
            trained, metrics = train(stage, groups, tokenizer)
        except Interrupted as stop:
            raise StageStopped from stop
        metrics["dropped"]["too_long"] = too_long
        metrics["override"] = override
        gate = read_json(METRICS / "gate.json") if uses_own_reward_model(stage.params.rejection_sampling.scorers) else None
        publish_policy(stage, trained.model, trained.engine.state_dict(), tokenizer, metrics, gate=gate)


def check_inputs(stage: Stage) -> str | None:
    """What the scorers need is there; nothing expensive has started.

    Returns:
        As check_gate.
    Raises:
        StageFailed: the chain's own reward model is asked and did not pass its gate.
        ValueError: a reward model's folder, a label or a function is missing.
    """
    from rlhf_core.scorers.needs import check_scorers, uses_own_reward_model

    scorers = stage.params.rejection_sampling.scorers
    override = check_gate(read_json(METRICS / "gate.json")) if uses_own_reward_model(scorers) else None
    check_scorers(scorers, reward_model=REWARD_MODEL, source_judges=source_judges(), has_labels=has_labels)
    return override


def label(stage: Stage, tokenizer) -> tuple[list, int]:
    """Every prompt's scored responses, and how many prompts are too long to leave room for one."""
    from rlhf_core.sampling.drawing import choose_prompts

    params, config = stage.params, stage.params.rejection_sampling.sampling
    rows = read_rows(PREPARED, "prompt", "train")
    longest = params.model.max_length - config.max_new_tokens
    fitting = choose_prompts(rows, tokenizer, longest=longest, count=None, seed=params.seed)
    prompts = fitting[: config.prompts]
    samples = as_samples(kept(stage.scratch / "samples.json", lambda: sample(stage, prompts)))
    scored = kept(stage.scratch / "scored.json", lambda: without_prompts(score(stage, prompts, samples, tokenizer)))
    return as_scored(scored, prompts), len(rows) - len(fitting)


def kept(path: Path, make: Callable[[], list]) -> list:
    """What an earlier run of this very work has made, or else made now, as JSON with dataclasses as objects; written aside and renamed."""
    if not path.exists():
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(make(), default=vars), encoding="utf-8")
        aside.replace(path)
    return json.loads(path.read_text(encoding="utf-8"))


def as_samples(groups: list[list[dict[str, Any]]]) -> list[list]:
    from rlhf_core.sampling.requests import Sample

    return [[Sample(**fields) for fields in group] for group in groups]


def without_prompts(groups: list[list]) -> list[list[dict[str, Any]]]:
    """Of scored responses all but their prompt, which is their group's."""
    return [[{name: value for name, value in vars(response).items() if name != "prompt"} for response in group] for group in groups]


def as_scored(groups: list[list[dict[str, Any]]], prompts: list) -> list[list]:
    from rlhf_core.sampling.scoring import ScoredResponse

    return [[ScoredResponse(prompt=prompt, **fields) for fields in group] for prompt, group in zip(prompts, groups, strict=True)]


def sample(stage: Stage, prompts: list) -> list[list]:
    from rlhf_core.sampling.drawing import SamplingStopped, sample_responses

    params, config = stage.params, stage.params.rejection_sampling.sampling
    log.info("train_policy: sampling %d responses to each of %d prompts", config.samples_per_prompt, len(prompts))
    try:
        return sample_responses(
            str(SFT_MODEL),
            prompts,
            config,
            model=params.model,
            threads=params.cluster.threads,
            seed=params.seed,
            stop_requested=lambda: stage.stop_requested,
        )
    except SamplingStopped as stop:
        raise StageStopped from stop


def score(stage: Stage, prompts: list, samples: list[list], tokenizer) -> list[list]:
    from rlhf_core.models.tokenizer import stop_ids
    from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer

    params = stage.params
    scorers = LocalScorers(params.rejection_sampling.scorers, reward_model=REWARD_MODEL, source_judges=source_judges(), model=params.model)
    scored: list[list] = []
    scorer = ResponseScorer(scorers, tokenizer, stops=stop_ids(tokenizer, SFT_MODEL))
    for start in range(0, len(prompts), SCORED_AT_ONCE):
        if stage.stop_requested:
            raise StageStopped
        part = slice(start, start + SCORED_AT_ONCE)
        scored += scorer.score_groups(prompts[part], samples[part])
    return scored


def train(stage: Stage, groups: list[list], tokenizer):
    """SFT on each prompt's best response. Returns what was trained and the stage's metrics."""
    from rlhf_core.engines.deepspeed_engine import join_world
    from rlhf_core.sampling.drawing import best_responses
    from rlhf_core.trainers.finetune import COLUMNS, finetune

    params, config = stage.params, stage.params.rejection_sampling
    best, dropped = best_responses(groups, min_score=config.min_score)
    log.info("train_policy: the best responses of %d prompts are kept, none of %s", len(best), dropped)
    if not best:
        raise StageFailed(f"rejection sampling: expected responses to train on, got none for {len(groups)} prompts: {dropped}")
    join_world()
    trained = finetune(
        SFT_MODEL,
        [as_demonstration(r, tokenizer) for r in best],
        heldout_demonstrations(stage, tokenizer),
        config,
        pad_id=tokenizer.pad_token_id,
        model=params.model,
        loop=stage.loop(config, COLUMNS, first_step=0),
    )
    counts = {"method": "rejection_sampling", "prompts": len(groups), "kept": len(best), "dropped": dropped}
    return trained, {**counts, **score_means(groups, best), "loss": stage.recent_mean("loss"), **trained.metrics}


def as_demonstration(response, tokenizer):
    """A finished response token by token as it was sampled, but for its last: whichever of the tokens that may end a response came, the one
    with which the template ends a turn is learned.
    """
    from rlhf_core.models.tokenizer import turn_end
    from rlhf_core.trainers.demonstrations import Demonstration

    prompt_ids = response.prompt.prompt_ids
    return Demonstration([*prompt_ids, *response.response_ids[:-1], turn_end(tokenizer).trained[-1]], len(prompt_ids))


def heldout_demonstrations(stage: Stage, tokenizer) -> list:
    """The validation split's, where the data has demonstrations, as SFT trains on them: how far the policy has gone from them."""
    from rlhf_core.trainers.demonstrations import encode_demonstrations

    if not (PREPARED / "sft.parquet").exists():
        return []
    sft = stage.params.sft
    how = {"max_length": stage.params.model.max_length, "train_on": sft.train_on, "train_on_thoughts": sft.train_on_thoughts}
    return encode_demonstrations(read_rows(PREPARED, "sft", "validation"), tokenizer, **how)[0]


def score_means(groups: list[list], best: list) -> dict[str, float]:
    """Means of the weighted sum and of each scorer, of all responses and of the best, over what could be scored."""
    import numpy as np

    def mean(scores: list[float]) -> float:
        known = np.array(scores)[np.isfinite(scores)]
        return float(known.mean()) if len(known) else float("nan")

    means = {}
    for prefix, responses in (("sampled_score", [r for group in groups for r in group]), ("best_score", best)):
        means[f"{prefix}_mean"] = mean([r.score for r in responses])
        means |= {f"{prefix}_{name}": mean([r.components[name] for r in responses]) for name in best[0].components}
    return means


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
