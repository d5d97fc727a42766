"""vLLM engines for models of several families: python families_probe.py <folder>

Prints its results as one line of JSON for test_family_chains.py. Each engine has its own process, forked after the imports.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from rlhf_core.config import LoraConfig
from rlhf_core.engines.rollout.open import RolloutActor
from rlhf_core.engines.rollout.requests import SamplingSettings
from rlhf_core.engines.transfer.sender import Target
from rlhf_core.engines.vllm.engine import VllmEngine
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.weights import checkpoint_names
from rlhf_core.process import configure_process

sys.path.insert(0, str(Path(__file__).parents[1]))
from actors_here import HerePeer
from transfers import adapters_of, counted, new_sender, send, sent_bytes, source_of

VOCABULARY, LONGEST, WINDOW = 128, 384, 16
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": LONGEST, "initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2, "dtype": "float32",
}  # fmt: skip
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama_tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2_tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(
        **SHAPE, head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32, layer_types=["sliding_attention", "full_attention"]
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "phi3": Phi3Config(**SHAPE, tie_word_embeddings=False),
}
NARROW = LlamaConfig(**{**SHAPE, "num_attention_heads": 8, "num_key_value_heads": 8})  # heads of width 8
GPT_OSS = GptOssConfig(**SHAPE, head_dim=32, num_local_experts=2, num_experts_per_tok=1)
IDS = torch.randint(3, VOCABULARY, (3 * WINDOW,), generator=torch.Generator().manual_seed(5)).tolist()


def model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A random model, with other values also where a new model has 0 or 1, such as biases."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) / 10)
    return made


@torch.no_grad()
def plain_logprobs(policy: PreTrainedModel) -> torch.Tensor:
    """Log-probabilities of the ids by transformers, [T - 1]."""
    logprobs = policy(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, torch.tensor(IDS[1:])[:, None]).squeeze(-1)


def engine_for(folder: Path, **changes) -> VllmEngine:
    settings = {
        "max_length": LONGEST, "dtype": "float32", "kv_cache_gib": 1, "max_concurrent_sequences": 256, "threads": 1, "seed": 0,
        "trust_remote_code": False, "gpu_memory_fraction": 0.3,
    }  # fmt: skip
    return VllmEngine(str(folder), **settings | changes)


def look(folder: Path, config: PreTrainedConfig) -> dict[str, Any]:
    """Largest differences between engine and transformers, as loaded and after each of two updates, and between the models. Updates come by
    weight transfer; then the second one is loaded as a whole. In the end only adapters of the first model are sent.
    """
    first, *updates = (model(config, seed) for seed in range(3))
    first.save_pretrained(folder)
    actor = RolloutActor(
        0, backend="vllm", model_path=str(folder), weight_transfer=["gloo"], max_length=LONGEST, dtype="float32", threads=1, seed=0,
        max_concurrent_sequences=256, trust_remote_code=False, gpu_memory_fraction=0.3,
    )  # fmt: skip
    found = [float((torch.tensor(actor.probe(IDS)) - plain_logprobs(first)).abs().max())]
    sender, target = new_sender(), Target(0, HerePeer(actor), "gloo", 1)
    for version, update in enumerate(updates, start=1):
        source = source_of(update, partial(checkpoint_names, update))
        answers, _ = send(sender, [target], source, version=version, ids=IDS)
        found.append(float((torch.tensor(answers[0][1]) - plain_logprobs(update)).abs().max()))
    apart = [float((plain_logprobs(a) - plain_logprobs(b)).abs().max()) for a, b in ((first, updates[0]), tuple(updates))]
    actor._engine.load_weights(checkpoint_names(update, update.state_dict()), 3)
    seen = {"differences": found, "apart": apart, "version": answers[0][0], "same_as_loaded": actor.probe(IDS) == answers[0][1]}
    return seen | send_changes(actor, update) | send_adapters(actor, first, folder)


def send_changes(actor: RolloutActor, policy: PreTrainedModel) -> dict[str, Any]:
    """Change one number in 50 in each of three updates and send what has changed; then send all of the last weights."""
    source, target = source_of(policy, partial(checkpoint_names, policy)), Target(0, HerePeer(actor), "gloo", 1)
    generator, found, traffic = torch.Generator().manual_seed(5), [], []
    for sender in [new_sender(send_changes=True)] * 4 + [new_sender()]:
        with torch.no_grad():
            for parameter in policy.parameters() if 0 < len(found) < 4 else ():
                parameter.mul_(1 + 0.5 * (torch.rand(parameter.shape, generator=generator) < 0.02))
        answers, _, sent = counted(sender, [target], source, version=10 + len(found), ids=IDS)
        found.append(answers[0][1])
        traffic.append(sent.nbytes)
    return {"changes_arrive": found[3] == found[4] != found[0], "changes_share": max(traffic[1:4]) / traffic[4]}


def send_adapters(actor: RolloutActor, policy: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Send adapters of the folder's model; and the same weights merged, by a second sender."""
    add_adapters(policy, LoraConfig(rank=2, alpha=4.0, dropout=0.0, target_modules="all-linear"), seed=0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    names, target, found, sent = partial(checkpoint_names, policy), Target(0, HerePeer(actor), "gloo", 1), [], []
    for source in (adapters_of(policy, folder, names), source_of(policy, names)):
        answers, _ = send(new_sender(), [target], source, version=4 + len(sent), ids=IDS)
        found.append(answers[0][1])
        sent.append(sent_bytes(source))
    return {
        "adapters_difference": float((torch.tensor(found[0]) - plain_logprobs(policy)).abs().max()),
        "same_as_merged": found[0] == found[1],
        "adapters_share": sent[0] / sent[1],
    }


def draw_long_prompts(folder: Path, config: PreTrainedConfig) -> dict[str, bool]:
    """512 seeded prompts of 300 tokens in one call, far more than fit into one forward pass."""
    model(config, 0).save_pretrained(folder)
    engine = engine_for(folder, max_concurrent_sequences=64)
    prompts = torch.randint(3, VOCABULARY, (512, 300), generator=torch.Generator().manual_seed(7)).tolist()
    settings, seeds = SamplingSettings(2, 1.0), list(range(512))
    drawn = engine.generate(prompts, seeds, settings, stop_ids=(1,), group_size=1)
    engine.generate(prompts[:3], seeds[:3], settings, stop_ids=(1,), group_size=2)
    again = engine.generate(prompts[500:], seeds[500:], settings, stop_ids=(1,), group_size=1)
    ids = [[s.response_ids for s in group] for group in drawn]
    return {"same": ids[500:] == [[s.response_ids for s in group] for group in again], "several": len({str(i) for i in ids}) > 100}


def refusal(folder: Path, config: PreTrainedConfig) -> str:
    model(config, 0).save_pretrained(folder)
    try:
        engine_for(folder)
    except ValueError as error:
        return str(error)
    return "none"


def main() -> None:
    configure_process()
    from vllm import LLM  # noqa: F401  # its modules, before there are two of us

    folder = Path(sys.argv[1])
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        seen = {name: pool.apply(look, (folder / name, config)) for name, config in FAMILIES.items()}
        seen["long_prompts"] = pool.apply(draw_long_prompts, (folder / "long", FAMILIES["llama_tied"]))
        seen["refusal"] = pool.apply(refusal, (folder / "narrow", NARROW))
        seen["not_reloaded"] = pool.apply(refusal, (folder / "gpt_oss", GPT_OSS))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
