from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from preference_runs import TRAIN, config, run_of
from seeing_models import FAMILIES, ONE_PICTURE, QUESTION, picture, rows, save_seeing_model, seeing, store
from tiny_models import save_tiny_models, settings, tiny_tokenizer
from transformers import AutoModelForImageTextToText

from rlhf_core.config import LoraConfig
from rlhf_core.data.pictures import Picture, StoredPictures, with_pictures
from rlhf_core.engines.deepspeed.engine import TrainEngine, join_world
from rlhf_core.model_check.trial import plain_logprobs
from rlhf_core.models import vision
from rlhf_core.models.build import check_weights, load_language_model, save_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.tokenizer import Unrenderable, encode_prompt, load_tokenizer
from rlhf_core.models.vision import FILES, Sight
from rlhf_core.process import Interrupted
from rlhf_core.trainers.preference.objectives import Continuation, ResponseForward, group_by_prompt
from rlhf_core.trainers.preference.train import PreferenceRun, begin_pairs
from rlhf_core.trainers.sft.train import sft_phase
from rlhf_core.trainers.supervised.demonstrations import collate_demonstrations, encode_demonstrations

LIMIT = 1e-5  # nats, in float32
ASKED = {"role": "user", "content": QUESTION}


QUICK = ("qwen2_5_vl", "llava")


@pytest.fixture(scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def family(request, tmp_path_factory) -> tuple[Path, Path, list[Picture]]:
    """A family's model, and a folder with pictures."""
    folder = tmp_path_factory.mktemp(request.param)
    return save_seeing_model(folder / "model", request.param), folder / "data", store(folder / "data", 6)


def rows_of(family) -> list[dict]:
    return rows(family[2], several=family[0].parent.name[:-1] not in ONE_PICTURE)


def encoded(family) -> tuple:
    tokenizer, sight = seeing(*family[:2])
    return tokenizer, sight, list(encode_demonstrations(rows_of(family), tokenizer, max_length=256)[0])


def trained_by_sft(family, lora: LoraConfig | None, *, vision: str = "frozen") -> tuple:
    """The engine and model after two steps, with its tokenizer, sight and examples."""
    tokenizer, sight, examples = encoded(family)
    join_world()
    model = load_language_model(family[0], vision=vision)
    add_adapters(model, lora, seed=0)
    engine = TrainEngine(PolicyModule(model), settings(disable_dropout=True))
    phase = sft_phase("sft", examples, [], steps=2, batch_size=6, pad_id=0, microbatch_tokens=120, sight=sight)
    for _ in range(2):
        phase.train_batch(engine, list(range(6)))
        engine.step()
    engine.eval()
    return engine, model, tokenizer, sight, examples


def differences_from_plain_forward(folder: Path, ours: torch.Tensor, sequences: list, starts: list[int], seen: list) -> float:
    plain = plain_logprobs(folder, sequences, pictures=seen)
    return float((ours - torch.cat([found[start - 1 :] for found, start in zip(plain, starts, strict=True)])).abs().max())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["whole", "lora"])
def test_sft_logprobs_equal_transformers_plain_forward(family, lora, tmp_path):
    engine, model, tokenizer, sight, examples = trained_by_sft(family, lora)
    with torch.no_grad():
        ours = engine(collate_demonstrations(examples, pad_id=0, sight=sight)).logprobs
    save_model(model, engine.state_dict(), tokenizer, tmp_path / "trained")
    ids, starts, seen = [e.ids for e in examples], [e.start for e in examples], [sight(e.pictures) for e in examples]
    assert differences_from_plain_forward(tmp_path / "trained", ours, ids, starts, seen) < LIMIT
    assert differences_from_plain_forward(family[0], ours, ids, starts, seen) > 100 * LIMIT  # it has learned something
    for name in FILES:
        given, saved = (folder / name for folder in (family[0], tmp_path / "trained"))
        assert given.exists() == saved.exists() and (not given.exists() or given.read_bytes() == saved.read_bytes())
    assert encode_prompt(load_tokenizer(str(tmp_path / "trained"), trust_remote_code=False, vision="frozen"), [ASKED])


@pytest.mark.parametrize(("vision", "changed"), [("frozen", False), ("trained", True)])
def test_vision_tower_changes_only_if_it_is_trained(family, vision, changed):
    before = AutoModelForImageTextToText.from_pretrained(family[0])
    frozen = load_language_model(family[0], vision="frozen")
    tower = {name for name, p in frozen.named_parameters() if not p.requires_grad}
    weights = trained_by_sft(family, None, vision=vision)[0].state_dict()
    assert any("vis" in name for name in tower) and not any("lm_head" in name or "embed_tokens" in name for name in tower)
    moved = {name for name, tensor in before.state_dict().items() if name in weights and not torch.equal(weights[name], tensor)}
    assert bool(moved & tower) == changed and moved - tower


def test_text_alone_gives_every_parameter_of_a_trained_tower_a_gradient(family):
    """Else a rank without a picture exchanges other gradients than the rest."""
    _, sight, examples = encoded(family)
    model = load_language_model(family[0], vision="trained")
    batch = collate_demonstrations([e for e in examples if not e.pictures], pad_id=0, sight=sight)
    PolicyModule(model)(batch).logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert any(parameter.grad.any() for parameter in model.parameters())


def test_logprobs_depend_on_the_picture_alone(family):
    tokenizer, sight, _ = encoded(family)
    same_size = [p for p in family[2] if (p.width, p.height) == (family[2][0].width, family[2][0].height)]
    talks = [[with_pictures(ASKED, [one, QUESTION])] for one in (same_size[0], same_size[0], same_size[1])]
    examples = [
        encode_demonstrations([{"messages": messages, "response": "Certainly."}], tokenizer, max_length=256)[0][0] for messages in talks
    ]
    assert examples[0].ids == examples[1].ids == examples[2].ids
    with torch.no_grad():
        module = PolicyModule(load_language_model(family[0], vision="frozen"))
        first, again, other = module(collate_demonstrations(examples, pad_id=0, sight=sight)).logprobs.view(3, -1)
    assert (first - again).abs().max() < LIMIT < (first - other).abs().max() / 100


def test_template_without_a_place_for_pictures_refuses_them(family):
    tokenizer, _, _ = encoded(family)
    with pytest.raises(Unrenderable, match="0 pictures, for which it writes"):
        encode_prompt(tokenizer, [{"role": "user", "content": f"What is {tokenizer.vision.token}?"}])
    tokenizer.chat_template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    with pytest.raises(Unrenderable, match="1 pictures, for which it writes 0 times"):
        encode_prompt(tokenizer, [with_pictures(ASKED, [family[2][0], QUESTION])])


def test_model_without_vision_refuses_pictures(family):
    tokenizer = load_tokenizer(str(family[0]), trust_remote_code=False)
    with pytest.raises(Unrenderable, match="need a model that sees"):
        encode_prompt(tokenizer, [with_pictures(ASKED, [family[2][0], QUESTION])])


def test_key_vision_must_fit_the_model(tmp_path):
    seeing_model = save_seeing_model(tmp_path / "llava", "llava")
    save_tiny_models(tmp_path, tiny_tokenizer())
    with pytest.raises(ValueError, match=r"model\.vision: expected frozen or trained with .*llava"):
        check_weights(seeing_model)
    with pytest.raises(ValueError, match=r"model\.vision: expected null with .*doesn't see"):
        check_weights(tmp_path / "sft", vision="frozen")
    with pytest.raises(ValueError, match="expected the settings of a processor"):
        load_tokenizer(str(tmp_path / "sft"), trust_remote_code=False, vision="frozen")


def pair_run(family, scratch: Path, **options) -> PreferenceRun:
    run = run_of(family[0], scratch, **options)
    model = run.model.model_copy(update={"vision": "frozen", "path": str(family[0]), "max_length": 256})
    return replace(run, model=model, prepared=family[1])


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_preference_training_equals_plain_forward_and_resumes_to_the_same_bits(family, method, tmp_path):
    join_world()
    pairs, settings = rows_of(family), config(method, batch_size=4)
    whole = TRAIN[method](pairs, pairs[:3], settings, pair_run(family, tmp_path / "whole"))
    with pytest.raises(Interrupted):
        TRAIN[method](pairs, pairs[:3], settings, pair_run(family, tmp_path / "halves", stop_after=2))
    resumed = TRAIN[method](pairs, pairs[:3], settings, pair_run(family, tmp_path / "halves"))
    first, second = whole.engine.state_dict(), resumed.engine.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)

    save_model(whole.model, first, whole.tokenizer, tmp_path / "trained")
    _, sight = seeing(*family[:2])
    encoded_pairs, _ = begin_pairs(pairs, whole.tokenizer, max_length=256)()
    sides = [side for pair in encoded_pairs for side in pair]
    forward = ResponseForward(0, False, 400, sight)
    whole.engine.eval()
    with torch.no_grad():
        parts = [(part.groups, forward.logprobs(whole.engine, part.groups)) for part in forward.microbatches(sides, together=2)]
    ours = {i: float(x) for groups, sums in parts for i, x in zip([i for g in groups for i in g.positions], sums, strict=True)}
    ids = [[*side.prompt_ids, *side.response_ids] for side in sides]
    plain = plain_logprobs(tmp_path / "trained", ids, pictures=[sight(side.pictures) for side in sides])
    sums = [float(found[len(side.prompt_ids) - 1 :].sum()) for side, found in zip(sides, plain, strict=True)]
    assert max(abs(ours[i] - theirs) / len(sides[i].response_ids) for i, theirs in enumerate(sums)) < LIMIT


def test_continuations_of_different_pictures_differ(family):
    one, other = (Continuation((1, 2), (3,), (p,)) for p in family[2][:2])
    assert len({one.digest, other.digest, Continuation((1, 2), (3,)).digest}) == 3
    groups = group_by_prompt([one, one, other, other], together=2, max_tokens=99, shares_prefix=False)
    assert [group.positions for group in groups] == [[0, 1], [2, 3]]


def test_pictures_in_the_store_are_read_by_hash(family):
    stored = StoredPictures(family[1])
    assert stored.read(family[2][1]).tobytes() == picture(1).tobytes()
    with pytest.raises(ValueError, match="got none; run prepare_data again"):
        stored.read(Picture("0" * 64, 1, 1))


def test_tensors_of_single_pictures_join_to_those_of_all(family):
    tokenizer, sight = seeing(*family[:2])
    pictures = [family[2][i] for i in (0, 1, 1, 2, 0)]
    ours, theirs = sight(pictures), tokenizer.vision.tensors([sight.read(picture) for picture in pictures])
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert sight([]) == {}


def test_tensors_of_the_last_pictures_are_kept_within_bounds(family, monkeypatch):
    _, sight = seeing(*family[:2])
    read, size = [], sum(tensor.nbytes for tensor in sight(family[2][:1]).values())
    monkeypatch.setattr(sight, "read", lambda picture: read.append(picture) or Sight.read(sight, picture))
    monkeypatch.setattr(vision, "KEPT_BYTES", 2 * size)
    for number in (0, 3, 0, 0, 3, 0):  # of one size
        sight([family[2][number]])
    assert read == [family[2][3]]
    for number in (1, 2, 4, 5, 0):
        sight([family[2][number]])
    assert read[-1] == family[2][0]
