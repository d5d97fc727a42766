"""Divergences from teachers, in pieces of rows, against those of all logits at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import sequences
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlhf_core.models import head as heads
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.divergence import Divergence, Target, TopTarget, likeliest
from rlhf_core.models.forward import PolicyModule

VOCABULARY = 60
KINDS = {"reverse_kl": {}, "forward_kl": {}, "jsd": {"beta": 0.3}}
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24, "pad_token_id": 0}


@pytest.fixture(params=[3, 256], ids="pieces of {}".format)
def piece_rows(request, monkeypatch) -> int:
    rows = request.param
    monkeypatch.setattr(heads, "pieces", lambda count, weight, at_most=None: [slice(i, i + rows) for i in range(0, count, rows)])
    return rows


def made(kind: type[PreTrainedModel], config: type, *, hidden: int = 16, vocabulary: int = VOCABULARY, seed: int = 0, **options):
    """A model with weights so large that its distributions are far from uniform."""
    torch.manual_seed(seed)
    model = kind(config(vocab_size=vocabulary, hidden_size=hidden, **SIZES, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 if parameter.ndim < 2 else 6.0)
    return model


def llama(**options) -> PreTrainedModel:
    return made(LlamaForCausalLM, LlamaConfig, **options)


def with_bias(model: PreTrainedModel) -> PreTrainedModel:
    head = nn.Linear(16, VOCABULARY)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
    model.lm_head = head
    return model


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "capped": lambda: made(Gemma2ForCausalLM, Gemma2Config, head_dim=8, final_logit_softcapping=3.0),
    "scaled and tied": lambda: made(CohereForCausalLM, CohereConfig, logit_scale=0.5),
    "a head with a bias": lambda: with_bias(llama()),
}


def target(teacher: PolicyModule, batch, weight: float = 1.0) -> Target:
    with torch.no_grad():
        return Target(teacher(batch, states_only=True), teacher.projection(lambda weight: weight), weight)


def plain(kind: str, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The divergence of logits [N, V], written out in probabilities."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    if kind == "reverse_kl":
        return (p * (p / q).log()).sum(-1)
    if kind == "forward_kl":
        return (q * (q / p).log()).sum(-1)
    m = 0.3 * q + 0.7 * p
    return 0.3 * (q * (q / m).log()).sum(-1) + 0.7 * (p * (p / m).log()).sum(-1)


def batch_of_rows():
    ids = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9], [7, 9, 3, 2, 3, 8]]
    return collate_tokens(ids, [2, 1, 3], pad_id=0)


def all_logits(model: PreTrainedModel, batch) -> torch.Tensor:
    """[N, V], those that predict the selected tokens."""
    rows, positions, _ = batch.predictions()
    return model(input_ids=batch.input_ids).logits[rows, positions]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradient_are_those_of_all_logits(piece_rows, family: str, kind: str, temperature: float):
    student, teacher, batch = FAMILIES[family](), PolicyModule(llama(hidden=32, seed=1)), batch_of_rows()
    expected = plain(kind, all_logits(student, batch) / temperature, all_logits(teacher.model, batch).detach() / temperature)
    weights = torch.linspace(0.5, 2.0, len(expected))
    theirs = torch.autograd.grad((weights * expected).sum(), [*student.parameters()], allow_unused=True)
    module = PolicyModule(student)
    output = module(batch, temperature=temperature, with_entropy=True, divergence=Divergence(kind, KINDS[kind], [target(teacher, batch)]))
    plain_output = module(batch, temperature=temperature, with_entropy=True)
    torch.testing.assert_close(output.divergence, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output[:2], plain_output[:2], rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad((weights * output.divergence).sum(), [*student.parameters()], allow_unused=True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"learn_entropy": True}, {"top_p": 0.9}], ids=str)
def test_gradients_of_all_outputs_add_up(piece_rows, options):
    """Log-probabilities, and with options that need all logits the rest too."""
    module, batch = PolicyModule(llama()), batch_of_rows()
    divergence = Divergence("reverse_kl", {}, [target(PolicyModule(llama(seed=1)), batch)])
    results = []
    for further in ({}, options):
        output = module(batch, with_entropy=True, divergence=divergence, **further)
        loss = (output.divergence - 0.5 * output.logprobs).sum()
        results.append((output.divergence, output.logprobs, *torch.autograd.grad(loss, [*module.parameters()])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_vocabularies_of_other_sizes_are_compared_on_the_ids_of_both(piece_rows):
    batch = batch_of_rows()
    for own, others in ((VOCABULARY, VOCABULARY - 8), (VOCABULARY - 8, VOCABULARY)):
        student, teacher = llama(vocabulary=own), PolicyModule(llama(vocabulary=others, seed=1))
        common = min(own, others)
        expected = plain("forward_kl", all_logits(student, batch)[:, :common], all_logits(teacher.model, batch)[:, :common])
        output = PolicyModule(student)(batch, divergence=Divergence("forward_kl", {}, [target(teacher, batch)]))
        torch.testing.assert_close(output.divergence, expected, rtol=1e-5, atol=1e-5)


def test_several_teachers_are_averaged_by_weight(piece_rows):
    batch, module = batch_of_rows(), PolicyModule(llama())
    teachers = [PolicyModule(llama(seed=seed)) for seed in (1, 2)]
    alone = [module(batch, divergence=Divergence("jsd", {"beta": 0.3}, [target(t, batch)])).divergence for t in teachers]
    both = module(batch, divergence=Divergence("jsd", {"beta": 0.3}, [target(t, batch, w) for t, w in zip(teachers, (3, 1), strict=True)]))
    torch.testing.assert_close(both.divergence, 0.75 * alone[0] + 0.25 * alone[1])


def test_a_batch_without_selected_tokens_has_no_divergence():
    batch = collate_tokens([[3, 1, 4]], [3], pad_id=0)
    output = PolicyModule(llama())(
        batch, with_entropy=True, divergence=Divergence("reverse_kl", {}, [target(PolicyModule(llama()), batch)])
    )
    assert output.divergence.shape == output.logprobs.shape == output.entropy.shape == (0,)
    output.divergence.sum().backward()


def test_bfloat16_is_computed_in_float32(piece_rows):
    batch, student, teacher = batch_of_rows(), llama(), llama(seed=1)
    expected = plain("reverse_kl", all_logits(student, batch), all_logits(teacher, batch)).detach()
    module = PolicyModule(student.bfloat16())
    output = module(batch, divergence=Divergence("reverse_kl", {}, [target(PolicyModule(teacher.bfloat16()), batch)]))
    assert output.divergence.dtype == torch.float32
    torch.testing.assert_close(output.divergence, expected, rtol=0.1, atol=0.1)
    output.divergence.sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in module.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 4])
def test_the_likeliest_tokens_have_trls_loss_and_gradient(piece_rows, kind: str, count: int):
    """TRL's loss of a teacher at a server, which has a rest too: beta 0 is the forward KL, beta 1 the reverse KL."""
    from trl.experimental.server_distillation import server_distillation_trainer as trl

    student, teacher, batch = llama(), llama(hidden=32, seed=1), batch_of_rows()
    own, theirs = (all_logits(model, batch).log_softmax(-1) for model in (student, teacher))
    best = theirs.detach().topk(count)
    every = torch.ones_like(best.indices, dtype=torch.bool)
    of_student, mask = trl._add_tail_bucket(own.gather(-1, best.indices), every)
    beta = {"forward_kl": 0, "reverse_kl": 1, "jsd": 0.3}[kind]
    expected = trl._jsd_divergence(of_student, trl._add_tail_bucket(best.values, every)[0], beta, mask).sum(-1)
    their_gradients = torch.autograd.grad(expected.sum(), [*student.parameters()])
    module, of_teacher = PolicyModule(student), target(PolicyModule(teacher), batch)
    how = {"count": count, "vocabulary": VOCABULARY, "temperature": 1.0}
    found = likeliest(of_teacher.states, of_teacher.logits, [slice(0, 2), slice(2, None)], **how)
    output = module(batch, divergence=Divergence(kind, KINDS[kind], [TopTarget(*found, 1.0)]))
    torch.testing.assert_close(output.divergence, expected, rtol=1e-5, atol=1e-5)
    for mine, other in zip(torch.autograd.grad(output.divergence.sum(), [*module.parameters()]), their_gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_the_likeliest_tokens_are_ids_that_the_policy_has(piece_rows):
    batch, teacher = batch_of_rows(), target(PolicyModule(llama(seed=1)), batch_of_rows())
    logprobs, ids = likeliest(teacher.states, teacher.logits, [slice(None)], count=3, vocabulary=10, temperature=0.7)
    expected = (teacher.logits(teacher.states) / 0.7).log_softmax(-1)[:, :10].topk(3)
    assert torch.equal(ids, expected.indices) and int(ids.max()) < 10 and len(ids) == int(batch.selected.sum())
    torch.testing.assert_close(logprobs, expected.values)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_same_batch_has_trls_loss_and_gradient(kind: str, temperature: float):
    """GKD's loss in TRL: beta 0 is the forward KL, beta 1 the reverse KL."""
    from trl.experimental.gkd import GKDTrainer

    student, teacher, rows = llama(), llama(hidden=32, seed=1), sequences(16, seed=4)
    ids = [[token % VOCABULARY for token in row] for row in rows]
    batch = collate_tokens(ids, [1] * len(ids), pad_id=0)
    labels = batch.input_ids.masked_fill(~batch.selected, -100)
    inputs = {"input_ids": batch.input_ids}
    beta = {"forward_kl": 0, "reverse_kl": 1, "jsd": 0.3}[kind]
    logits = student(**inputs).logits[:, :-1], teacher(**inputs).logits[:, :-1].detach()
    theirs = GKDTrainer.generalized_jsd_loss(*logits, labels=labels[:, 1:], beta=beta, temperature=temperature)
    their_gradients = torch.autograd.grad(theirs, [*student.parameters()])
    module = PolicyModule(student)
    output = module(batch, temperature=temperature, divergence=Divergence(kind, KINDS[kind], [target(PolicyModule(teacher), batch)]))
    ours = output.divergence.mean()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-5)
    for mine, other in zip(torch.autograd.grad(ours, [*module.parameters()]), their_gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
