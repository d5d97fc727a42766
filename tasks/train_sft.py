"""Stage train_sft: fine-tuning on demonstrations. Every later model starts from the SFT model.

With `sft.enabled: false` nothing is trained: models/sft is the model at `model.path` with its own weights, the chain's tokenizer and its
chat template.
"""

from __future__ import annotations

import logging
from typing import Any

from rlhf_core.data.schema import read_rows
from rlhf_core.paths import PREPARED, SFT_MODEL, TOKENIZER
from rlhf_core.stage.run import Stage, no_arguments, publish_training
from rlhf_core.stage.training import TrainRun, train

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("train_sft") as stage:
        if stage.params.sft.enabled:
            metrics = train(stage, stage.params.sft, train_sft)
            publish_training(stage, stage.scratch / "model", SFT_MODEL, stage.card("sft", "supervised fine-tuning", metrics), metrics)
        else:
            save_given(stage)


def save_given(stage: Stage) -> None:
    from rlhf_core.models.build import save_model
    from rlhf_core.models.folder import locate_model
    from rlhf_core.models.given import load_as_given
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.trainers.sft.train import COLUMNS

    config = stage.params.model
    model = load_as_given(locate_model(config.path, config.revision), config)
    tokenizer = load_tokenizer(str(TOKENIZER), trust_remote_code=config.trust_remote_code, vision=config.vision)
    save_model(model, model.state_dict(), tokenizer, stage.scratch / "model")
    metrics = {"trained": False, "reason": "sft.enabled is false", "parameters": model.num_parameters()}
    log.info("train_sft: not needed, since sft.enabled is false; %s is the given model", SFT_MODEL)
    publish_training(stage, stage.scratch / "model", SFT_MODEL, stage.card("given", "none", metrics), metrics, untrained=COLUMNS)


def train_sft(run: TrainRun) -> dict[str, Any]:
    """Train by SFT on the prepared demonstrations. Every rank calls this."""
    from rlhf_core.engines.deepspeed.engine import release_memory
    from rlhf_core.models.build import new_language_model
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.models.vision import sight
    from rlhf_core.trainers.sft.train import COLUMNS, begin_demonstrations, pretrain, train_on_demonstrations
    from rlhf_core.trainers.supervised.loop import train_loop

    params, config = run.params, run.params.sft
    tokenizer = load_tokenizer(str(TOKENIZER), trust_remote_code=params.model.trust_remote_code, vision=params.model.vision)
    begun = [
        begin_demonstrations(read_rows(PREPARED, "sft", split), tokenizer, config, max_length=params.model.max_length)
        for split in ("train", "validation")
    ]
    model = new_language_model(params.model, tokenizer, seed=params.seed)
    first_step = 0
    if params.model.path is None and (PREPARED / "pretrain.parquet").exists() and config.pretrain.steps != 0:
        texts, loop = read_rows(PREPARED, "pretrain", "train"), train_loop(run, config, COLUMNS, first_step=0)
        weights, first_step = pretrain(model, tokenizer, texts, config, model_config=params.model, loop=loop)
        model = texts = None
        release_memory()
        model = new_language_model(params.model, tokenizer, seed=params.seed)
        model.load_state_dict(weights)
    engine, metrics = train_on_demonstrations(
        model,
        tokenizer,
        begun,
        config,
        loop=train_loop(run, config, COLUMNS, first_step=first_step),
        model_config=params.model,
        sight=sight(tokenizer, PREPARED),
    )
    run.save_model(model, engine.state_dict(), tokenizer)
    return metrics


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
