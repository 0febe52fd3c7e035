"""hg.nn.replace on models that users change: every change keeps its effect, before and after, and what is left is listed.

HANDGRAD_CHANGES sets the number of random combinations (default 40)."""

import contextlib
import copy
import importlib.util
import os
import random
import threading
import warnings
from typing import Any

import pytest
import torch
from changes import CHANGES, FIELDS, KINDS, Change, batch_of, model_of, surroundings, with_adapter
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import handgrad as hg
from handgrad.families import FAMILIES
from handgrad.nn import replacement
from handgrad.ops import attention as heads_op
from handgrad.proof.oracles import relative_error
from handgrad.tolerances import NORM_FLOOR, TOLERANCE

COUNT = int(os.environ.get("HANDGRAD_CHANGES", "40"))
FIRST = int(os.environ.get("HANDGRAD_CHANGES_FIRST", "0"))
IDS = torch.randint(35, (2, 12), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}


def outcome(model: Any, batch: dict[str, Any], seed: int) -> dict[str, Tensor] | str:
    """Loss, logits if there are any, and gradients; or the kind of error."""
    model.zero_grad()
    torch.manual_seed(seed)
    try:
        out = model(**{name: x.clone() if isinstance(x, Tensor) else x for name, x in batch.items()})
        loss = out[0] if isinstance(out, tuple) else out.loss
        loss.backward()
    except Exception as error:
        return type(error).__name__
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_equal(found: Any, expected: Any, dtype: torch.dtype = torch.float32, where: str = "") -> None:
    if isinstance(expected, str):
        assert isinstance(found, str), f"{where}: {expected} was raised before"
        return
    assert not isinstance(found, str) and set(found) == set(expected), (
        f"{where}: {found if isinstance(found, str) else ''}"
    )
    largest = max(
        (x.abs().max().item() for name, x in expected.items() if name != "loss" and x.isfinite().all()), default=0
    )
    for name, x in expected.items():
        if x.isnan().any():
            assert found[name].isnan().any(), f"{where}: {name}"
            continue
        error = relative_error(found[name], x, floor=NORM_FLOOR * largest)
        assert error <= TOLERANCE[dtype], f"{where}: {name} differs by {error:.1e}"


def pair(kind: str, seed: int = 0) -> tuple[Any, Any]:
    model = model_of(kind, seed)
    return model, copy.deepcopy(model)


def change_both(change: Change, plain: Any, model: Any, seed: float) -> None:
    """Two changes may exclude each other; then they do in both models."""
    errors = []
    for x in (plain, model):
        try:
            change(x, random.Random(seed))
        except Exception as error:
            errors.append(type(error))
    assert len(errors) != 1, f"{change.__name__}: {errors}"


@pytest.mark.parametrize("part", range(4))
def test_random_changes_keep_their_effect(part: int) -> None:
    for seed in range(FIRST + part, FIRST + COUNT, 4):
        rng = random.Random(seed)
        kind = rng.choice(sorted(KINDS))
        plain, model = pair(kind, seed)
        if rng.random() < 0.25:
            plain, model = (with_adapter(x, seed) for x in (plain, model))
        before, after = ([rng.choice(CHANGES) for _ in range(rng.choice([0, 0, 1, 2]))] for _ in range(2))
        seeds = [rng.random() for _ in (*before, *after)]
        batch, loss = batch_of(rng), rng.random() < 0.5
        log = [c.__name__ for c in before], [c.__name__ for c in after]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i, change in enumerate(before):
                change_both(change, plain, model, seeds[i])
            patched = random.Random(seeds[0] if seeds else 0)
            early = rng.random() < 0.5
            if not early:
                result = hg.nn.replace(model, loss=loss)
            with surroundings(patched, [plain]):
                if early:
                    result = hg.nn.replace(model, loss=loss)
                for i, change in enumerate(after, len(before)):
                    change_both(change, plain, model, seeds[i])
                low = torch.is_autocast_enabled("cpu")
                expected, found = outcome(plain, batch, seed), outcome(model, batch, seed)
            where = f"seed {seed}, {kind}, {log}, loss={loss}, {list(batch)}, {result.fallbacks}"
            assert_equal(found, expected, torch.bfloat16 if low else torch.float32, where)


def both(kind: str, change: Any, **options: Any) -> tuple[Any, Any, hg.nn.Replacement]:
    """A plain and a replaced model, both changed afterwards."""
    plain, model = pair(kind)
    result = hg.nn.replace(model, **options)
    for x in (plain, model):
        change(x)
    return plain, model, result


@pytest.mark.parametrize("loss", [False, True])
def test_a_loss_function_that_is_set_afterwards_is_used(loss: bool) -> None:
    def change(model: Any) -> None:
        model.loss_function = lambda logits, labels, **others: logits.square().mean()

    plain, model, result = both("llama", change, loss=loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal(outcome(model, BATCH, 0), outcome(plain, BATCH, 0))
    assert any("loss_function" in reason for reason in result.fallbacks) == loss


def test_hooks_on_the_logits_layer_see_logits() -> None:
    seen = []

    def change(model: Any) -> None:
        def cap(module: Any, given: Any, out: Tensor) -> Tensor:
            seen.append(out.shape[-1])
            return 3 * torch.tanh(out / 3)

        model.lm_head.register_forward_hook(cap)

    plain, model, result = both("llama", change, loss=True)
    with pytest.warns(UserWarning, match="a hook, or another forward, on the logits layer"):
        found = outcome(model, BATCH, 0)
    assert_equal(found, outcome(plain, BATCH, 0))
    assert seen == [35, 35] and "fell back" in str(result)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_other_calls_of_the_logits_layer_get_logits(kind: str) -> None:
    """Those of a hook, and those of another thread, during a forward pass that computes logits and loss together."""
    found: list[Tensor] = []

    def change(model: Any) -> None:
        def read(module: Any, given: Any, out: Any) -> None:
            found.append(model.lm_head(out if isinstance(out, Tensor) else out[0]).detach())

        def elsewhere(module: Any, given: Any) -> None:
            def read() -> None:
                with torch.no_grad():
                    found.append(model(input_ids=IDS[:, :5]).logits)

            if threading.current_thread() is threading.main_thread():  # not again in the other
                thread = threading.Thread(target=read)
                thread.start()
                thread.join()

        body = model.transformer.h if kind == "gpt2" else model.model.layers
        body[0].register_forward_hook(read)
        body[1].register_forward_pre_hook(elsewhere)
        model.base_model.register_forward_hook(lambda module, given, out: read(module, given, out[0]))

    plain, model, result = both(kind, change, loss=True)
    expected = outcome(plain, BATCH, 0)
    theirs, found = found, []
    assert_equal(outcome(model, BATCH, 0), expected)
    assert len(found) == len(theirs) > 3 and not result.fallbacks
    for x, y in zip(found, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
def test_activations_that_are_exchanged_or_hooked_are_used(kind: str) -> None:
    def exchange(model: Any) -> None:
        for module in model.modules():
            for name in {"act_fn", "activation_fn", "act"} & set(module._modules):
                setattr(module, name, nn.Tanh())

    def hook(model: Any) -> None:
        for module in model.modules():
            for name in {"act_fn", "activation_fn", "act"} & set(module._modules):
                getattr(module, name).register_forward_hook(lambda m, given, out: 2 * out)

    for change, reason in ((exchange, "its activation is now a Tanh"), (hook, "a hook, or another forward")):
        plain, model, result = both(kind, change)
        with pytest.warns(UserWarning, match=reason):
            found = outcome(model, BATCH, 0)
        assert_equal(found, outcome(plain, BATCH, 0))
    plain, model = pair(kind)  # and before
    for x in (plain, model):
        exchange(x)
        setattr(x.config, "activation_function" if kind == "gpt2" else "hidden_act", "relu")
    result = hg.nn.replace(model)
    assert "no hand-derived activation Tanh" in result.left.values()
    assert_equal(outcome(model, BATCH, 0), outcome(plain, BATCH, 0))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("use_cache", [True, False, None])
def test_positions_that_restart(kind: str, use_cache: bool | None) -> None:
    """transformers takes them for several sequences if there is no cache; nothing here decides whether there is one."""
    plain, model = pair(kind)
    result = hg.nn.replace(model)
    given = {**BATCH, "position_ids": (torch.arange(12) % 5).expand(2, -1), "use_cache": use_cache}
    assert_equal(outcome(model, given, 0), outcome(plain, given, 0))
    assert not result.fallbacks and result.checked


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("through", ["data", "numpy"])
def test_hooks_that_edit_the_data_of_what_a_module_reads(kind: str, when: str, through: str) -> None:
    """Weights get the gradients of the edited input, of which torch takes no notice."""

    def change(model: Any) -> None:
        def edit(module: Any, given: Any, *rest: Any) -> None:
            x = rest[0]["hidden_states"] if rest and "hidden_states" in rest[0] else given[0]
            if through == "data":
                x.data.mul_(0.5)
            else:
                x.detach().numpy()[:] *= 0.5

        for name, module in model.named_modules():
            if name.endswith((".mlp", ".attn", ".self_attn")):
                if when == "before":
                    module.register_forward_pre_hook(edit, with_kwargs=True)
                else:
                    module.register_forward_hook(edit, with_kwargs=True)

    plain, model, _ = both(kind, change)
    assert_equal(outcome(model, BATCH, 0), outcome(plain, BATCH, 0))


def test_float64_stays_float64_under_autocast() -> None:
    plain, model = pair("llama")
    for x in (plain, model):
        x.double()
    hg.nn.replace(model, loss=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = outcome(model, BATCH, 0), outcome(plain, BATCH, 0)
    assert_equal(found, expected)  # which bfloat16 would not be
    layer, x = hg.nn.Linear(6, 7).double(), torch.randn(3, 6, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
        assert hg.nn.attention(x[None], x[None], x[None], 2).dtype == torch.float64


# ── masks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def masks() -> dict[str, Tensor]:
    """Two rows of 12 tokens."""
    found = {
        name: torch.ones(2, 12, dtype=torch.long)
        for name in ("left", "right", "left and right", "both", "holes", "mixed")
    }
    found["left"][1, :4] = 0
    found["right"][0, -5:] = 0
    found["left and right"][0, :3] = found["left and right"][1, -2:] = 0  # in different rows
    found["both"][:, :2] = found["both"][:, -3:] = 0
    found["holes"][0, 4:6] = found["holes"][1, 2] = 0
    found["mixed"][0, :3] = found["mixed"][0, -2:] = found["mixed"][1, 5] = 0
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "mistral"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.some_cases(3)
def test_masks_of_every_kind(kind: str, implementation: str) -> None:
    model = model_of(kind, attention=implementation)
    plain = copy.deepcopy(model)
    result = hg.nn.replace(model, loss=True)
    given = [{"attention_mask": mask, "labels": IDS.masked_fill(mask == 0, -100)} for mask in masks().values()]
    given.append({"position_ids": (torch.arange(12) % 5).expand(2, -1), "use_cache": False})  # packed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in given:
            for _ in range(2):
                assert_equal(
                    outcome(model, {**BATCH, **batch}, 0), outcome(plain, {**BATCH, **batch}, 0), where=str(batch)
                )
    assert ("attention" in result.replaced.values()) == (implementation == "sdpa")
    ours = [reason for reason in result.checked.values() if not reason]
    assert len(ours) >= 2 if implementation == "sdpa" else not result.checked


def test_a_mask_that_is_edited_without_a_new_version() -> None:
    """Through .data, through numpy and in inference mode."""
    plain, model = pair("llama")
    result = hg.nn.replace(model)
    seen = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()

    def compare(labels: Tensor | None = IDS) -> None:
        found, expected = (x(input_ids=IDS, labels=labels, attention_mask=seen).logits for x in (model, plain))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    compare()
    seen.data[1, :, 4:, :4] = False  # two sequences
    compare()
    seen.numpy()[0, :, 6:, :6] = False
    compare()
    with torch.inference_mode():
        seen = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()
        compare()
        seen[:, :, 3:, :3] = False
        compare()
    assert not result.fallbacks


def test_another_scale_of_scores() -> None:
    plain, model = pair("llama")
    for x in (plain, model):
        for layer, scale in zip(x.model.layers, (0.2, 0.5), strict=True):
            layer.self_attn.scaling = scale
    result = hg.nn.replace(model)
    assert_equal(outcome(model, BATCH, 0), outcome(plain, BATCH, 0))
    assert not result.fallbacks and not any(name.rpartition(".")[2] == "self_attn" for name in result.left)


def test_a_mask_that_wants_a_gradient() -> None:
    plain, model = pair("llama")
    hg.nn.replace(model)
    hidden = torch.full((12, 12), -torch.inf).triu(1).expand(2, 1, -1, -1)
    grads = []
    with pytest.warns(UserWarning, match="a mask that wants a gradient"):
        for x in (plain, model):
            mask = hidden.clone().requires_grad_()
            x(input_ids=IDS, labels=IDS, attention_mask=mask).loss.backward()
            grads.append(mask.grad)
    assert grads[0] is not None and grads[0].abs().max() > 0
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("number", [7.5, 0.5])
def test_a_number_of_items_that_is_not_whole(number: float) -> None:
    plain, model = pair("llama")
    hg.nn.replace(model, loss=True)
    for n in (number, torch.tensor(number)):
        given = {**BATCH, "num_items_in_batch": n}
        assert_equal(outcome(model, given, 0), outcome(plain, given, 0))


def test_a_wrong_kernel_is_noticed_at_the_first_batch_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward or a backward pass that is wrong for one kind of mask: that kind is left to torch, with a warning."""
    forward, backward = heads_op.forward, heads_op.backward

    def wrong_forward(q: Tensor, k: Tensor, v: Tensor, spans: Any, *rest: Any) -> Any:
        a, saved = forward(q, k, v, spans, *rest)
        return (a * 1.01 if any(span.positions is not None for span in spans) else a), saved

    def wrong_backward(delta: Tensor, saved: Any, spans: Any, into: Any, scores: Any) -> None:
        backward(delta, saved, spans, into, scores)
        if any(span.positions is not None for span in spans):
            into[1].mul_(1.01)

    for name, wrong in (("forward", wrong_forward), ("backward", wrong_backward)):
        plain, model = pair("llama")
        result = hg.nn.replace(model)
        with monkeypatch.context() as patch:
            patch.setattr(heads_op, name, wrong)
            assert_equal(outcome(model, BATCH, 0), outcome(plain, BATCH, 0))
            assert not result.fallbacks
            given = {**BATCH, "attention_mask": masks()["right"]}
            with pytest.warns(UserWarning, match="its result for this kind of mask differs by .* from torch's"):
                found = outcome(model, given, 0)
            assert_equal(found, outcome(plain, given, 0))
            assert sum(result.fallbacks.values()) == 2 and list(map(bool, result.checked.values())) == [False, True]


def test_a_configuration_that_two_models_share() -> None:
    """The other model's attention stays transformers'."""
    plain, model = pair("llama")
    other = type(model)(model.config)
    result = hg.nn.replace(model)
    other.load_state_dict(plain.state_dict())
    assert other.config._attn_implementation == "handgrad"
    expected = outcome(plain, BATCH, 0)
    assert_equal(outcome(other.train(), BATCH, 0), expected)
    assert not result.checked
    assert_equal(outcome(model, BATCH, 0), expected)
    assert len(result.checked) == 1
    result.undo()
    assert other.config._attn_implementation == model.config._attn_implementation == "sdpa"


def adapted(**options: Any) -> tuple[Any, Any, hg.nn.Replacement]:
    """A plain and a replaced model with PEFT's adapters whose factors are not 0."""
    torch.manual_seed(0)
    found = get_peft_model(model_of("llama"), LoraConfig(r=3, target_modules=["o_proj", "down_proj"], **options))
    with torch.no_grad():
        for name, p in found.named_parameters():
            p.requires_grad_(True)
            if "lora_B" in name:
                p += 0.2 * torch.randn_like(p)
    model = copy.deepcopy(found)
    return found, model, hg.nn.replace(model)


def test_an_adapters_dropout_has_a_mode_of_its_own() -> None:
    plain, model, result = adapted(lora_dropout=0.5)
    for x in (plain, model):
        for name, m in x.named_modules():
            if name.endswith("lora_dropout.default"):
                m.eval()
    assert_equal(outcome(model, BATCH, 0), outcome(plain, BATCH, 0))
    losses = []
    for m in model.eval().modules():
        if isinstance(m, nn.Dropout):
            m.train()
    for seed in range(2):
        torch.manual_seed(seed)
        losses.append(model(**BATCH).loss.item())
    assert losses[0] != losses[1] and not result.fallbacks


def test_a_hook_on_the_magnitudes_of_dora_is_run() -> None:
    plain, model, result = adapted(use_dora=True)
    for x in (plain, model):
        layer = x.base_model.model.model.layers[0].mlp.down_proj
        layer.lora_magnitude_vector["default"].register_forward_hook(lambda m, given, out: 1.5 * out)
    with pytest.warns(UserWarning, match="a hook, or another forward, on its layer, factors, magnitude or dropout"):
        found = outcome(model, BATCH, 0)
    assert_equal(found, outcome(plain, BATCH, 0))
    assert sum(result.fallbacks.values()) == 1


@pytest.mark.parametrize("dora", [False, True])
def test_factors_narrower_than_their_layer_do_not_round_it(dora: bool) -> None:
    """The result is that of the factors' values in the layer's dtype; only the factors' own gradients are rounded."""
    plain, model, result = adapted(use_dora=dora)
    for x in (plain, model):
        for name, p in x.named_parameters():
            if "lora" in name:
                p.data = p.data.bfloat16().to(p.dtype if x is plain else torch.bfloat16)
    expected, found = outcome(plain, BATCH, 0), outcome(model, BATCH, 0)
    assert not isinstance(expected, str) and not isinstance(found, str) and not result.fallbacks
    for lora, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        assert_equal(*({k: v for k, v in x.items() if ("lora" in k) == lora} for x in (found, expected)), dtype)
    assert all(x.dtype == torch.bfloat16 for name, x in found.items() if "lora" in name)


# ── dropout ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_dropout_without_a_hand_derived_layer_is_left_to_torch(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of Starcoder2's feed-forward layers, which is a number; as if the family were one of ours."""
    monkeypatch.setattr(replacement, "MODULES", {"transformers.models.starcoder2.modeling_starcoder2"})
    torch.manual_seed(0)
    fields = {**FIELDS, "residual_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh"}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model("starcoder2", **fields)).train()
    model = copy.deepcopy(plain)

    def drop() -> None:
        for x in (plain, model):
            x.model.layers[1].mlp.residual_dropout = 0.4

    if when == "before":
        drop()
    result = hg.nn.replace(model)
    if when == "after":
        drop()
    reason = "residual_dropout 0.4, which has no hand-derived layer"
    name = "model.layers.1.mlp"
    assert (name in result.replaced) == (when != "before") and (reason in result.left.get(name, "")) == (
        when == "before"
    )
    with pytest.warns(UserWarning, match=reason) if when == "after" else contextlib.nullcontext():
        found = outcome(model, BATCH, 0)
    assert_equal(found, outcome(plain, BATCH, 0))
    assert sum(result.fallbacks.values()) == (when == "after")
    fallbacks = dict(result.fallbacks)
    assert_equal(*(outcome(x.eval(), BATCH, 0) for x in (model, plain)))  # nothing is dropped
    assert result.fallbacks == fallbacks


def test_feed_forward_layers_of_another_form_are_left() -> None:
    plain, model = pair("llama")
    for x in (plain, model):
        x.model.layers[0].mlp.more = nn.Identity()
    result = hg.nn.replace(model)
    reason = "no hand-derived feed-forward layer of gate_proj, up_proj, down_proj, more"
    assert result.left["model.layers.0.mlp"] == reason and result.replaced["model.layers.1.mlp"] == "feed-forward"
    assert_equal(outcome(model, BATCH, 0), outcome(plain, BATCH, 0))


def test_parts_are_found_for_every_family() -> None:
    """Their modules of transformers follow from the table of families."""
    assert {x.removesuffix("_text") for x in FAMILIES} == {name.split(".")[2] for name in replacement.MODULES}
    elsewhere = {"minicpm", "internlm3", "iquestcoder"}  # code of its authors, and Llama's
    for name in replacement.MODULES - {f"transformers.models.{x}.modeling_{x}" for x in elsewhere}:
        assert importlib.util.find_spec(name) is not None, name
