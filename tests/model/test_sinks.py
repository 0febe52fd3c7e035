"""The sinks of a model as parameters: first values, gradients, freezing, adapters."""

import torch
from torch import Tensor

import handgrad as hg
from conftest import make_batch, perturb
from handgrad.optim.optimizers import groups
from handgrad.plan.parameters import parameters
from handgrad.proof.oracles import relative_error

LENGTHS = [5, 1, 9]
CONFIG = hg.preset(
    "nano-llama", n_vocab=11, n_context=16, d_model=12, n_heads=3, n_kv_heads=1, d_hidden=16, n_blocks=2, sinks=True,
    score_cap=1.5,
)  # fmt: skip
NAMES = [f"model.layers.{i}.self_attn.sinks" for i in range(2)]


def made() -> tuple[hg.GPT, Tensor, Tensor]:
    model = hg.GPT(CONFIG, dtype="float64")
    perturb(model)
    return model, *make_batch(model, LENGTHS)


def gradients(model: hg.GPT, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    for p in model.parameters():
        p.grad = None
    model.loss_and_grads(tokens, targets, LENGTHS)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_first_values_and_count() -> None:
    model = hg.GPT(CONFIG)
    named = dict(model.named_parameters())
    assert all(torch.equal(named[name], torch.zeros(3)) for name in NAMES)
    decayed, rest = groups(model.parameters(), 0.1)
    assert all(any(p is named[name] for p in rest["params"]) for name in NAMES) and decayed["params"]  # type: ignore[attr-defined]
    (row,) = (x for x in parameters(CONFIG) if x.symbol == "b_sink")
    assert (row.name, row.shape) == ("self_attn.sinks", (3,))
    assert sum(x.count * (2 if x.layer == "block" else 1) for x in parameters(CONFIG)) == model.size


def test_the_gradient_is_that_of_finite_differences() -> None:
    model, *batch = made()
    found, step = gradients(model, *batch), 1e-5
    for name in NAMES:
        p, slopes = model.get_parameter(name), []
        for i in range(3):
            losses = []
            for sign in (1, -1):
                p.data[i] += sign * step
                losses.append(model.loss(*batch, LENGTHS))
                p.data[i] -= sign * step
            slopes.append((losses[0] - losses[1]) / (2 * step))
        assert relative_error(found[name], torch.tensor(slopes).double()) <= 1e-6


def test_gradients_accumulate_and_frozen_sinks_have_none() -> None:
    model, *batch = made()
    expected = gradients(model, *batch)
    model.loss_and_grads(*batch, LENGTHS)
    sinks = [model.get_parameter(name) for name in NAMES]
    assert all(torch.allclose(p.grad, 2 * expected[n], rtol=1e-12) for p, n in zip(sinks, NAMES, strict=True))  # type: ignore[arg-type]
    for p in sinks:
        p.requires_grad_(False)
    assert gradients(model, *batch).keys() == expected.keys() - set(NAMES)
    model.requires_grad_(False)
    sinks[1].requires_grad_(True)  # alone, in the highest block
    found = gradients(model, *batch)
    assert [*found] == NAMES[1:] and relative_error(found[NAMES[1]], expected[NAMES[1]]) <= 1e-12
    hg.lora.inject(model, 2)
    assert not any(p.requires_grad for p in sinks)


def test_recomputed_and_edited_passes_have_the_same_gradients() -> None:
    model, *batch = made()
    expected = gradients(model, *batch)
    for p in model.parameters():
        p.grad = None
    model.loss_and_grads(*batch, LENGTHS, recompute="blocks")
    assert all(relative_error(model.get_parameter(name).grad, expected[name]) <= 1e-12 for name in NAMES)
    trace = hg.trace(model, *batch, LENGTHS, edit={"blocks.0.a_3": lambda a: a})
    for i, name in enumerate(NAMES):
        assert relative_error(trace[f"blocks.{i}.grad_b_sink"], expected[name]) <= 1e-12
        rho = trace[f"blocks.{i}.rho"]
        assert (rho.sum(2) < 1).all() and (rho >= 0).all()
