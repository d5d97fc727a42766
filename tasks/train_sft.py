"""Stage train_sft: the model that imitates the demonstrations, and where every later model starts."""

from __future__ import annotations

import copy
import shutil

from rlhf_core.data.schema import read_rows
from rlhf_core.paths import METRICS, PLOTS, PREPARED, SFT_MODEL, TOKENIZER
from rlhf_core.stage.files import publish_model, write_json
from rlhf_core.stage.run import Stage, no_arguments

COLUMNS = ("step", "phase", "loss", "heldout_loss", "learning_rate", "grad_norm")


def main() -> None:
    with Stage("train_sft") as stage:
        from rlhf_core.engines.deepspeed_engine import join_world
        from rlhf_core.models.build import new_language_model, save_model
        from rlhf_core.models.tokenizer import load_tokenizer

        stage.use_threads()
        join_world()
        tokenizer = load_tokenizer(str(TOKENIZER), trust_remote_code=stage.params.model.trust_remote_code)
        model = new_language_model(stage.params.model, tokenizer, seed=stage.params.seed)
        first_step = pretrain(stage, model, tokenizer)
        engine, metrics = finetune(stage, model, tokenizer, first_step=first_step)
        aside = stage.scratch / "model"
        save_model(model, engine.state_dict(), tokenizer, aside)
        publish_model(aside, SFT_MODEL, stage.card("sft", "supervised fine-tuning", metrics))
        PLOTS.mkdir(exist_ok=True)
        shutil.copy(stage.scratch / "curves.csv", PLOTS / "train_sft.csv")
        write_json(METRICS / "train_sft.json", metrics)


def pretrain(stage: Stage, model, tokenizer) -> int:
    """A short pretraining of a model that starts from nothing, where the data has plain text. Returns the number of steps."""
    from rlhf_core.engines.deepspeed_engine import TrainEngine
    from rlhf_core.models.forward import PolicyModule
    from rlhf_core.trainers.demonstrations import encode_texts
    from rlhf_core.trainers.sft import sft_phase
    from rlhf_core.trainers.supervised import engine_settings, train_phase

    params, config = stage.params, stage.params.sft
    if params.model.path is not None or not (PREPARED / "pretrain.parquet").exists() or config.pretrain.steps == 0:
        return 0
    examples, _ = encode_texts(read_rows(PREPARED, "pretrain", "train"), tokenizer, max_length=params.model.max_length)
    phase = sft_phase(
        "pretrain",
        examples,
        [],
        steps=config.pretrain.steps,
        batch_size=config.pretrain.batch_size,
        pad_id=tokenizer.pad_token_id,
        microbatch_tokens=config.microbatch_tokens,
    )
    settings = engine_settings(
        config, steps=phase.steps, learning_rate=config.pretrain.learning_rate, dtype=params.model.dtype, seed=params.seed
    )
    # An engine leaves its hooks on what it trained, so it gets a copy, and the model its weights.
    engine = TrainEngine(PolicyModule(copy.deepcopy(model)), settings)
    train_phase(engine, phase, stage.loop(config, COLUMNS, first_step=0))
    model.load_state_dict(engine.state_dict())
    return phase.steps


def finetune(stage: Stage, model, tokenizer, *, first_step: int):
    """SFT proper. Returns the engine and the stage's metrics."""
    from rlhf_core.engines.deepspeed_engine import TrainEngine
    from rlhf_core.models.forward import PolicyModule
    from rlhf_core.models.lora import add_adapters
    from rlhf_core.trainers.demonstrations import encode_demonstrations
    from rlhf_core.trainers.sft import sft_phase
    from rlhf_core.trainers.supervised import engine_settings, evaluate, train_phase

    params, config = stage.params, stage.params.sft
    how = {"max_length": params.model.max_length, "train_on": config.train_on, "train_on_thoughts": config.train_on_thoughts}
    train, dropped = encode_demonstrations(read_rows(PREPARED, "sft", "train"), tokenizer, **how)
    heldout, _ = encode_demonstrations(read_rows(PREPARED, "sft", "validation"), tokenizer, **how)
    phase = sft_phase(
        "sft",
        train,
        heldout,
        steps=config.steps,
        batch_size=config.batch_size,
        pad_id=tokenizer.pad_token_id,
        microbatch_tokens=config.microbatch_tokens,
    )
    settings = engine_settings(config, steps=phase.steps, learning_rate=config.learning_rate, dtype=params.model.dtype, seed=params.seed)
    parameters = sum(p.numel() for p in model.parameters())
    add_adapters(model, config.lora, seed=params.seed)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    engine = TrainEngine(PolicyModule(model), settings)
    train_phase(engine, phase, stage.loop(config, COLUMNS, first_step=first_step))
    metrics = {"demonstrations": len(train), "dropped_too_long": dropped, "parameters": parameters, "trained_parameters": trained}
    if phase.evaluate is not None:
        metrics |= evaluate(engine, phase.evaluate)
    return engine, metrics


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
