"""Every family against transformers in float64: logits, all gradients, generation, verify with finite differences."""

from pathlib import Path

import pytest
import torch
from members import (
    LENGTHS,
    LIMIT,
    MEMBERS,
    TYPICAL,
    assert_equal_gradients,
    batch,
    opened,
    our_gradients,
    their_gradients,
    their_logits,
    their_tensors,
    transformers_model,
)
from torch.nn import functional as F

import handgrad as hg
from handgrad.proof.oracles import relative_error


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.some_cases(3)
def test_logits_and_every_gradient(name: str, tmp_path: Path) -> None:
    theirs, ours = opened(name, tmp_path)
    parameters = their_tensors(theirs)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in parameters.items()}
    assert all(torch.equal(p, parameters[n]) for n, p in ours.named_parameters())

    tokens, targets = batch()
    loss, grads = their_gradients(theirs, tokens, targets, LENGTHS)
    assert relative_error(ours.logits(tokens, LENGTHS), their_logits(theirs, tokens, LENGTHS)) <= LIMIT
    assert ours.loss_and_grads(tokens, targets, LENGTHS) == pytest.approx(loss, rel=LIMIT)
    assert_equal_gradients(our_gradients(ours), grads)


@pytest.mark.parametrize("name", TYPICAL)
@pytest.mark.parametrize("path", [{"recompute": "blocks"}, {"tokens_at_once": 8}], ids=str)
@pytest.mark.some_cases(3)
def test_other_code_paths_give_the_same_gradients(name: str, path: dict[str, object], tmp_path: Path) -> None:
    theirs, ours = opened(name, tmp_path)
    tokens, targets = batch()
    ours.loss_and_grads(tokens, targets, LENGTHS, **path)  # type: ignore[arg-type]
    assert_equal_gradients(our_gradients(ours), their_gradients(theirs, tokens, targets, LENGTHS)[1])


@pytest.mark.parametrize("name", TYPICAL)
@pytest.mark.some_cases(3)
def test_a_rectangle_of_tokens_and_a_target_at_one_position(name: str, tmp_path: Path) -> None:
    theirs, ours = opened(name, tmp_path)
    tokens = torch.randint(29, (3, 9))
    targets = torch.full((3, 9), -100)
    targets[1, 6] = 4
    assert relative_error(ours.logits(tokens).flatten(0, 1), their_logits(theirs, tokens.flatten(), [9] * 3)) <= LIMIT
    ours.loss_and_grads(tokens, targets)
    grads = their_gradients(theirs, tokens.flatten(), targets.flatten(), [9] * 3)[1]
    assert_equal_gradients(our_gradients(ours), grads)


@pytest.mark.parametrize("name", [*TYPICAL, "llama, yarn with options", "smollm3, every fourth layer unrotated"])
@pytest.mark.some_cases(3)
def test_greedy_generation(name: str, tmp_path: Path) -> None:
    theirs, ours = opened(name, tmp_path)
    prompts = torch.randint(29, (2, 5))
    expected = theirs.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert torch.equal(hg.generate(ours, prompts, max_new_tokens=12), expected[:, 5:])


ONE_BLOCK = {
    "gpt2": {"n_layer": 1},
    "lfm2": {"num_hidden_layers": 2},
    "gpt_bigcode": {"n_layer": 1},
    "cohere2": {"layer_types": ["sliding_attention"]},
    "exaone4": {"layer_types": ["sliding_attention"]},
    "gemma3_text": {"layer_types": ["sliding_attention"]},
    "olmo3": {"layer_types": ["full_attention"]},
    "granitemoehybrid": {"layer_types": ["attention"]},
    "qwen2": {"max_window_layers": 0},
    "smollm3": {"no_rope_layers": [0]},
}


@pytest.mark.parametrize("name", TYPICAL)
@pytest.mark.some_cases(6)
def test_verify_passes_and_names_every_parameter(name: str, tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 1, **ONE_BLOCK.get(name.split(",")[0], {})}
    _, model = opened(name, tmp_path, **changes)
    tokens, targets = batch(lengths=[6, 3])
    report = hg.verify(model, tokens, targets, [6, 3])
    assert report.passed, report.failed or report.missing
    assert {name for name, _ in model.named_parameters()} <= {check.id for check in report.checks}


def test_a_wrong_gradient_fails(tmp_path: Path) -> None:
    """The comparison above can fail: a model with other weights in one matrix has other gradients."""
    theirs, ours = opened("qwen3, biases", tmp_path)
    with torch.no_grad():
        dict(ours.named_parameters())["model.layers.0.self_attn.k_norm.weight"][0] *= 1 + 1e-6
    tokens, targets = batch()
    ours.loss_and_grads(tokens, targets, LENGTHS)
    with pytest.raises(AssertionError):
        assert_equal_gradients(our_gradients(ours), their_gradients(theirs, tokens, targets, LENGTHS)[1])


def test_transformers_is_judged_in_float64() -> None:
    """The judge itself, by finite differences: anything in float32 would be an error of 1e-3 at this step."""
    network = transformers_model("qwen3, yarn")
    tokens, targets = batch()
    _, grads = their_gradients(network, tokens, targets, LENGTHS)
    weight = network.model.layers[0].input_layernorm.weight
    direction = torch.randn_like(weight)
    losses = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            weight.add_(direction, alpha=step)
            losses.append(F.cross_entropy(their_logits(network, tokens, LENGTHS), targets).item())
            weight.sub_(direction, alpha=step)
    slope = (grads["model.layers.0.input_layernorm.weight"] * direction).sum().item()
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(slope, rel=1e-5)
