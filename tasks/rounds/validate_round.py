"""Stage validate_round of a round of iterative DPO: its pairs must satisfy the expectations that prepared data must satisfy.

    python -m tasks.rounds.validate_round <number of the round>

The verdict is in rounds/<n>/metrics/validation.json and the stage ends well either way: a round whose data is refused is a finished
round, which trains nothing and keeps the policy before it. The flow says so in its state.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf_core.data.schema import open_rows
from rlhf_core.data.validation.measures import load_prepared_tokenizer
from rlhf_core.paths import PREPARED, TOKENIZER, round_folder
from rlhf_core.stage.files import write_json
from rlhf_core.stage.run import Stage, round_argument

if TYPE_CHECKING:
    from rlhf_core.data.validation.validate import Finding

# The round's pairs, and the prompts beside them: a pair whose prompt is held out would be a leak.
NEEDED = (("preference", "train"), ("prompt", "promotion"))

ADVICE = {
    "length_bias": "DPO would learn length, since the scorers prefer it: take scorers that don't, or raise validation.max_length_bias "
    "knowingly, in another series"
}

log = logging.getLogger("rlhf")


def main() -> None:
    number = round_argument(__doc__)
    with Stage("validate_round", resumable=False, round_number=number) as stage:
        tables = {
            "preference": open_rows(round_folder(number) / "data" / "preference.parquet"),
            "prompt": open_rows(PREPARED / "prompt.parquet"),
        }
        logging.getLogger("great_expectations").setLevel(logging.WARNING)
        from rlhf_core.data.validation.validate import summary, validate  # takes seconds

        params = stage.params
        config = params.validation.model_copy(update={"min_pairs": params.iterative.min_pairs})
        tokenizer = load_prepared_tokenizer(TOKENIZER, trust_remote_code=params.model.trust_remote_code)
        findings = validate(tables, tokenizer, config, max_length=params.model.max_length, needed=NEEDED)
        verdict = summary(findings, tables, max_reported_ids=config.max_reported_ids)
        messages = [in_rounds(finding).message() for finding in findings if not finding.passed]
        write_json(round_folder(number) / "metrics" / "validation.json", {**verdict, "messages": messages})
        for message in messages:
            log.warning("validate_round@%d: %s", number, message)
        if messages:
            log.warning("validate_round@%d: nothing is trained on this data; the round keeps the policy before it", number)
        else:
            log.info("%d expectations met by %d pairs", len(findings), tables["preference"].metadata.num_rows)


def in_rounds(finding: Finding) -> Finding:
    """With advice for pairs of the policy's own samples, on which no reward model is trained."""
    return replace(finding, advice=ADVICE[finding.name]) if finding.name in ADVICE else finding


if __name__ == "__main__":
    main()
