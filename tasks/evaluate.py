"""Stage evaluate: the SFT model against the policy on held-out prompts, greedy and sampled."""

from __future__ import annotations

from rlhf_core.data.schema import read_rows
from tasks.stage import (
    EVALUATION_SAMPLES,
    METRICS,
    POLICY_MODEL,
    PREPARED,
    REWARD_MODEL,
    SFT_MODEL,
    Stage,
    StageFailed,
    read_json,
    write_json,
)

MICROBATCH_TOKENS = 8192
MODES = ("greedy", "sampled")


def main() -> None:
    with Stage("evaluate", resumable=False) as stage:
        pad_id, answers = generate_all(stage)
        metrics = measure(stage, answers, pad_id)
        write_samples(answers, stage.params.evaluation.table_rows)
        write_json(METRICS / "evaluate.json", metrics)


def heldout_prompts(stage: Stage, tokenizer):
    """The first `evaluation.prompts` prompts of the test split, in a seeded order, that leave room for an answer."""
    from rlhf_core.data.batching import batch_indices
    from rlhf_core.models.tokenizer import encode_prompt
    from rlhf_core.types import Prompt

    params = stage.params
    rows = read_rows(PREPARED, "prompt", "test")
    longest = params.model.max_length - params.evaluation.max_new_tokens
    prompts = [Prompt(r["id"], r["source"], r["messages"], encode_prompt(tokenizer, r["messages"]), r["label"]) for r in rows]
    prompts = [p for p in prompts if len(p.prompt_ids) <= longest]
    if not prompts:
        raise StageFailed(
            f"evaluation: expected held-out prompts of at most {longest} tokens, got none of {len(rows)}; raise model.max_length"
        )
    order = batch_indices(0, batch_size=len(prompts), num_examples=len(prompts), seed=params.seed)
    return [prompts[i] for i in order[: params.evaluation.prompts]]


def generate_all(stage: Stage):
    """Every model's answers in every mode, scored and judged: {mode: {"sft": [...], "policy": [...]}}."""
    from rlhf_core.engines.vllm_engine import SamplingSettings, VllmEngine, request_seeds
    from rlhf_core.models.build import read_state_dict
    from rlhf_core.models.tokenizer import load_tokenizer

    params, config = stage.params, stage.params.evaluation
    tokenizer = load_tokenizer(str(SFT_MODEL), trust_remote_code=params.model.trust_remote_code)
    prompts = heldout_prompts(stage, tokenizer)
    engine = VllmEngine(
        str(SFT_MODEL),
        max_length=params.model.max_length,
        dtype=params.model.dtype,
        kv_cache_gib=1,
        max_concurrent_sequences=256,
        threads=params.cluster.threads,
        seed=params.seed,
        trust_remote_code=params.model.trust_remote_code,
        gpu_memory_fraction=config.gpu_memory_fraction,
    )
    seeds = request_seeds(params.seed, 0, len(prompts))
    samples: dict[str, dict[str, list]] = {mode: {} for mode in MODES}
    for name in ("sft", "policy"):
        if name == "policy":
            engine.load_weights(read_state_dict(POLICY_MODEL), version=1)
        for mode in MODES:
            settings = SamplingSettings(config.max_new_tokens, 0.0 if mode == "greedy" else config.temperature)
            groups = engine.generate([p.prompt_ids for p in prompts], seeds, settings, eos_id=tokenizer.eos_token_id, group_size=1)
            samples[mode][name] = [group[0] for group in groups]
    return tokenizer.pad_token_id, score_and_judge(stage, tokenizer, prompts, samples)


def score_and_judge(stage: Stage, tokenizer, prompts, samples):
    import torch

    from rlhf_core.data.judge import JUDGES
    from rlhf_core.engines.deepspeed_engine import device
    from rlhf_core.evaluation import Answer
    from rlhf_core.models.build import load_scalar_model
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.models.wrappers import ScalarModule
    from rlhf_core.scorers.reward_model import RewardModelInput, score_sequences

    trust = stage.params.model.trust_remote_code
    reward_tokenizer = load_tokenizer(str(REWARD_MODEL), trust_remote_code=trust)
    reward_input = RewardModelInput(tokenizer, reward_tokenizer, max_length=stage.params.model.max_length)
    reward = ScalarModule(load_scalar_model(REWARD_MODEL, trust_remote_code=trust)).to(device()).eval()
    kinds = {name: source["kind"] for name, source in read_json(PREPARED / "sources.json").items()}

    def answers(responses: list) -> list[Answer]:
        inputs = [
            reward_input.sequence(p.messages, p.prompt_ids, s.response_ids, finished=s.finished)
            for p, s in zip(prompts, responses, strict=True)
        ]
        scores: torch.Tensor = score_sequences(
            reward, inputs, pad_id=reward_tokenizer.pad_token_id, microbatch_tokens=MICROBATCH_TOKENS, device=device()
        )
        made = []
        for prompt, sample, score in zip(prompts, responses, scores.tolist(), strict=True):
            text = tokenizer.decode(sample.response_ids, skip_special_tokens=True)
            judge = JUDGES.get(kinds[prompt.source])
            made.append(Answer(prompt, sample.response_ids, text, sample.finished, score, judge and judge(prompt.messages, text)))
        return made

    return {mode: {name: answers(responses) for name, responses in by_model.items()} for mode, by_model in samples.items()}


def measure(stage: Stage, answers, pad_id: int) -> dict:
    """The stage's metrics: see tasks/report.py for who reads them."""
    from rlhf_core.engines.deepspeed_engine import device
    from rlhf_core.evaluation import response_logprobs, summarize, win_rate
    from rlhf_core.models.build import load_language_model
    from rlhf_core.models.wrappers import PolicyModule

    config, trust = stage.params.evaluation, stage.params.model.trust_remote_code
    logprobs = {}
    for name, folder in (("sft", SFT_MODEL), ("policy", POLICY_MODEL)):
        module = PolicyModule(load_language_model(folder, trust_remote_code=trust)).to(device()).eval()
        for mode in MODES:
            logprobs[name, mode] = response_logprobs(
                module,
                answers[mode]["policy"],
                pad_id=pad_id,
                microbatch_tokens=MICROBATCH_TOKENS,
                temperature=config.temperature,
                device=device(),
            )
    metrics = {
        mode: {name: summarize(a, confidence=config.confidence) for name, a in by_model.items()} for mode, by_model in answers.items()
    }
    metrics["win_rate"] = {mode: win_rate(a["policy"], a["sft"], confidence=config.confidence) for mode, a in answers.items()}
    metrics["kl"] = {mode: float((logprobs["policy", mode] - logprobs["sft", mode]).mean()) for mode in MODES}
    metrics["judge"] = any(a.judgement is not None for a in answers["greedy"]["policy"])
    return metrics


def write_samples(answers, rows: int) -> None:
    """The first prompts' answers side by side."""
    import pandas as pd

    table = [
        {
            "id": sft.prompt.id,
            "source": sft.prompt.source,
            "prompt": "\n".join(f"{m['role']}: {m['content']}" for m in sft.prompt.messages),
            "mode": mode,
            "sft_response": sft.text,
            "policy_response": policy.text,
            "sft_reward": sft.score,
            "policy_reward": policy.score,
            "sft_judge_ok": sft.judgement.ok if sft.judgement else None,
            "policy_judge_ok": policy.judgement.ok if policy.judgement else None,
        }
        for mode, by_model in answers.items()
        for sft, policy in list(zip(by_model["sft"], by_model["policy"], strict=True))[:rows]
    ]
    pd.DataFrame(table).to_parquet(EVALUATION_SAMPLES, index=False)


if __name__ == "__main__":
    main()
