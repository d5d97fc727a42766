"""Tests that need a GPU: `python -m pytest tests/gpu`. Skipped with the reason without one.

Marks say what a test needs: -m torch, -m vllm, -m ray. Engines are eager, since capturing graphs takes longer than the tests.
"""

from __future__ import annotations

import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from clerk_params import CLERK_PARAMS

sys.path.insert(0, str(Path(__file__).parents[1]))
from transfers import new_sender, send, source_of

from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.config import load_params
from rlhf_core.models.tokenizer import build_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PLAIN = {"max_length": 96, "max_concurrent_sequences": 64, "threads": 1, "seed": 0, "trust_remote_code": False, "enforce_eager": True}
TEXTS = [f"Sort {n}: {''.join(sorted(str(n)))}." for n in range(100, 400)]


@pytest.fixture(scope="module", autouse=True)
def workspaces():
    """Matrix products here and in a backward pass: cuBLAS keeps 32 MiB for each of the two threads, which tests that count bytes, each of
    which may be the first, would take for the model's.
    """
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.zeros(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        (matrix @ matrix).sum().backward()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random model with its tokenizer, as a Hugging Face folder."""
    from rlhf_core.models.build import new_language_model, save_model

    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(TEXTS, vocab_size=390)
    model = new_language_model(load_params(CLERK_PARAMS).model, tokenizer, seed=0)
    save_model(model, model.state_dict(), tokenizer, path)
    return path


def engine(folder, dtype: str, **changes):
    from rlhf_core.algorithms.schedules import learning_rate_factor
    from rlhf_core.engines.deepspeed.engine import EngineSettings, TrainEngine, join_world
    from rlhf_core.models.build import load_language_model
    from rlhf_core.models.forward import PolicyModule

    join_world()
    settings = dict(
        learning_rate=1e-3,
        schedule=functools.partial(learning_rate_factor, schedule="cosine", total=20, warmup=1, floor=0.1, decay_fraction=0.2),
        weight_decay=0.0,
        max_grad_norm=1.0,
        zero_stage=0 if dtype == "float32" else 1,
        offload_optimizer=False,
        offload_parameters=False,
        gradient_checkpointing=False,
        dtype=dtype,
        seed=0,
        disable_dropout=False,
    )
    return TrainEngine(PolicyModule(load_language_model(folder, training_dtype=dtype)), EngineSettings(**{**settings, **changes}))


def batch(folder):
    from rlhf_core.models.batch import collate_tokens
    from rlhf_core.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder), trust_remote_code=False)
    ids = tokenizer(TEXTS[:64], add_special_tokens=False)["input_ids"]
    return collate_tokens(ids, [1] * len(ids), pad_id=tokenizer.pad_token_id)


@pytest.mark.torch
def test_a_batch_is_copied_while_the_gpu_works_and_arrives_whole(folder):
    factor, device, given = torch.randn(8192, 8192, device="cuda"), torch.device("cuda"), batch(folder)
    given.to(device)  # the first pinned memory is made here
    torch.cuda.synchronize()
    for _ in range(40):
        factor @ factor
    worked = torch.cuda.Event()
    worked.record()
    copies = [given.to(device) for _ in range(3)]
    waited = worked.query()
    assert not waited
    assert all(torch.equal(copy.input_ids.cpu(), given.input_ids) for copy in copies)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_steps_on_the_gpu_lower_the_loss(folder, dtype):
    trained, tokens = engine(folder, dtype), batch(folder).to(torch.device("cuda"))
    losses = []
    for _ in range(20):
        loss = -trained(tokens).logprobs.mean()
        trained.backward(loss)
        trained.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.torch
@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"zero_stage": 2, "offload_optimizer": True},
        {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True, "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_settings_that_save_memory_train_alike(folder, changes):
    tokens = batch(folder).to(torch.device("cuda"))
    losses = []
    for trained in (engine(folder, "bfloat16"), engine(folder, "bfloat16", **changes)):
        losses.append([])
        for _ in range(5):
            loss = -trained(tokens).logprobs.mean()
            trained.backward(loss)
            trained.step()
            losses[-1].append(float(loss))
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.torch
def test_gradient_checkpointing_takes_less_memory(folder):
    from rlhf_core.models.batch import TokenBatch

    few, peaks = batch(folder).to(torch.device("cuda")), []
    tokens = TokenBatch(few.input_ids.repeat(16, 1), few.selected.repeat(16, 1))
    for recompute in (False, True):
        trained = engine(folder, "bfloat16", gradient_checkpointing=recompute)
        trained.backward(-trained(tokens).logprobs.mean())  # makes the buffers of gradients
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trained.backward(-trained(tokens).logprobs.mean())
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.7 * peaks[0]


@pytest.mark.torch
def test_an_offloaded_frozen_model_is_on_the_gpu_while_it_computes_only(folder):
    from rlhf_core.engines.deepspeed.frozen import FrozenModel
    from rlhf_core.models.build import load_language_model
    from rlhf_core.models.forward import PolicyModule

    model = load_language_model(folder)
    size = sum(4 * p.numel() for p in model.parameters())
    on_gpu, offloaded = (
        FrozenModel(PolicyModule(load_language_model(folder)), dtype="float32", zero_stage=0, offload=offload) for offload in (False, True)
    )
    tokens, before = batch(folder).to(torch.device("cuda")), torch.cuda.memory_allocated()
    with torch.no_grad(), on_gpu.in_use() as module:
        expected = module(tokens).logprobs.cpu()
    with torch.no_grad(), offloaded.in_use() as module:
        assert torch.cuda.memory_allocated() - before >= size
        found = module(tokens).logprobs.cpu()
    assert torch.cuda.memory_allocated() - before < size / 10
    torch.testing.assert_close(found, expected)


@pytest.mark.torch
def test_an_offloaded_live_reference_leaves_the_gpu_to_the_trained_model(folder):
    from rlhf_core.engines.deepspeed.frozen import FrozenModel
    from rlhf_core.models.build import load_language_model
    from rlhf_core.models.forward import PolicyModule
    from rlhf_core.trainers.preference.objectives import Continuation, ResponseForward
    from rlhf_core.trainers.preference.train import live_reference

    items = [Continuation((5, 6, 7, number), (9, 10)) for number in range(8, 40)]
    forward, size, seen = ResponseForward(0, False, 60), sum(4 * p.numel() for p in load_language_model(folder).parameters()), []
    shares = forward.microbatches(items)
    assert len(shares) > 1
    for offload in (False, True):
        before = torch.cuda.memory_allocated()
        model = FrozenModel(PolicyModule(load_language_model(folder)), dtype="float32", zero_stage=0, offload=offload)
        logprobs = live_reference(model, forward)(None, shares)  # the policy isn't used
        seen.append((logprobs, torch.cuda.memory_allocated() - before))
        del model
    torch.testing.assert_close(seen[1][0], seen[0][0])
    assert seen[1][1] < size / 10 < size <= seen[0][1]


@pytest.mark.torch
def test_the_gpu_computes_the_log_probabilities_of_the_cpu(folder):
    from rlhf_core.models.build import load_language_model
    from rlhf_core.models.forward import PolicyModule

    module, tokens = PolicyModule(load_language_model(folder)).eval(), batch(folder)
    with torch.no_grad():
        on_cpu = module(tokens).logprobs
        on_gpu = module.cuda()(tokens.to(torch.device("cuda"))).logprobs
    assert float((on_gpu.cpu() - on_cpu).abs().max()) < 1e-3


@pytest.mark.parametrize("backend", [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("pytorch", marks=pytest.mark.torch)])
def test_engine_and_trainer_agree_before_and_after_a_weight_sync(folder, backend):
    from rlhf_core.engines.rollout.open import open_engine
    from rlhf_core.engines.rollout.requests import SamplingSettings, request_seeds
    from rlhf_core.models.batch import collate_tokens
    from rlhf_core.models.build import load_language_model
    from rlhf_core.models.forward import PolicyModule
    from rlhf_core.models.weights import checkpoint_names

    model = load_language_model(folder)
    engine = open_engine(backend, str(folder), dtype="float32", gpu_memory_fraction=0.3, **PLAIN)
    prompts = [ids[:6] for ids in batch(folder).input_ids.tolist()]
    for version in (0, 1):
        if version == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
            engine.load_weights(checkpoint_names(model, model.state_dict()), version)
        groups = engine.generate(prompts, request_seeds(0, version, len(prompts)), SamplingSettings(16, 1.0), stop_ids=(1,), group_size=1)
        samples = [group[0] for group in groups]
        sequences = [[*p, *s.response_ids] for p, s in zip(prompts, samples, strict=True)]
        tokens = collate_tokens(sequences, [len(p) for p in prompts], pad_id=0)
        with torch.no_grad():
            logprobs = PolicyModule(model)(tokens).logprobs
            whole = PolicyModule(model)(collate_tokens([sequences[0]], [1], pad_id=0)).logprobs
        assert float((logprobs - torch.tensor([x for s in samples for x in s.logprobs])).abs().max()) < 1e-3
        assert float((whole - torch.tensor(engine.probe(sequences[0]))).abs().max()) < 1e-3


class ApartPeer:
    """An engine in another process, as a trainer rank calls it."""

    def __init__(self, engine):
        self._engine, self._thread, self.key = engine, ThreadPoolExecutor(1), "apart"

    def submit(self, method: str, *args):
        return self._thread.submit(self._engine._call, method, *args)

    def answer(self, call, timeout: float):
        return call.result(timeout)


@pytest.mark.vllm
@pytest.mark.parametrize("way", ["gloo", "ipc", "nccl"])
def test_an_engine_computes_with_weights_that_were_sent_to_it(folder, way, monkeypatch):
    from rlhf_core.engines.deepspeed.engine import join_world
    from rlhf_core.engines.rollout.open import RolloutActor
    from rlhf_core.engines.rollout.process import EngineProcess
    from rlhf_core.engines.transfer.gpu import IpcBuffer
    from rlhf_core.engines.transfer.sender import Target
    from rlhf_core.models.build import load_language_model
    from rlhf_core.models.weights import checkpoint_names

    if way == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs")
    join_world()
    model, ids = load_language_model(folder).cuda(), [5, 6, 7, 8, 9]
    source = source_of(model, functools.partial(checkpoint_names, model))
    if way == "nccl":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # of the engine; this process has its GPUs
    settings = {"backend": "vllm", "model_path": str(folder), "dtype": "float32", "gpu_memory_fraction": 0.3}
    opened = EngineProcess(RolloutActor, rank=0, weight_transfer=[way], **settings, **PLAIN)
    try:
        sender, target = new_sender(timeout=60.0), Target(0, ApartPeer(opened), way, 1)
        shared = IpcBuffer(source.specs) if way == "ipc" else None
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
                logprobs = model(torch.tensor([ids]).cuda()).logits[0].log_softmax(-1)
            answers, lost = send(sender, [target], source, version=version, ids=ids, shared=shared)
            expected = [float(logprobs[t, token]) for t, token in enumerate(ids[1:])]
            assert not lost and answers[0] == (version, pytest.approx(expected, abs=1e-3))
    finally:
        opened.close()


@pytest.mark.vllm
def test_an_engine_rounds_the_weights_of_each_sync_with_new_scales(tmp_path):
    """A matrix grows by 16 in the second update: with the scale of the first one its numbers would be cut at a sixteenth."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_core.engines.deepspeed.engine import join_world
    from rlhf_core.engines.rollout.open import RolloutActor
    from rlhf_core.engines.rollout.process import EngineProcess
    from rlhf_core.engines.transfer.sender import Target
    from rlhf_core.models.weights import checkpoint_names

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 products need compute capability 8.9")
    join_world()
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=96, initializer_range=0.05, pad_token_id=0)).bfloat16()
    model.save_pretrained(tmp_path)
    model, ids = model.cuda().eval(), list(range(5, 45))
    settings = {"backend": "vllm", "model_path": str(tmp_path), "dtype": "bfloat16", "gpu_memory_fraction": 0.3, "quantization": "fp8"}
    opened = EngineProcess(RolloutActor, rank=0, weight_transfer=["gloo"], **settings, **PLAIN)
    try:
        sender, source, before = new_sender(timeout=60.0), source_of(model, functools.partial(checkpoint_names, model)), None
        for version, factor in ((1, 1.0), (2, 16.0)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
                model.model.layers[1].mlp.down_proj.weight.mul_(factor)
                logprobs = model(torch.tensor([ids]).cuda()).logits[0, :-1].float().log_softmax(-1).cpu()
            expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            answers, lost = send(sender, [Target(0, ApartPeer(opened), "gloo", 1)], source, version=version, ids=ids)
            assert not lost
            apart = (torch.tensor(answers[0][1]) - expected).abs().mean()
            assert apart > 0  # eight bits round
            assert before is None or apart < 0.2 * (expected - before).abs().mean()
            before = expected
    finally:
        opened.close()


@pytest.mark.vllm
def test_an_engine_of_a_stage_gives_the_gpu_back_when_it_is_closed(folder):
    """vLLM runs in its own process: its memory is free again, and nothing of it is left in this process."""
    from rlhf_core.engines.rollout.open import open_engine
    from rlhf_core.engines.rollout.process import EngineProcess
    from rlhf_core.models.weights import read_state_dict

    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    opened = open_engine("vllm", str(folder), dtype="bfloat16", gpu_memory_fraction=0.3, **PLAIN)
    assert isinstance(opened, EngineProcess)
    taken = free - torch.cuda.mem_get_info()[0]
    assert opened.load_weights(read_state_dict(folder), 1) == 1 and len(opened.probe([5, 6, 7])) == 2
    opened.close()
    assert taken > 1 << 30
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20


@pytest.mark.vllm
def test_a_model_of_a_class_that_vllm_has_compiled_can_be_made_here_afterwards(tmp_path):
    """vLLM runs OLMo-2 by transformers' class, which its process marks for compiling."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    from rlhf_core.engines.rollout.open import open_engine
    from rlhf_core.models.build import load_language_model

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
    Olmo2ForCausalLM(Olmo2Config(**shape, max_position_embeddings=96, pad_token_id=0)).save_pretrained(tmp_path)
    opened = open_engine("vllm", str(tmp_path), dtype="float32", gpu_memory_fraction=0.2, **PLAIN | {"enforce_eager": False})
    message = opened.probe([5, 6, 7, 8])
    opened.close()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logprobs = load_language_model(tmp_path)(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert float((logprobs - torch.tensor(message)).abs().max()) < 1e-3


@pytest.mark.vllm
def test_an_engine_that_shares_a_gpu_takes_its_share_and_no_more(folder):
    """Another process holds half of the GPU while the engine starts; the cache is computed, not measured."""
    from rlhf_core.engines.rollout.open import open_here
    from rlhf_core.engines.rollout.process import EngineProcess

    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    others = torch.empty(int(0.5 * total), dtype=torch.uint8, device="cuda")
    how = {"dtype": "bfloat16", "gpu_memory_fraction": 0.3, "shares_gpu": True}
    opened = EngineProcess(open_here, backend="vllm", model_path=str(folder), **how, **PLAIN)
    try:
        assert free - torch.cuda.mem_get_info()[0] < len(others) + 0.3 * total
        assert len(opened.probe([5, 6, 7])) == 2
    finally:
        opened.close()
        del others
        torch.cuda.empty_cache()


@pytest.mark.torch
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_nothing_of_a_training_engine_is_on_the_gpu_while_it_is_on_the_host(folder, zero_stage):
    import gc

    gc.collect()
    before, tokens = torch.cuda.memory_allocated(), batch(folder).to(torch.device("cuda"))
    turning, undisturbed = (engine(folder, "bfloat16", zero_stage=zero_stage) for _ in range(2))
    for _ in range(3):
        for trained in (turning, undisturbed):
            trained.backward(-trained(tokens).logprobs.mean())
            trained.step()
        held = torch.cuda.memory_allocated()
        turning.keep("nothing")
        assert held - torch.cuda.memory_allocated() > 0.4 * (held - before)  # the other half is the other engine's
        turning.keep("all")
    weights = turning.state_dict(), undisturbed.state_dict()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.vllm
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_gives_the_gpu_back_and_wakes_up_with_its_weights(folder, level):
    """In a process of its own: vLLM allows one engine that sleeps in a process, and its pool of memory may not outlive it."""
    from rlhf_core.engines.rollout.open import open_here
    from rlhf_core.engines.rollout.process import EngineProcess
    from rlhf_core.models.weights import read_state_dict

    how = {"dtype": "bfloat16", "gpu_memory_fraction": 0.3, "shares_gpu": True, "sleeps": True}
    opened = EngineProcess(open_here, backend="vllm", model_path=str(folder), **how, **PLAIN)
    try:
        expected, free = opened.probe([5, 6, 7]), torch.cuda.mem_get_info()[0]
        opened._call("sleep", level)
        assert torch.cuda.mem_get_info()[0] > free
        with pytest.raises(RuntimeError, match="expected it to be awake for probe"):
            opened.probe([5, 6, 7])
        opened._call("wake_up", ["weights"])
        if level == 2:
            opened.load_weights(read_state_dict(folder), 1)
        opened._call("wake_up", ["kv_cache"])
        assert opened.probe([5, 6, 7]) == expected
    finally:
        opened.close()


@pytest.mark.ray
@pytest.mark.parametrize(("backend", "dtype"), [pytest.param("vllm", "bfloat16", marks=pytest.mark.vllm), ("pytorch", "float32")])
def test_the_default_job_runs_with_trainer_and_engines_on_one_gpu(folder, tmp_path, monkeypatch, backend, dtype):
    """Two steps of the RL job on its own Ray head, with gpus_per_rank and gpus_per_engine auto, by turns."""
    import json
    import os
    import sys

    from rlhf_core.config import load_params
    from rlhf_core.data.schema import write_rows
    from rlhf_core.engines.ray.cluster import run_job
    from rlhf_core.models.build import new_scalar_model, save_model
    from rlhf_core.models.tokenizer import load_tokenizer
    from rlhf_core.stage.job import pulse_file
    from rlhf_core.stage.ray_job import DRIVER
    from rlhf_core.trainers.rl.job import PLACEMENT
    from rlhf_core.trainers.rl.submit import rl_job as as_job
    from tests.clerk_params import CLERK_PARAMS
    from tests.tiny_models import rl_job
    from tools.bench.gpu.online import head

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False)
    reward = new_scalar_model(folder, tokenizer, trust_remote_code=False)
    save_model(reward, reward.state_dict(), tokenizer, tmp_path / "reward")
    messages = [[{"role": "user", "content": text}] for text in TEXTS[:128]]
    rows = [
        {"id": str(i), "source": "mine", "split": "train" if i % 4 else "validation", "messages": m, "label": None}
        for i, m in enumerate(messages)
    ]
    write_rows(tmp_path / "prepared", "prompt", rows)
    steps = {"rl.steps": 2, "rl.samples_per_step": 32, "rl.minibatch_size": 32, "rl.reward.normalization_samples": 32}
    changes = {"model.dtype": dtype, "model.max_length": 96, "rl.rollout.backend": backend, **steps}
    changes["rl.rollout.enforce_eager"] = backend == "vllm"
    (tmp_path / "work").mkdir()
    job = rl_job(folder, tmp_path / "reward", **changes).model_copy(
        update={"prepared": str(tmp_path / "prepared"), "work": str(tmp_path / "work"), "output": str(tmp_path / "policy"),
                "timings": str(tmp_path / "timings.csv")}
    )  # fmt: skip
    as_job(job, load_params(CLERK_PARAMS), root=Path.cwd(), work=tmp_path / "work").write(tmp_path / "job.pkl")
    message: list[str] = []
    with head(4) as address:
        code = run_job(
            address,
            f"cd {os.getcwd()} && exec {sys.executable} -m {DRIVER} {tmp_path / 'job.pkl'}",
            name="gpu",
            environment={"PYTHONPATH": os.environ.get("PYTHONPATH", os.getcwd())},
            start_timeout=120.0,
            silence_timeout=120.0,
            pulse=pulse_file(tmp_path / "work"),
            on_output=message.append,
            stop_requested=lambda: False,
        )
    assert code == 0, "".join(message)
    assert json.loads((tmp_path / "work" / PLACEMENT).read_text())["per_rank"] == 0.6
    assert (tmp_path / "policy/model.safetensors").exists()


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pairs_are_learned_on_the_gpu_whatever_its_attention_takes(folder, tmp_path, dtype):
    """With and without flash attention, a precomputed reference, adapters."""
    from rlhf_core.config import LoraConfig
    from rlhf_core.curves import MetricsLog
    from rlhf_core.engines.deepspeed.engine import join_world
    from rlhf_core.trainers.preference.train import COLUMNS, PreferenceRun, train_on_pairs
    from rlhf_core.trainers.supervised.loop import TrainLoop

    join_world()
    params = load_params(CLERK_PARAMS)
    lora = LoraConfig(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear")
    changes = {"lora": lora, "learning_rate": 1e-2, "batch_size": 16, "zero_stage": 0 if dtype == "float32" else 1}
    rows = [
        {"id": str(i), "messages": [{"role": "user", "content": f"Sort {i}."}], "chosen": f"Surely: {i}.", "rejected": f"{i}{i} no"}
        for i in range(120, 180)
    ]

    def curves(step: int) -> MetricsLog:
        path = tmp_path / "curves.csv"
        return MetricsLog(path, COLUMNS, timings=None, first_step=step)

    loop = TrainLoop(0, 100, 100, 0, lambda phase: CheckpointStore(tmp_path / "scratch" / phase), curves, lambda: False)
    run = PreferenceRun(folder, params.model.model_copy(update={"dtype": dtype}), tmp_path / "scratch", loop, 12)
    trained = train_on_pairs(rows[:48], rows[48:], params.dpo.model_copy(update=changes), run)
    assert trained.metrics["heldout_accuracy"] > 0.9


@pytest.mark.torch
def test_flash_attention_without_padding_gives_what_it_gives_with_padding(folder):
    from rlhf_core.models.backend import Backend
    from rlhf_core.models.build import load_language_model

    pytest.importorskip("flash_attn")

    class Padded(Backend):
        def packs(self, model, batch):
            return False

    model = load_language_model(folder, training_dtype="bfloat16").to("cuda", torch.bfloat16)
    given = batch(folder).to(torch.device("cuda"))
    assert model.config._attn_implementation == "flash_attention_2" and Backend().packs(model, given)
    places = given.selected.nonzero(as_tuple=True)
    packed, padded = (backend.hidden_states(model, given, *places)[0] for backend in (Backend(), Padded()))
    torch.testing.assert_close(packed, padded, rtol=0, atol=3e-2 * float(padded.abs().max()))


@pytest.mark.torch
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("kept", [1 << 30, 0], ids=["kept", "computed again"])
def test_the_vocabulary_in_pieces_gives_what_all_logits_give(monkeypatch, dtype: torch.dtype, close: float, kept: int):
    from rlhf_core.algorithms.logprobs import token_logprobs
    from rlhf_core.models import head as heads

    monkeypatch.setattr(heads, "MOST_ROWS", 100)
    monkeypatch.setattr(heads, "KEPT_BYTES", kept)
    place = {"device": "cuda", "dtype": dtype}
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(64, 1000, bias=False, **place), torch.randn(257, 64, **place, requires_grad=True)
    ids = torch.randint(1000, (257,), device="cuda")
    mine, _ = heads.head_logprobs(head.weight, hidden, ids, temperature=0.7, with_entropy=True)
    whole = token_logprobs(head(hidden), ids, temperature=0.7)
    torch.testing.assert_close(mine, whole, rtol=close, atol=close)
    for ours, expected in zip(*(torch.autograd.grad(x.sum(), (hidden, head.weight)) for x in (mine, whole)), strict=True):
        torch.testing.assert_close(ours, expected, rtol=close, atol=close * float(expected.abs().max()))
