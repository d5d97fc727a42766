"""Adapters: a start that equals the model, an export that equals what is trained, training that leaves the rest alone and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import (
    PAD,
    largest_difference,
    merged_state_dict,
    negative_logprob_step,
    rl_job,
    save_tiny_experts,
    sequences,
    settings,
    train_batch,
    whole,
)

from rlhf_core.config import LoraConfig
from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model, load_scalar_model, new_scalar_model, save_model, scalar_head
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.models.lora import add_adapters, without_adapters
from rlhf_core.models.weights import checkpoint_names, read_state_dict
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.types import Sequences
from tests.model_families import FAMILIES, OTHERS

pytestmark = pytest.mark.usefixtures("world")
ALL = LoraConfig(rank=3, alpha=6.0, dropout=0.0, target_modules="all-linear")
BATCHES = [sequences(6, seed=k) for k in range(4)]
# Width 16, intermediate 32, 2 layers: q, k, v, o are 16 x 16, gate, up and down 16 x 32; rank 3: 2 * (4 * 3 * 32 + 3 * 3 * 48) numbers.
ADAPTED, NUMBERS = 14, 1632


def tokens(ids: list[list[int]]):
    return collate_tokens(ids, [1] * len(ids), pad_id=PAD)


def engine(folder: Path, config: LoraConfig | None = ALL, *, seed: int = 0, **changes) -> TrainEngine:
    model = load_language_model(folder)
    add_adapters(model, config, seed=seed)
    return TrainEngine(PolicyModule(model), settings(learning_rate=1e-2, schedule=lambda _: 1.0, **changes))


def train(trained: TrainEngine, batches: list[list[list[int]]]) -> list[tuple[float, float]]:
    return [negative_logprob_step(trained, b, num_loss_tokens=sum(len(s) - 1 for s in b), microbatch_tokens=40) for b in batches]


@torch.no_grad()
def logprobs(module, ids: list[list[int]] = BATCHES[0]) -> torch.Tensor:
    return module(tokens(ids)).logprobs


def test_an_adapted_model_starts_as_the_model_itself(sft_folder: Path):
    plain, adapted = load_language_model(sft_folder), load_language_model(sft_folder)
    add_adapters(adapted, ALL, seed=0)
    # The plain model is computed on its real tokens alone, the adapted one by its own forward: apart from rounding the same.
    torch.testing.assert_close(logprobs(PolicyModule(adapted)), logprobs(PolicyModule(plain)), rtol=0, atol=2e-6)
    assert largest_difference(merged_state_dict(adapted), plain.state_dict()) == 0


def test_adapters_follow_the_seed_and_draw_from_nobody_elses_numbers(sft_folder: Path):
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(1)
        model = load_language_model(sft_folder)
        before = torch.get_rng_state()
        add_adapters(model, ALL, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        drawn.append({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    assert largest_difference(drawn[0], drawn[1]) == 0 < largest_difference(drawn[0], drawn[2])


def test_the_correction_by_hand():
    """W = [[1, 2], [3, 4]], B = [1, 2]^T, A = [10, 20], alpha 4 over rank 1: W + 4 * [[10, 20], [20, 40]]."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    module[0].weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    inject_adapter_in_model(PeftLoraConfig(r=1, lora_alpha=4, target_modules=["0"]), module)
    module[0].lora_A["default"].weight.data = torch.tensor([[10.0, 20.0]])
    module[0].lora_B["default"].weight.data = torch.tensor([[1.0], [2.0]])
    (merged,) = merged_state_dict(module).items()
    assert merged[0] == "0.weight" and merged[1].tolist() == [[41.0, 82.0], [83.0, 164.0]]
    assert module[0].base_layer.weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_merged_weights_equal_adapters_and_training_is_unaffected(sft_folder: Path, zero_stage: int):
    trained, unwatched = (engine(sft_folder, zero_stage=zero_stage) for _ in range(2))
    for batch in BATCHES:
        assert train(trained, [batch]) == train(unwatched, [batch])
        plain = load_language_model(sft_folder)
        start = logprobs(PolicyModule(plain))
        plain.load_state_dict(trained.state_dict())  # strict: the names are the plain model's
        now = logprobs(trained)
        assert (logprobs(PolicyModule(plain)) - now).abs().max() < 1e-5 < (start - now).abs().max()
        with without_adapters(trained.module):
            torch.testing.assert_close(logprobs(trained), start, rtol=0, atol=2e-6)
    assert largest_difference(trained.state_dict(), unwatched.state_dict()) == 0


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_only_adapters_are_trained_and_have_an_optimizer_state(sft_folder: Path, zero_stage: int):
    trained = engine(sft_folder, zero_stage=zero_stage)
    losses = [loss for loss, _ in train(trained, [BATCHES[0]] * 6)]
    assert losses[-1] < losses[0] - 0.1
    held = [tensor for state in trained._torch_optimizer.state.values() for tensor in state.values() if tensor.numel() > 1]
    assert sum(tensor.numel() for tensor in held) == 2 * NUMBERS  # two moments
    assert sum(p.numel() for p in trained.module.parameters() if p.requires_grad) == NUMBERS
    before, after = load_language_model(sft_folder).state_dict(), trained.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(moved) == ADAPTED and all("_proj" in name for name in moved)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_resume_equals_an_uninterrupted_run(sft_folder: Path, tmp_path: Path, zero_stage: int):
    whole, first = (engine(sft_folder, zero_stage=zero_stage) for _ in range(2))
    expected = train(whole, BATCHES)
    train(first, BATCHES[:2])
    first.save(tmp_path, "engine")
    second = engine(sft_folder, seed=9, zero_stage=zero_stage)  # other adapters, which the checkpoint replaces
    second.load(tmp_path, "engine")
    assert train(second, BATCHES[2:]) == expected[2:]
    assert largest_difference(second.state_dict(), whole.state_dict()) == 0


def test_a_reward_models_new_head_is_trained_too(sft_folder: Path, tokenizer, tmp_path: Path):
    model = new_scalar_model(sft_folder, tokenizer, trust_remote_code=False)
    add_adapters(model, ALL, seed=0)
    head = scalar_head(model)
    assert [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name] == ["score.weight"]
    trained = TrainEngine(ScalarModule(model), settings())
    for batch in BATCHES:
        trained.backward((trained(tokens(batch)) - 1.0).square().mean())
        trained.step()
    assert head.weight.abs().max() > 0
    save_model(model, trained.state_dict(), tokenizer, tmp_path)
    with torch.no_grad():
        again = ScalarModule(load_scalar_model(tmp_path))(tokens(BATCHES[0]))
        assert (again - trained(tokens(BATCHES[0]))).abs().max() < 1e-5 < again.abs().max()


def test_a_saved_model_is_a_plain_hugging_face_folder(sft_folder: Path, tokenizer, tmp_path: Path):
    trained = engine(sft_folder)
    train(trained, BATCHES)
    save_model(trained.module.model, trained.state_dict(), tokenizer, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in sft_folder.iterdir())
    assert (tmp_path / "config.json").read_text() == (sft_folder / "config.json").read_text()
    assert largest_difference(read_state_dict(tmp_path), trained.state_dict()) == 0
    assert (logprobs(PolicyModule(load_language_model(tmp_path))) - logprobs(trained)).abs().max() < 1e-5


def test_experts_keep_the_names_of_their_folder(tokenizer, tmp_path: Path):
    folder = save_tiny_experts(tmp_path / "experts", tokenizer)
    trained = engine(folder)
    train(trained, BATCHES)
    assert checkpoint_names(trained.module.model, trained.state_dict()).keys() == read_state_dict(folder).keys()


def test_bfloat16_is_merged_in_float32_and_rounded_once(sft_folder: Path):
    trained = engine(sft_folder, dtype="bfloat16")
    train(trained, BATCHES)
    layer = trained.module.model.model.layers[0].mlp.down_proj
    base, a, b = (w.weight.double() for w in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]))
    state = trained.state_dict()
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    exact = base + 2.0 * (b @ a)
    ulp = torch.finfo(torch.bfloat16).eps * exact.abs()
    assert ((state["model.layers.0.mlp.down_proj.weight"].double() - exact).abs() <= 0.51 * ulp).all()


def test_named_layers_alone_get_adapters(sft_folder: Path):
    model = load_language_model(sft_folder)
    add_adapters(model, LoraConfig(rank=2, alpha=1.0, dropout=0.0, target_modules=["q_proj", "layers.1.mlp.up_proj"]), seed=0)
    adapted = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted == {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "proj", "query"])
def test_names_that_are_no_linear_layers_are_refused(sft_folder: Path, name: str):
    with pytest.raises(ValueError, match=rf"lora.target_modules: expected linear layers .*'q_proj'.* got \['{name}'\]"):
        add_adapters(load_language_model(sft_folder), LoraConfig(rank=2, alpha=1.0, dropout=0.0, target_modules=["q_proj", name]), seed=0)


@pytest.mark.parametrize("family", ["falcon_7b", "falcon_40b", "falcon_rw", "llama", "gpt2", "llama4"])
def test_all_linear_is_what_peft_takes_but_routers(family: str):
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    made = (FAMILIES | OTHERS)[family]
    ours, theirs = made(), get_peft_model(made(), PeftConfig(target_modules="all-linear"))
    add_adapters(ours, settings_of(target_modules="all-linear"), seed=0)
    wrapped = {name.removeprefix("base_model.model.") for name in adapted(theirs) if not name.endswith("router")}
    assert adapted(ours) == wrapped and wrapped
    assert family != "llama4" or any(name.endswith("router") for name in adapted(theirs))


def test_a_layer_of_a_derived_class_is_quantized_too():
    model = OTHERS["falcon_rw"]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add_adapters(model, settings_of(target_modules="all-linear", quantize="nf4"), seed=0)
    after = merged_state_dict(model)
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed == {name for name in before if name.endswith(("query_key_value.weight", "dense.weight", "_4h.weight", "_to_h.weight"))}


def test_layers_whose_weights_their_parent_reads_get_no_adapters():
    """torch's attention, as in vision towers, passes its output layer's weight to a function."""
    model = FAMILIES["llama"]()
    model.model.layers[0].tower = torch.nn.MultiheadAttention(64, 2)
    add_adapters(model, settings_of(target_modules="all-linear"), seed=0)
    assert adapted(model) and not any("tower" in name for name in adapted(model))


def test_a_model_without_linear_layers_is_refused():
    model = FAMILIES["llama"]()
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(ValueError, match="lora: expected a model with linear layers, got LlamaForCausalLM without any; set lora to null"):
        add_adapters(model, settings_of(target_modules="all-linear"), seed=0)


def settings_of(**changes) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "alpha": 8.0, "dropout": 0.0, **changes})


def adapted(model: torch.nn.Module) -> set[str]:
    return {name.removesuffix(".lora_A") for name, _ in model.named_modules() if name.endswith(".lora_A")}


def test_dropout_is_active_in_training_only(sft_folder: Path):
    config = LoraConfig(rank=3, alpha=6.0, dropout=0.5, target_modules="all-linear")
    trained = engine(sft_folder, config)
    train(trained, BATCHES)
    assert not torch.equal(logprobs(trained), logprobs(trained))
    trained.eval()
    assert torch.equal(logprobs(trained), logprobs(trained))


def test_without_a_section_nothing_happens(sft_folder: Path):
    model = load_language_model(sft_folder)
    add_adapters(model, None, seed=0)
    assert all(p.requires_grad for p in model.parameters()) and merged_state_dict(model).keys() == model.state_dict().keys()


# In RL


def connected(folders: tuple[Path, Path], **overrides) -> TrainerRank:
    rank = TrainerRank(0, 1, rl_job(*folders, **{"rl.lora": ALL.model_dump(), **overrides}))
    rank.connect(rank.address())
    return rank


def rl_step(rank: TrainerRank, seed: int) -> dict[str, float]:
    return rank.update([whole(train_batch(8, seed=seed))], kl_coef=0.2, train_policy=True).totals


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_in_rl_the_policy_without_its_adapters_is_the_reference(model_folders: tuple[Path, Path], zero_stage: int):
    rank = connected(model_folders, **{"rl.trainer.zero_stage": zero_stage})
    starts = [1] * len(BATCHES[0])
    before = rank.forward(Sequences.of(BATCHES[0], starts))
    assert torch.equal(before["ref_logprobs"], before["old_logprobs"])
    for seed in range(3):
        rl_step(rank, seed)
        after = rank.forward(Sequences.of(BATCHES[0], starts))
        assert torch.equal(after["ref_logprobs"], before["ref_logprobs"])
    assert (after["old_logprobs"] - before["old_logprobs"]).abs().max() > 1e-4
    plain = load_language_model(model_folders[0])
    plain.load_state_dict(rank.weights())
    assert (logprobs(PolicyModule(plain)) - after["old_logprobs"]).abs().max() < 1e-5


def test_in_rl_a_reference_that_moves_becomes_the_merged_policy(model_folders: tuple[Path, Path]):
    rank = connected(model_folders, **{"rl.kl.refresh_reference_every": 1})
    rl_step(rank, 0)
    rank.refresh_reference()
    seen = rank.forward(Sequences.of(BATCHES[0], [1] * len(BATCHES[0])))
    assert (seen["ref_logprobs"] - seen["old_logprobs"]).abs().max() < 1e-5
    assert largest_difference(rank.roles.reference.state_dict(), rank.weights()) == 0


def test_in_rl_resume_equals_an_uninterrupted_run(model_folders: tuple[Path, Path], tmp_path: Path):
    whole_run, first = connected(model_folders), connected(model_folders)
    expected = [rl_step(whole_run, seed) for seed in range(3)]
    rl_step(first, 0)
    first.save(str(tmp_path))
    second = connected(model_folders)
    second.load(str(tmp_path))
    assert [rl_step(second, seed) for seed in (1, 2)] == expected[1:]
    assert largest_difference(second.weights(), whole_run.weights()) == 0
