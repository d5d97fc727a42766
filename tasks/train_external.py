"""Stage train_policy with method external: a policy that was made elsewhere becomes models/policy, with its own weights."""

from __future__ import annotations

from rlhf_core.paths import SFT_MODEL
from rlhf_core.stage.run import Stage, no_arguments, publish_policy

COLUMNS = ("step", "loss")  # of curves without rows


def main() -> None:
    with Stage("train_policy", resumable=False) as stage:
        from rlhf_core.models.build import save_model
        from rlhf_core.models.given import check_same_architecture, config_of, load_policy_from_elsewhere, tokenizer_of_policy
        from rlhf_core.models.tokenizer import load_tokenizer

        external, config = stage.params.external, stage.params.model
        own = load_tokenizer(str(SFT_MODEL), trust_remote_code=config.trust_remote_code)
        tokenizer = tokenizer_of_policy(external.path, own, config, own_template=external.own_template)
        model = load_policy_from_elsewhere(external.path, config)
        check_same_architecture(model.config, config_of(SFT_MODEL, config))
        save_model(model, model.state_dict(), tokenizer, stage.scratch / "model")
        publish_policy(stage, {"method": "external", "parameters": model.num_parameters()}, untrained=COLUMNS)


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
