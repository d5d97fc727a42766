"""A vLLM engine over two processes in a Ray actor, beside the trainer's own modules: python divided_engine_probe.py <folder> [--replace]

Prints its results as one line of JSON for test_divided_engine.py. --replace: also replaces the engine that has lost a process.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from transfers import adapters_of, counted, new_sender, send, source_of

from rlhf_core.config import LoraConfig
from rlhf_core.engines.ray.actors import ActorGroup
from rlhf_core.engines.ray.places import RoleLost
from rlhf_core.engines.rollout.requests import SamplingSettings, request_seeds
from rlhf_core.engines.transfer.sender import Answer, Target, WeightSender
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.weights import checkpoint_names
from rlhf_core.process import configure_process

EOS, VOCABULARY, LONGEST, BLOCK = 1, 101, 320, 128
PROBE = list(range(2, 34))
BEGINNING = [3 + i % 90 for i in range(BLOCK + 20)]  # longer than a block of the cache
PROMPTS = [[*BEGINNING, 7, 8], [*BEGINNING, 9], [4, 5, 6]]
DEADLINE = 400.0


def main() -> None:
    configure_process()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, logging_level="ERROR", log_to_driver=False, object_store_memory=100_000_000)
    first, second = model(0), model(1)
    first.save_pretrained(folder)
    engine = start(str(folder))
    try:
        engine.wait_ready()
        seen = compare(engine, first, second, str(folder))
        seen["lost_worker"] = lose_a_worker(engine)
        if "--replace" in sys.argv:
            seen["replaced"] = replace(engine, second)
            seen["left_after_a_kill"] = left_after_a_kill(engine)
    finally:
        engine.close()
        ray.shutdown()
    print(json.dumps(seen))


def model(seed: int) -> LlamaForCausalLM:
    """A random model with a tied head, and one head of keys and values, which both processes have."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=LONGEST, tie_word_embeddings=True, eos_token_id=EOS, pad_token_id=0, initializer_range=0.2, dtype="float32",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def start(folder: str) -> ActorGroup:
    settings = {
        "backend": "vllm", "model_path": folder, "max_length": LONGEST, "dtype": "float32", "kv_cache_gib": 1, "threads": 2, "seed": 0,
        "max_concurrent_sequences": 8, "trust_remote_code": False, "gpu_memory_fraction": 0.3, "tensor_parallel_size": 2,
        "prefix_caching": True, "weight_transfer": ["gloo"],
    }  # fmt: skip
    return ActorGroup(
        "rollout",
        "rlhf_core.engines.rollout.open:RolloutActor",
        1,
        cpus=1,
        threads=2,
        start_deadline=DEADLINE,
        kwargs=settings,
        together=False,
    )


def compare(engine: ActorGroup, first: LlamaForCausalLM, second: LlamaForCausalLM, folder: str) -> dict[str, Any]:
    call, sender = partial(engine.call_one, 0, deadline=DEADLINE), new_sender()
    memory = engine.actors[0].__ray_call__.remote(lambda hosted: hosted._object._engine.memory_in_use())
    seen = {"memory": ray.get(memory, timeout=DEADLINE), "weights": weight_bytes(engine)}
    seen |= {"started": [probe_difference(first, call("probe", PROBE)), sampled_difference(first, call)], "cached": cached(engine)}
    version, probe = sent(sender, engine, second, 7)
    seen |= {"version": version, "synced": [probe_difference(second, probe), sampled_difference(second, call)]}
    seen["old_after_sync"] = probe_difference(first, probe)
    keep_cache(engine, keep=True)
    _, probe = sent(sender, engine, first, 8)
    seen["kept_cache"] = [probe_difference(first, probe), sampled_difference(first, call)]
    keep_cache(engine, keep=False)
    _, probe = sent(sender, engine, first, 9)
    seen["back"] = [probe_difference(first, probe), sampled_difference(first, call)]
    return seen | {"changes": send_changes(engine, first), "adapters": send_adapters(engine, folder)}


def send_changes(engine: ActorGroup, policy: LlamaForCausalLM) -> list[float]:
    """Twice change one number in 50 and send what has changed. Returns the differences of the probe to the model of each time, the change
    of the last time, and the share of the bytes that it sent.
    """
    sender, changed = new_sender(send_changes=True), copy.deepcopy(policy)
    source, found, traffic = source_of(changed, partial(checkpoint_names, changed)), [], []
    for version in (20, 21, 22):
        answers, _, sent = counted(sender, [Target(0, engine.peer(0), "gloo", 2)], source, version=version, ids=PROBE)
        found.append(probe_difference(changed, answers[0][1]))
        traffic.append(sent.nbytes)
        last = answers[0][1]
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.mul_(1 + 0.5 * (torch.rand(parameter.shape) < 0.02))
    return [max(found), probe_difference(policy, last), max(traffic[1:]) / traffic[0]]


def weight_bytes(engine: ActorGroup) -> list[int]:
    """Bytes of the parameters that each process of the engine holds."""

    def look(hosted) -> list[int]:
        def held(worker) -> int:
            weights = {weight.data_ptr(): weight.nbytes for weight in worker.model_runner.model.parameters()}
            return sum(weights.values())

        return hosted._object._engine._llm.collective_rpc(held)

    return ray.get(engine.actors[0].__ray_call__.remote(look), timeout=DEADLINE)


def send_adapters(engine: ActorGroup, folder: str) -> list[float]:
    """Differences of the probe after adapters of the folder's model were sent: to the merged model, and to the one without adapters."""
    plain, policy = LlamaForCausalLM.from_pretrained(folder).eval(), LlamaForCausalLM.from_pretrained(folder).eval()
    add_adapters(policy, LoraConfig(rank=2, alpha=4.0, dropout=0.0, target_modules="all-linear"), seed=0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    source = adapters_of(policy, folder, partial(checkpoint_names, policy))
    answers, _ = send(new_sender(), [Target(0, engine.peer(0), "gloo", 2)], source, version=11, ids=PROBE)
    return [probe_difference(policy, answers[0][1]), probe_difference(plain, answers[0][1])]


def sent(sender: WeightSender, engine: ActorGroup, policy: LlamaForCausalLM, version: int) -> Answer:
    """Send weights to both processes of the engine. Returns its version, and its log-probabilities of the probe."""
    target = Target(0, engine.peer(0), "gloo", 2)
    answers, _ = send(sender, [target], source_of(policy, partial(checkpoint_names, policy)), version=version, ids=PROBE)
    return answers[0]


@torch.no_grad()
def probe_difference(policy: LlamaForCausalLM, found: list[float]) -> float:
    logprobs = policy(torch.tensor([PROBE])).logits[0, :-1].log_softmax(-1)
    return float((logprobs.gather(1, torch.tensor(PROBE[1:])[:, None])[:, 0] - torch.tensor(found)).abs().max())


@torch.no_grad()
def sampled_difference(policy: LlamaForCausalLM, call) -> float:
    """Largest difference over sampled tokens, three responses to each prompt."""
    groups = call("generate", PROMPTS, request_seeds(1, 0, len(PROMPTS)), SamplingSettings(12, 1.0), stop_ids=(EOS,), group_size=3)
    pairs = [(prompt, sample) for prompt, group in zip(PROMPTS, groups, strict=True) for sample in group]
    batch = collate_tokens([[*p, *s.response_ids] for p, s in pairs], [len(p) for p, _ in pairs], pad_id=0)
    theirs = torch.tensor([x for _, sample in pairs for x in sample.logprobs])
    return float((PolicyModule(policy)(batch, temperature=1.0).logprobs - theirs).abs().max())


def cached(engine: ActorGroup) -> int:
    """Tokens of a prompt that the engine takes from its cache."""

    def look(hosted) -> int:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, detokenize=False)
        (output,) = hosted._object._engine._llm.generate([{"prompt_token_ids": PROMPTS[0]}], parameters, use_tqdm=False)
        return output.num_cached_tokens

    return ray.get(engine.actors[0].__ray_call__.remote(look), timeout=DEADLINE)


def keep_cache(engine: ActorGroup, *, keep: bool) -> None:
    """Whether the engine keeps its cache when it loads weights, which is wrong."""

    def change(hosted) -> None:
        llm = hosted._object._engine._llm
        if keep:
            llm.reset_prefix_cache = lambda: True
        else:
            del llm.reset_prefix_cache

    ray.get(engine.actors[0].__ray_call__.remote(change), timeout=DEADLINE)


def processes(engine: ActorGroup) -> list[psutil.Process]:
    """The actor's process, and those of its vLLM engine."""
    actor = psutil.Process(ray.get(engine.actors[0].__ray_call__.remote(lambda _: os.getpid()), timeout=DEADLINE))
    return [actor, *(child for child in actor.children() if "resource_tracker" not in " ".join(child.cmdline()))]


def left(those: list[psutil.Process]) -> int:
    """How many of the processes still run after some seconds; one whose parent doesn't ask for its exit code has ended too."""
    deadline = time.monotonic() + 20
    while (running := sum(map(runs, those))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return running


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lose_a_worker(engine: ActorGroup) -> dict[str, Any]:
    """Kill one process of the engine."""
    actor, *workers = processes(engine)
    workers[1].kill()
    try:
        message = f"no loss: {engine.call_one(0, 'probe', PROBE, deadline=DEADLINE)}"
    except RoleLost as lost:
        message = str(lost)
    return {"workers": len(workers), "message": message, "left": left([actor, *workers])}


def replace(engine: ActorGroup, policy: LlamaForCausalLM) -> float:
    """Replace the engine. Returns the difference of the probe after weights were sent to the new one."""
    engine.replace([0])
    _, probe = sent(new_sender(), engine, policy, 10)
    return probe_difference(policy, probe)


def left_after_a_kill(engine: ActorGroup) -> int:
    """Processes that are left of an engine whose actor was killed."""
    actor, *workers = processes(engine)
    workers[0].send_signal(signal.SIGSTOP)  # as if it hung
    actor.kill()
    return left([actor, *workers])


if __name__ == "__main__":
    main()
