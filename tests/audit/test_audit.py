"""Audits of real models of transformers and PEFT: sound ones pass, and every seeded fault is found and named."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import (
    FAMILIES,
    Make,
    adapted,
    attending,
    batch,
    function_of,
    model_of,
    only_backward,
    random_model,
    rotating,
    with_forward,
)
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.lfm2 import modeling_lfm2
from typer.testing import CliRunner

import handgrad as hg
from families.members import ALL, MECHANISMS, in_file_names
from handgrad.auditing.findings import Audit
from handgrad.auditing.model import folder
from handgrad.cli.app import app

AUDITS = int(os.environ.get("HANDGRAD_AUDITS", "0"))  # random models; make long: 200
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns about names of GPT-2's layers and about DoRA


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, torch.float32) for family in FAMILIES]
    + [(family, torch.bfloat16) for family in FAMILIES if ALL or family in MECHANISMS],
)
@pytest.mark.some_cases(10)
def test_sound_models_pass(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, tie_word_embeddings=family == "llama").to(dtype)
    report = hg.audit(model, batch(), setup=False)
    assert report.passed, str(report)
    assert {x.kind for x in report.compared} == {"activation", "loss", "error signal", "gradient"}
    pieces = in_file_names(model, dict(model.named_parameters()))  # experts one by one
    assert sum(x.kind == "gradient" for x in report.compared) == len(pieces)
    assert report.worst < 0.6, "a sound model is nearly accused"


@pytest.mark.parametrize(
    ("family", "options"),
    [("gpt2", {}), ("gpt2", {"bias": "all"}), ("llama", {"use_dora": True})],
    ids=["lora", "biases", "dora"],
)
def test_sound_adapters_pass_with_their_set_up(family: str, options: dict[str, Any]) -> None:
    model = adapted(model_of(family, attention="sdpa"), family, **options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = hg.audit(model, batch(left=True))
    assert report.passed, str(report)
    assert [x.name for x in report.setup] == [
        "every adapter receives a gradient", "frozen weights receive none", "accumulation equals the big batch",
        "padding changes nothing", "masked targets contribute nothing", "merged equals unmerged",
        "saving and loading changes nothing", "resume is exact",
    ]  # fmt: skip
    assert all(x.passed for x in report.setup)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


@pytest.mark.parametrize("seed", range(AUDITS) if AUDITS else [3, 11, 24, 115, 127])
def test_random_sound_models_pass(seed: int) -> None:
    """127 has norms of two features, which cancel, and 115, with one target left, a softmax that saturates."""
    name, model, made = random_model(seed)
    report = hg.audit(model, made, setup=AUDITS > 0 or seed == 115)
    assert report.passed, f"{name}\n{report}"


# ── twelve faults ───────────────────────────────────────────────────────────────────────────────────────────────────


def norm_with_wrong_sign(delta: Tensor, a: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The backward pass of LayerNorm, but adding the mean instead of subtracting it."""
    sigma = (a.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    a_bar = (a - a.mean(-1, keepdim=True)) / sigma
    g = delta * w
    below = (g + g.mean(-1, keepdim=True) - a_bar * (g * a_bar).mean(-1, keepdim=True)) / sigma
    return below, (delta * a_bar).sum((0, 1)), delta.sum((0, 1))


NormWithWrongSign = function_of(lambda a, w, b: F.layer_norm(a, w.shape, w, b, 1e-5), norm_with_wrong_sign)
sign_in_a_norm = with_forward(
    "gpt2", "transformer.h.1.ln_1", lambda norm, right, a: NormWithWrongSign.apply(a, norm.weight, norm.bias)
)


def wrong_linear(grad_w: Callable[[Tensor, Tensor], Tensor]) -> type[torch.autograd.Function]:
    """A linear layer whose weight gradient this function computes, from its input (n, f_in) and error signal (n, f_out)."""
    return function_of(
        lambda a, w: a @ w.t(), lambda delta, a, w: (delta @ w, grad_w(a.flatten(0, 1), delta.flatten(0, 1)))
    )


TransposedGradient = wrong_linear(lambda a, delta: (delta.t() @ a).t())


without_scale = attending("gpt2", lambda right, q, k, v, mask, scale: right(q, k, v, mask, 1.0))


def without_scale_in_backward(right: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Any:
    scores = q @ k.transpose(2, 3)
    scaled = only_backward(scores * scale, scores)  # Δ_raw without 1/√d
    rho = torch.softmax(scaled + mask, -1)
    return (rho @ v).transpose(1, 2), rho


def untrained_magnitude(patch: pytest.MonkeyPatch) -> Any:
    model = adapted(model_of("llama"), "llama", use_dora=True)
    layer = model.base_model.model.model.layers[0].self_attn.v_proj
    layer.lora_magnitude_vector["default"].weight.requires_grad_(False)
    return model


def bypassed_adapter(patch: pytest.MonkeyPatch) -> Any:
    model = adapted(model_of("llama"), "llama", filled=False)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    layer.forward = layer.base_layer.forward
    return model


def with_next_token(right: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Any:
    ahead = mask.masked_fill(torch.ones_like(mask, dtype=torch.bool).triu(2).logical_not(), 0.0)
    return right(q, k, v, ahead.masked_fill(mask[:, :, -1:] < 0, -math.inf), scale)


def stale_gradient(patch: pytest.MonkeyPatch) -> Any:
    model = adapted(model_of("gpt2"), "gpt2")
    weight = model.base_model.model.transformer.h[1].mlp.c_fc.base_layer.weight
    weight.grad = torch.ones_like(weight)
    return model


def rotate_key_twice(right: Any, q: Tensor, k: Tensor, *angles: Tensor) -> Any:
    turned = right(q, k, *angles)
    return turned[0], right(q, turned[1], *angles)[1]


def overflow(patch: pytest.MonkeyPatch) -> Any:
    model = model_of("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight *= 2e5
    return model.half()


class LossOfParts:
    """Accumulates sequence by sequence, and divides by their number instead of weighting them by their targets."""

    def __call__(self, model: nn.Module, given: dict[str, Tensor]) -> float:
        total = 0.0
        n = len(given["input_ids"])
        for i in range(n):
            loss = model(**{name: x[i : i + 1] for name, x in given.items()}).loss / n
            loss.backward()
            total += loss.item()
        return total


def convolving(change: Callable[..., Tensor]) -> Make:
    """An LFM2 whose convolution is change(right, z, w, b), in which z is (B, d, T) and w (d, L)."""

    def make(patch: pytest.MonkeyPatch) -> Any:
        right = modeling_lfm2.causal_conv1d_fn
        wrong = lambda z, w, b=None, **given: change(lambda *x: right(*x, **given), z, w, b)  # noqa: E731
        patch.setattr(modeling_lfm2, "causal_conv1d_fn", wrong)
        return model_of("lfm2", conv_bias=True)

    return make


FAULTS: dict[str, tuple[Make, str, str, str]] = {
    "taps in the other order": (
        convolving(lambda right, z, w, b: right(z, w.flip(1), b)),
        "model.layers.1.conv", "known mistake", "the taps were in the other order",
    ),
    "taps in the other order in the backward pass": (
        convolving(lambda right, z, w, b: right(z.detach(), w, b) + only_backward(0 * z, right(z, w.detach().flip(1)))),
        "model.layers.1.conv", "known mistake", "the taps were in the other order",
    ),
    "no convolution": (
        convolving(lambda right, z, w, b: z), "model.layers.1.conv", "known mistake", "the convolution were left out",
    ),
    "taps that are not trained": (
        convolving(lambda right, z, w, b: right(z, w.detach(), b)),
        "model.layers.1.conv.conv", "not trained", "conv.weight",
    ),
    # the model, the layer that must be named, the kind of fault, and words of the sentence
    "a sign in a norm": (
        sign_in_a_norm, "transformer.h.1.ln_1", "missing term", "wrong sign in the norm's term of the mean",
    ),
    "a dropped 1/√d": (
        attending("llama", lambda right, q, k, v, mask, scale: right(q, k, v, mask, 1.0)),
        "model.layers.1.self_attn", "known mistake", "1/√d_head were left out",
    ),
    "a dropped 1/√d in the backward pass": (
        attending("gpt2", without_scale_in_backward), "transformer.h.1.attn.c_attn", "factor",
        "in q and k is 2 times too large (multiplied by √d_head",
    ),
    "an untrained magnitude": (
        untrained_magnitude, "model.layers.0.self_attn.v_proj", "not trained", "requires_grad is False",
    ),
    "a bypassed adapter": (
        bypassed_adapter, "model.layers.1.self_attn", "known mistake", "the adapter of q were bypassed",
    ),
    "a wrong mask": (
        attending("llama", with_next_token), "model.layers.1.self_attn", "known mistake", "a token saw the next one",
    ),
    "a stale gradient": (stale_gradient, "transformer.h.1.mlp.c_fc", "unexpected", "should not be"),
    "a transposed weight gradient": (
        with_forward("llama", "model.layers.1.self_attn.o_proj",
                     lambda layer, right, a: TransposedGradient.apply(a, layer.weight)),
        "model.layers.1.self_attn.o_proj", "transpose", "is transposed",
    ),
    "a missing tied contribution": (
        with_forward("gpt2", "lm_head", lambda head, right, a: a @ head.weight.detach().t()),
        "transformer.wte", "missing term", "lacks the head's part",
    ),
    "a detached branch": (
        with_forward("gpt2", "transformer.h.0.mlp", lambda mlp, right, a: right(a).detach()),
        "transformer.h.0.mlp.c_proj", "not trained", "its branch is detached",
    ),
    "a key rotated twice": (
        rotating(rotate_key_twice, blocks=(1,)), "model.layers.1.self_attn", "known mistake", "the keys were rotated twice",
    ),
    "a float16 overflow": (overflow, "transformer.h.1.mlp.c_fc", "not finite", "overflows float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.some_cases(4)
def test_faults_are_found_and_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, layer, kind, words = FAULTS[name]
    report = hg.audit(make(monkeypatch), batch(), setup=False)
    assert not report.passed
    assert report.first is not None
    said = f"{report.first.layer}: {report.first.diagnosis.kind}: {report.first.sentence()}"
    assert (report.first.layer, report.first.diagnosis.kind) == (layer, kind), said
    assert words in report.first.sentence(), said


def test_averaged_accumulation_is_named() -> None:
    report = hg.audit(model_of("llama"), batch(), loss=LossOfParts(), setup=False)
    assert report.first is not None
    assert report.first.diagnosis.kind == "known mistake", str(report)
    assert "every sequence were averaged by itself" in report.first.sentence()


def test_a_step_that_returns_no_loss() -> None:
    report = hg.audit(model_of("llama"), batch(), loss=lambda model, given: model(**given).loss.backward(), setup=False)
    assert report.passed, str(report)
    assert {x.kind for x in report.compared} == {"activation", "error signal", "gradient"}


def test_faults_are_found_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("a dropped 1/√d", "a missing tied contribution", "a transposed weight gradient")
    for make, layer, kind, words in map(FAULTS.__getitem__, names):
        with monkeypatch.context() as patch:
            report = hg.audit(make(patch).to(torch.bfloat16), batch(), setup=False)
        assert report.first is not None
        assert (report.first.layer, report.first.diagnosis.kind) == (layer, kind), str(report)
        assert words in report.first.sentence()


# ── the set-up ──────────────────────────────────────────────────────────────────────────────────────────────────────


def failed(report: Audit) -> dict[str, str]:
    return {x.name: x.note for x in report.setup if x.passed is False}


def test_faults_of_the_set_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained_magnitude(monkeypatch)
    frozen = model.base_model.model.model.embed_tokens.weight
    frozen.grad = torch.ones_like(frozen)
    found = failed(hg.audit(model, batch()))
    assert "embed_tokens.weight still has an old one" in found["frozen weights receive none"]
    assert "v_proj.lora_magnitude_vector" in found["every adapter receives a gradient"]
    assert frozen.grad is not None, "the audit leaves the model as it was"


def test_a_loss_that_ignores_the_batch_is_found() -> None:
    """It averages over the targets of its own part, whatever num_items_in_batch says."""
    model = model_of("llama")
    right = model.forward
    model.forward = lambda **given: right(**{k: v for k, v in given.items() if k != "num_items_in_batch"})
    report = hg.audit(model, batch())
    assert report.first is None
    assert list(failed(report)) == ["accumulation equals the big batch"]
    assert "averages of the sequences were added" in failed(report)["accumulation equals the big batch"]


def test_padding_that_is_seen_is_found() -> None:
    """Learned positions count the padding on the left unless position_ids are given."""
    given = batch(left=True)
    del given["position_ids"]
    report = hg.audit(model_of("gpt2"), given, setup=False)
    assert report.first is not None
    assert report.first.layer == "transformer.wte"
    assert "positions counted the padding" in report.first.sentence()


def test_weights_that_train_beside_an_adapter() -> None:
    """They are compared like others; PEFT does not save them, which the set-up shows."""
    model = adapted(model_of("llama"), "llama")
    model.base_model.model.model.norm.weight.requires_grad_(True)
    report = hg.audit(model, batch())
    assert report.first is None, str(report)
    assert "base_model" not in report.notes[0] and "1 weight of the base model" in report.notes[0]
    assert "model.norm.weight changes" in failed(report)["resume is exact"]


def test_an_adapter_that_transformers_added() -> None:
    model = model_of("llama")
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    report = hg.audit(model, batch())
    assert report.passed, str(report)
    assert sum(".lora_" in x.name for x in report.compared) == 8 and "the adapter is new" in report.notes[0]


def test_a_model_that_does_not_save_everything_is_found() -> None:
    model = adapted(model_of("gpt2"), "gpt2")
    right = model.save_pretrained
    lost = next(p for name, p in model.named_parameters() if "lora_A" in name)

    def save(folder: str) -> None:
        kept = lost.detach().clone()
        lost.data.zero_()
        right(folder)
        lost.data.copy_(kept)

    model.save_pretrained = save
    found = failed(hg.audit(model, batch()))
    assert "c_attn.lora_A.default.weight changes (1 of" in found["saving and loading changes nothing"]


# ── other models, and the report ────────────────────────────────────────────────────────────────────────────────────


class Plain(nn.Module):
    """A plain PyTorch module around GPT-2's blocks, with other names and no configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model_of("gpt2")

    def forward(self, ids: Tensor) -> Any:
        return self.net(input_ids=ids).logits


def test_any_module_with_names_and_a_loss() -> None:
    model = Plain()

    def loss(model: Any, given: dict[str, Tensor]) -> Tensor:
        logits = model(given["input_ids"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())

    ids = batch()["input_ids"]
    config = hg.ModelConfig(n_vocab=31, n_context=32, d_model=16, n_heads=4, n_blocks=2)
    report = hg.audit(model, ids, loss=loss, config=config, names=lambda name: name.removeprefix("net."))
    assert report.passed, str(report)
    assert sum(x.kind == "error signal" for x in report.compared) > 10


def test_report_in_three_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    report = hg.audit(sign_in_a_norm(monkeypatch), batch(), setup=False)
    text = str(report)
    assert "✘ transformer.h.1.ln_1 is wrong" in text
    assert "wrong sign in the norm's term of the mean" in text
    found = json.loads(report.to_json())
    assert found["passed"] is False
    assert found["first"]["layer"] == "transformer.h.1.ln_1"
    assert found["first"]["diagnosis"] == "missing term"
    page = report.to_html()
    assert page.startswith("<!doctype html>") and "transformer.h.1.ln_1" in page and "://" not in page


def no_library(name: str) -> Any:
    raise ImportError(name)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of("gpt2").save_pretrained(tmp_path / "m")
    files = [str(tmp_path / name) for name in ("a.json", "a.html")]
    options = [str(tmp_path / "m"), "--no-setup", "--attention", "eager", "--tokens", "8"]
    done = CliRunner().invoke(app, ["audit", *options, "--json", files[0], "--html", files[1]])
    assert done.exit_code == 0, done.output
    assert json.loads(Path(files[0]).read_text())["passed"] is True
    assert "all gradients are right" in Path(files[1]).read_text()
    for file in files:  # a report may be published: it has no path of this machine
        assert str(tmp_path) not in Path(file).read_text() and "m: GPT2LMHeadModel" in Path(file).read_text()
    without_scale(monkeypatch)
    done = CliRunner().invoke(app, ["audit", *options])
    assert done.exit_code == 1
    assert "✘ transformer.h.1.attn is wrong" in done.output
    monkeypatch.setattr(folder, "import_module", no_library)
    done = CliRunner().invoke(app, ["audit", *options])
    assert done.exit_code == 1
    assert "pip install transformers" in str(done.exception)


def test_mistakes_of_the_caller_are_explained() -> None:
    model = model_of("gpt2")
    for given, words in (
        ({"input_ids": torch.zeros(2, 3)}, "integers"),
        ({"ids": torch.zeros(2, 3, dtype=torch.int64)}, "input_ids is needed"),
        (torch.zeros(2, 1, dtype=torch.int64), "no token of the batch has a target"),
        ({**batch(), "position_ids": torch.zeros(3, 10, dtype=torch.int64)}, "one sequence per row"),
        (torch.full((2, 3), 31), "outside the vocabulary"),
        (torch.zeros(1, 33, dtype=torch.int64), "context of 32"),
    ):
        with pytest.raises(hg.HandgradError, match=words):
            hg.audit(model, given)
    with pytest.raises(hg.HandgradError, match=r"hg\.verify"):
        hg.audit(hg.GPT(hg.preset("nano")), batch())
    with pytest.raises(hg.HandgradError, match=r"config=hg\.ModelConfig"):
        hg.audit(nn.Linear(3, 3), batch())
    broken = model_of("gpt2")
    broken.transformer.ln_f.weight.data[0] = math.nan
    with pytest.raises(hg.HandgradError, match=r"ln_f\.weight holds NaN"):
        hg.audit(broken, batch())
    with pytest.raises(hg.HandgradError, match="frozen"):
        hg.audit(model.requires_grad_(False), batch())
