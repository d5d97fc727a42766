"""Evaluates the policy against the SFT model on held-out prompts, for stage evaluate."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import Params
from rlhf_core.data.hashing import conversation_text
from rlhf_core.data.pictures import previews
from rlhf_core.data.schema import Message
from rlhf_core.engines.rollout.requests import request_seeds
from rlhf_core.evaluation.answers import (
    MODES,
    Answers,
    EvaluatedModel,
    heldout_prompts,
    load_policy,
    open_environments,
    response_logprobs,
    sample_answers,
    score_answers,
    with_prompts_of,
)
from rlhf_core.evaluation.figures import Answer, by_prompt, differences, summarize, turns_before, win_rate
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.models.vision import sight
from rlhf_core.paths import PREPARED
from rlhf_core.sampling.scoring import LocalScorers
from rlhf_core.scorers.needs import try_services

if TYPE_CHECKING:
    from rlhf_core.stage.training import TrainRun

MAX_CONCURRENT_SEQUENCES = 256


def evaluate(
    run: TrainRun,
    rows: list[dict],
    folders: dict[str, Path],
    reward_model: Path,
    source_judges: dict[str, str],
    gate_texts: Collection[str],
) -> dict[str, Any]:
    """Runs on each rank. Returns `metrics`, and the rows of two tables, `samples` and `prompts`. For arguments see `answer_prompts`."""
    judged_by = {"reward_model": reward_model, "source_judges": source_judges}
    answers = answer_prompts(run.params, rows, folders, **judged_by, gate_texts=gate_texts)
    measured = measure(run.params, answers, folders, gate_texts=gate_texts)
    if run.params.evaluation.harness is not None:
        from rlhf_core.harness.run import run_harness

        measured["harness"] = run_harness(run.params, folders)
    return {
        "metrics": measured,
        "samples": sample_table(answers, run.params.evaluation.table_rows, PREPARED),
        "prompts": by_prompt(answers),
    }


def answer_prompts(
    params: Params,
    rows: list[dict],
    folders: dict[str, Path],
    *,
    reward_model: Path,
    source_judges: dict[str, str],
    gate_texts: Collection[str],
) -> Answers:
    """Answers of every model in every mode, scored and judged.

    Answers end at an end token or a string of `Params.evaluation_stop`. With rl.environment they are episodes.

    Args:
        rows: of the use prompt, held out.
        folders: model's name -> its folder, for "sft" and "policy".
        gate_texts: canonical texts of the gate's conversations.
    Raises:
        ValueError: a service that scores doesn't answer as it should.
    """
    try_services(params.evaluation_scorers[1])
    config = params.evaluation
    load_options = {"trust_remote_code": params.model.trust_remote_code, "vision": params.model.vision}
    tokenizers = {name: load_tokenizer(str(folder), **load_options) for name, folder in folders.items()}
    longest = params.model.max_length - config.max_new_tokens
    prompts = heldout_prompts(rows, tokenizers, longest=longest, count=config.prompts, seed=params.seed, gate_texts=gate_texts)
    models = {name: EvaluatedModel(folder, tokenizers[name], prompts[name]) for name, folder in folders.items()}
    samples = sample_answers(
        models,
        config,
        backend=params.evaluation_backend,
        model=params.model,
        max_concurrent_sequences=MAX_CONCURRENT_SEQUENCES,
        threads=params.cluster.threads,
        seed=params.seed,
        seeds=request_seeds(params.seed, 0, len(prompts["sft"])),
        stop=tuple(params.evaluation_stop),
        environments=open_environments(params, models),
        ranks_per_model=params.cluster.inference_ranks_per_model,
    )
    scorers = LocalScorers(params.evaluation_scorers[1], reward_model=reward_model, source_judges=source_judges, model=params.model)
    return score_answers(models, samples, scorers, source_judges)


def measure(params: Params, answers: Answers, folders: dict[str, Path], *, gate_texts: Collection[str]) -> dict[str, Any]:
    """Figures of each model, their win rate and differences, and the policy's KL from the SFT model in nats per response.

    The KL is estimated on the policy's answers. Each model sees a prompt as its own template renders it.
    """
    confidence = params.evaluation.confidence
    logprobs, divided = {}, {"ranks_per_model": params.cluster.inference_ranks_per_model}
    load_options = {"trust_remote_code": params.model.trust_remote_code, "vision": params.model.vision}
    tokenizer = load_tokenizer(str(folders["sft"]), **load_options)
    of_tokens = {"pad_id": tokenizer.pad_token_id, "sight": sight(tokenizer, PREPARED)}
    for name, folder in folders.items():
        module = load_policy(folder, params.model, **divided)
        rendered = [a for mode in MODES for a in with_prompts_of(answers[mode]["policy"], answers[mode][name])]
        logprob_options = {"temperature": params.evaluation.temperature, **of_tokens, **divided}
        found = response_logprobs(module, rendered, **logprob_options)  # of all modes together, which have the prompts in common
        logprobs |= {(name, mode): part for mode, part in zip(MODES, found.chunk(len(MODES)), strict=True)}
        del module  # before the next one is loaded
    return {
        **{mode: {name: summarize(a, confidence=confidence) for name, a in by_model.items()} for mode, by_model in answers.items()},
        "win_rate": {mode: win_rate(a["policy"], a["sft"], confidence=confidence) for mode, a in answers.items()},
        "difference": {mode: differences(a["policy"], a["sft"], confidence=confidence) for mode, a in answers.items()},
        "kl": {mode: float((logprobs["policy", mode] - logprobs["sft", mode]).mean()) for mode in MODES},
        "prompts_of_gate": sum(conversation_text(a.prompt.messages) in gate_texts for a in answers["greedy"]["policy"])
        if params.reward.enabled
        else 0,
        "judge": any(a.judgement is not None for a in answers["greedy"]["policy"]),
    }


def sample_table(answers: Answers, rows: int, prepared: Path) -> list[dict[str, Any]]:
    """Return the first `rows` prompts of each mode with both models' responses, scores and judgements; prompts with pictures have previews.

    Args:
        prepared: folder of the prepared data.
    """
    preview = previews(prepared)
    return [
        {
            "id": sft.prompt.id,
            "source": sft.prompt.source,
            "prompt": _written(sft.prompt.messages),
            "mode": mode,
            "sft_response": _written_answer(sft),
            "policy_response": _written_answer(policy),
            "sft_score": sft.score,
            "policy_score": policy.score,
            "sft_judge_ok": sft.judgement.ok if sft.judgement else None,
            "policy_judge_ok": policy.judgement.ok if policy.judgement else None,
            "sft_steps": _written_steps(sft),
            "policy_steps": _written_steps(policy),
            **({} if preview is None else {"pictures": preview(sft.prompt.messages)}),
        }
        for mode, by_model in answers.items()
        for sft, policy in list(zip(by_model["sft"], by_model["policy"], strict=True))[:rows]
    ]


def _written(messages: Sequence[Message]) -> str:
    return "\n".join(f"{m['role']}: {m['content']}" for m in messages)


def _written_steps(answer: Answer) -> str | None:
    """Return what process reward models say of the answer's steps; None without one."""
    names = answer.steps if len(answer.steps) > 1 else dict.fromkeys(answer.steps, "")
    found = [" ".join([*([f"{name}:"] if names[name] else []), *(f"{p:.2f}" for p in of)]) for name, of in answer.steps.items()]
    return "; ".join(found) or None


def _written_answer(answer: Answer) -> str:
    """Return the answer's text; of several turns, all that follows the prompt."""
    if answer.dialogue is None:
        return answer.text
    return _written([*turns_before(answer), {"role": "assistant", "content": answer.text}])
