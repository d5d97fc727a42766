"""Stage train_reward: a scalar head on the SFT model, and its scores of the held-out pairs for the gate to judge.

An ensemble's members differ in the order of their pairs, in their adapters' first weights and, but for the first, in those of their head.
The first is in models/reward itself, so that whatever takes one model finds one; the others are beside its files, in member_1 and so on.
With `reward.enabled: false` there is no reward model; the stage then writes that, in the place of all that it makes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
import shutil
from collections.abc import Iterator

from rlhf_core.data.hashing import conversation_text
from rlhf_core.data.schema import read_rows
from rlhf_core.paths import METRICS, PLOTS, PREPARED, REWARD_HELDOUT, REWARD_MODEL, SFT_MODEL
from rlhf_core.stage.files import publish, publish_model, write_json
from rlhf_core.stage.run import Stage, no_arguments

log = logging.getLogger("rlhf")

COLUMNS = ("step", "phase", "loss", "accuracy", "heldout_loss", "heldout_accuracy", "learning_rate", "grad_norm")
HELDOUT_COLUMNS = {
    "id": "str",
    "source": "str",
    "split": "str",
    "chosen_score": "float64",
    "rejected_score": "float64",
    "chosen_tokens": "int64",
    "rejected_tokens": "int64",
    "prompt": "str",
    "prompt_tokens": "int64",
    "chosen_std": "float64",
    "rejected_std": "float64",
}
MEMBER_SEEDS = 1_000_003  # apart, so that no member has the seed of another run's first
MEASURED = ("heldout_loss", "heldout_accuracy")  # of each member
NOT_TRAINED = {"trained": False, "reason": "reward.enabled is false"}


def main() -> None:
    with Stage("train_reward") as stage:
        if not stage.params.reward.enabled:
            write_nothing(stage)
            return
        from rlhf_core.engines.deepspeed_engine import join_world

        stage.use_threads()
        join_world()
        train_members(stage)


def train_members(stage: Stage) -> None:
    """All that the stage makes where there is a reward model."""
    from rlhf_core.engines.deepspeed_engine import release_memory
    from rlhf_core.models.build import save_model
    from rlhf_core.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(SFT_MODEL), trust_remote_code=stage.params.model.trust_remote_code)
    aside = stage.scratch / "model"
    metrics, scores = {}, []
    for member in range(stage.params.reward.ensemble):
        if member:
            engine = model = None  # the one before
            release_memory()
        model = new_member(stage, tokenizer, member)
        encoder = comparison_encoder(stage, model, tokenizer)
        engine, of_member = train(stage, model, encoder, member)
        metrics |= of_member if member == 0 else {f"{name}_member_{member}": of_member[name] for name in MEASURED if name in of_member}
        scores.append(score_splits(stage, engine, encoder))
        save_model(model, engine.state_dict(), tokenizer, aside / f"member_{member}" if member else aside)
    metrics["heldout_pairs"] = write_heldout_scores(scores, encoder, tokenizer)
    publish_model(aside, REWARD_MODEL, stage.card("reward", "Bradley-Terry on pairs", metrics))
    PLOTS.mkdir(exist_ok=True)
    shutil.copy(stage.scratch / "curves.csv", PLOTS / "train_reward.csv")
    write_json(METRICS / "train_reward.json", metrics)


def write_nothing(stage: Stage) -> None:
    """Outputs that say that there is no reward model: later stages and DVC find every file, and none that could be taken for one."""
    aside = stage.scratch / "model"
    write_json(aside / "not_trained.json", NOT_TRAINED)
    publish(aside, REWARD_MODEL)
    PLOTS.mkdir(exist_ok=True)
    (PLOTS / "train_reward.csv").write_text(",".join(COLUMNS) + "\n")
    write_heldout([])
    write_json(METRICS / "train_reward.json", NOT_TRAINED)


def comparison_encoder(stage: Stage, model, tokenizer):
    """From a split's rows of pairs to comparisons and the number of pairs that were too long; a common prompt is computed once if the
    model can.
    """
    from rlhf_core.engines.deepspeed_engine import device
    from rlhf_core.models.probe import shares_prefixes
    from rlhf_core.models.score_head import probe_score_head
    from rlhf_core.trainers.reward import encode_comparisons

    max_length = stage.params.model.max_length
    shares = probe_score_head(model).per_token and shares_prefixes(model, device=device(), max_length=max_length)
    if not shares:
        log.info("train_reward: prompts are computed for each response: prefix sharing takes a CPU and a model with scores of tokens")
    tokens = stage.params.reward.microbatch_tokens if shares else 0
    return functools.partial(encode_comparisons, tokenizer=tokenizer, max_length=max_length, max_shared_tokens=tokens)


def new_member(stage: Stage, tokenizer, member: int):
    """The model that a member of the ensemble starts as. All but the first have a head of their own seed in the place of zeros."""
    import torch

    from rlhf_core.models.build import new_scalar_model, scalar_head

    params = stage.params
    model = new_scalar_model(SFT_MODEL, tokenizer, trust_remote_code=params.model.trust_remote_code, training_dtype=params.model.dtype)
    if member:
        head = scalar_head(model).weight
        torch.nn.init.normal_(head, std=head.shape[1] ** -0.5, generator=torch.Generator().manual_seed(member_seed(stage, member)))
    return model


def member_seed(stage: Stage, member: int) -> int:
    return stage.params.seed + MEMBER_SEEDS * member


def train(stage: Stage, model, encoder, member: int):
    """Returns the engine and the member's metrics. Its steps in the curves follow those of the members before it."""
    from rlhf_core.engines.deepspeed_engine import TrainEngine
    from rlhf_core.models.forward import ScalarModule
    from rlhf_core.models.lora import add_adapters
    from rlhf_core.models.score_head import filler_id
    from rlhf_core.trainers.reward import reward_phase
    from rlhf_core.trainers.supervised import engine_settings, evaluate, train_phase

    params, config, seed = stage.params, stage.params.reward, member_seed(stage, member)
    comparisons, dropped = encoder(read_rows(PREPARED, "preference", "train"))
    heldout, _ = encoder(read_rows(PREPARED, "preference", "validation"))
    name = f"reward_member_{member}" if member else "reward"
    phase = reward_phase(
        comparisons,
        heldout,
        name=name,
        steps=math.ceil(config.epochs * len(comparisons) / config.batch_size),
        batch_size=config.batch_size,
        pad_id=filler_id(model),
        microbatch_tokens=config.microbatch_tokens,
        margin=config.margin,
        centering_coef=config.centering_coef,
    )
    settings = engine_settings(config, steps=phase.steps, learning_rate=config.learning_rate, dtype=params.model.dtype, seed=seed)
    add_adapters(model, config.lora, seed=seed)
    engine = TrainEngine(ScalarModule(model), settings)
    loop = stage.loop(config, COLUMNS, first_step=member * phase.steps)
    train_phase(engine, phase, dataclasses.replace(loop, seed=seed))
    metrics = {"trained": True, "pairs": sum(len(c.pairs) for c in comparisons), "dropped_too_long": dropped, "steps": phase.steps}
    if phase.evaluate is not None:
        metrics |= evaluate(engine, phase.evaluate)
    return engine, metrics


def heldout_comparisons(encoder) -> Iterator[tuple[str, list[dict], list]]:
    """Split, its rows, and what the encoder makes of them, where that is anything."""
    for split in ("validation", "test"):
        rows = read_rows(PREPARED, "preference", split)
        comparisons, _ = encoder(rows)
        if comparisons:
            yield split, rows, comparisons


def score_splits(stage: Stage, engine, encoder) -> dict[str, tuple]:
    """Split -> one member's scores of its pairs, chosen and rejected."""
    from rlhf_core.models.score_head import filler_id
    from rlhf_core.trainers.reward import score_heldout

    engine.eval()
    how = {"pad_id": filler_id(engine.module.model), "microbatch_tokens": stage.params.reward.microbatch_tokens}
    return {split: score_heldout(engine, comparisons, **how) for split, _, comparisons in heldout_comparisons(encoder)}


def write_heldout_scores(members: list[dict[str, tuple]], encoder, tokenizer) -> int:
    """Every validation and test pair with the members' mean scores into data/reward_heldout.parquet. Returns how many there are.

    Args:
        members: of each what `score_splits` gave.
    """
    import torch

    from rlhf_core.models.tokenizer import encode_prompt
    from rlhf_core.scorers.members import combine_members

    written = []
    for split, rows, comparisons in heldout_comparisons(encoder):
        by_id = {row["id"]: row for row in rows}
        sides = (torch.stack([scores[split][side] for scores in members], 1) for side in (0, 1))
        (chosen, chosen_std), (rejected, rejected_std) = (combine_members(side, std_coef=0.0) for side in sides)
        scores = zip(*(values.tolist() for values in (chosen, rejected, chosen_std, rejected_std)), strict=True)
        for c in comparisons:
            for (a, b), row_id in zip(c.pairs, c.row_ids, strict=True):
                row = by_id[row_id]
                prompt = hashlib.sha256(conversation_text(row["messages"]).encode("utf-8", "surrogatepass")).hexdigest()[:16]
                of_chosen, of_rejected, *stds = next(scores)
                tokens = len(c.sequences[a]), len(c.sequences[b]), prompt, len(encode_prompt(tokenizer, row["messages"]))
                written.append((row_id, row["source"], split, of_chosen, of_rejected, *tokens, *stds))
    write_heldout(written)
    return len(written)


def write_heldout(rows: list[tuple]) -> None:
    import pandas as pd

    REWARD_HELDOUT.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=list(HELDOUT_COLUMNS)).astype(HELDOUT_COLUMNS).to_parquet(REWARD_HELDOUT, index=False)


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
