"""Stage check_model: train and sample from a small copy of the configured model before the real training.

The stage also loads scorer functions and the tasks of evaluation.harness, tries services that score and the sandbox of programs, checks
that there are labels for the evaluation's scorers, and checks what is known of the RL job: its number of steps, GPUs, the engines'
division, and how weights travel.

A model with wrong computations is refused within seconds, before SFT, reward model and gate. Numerical differences vary between machines
and are in reports/check_model.json, outside DVC; verdicts are in metrics/check_model.json. train_sft depends on
checks/model.json, which is the same for every engine, so a change of the engine doesn't rerun SFT.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import asdict
from functools import partial

from rlhf_core.data.schema import read_rows
from rlhf_core.paths import CHECK_MODEL_FIGURES, MODEL_ACCEPTED, PREPARED, STAGE_METRICS, TOKENIZER
from rlhf_core.stage.files import has_labels, write_json
from rlhf_core.stage.run import Stage, StageRefused, no_arguments

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("check_model", resumable=False) as stage:
        import torch

        from rlhf_core.agents.environment import check_environment
        from rlhf_core.model_check.check import check_build, check_rl_job, message, run_trials, scorers, title, verdict
        from rlhf_core.sampling.prompts import with_steps
        from rlhf_core.scorers.code.cases import check_tests
        from rlhf_core.scorers.needs import check_labels, try_services
        from rlhf_core.scorers.text import TextScorers

        params = stage.params
        tried = [scorer for scorer in scorers(params) if scorer.kind in ("function", "code")]
        TextScorers(0, tried, {})  # loads and checks each function, and runs a program in the sandbox
        for scorer in tried:
            if scorer.kind == "code":
                check_tests(scorer.name, (row["label"] for row in read_rows(PREPARED, "prompt", "train")))
        if params.rl.environment is not None:
            row = read_rows(PREPARED, "prompt", "train")[0]
            check_environment(params.rl.environment, TOKENIZER, params.model, row=row)
        check_labels(params.evaluation_scorers[1], partial(has_labels, "test"))
        services = try_services(scorers(params))
        is_rl, gpus = params.alignment.method == "rl", torch.cuda.device_count()
        if is_rl:
            check_rl_job(params, gpus)
            with_steps(params, TOKENIZER)  # refuses what doesn't fit the number of steps that rl.epochs make
        stage.use_threads()
        if params.evaluation.harness is not None:
            from rlhf_core.harness.tasks import try_tasks

            try_tasks(params, TOKENIZER)
        name, findings = run_trials(params, TOKENIZER, stage.scratch / "trial")
        shutil.rmtree(stage.scratch / "trial", ignore_errors=True)
        write_json(CHECK_MODEL_FIGURES, {"model": name, "findings": [asdict(finding) for finding in findings]})
        told = {"services": services} if services else {}
        write_json(STAGE_METRICS["check_model"], {"model": name, "checks": {f.column: verdict(f) for f in findings}, **told})
        for finding in findings:
            difference = "" if finding.difference is None else f", {finding.difference:.1g} apart at most"
            log.info("%s: %s%s", title(finding), verdict(finding), difference)
        if refused := [message(name, finding, params) for finding in findings if finding.refusal is not None]:
            raise StageRefused("\n".join(refused))
        if is_rl:
            check_build(params, gpus)
        write_json(MODEL_ACCEPTED, {"model": name, "accepted": True})


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
