"""The same training on one rank and on two: each rank's work, and two processes that do it over gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import CLEAN, run_processes
from tiny_models import PAD, demonstrations, negative_logprob_step, policy_engine, rl_job, sequences, share, train_batch
from transfers import at_an_engine, sent_bytes
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.engines.deepspeed.engine import TrainEngine, equal_count, gathered_weights, sum_over_ranks
from rlhf_core.engines.deepspeed.frozen import FrozenModel
from rlhf_core.engines.deepspeed.universal import convert_to_universal, is_sharded
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.trainers.rl.minibatch import Minibatch
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.types import Sequences

Address = tuple[str, int] | None
STAGES = (0, 2, 3)
DEADLINE = 280  # seconds; two processes import torch and deepspeed on a machine that may be busy
BATCHES = [sequences(8, seed=k) for k in range(4)]
SCORER = {"name": "reward_model", "kind": "reward_model", "weight": 1.0, "normalization": "initial", "members": 2}
LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}
# Every policy loss, aggregation, and part of an optimizer step; "experts" has a model of its own, and "ppo" ends its first step early.
# "adapters" has two reward models, a reference that the policy replaces, and layers that are computed again.
CASES = {
    "ppo": {"rl.max_approx_kl": 1.0, "rl.minibatch_size": 128, "rl.ptx.coef": 0.5, "rl.ppo.critic_init": "reward_model"},
    "gspo": {"rl.algorithm": "rloo", "rl.policy_loss": "gspo", "rl.clip_low": 0.9, "rl.clip_high": 3.0},
    "adapters": {
        "rl.lora": LORA,
        "rl.ppo.critic_init": "reward_model_trunk",
        "rl.reward.scorers": [SCORER],
        "reward.ensemble": 2,
        "rl.kl.refresh_reference_every": 1,
        "rl.trainer.gradient_checkpointing": True,
    },
    "experts": {
        "rl.algorithm": "rloo",
        "rl.policy_loss": "cispo",
        "rl.loss_aggregation": "constant_horizon",
        "rl.moe_aux_coef": 0.5,
        "rl.kl.placement": "loss",
        "rl.kl.estimator": "k3",
    },
}
SHARED = {"ppo": 0, "gspo": 1, "adapters": 3}  # cases of two ranks that share each sequence -> their ZeRO stage
# The cells that `make test` runs: every case, every stage, and the cheap ones of SHARED. The others are long.
QUICK = {(0, "gspo"), (2, "ppo"), (2, "experts"), (3, "adapters")}
QUICK_SHARED = {"ppo", "gspo"}
QUICK_STAGES = (2, 3)  # of SFT steps, resume and turns; DeepSpeed's optimizers of the two have no code in common
FORWARD, STARTS = sequences(6, seed=11), [1, 2, 3, 1, 2, 3]


def sft_steps(engine: TrainEngine, batches: list[list[list[int]]], *, rank: int, ranks: int) -> list[tuple[float, float]]:
    """Loss share and gradient norm of each step, with denominators over all ranks."""
    return [
        negative_logprob_step(engine, ids[rank::ranks], num_loss_tokens=sum(len(s) - 1 for s in ids), microbatch_tokens=30)
        for ids in batches
    ]


def turning_steps(engine: TrainEngine, *, rank: int) -> list[tuple[float, float]]:
    """Two steps, and the engine on the host before each."""
    steps = []
    for batch in BATCHES[:2]:
        engine.keep("nothing")
        engine.keep("all")
        steps += sft_steps(engine, [batch], rank=rank, ranks=2)
    return steps


def alone(address: Address) -> Address:
    """One rank needs no other's address."""
    return address


def rl_case(
    case: str,
    folders: tuple[Path, Path, Path],
    *,
    stage: int,
    rank: int,
    ranks: int,
    sharing: int = 1,
    agree: Callable[[Address], Address] = alone,
) -> dict:
    """A rank's results of a forward pass, of scores by the reward model and of two updates, and its weights after them.

    Args:
        sharing: ranks that share each sequence.
        agree: gives every rank the address of rank 0.
    """
    sft, reward, experts = folders
    options = {"rl.trainer.zero_stage": stage, "rl.trainer.microbatch_tokens": 30, **CASES[case]}
    options |= {"rl.trainer.ranks": ranks, "rl.trainer.sequence_parallel": sharing}
    trainer = TrainerRank(rank, ranks, rl_job(experts if case == "experts" else sft, reward, **options), adapters_alone=case == "adapters")
    trainer.connect(agree(trainer.address()))
    rank, ranks = rank // sharing, ranks // sharing
    size = len(FORWARD) // ranks
    mine = slice(size * rank, size * (rank + 1))
    forward = trainer.forward(Sequences.of(FORWARD[mine], STARTS[mine]))
    scores = trainer.score_by_reward_model("reward_model", [*FORWARD[mine], None] if rank == 0 else [])
    totals = [trainer.update(minibatches, kl_coef=0.2, train_policy=True).totals for minibatches in rl_steps(case, rank=rank, ranks=ranks)]
    if case == "adapters":
        trainer.refresh_reference()
        forward |= {"refreshed": trainer.forward(Sequences.of(FORWARD[mine], STARTS[mine]))["ref_logprobs"]}
    found = {"forward": forward, "scores": scores, "totals": totals, "weights": trainer.weights()}
    return found | ({"engine": at_an_engine(trainer._source, sft), "sent": sent_bytes(trainer._source)} if case == "adapters" else {})


def rl_steps(case: str, *, rank: int, ranks: int) -> list[list[Minibatch]]:
    """Steps of two and three minibatches. In the fourth minibatch all rows of rank 1 are unscored, in the fifth all rows; in case ppo the
    second ends its step.
    """
    unscored = {3: (1, 3, 5, 7), 4: tuple(range(8))}
    minibatches = []
    for seed in range(5):
        batch = train_batch(8, seed=seed, unscored=unscored.get(seed, (6,)))
        if case == "ppo" and seed == 1:
            batch.old_logprobs[::2] -= 3.0  # by rank 0 alone; rank 1's own tokens would not end the step
        minibatches.append(share(batch, demonstrations(6, seed=seed), rank=rank, ranks=ranks))
    return [minibatches[:2], minibatches[2:]]


def reductions(sft: Path, *, stage: int, rank: int) -> tuple[int, int]:
    """Reductions of gradients during the backward passes of three micro-batches, and in the optimizer's step."""
    engine, counts = policy_engine(sft, zero_stage=stage), []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"):
            collective = getattr(dist, name)
            patch.setattr(dist, name, lambda *args, _run=collective, **kwargs: counts.append(1) or _run(*args, **kwargs))
        for ids in BATCHES[:3]:
            engine.backward(engine(collate_tokens(ids[rank::2], [1] * 4, pad_id=PAD)).logprobs.mean())
        during = len(counts)
        engine.step()
    return during, len(counts) - during


def private_bytes() -> int:
    """Memory of this process that no file backs."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def sharded_loading(folder: Path) -> dict[str, float]:
    """Private memory that a model takes as it is loaded and sharded, and the weights that are whole while all are read; bytes, over those
    of the whole model.
    """
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    before = private_bytes()
    module = PolicyModule(load_language_model(folder))
    loaded = private_bytes()
    model = FrozenModel(module, dtype="float32", zero_stage=3, offload=False)
    sharded, whole = private_bytes(), []
    large = [p for p in module.parameters() if p.ds_numel > 1e5]  # DeepSpeed keeps smaller ones whole
    for _ in gathered_weights(module):
        whole.append(sum(4 * p.numel() for p in large))
    assert model.sharded and all(p.numel() == 0 for p in large)
    return {"loaded": (loaded - before) / files, "sharded": (sharded - before) / files, "gathered": max(whole) / files}


def save_large(folder: Path) -> None:
    """A model of 50 MB, of which the embedding and the head are 8 MB each."""
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=8000, dtype="float32", **shape)).save_pretrained(folder)


def saved_by_one_rank(sft: Path, folder: Path, *, whole: bool) -> None:
    """The engine after two batches on one rank, for two ranks to resume from: as it is, and as a universal checkpoint."""
    for stage in STAGES if whole else QUICK_STAGES:
        engine = policy_engine(sft, zero_stage=stage)
        sft_steps(engine, BATCHES[:2], rank=0, ranks=1)
        engine.save(folder, f"stage-{stage}")
        if is_sharded(folder / f"stage-{stage}"):
            convert_to_universal(folder / f"stage-{stage}", folder / "universal" / f"stage-{stage}")


def load_of_other_ranks(engine: TrainEngine, folder: Path, name: str) -> None:
    if (folder / "universal" / name).exists():
        engine.load_universal(folder / "universal", name)
    else:
        engine.load(folder, name)


def rank_main(rank: int, addresses: multiprocessing.Queue, folders: tuple[Path, Path, Path], out: Path, whole: bool) -> None:
    """Run one of two ranks; writes its results to `out`. whole: all cells, or the quick ones alone."""

    def agree(address: Address) -> Address:
        if rank == 1:
            return addresses.get(timeout=DEADLINE)
        addresses.put(address)
        return address

    results: dict = {"rl": {}, "sft": {}, "resumed": {}, "grown": {}, "turns": {}}
    for stage in STAGES:
        chosen = [case for case in CASES if whole or (stage, case) in QUICK]
        results["rl"][stage] = {case: rl_case(case, folders, stage=stage, rank=rank, ranks=2, agree=agree) for case in chosen}
        if not whole and stage not in QUICK_STAGES:
            continue
        engine = policy_engine(folders[0], zero_stage=stage)
        steps = sft_steps(engine, BATCHES[:2], rank=rank, ranks=2)
        engine.save(out / "engines", f"stage-{stage}")
        results["turns"][stage] = turning_steps(policy_engine(folders[0], zero_stage=stage), rank=rank)
        steps += sft_steps(engine, BATCHES[2:], rank=rank, ranks=2)
        results["sft"][stage] = (steps, engine.state_dict(every_rank=True))
        again = policy_engine(folders[0], zero_stage=stage)
        again.load(out / "engines", f"stage-{stage}")
        again.save(out / "again", f"stage-{stage}")
        results["resumed"][stage] = (sft_steps(again, BATCHES[2:], rank=rank, ranks=2), again.state_dict(every_rank=True))
        grown = policy_engine(folders[0], zero_stage=stage)
        load_of_other_ranks(grown, out / "one", f"stage-{stage}")
        results["grown"][stage] = (sft_steps(grown, BATCHES[2:], rank=rank, ranks=2), grown.state_dict(every_rank=True))
    results["reductions"] = [reductions(folders[0], stage=stage, rank=rank) for stage in range(3)]
    results["loading"] = sharded_loading(out / "large")
    results["shared"] = {
        case: rl_case(case, folders, stage=stage, rank=rank, ranks=2, sharing=2, agree=agree)
        for case, stage in SHARED.items()
        if whole or case in QUICK_SHARED
    }
    results["equal_count"] = equal_count([[0, 1, 2, 3, 4]] if rank == 0 else [[0], [1], [2]])
    try:
        equal_count([[0]] if rank == 0 else [[0], [1]])
    except ValueError as error:
        results["too few"] = str(error)
    results["sum"] = sum_over_ranks(torch.tensor([1.0, 10.0]) * (rank + 1))
    torch.save(results, out / f"rank-{rank}.pt")


def run_two_ranks(folders: tuple[Path, Path, Path], out: Path, *, whole: bool) -> list[dict]:
    """The results of both ranks. whole: see `rank_main`.

    Raises:
        RuntimeError: a rank failed, or exceeded DEADLINE seconds.
    """
    addresses = CLEAN.Queue()
    run_processes(rank_main, [(rank, addresses, folders, out, whole) for rank in range(2)], deadline=DEADLINE)
    return [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]
