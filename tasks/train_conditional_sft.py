"""Stage train_policy with method conditional_sft: SFT on the preference data's responses with their quality in the prompt.

The policy's own chat template asks for the wanted quality.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial

from rlhf_core.data.schema import read_rows
from rlhf_core.paths import GATE_METRICS, PREPARED, REWARD_MODEL, SFT_MODEL
from rlhf_core.stage.files import read_json
from rlhf_core.stage.run import Stage, check_gate, no_arguments, publish_policy
from rlhf_core.stage.training import infer, train

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("train_policy") as stage:
        params, config = stage.params, stage.params.conditional_sft
        gate = read_json(GATE_METRICS) if config.label_by == "scores" else None
        override = None if gate is None else check_gate(gate)
        from rlhf_core.models.tokenizer import load_tokenizer
        from rlhf_core.trainers.sft.conditional import asking_tokenizer, encode_with_levels, quality_levels, rated_responses
        from rlhf_core.trainers.sft.train import finetune

        stage.use_threads()
        tokenizer = load_tokenizer(str(SFT_MODEL), trust_remote_code=params.model.trust_remote_code)
        responses = {split: rated_responses(read_rows(PREPARED, "preference", split)) for split in ("train", "validation")}
        levels, borders = quality_levels(responses, config, REWARD_MODEL, infer=partial(infer, stage))
        options = {"max_length": params.model.max_length, "train_on_thoughts": params.sft.train_on_thoughts}
        examples, too_long = encode_with_levels(tokenizer, responses["train"], levels["train"], **options)
        heldout, _ = encode_with_levels(tokenizer, responses["validation"], levels["validation"], **options)
        counts = Counter(levels["train"])
        per_level = {str(level): counts[level] for level in range(config.levels)}
        log.info("train_policy: responses per quality level %s, without one %d", per_level, counts[None])
        asking = asking_tokenizer(tokenizer, levels=config.levels, wanted=config.wanted)
        figures = train(stage, config, finetune, SFT_MODEL, examples, heldout, config, asking)
        made = {"responses": len(examples), "per_level": per_level, "without_level": counts[None], "dropped_too_long": too_long}
        made |= {"loss": stage.recent_mean("loss"), **figures, "override": override}
        publish_policy(stage, {"method": "conditional_sft", "borders": borders, **made}, gate=gate)


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
