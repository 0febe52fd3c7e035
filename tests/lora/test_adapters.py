"""Adapters: injection, gradients, dropout and merging, compared with PEFT and finite differences."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import handgrad as hg
from conftest import make_batch, make_model, perturb
from handgrad import lora
from handgrad.lora.layer import LoRA
from handgrad.model.passes.arguments import Pass
from handgrad.proof.checker import loss_of
from handgrad.proof.oracles import directional_error, relative_error

SHAPE = {"n_vocab": 31, "n_context": 16, "d_model": 8, "n_heads": 2, "n_blocks": 2}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"rank": 4, "alpha": 8},
    "rslora": {"rank": 4, "alpha": 8, "rslora": True},
    "dora": {"rank": 3, "alpha": 5, "dora": True},
    "patterns": {"rank": 4, "alpha": 8, "rank_pattern": {"mlp.c_proj": 2, "h.1.attn.c_attn": 1},
                 "alpha_pattern": {"c_fc": 3}},
    "head": {"rank": 2, "alpha": 3, "targets": ("lm_head",)},
    "head and more, dora": {"rank": 2, "targets": ("lm_head", "c_attn", "mlp.c_proj"), "dora": True},
    "one layer by regex": {"rank": 2, "targets": r"transformer\.h\.1\.mlp\.(c_fc|c_proj)"},
    "saved layers of every block": {"rank": 2, "targets": ("c_fc",), "modules_to_save": ("ln_1", "wte")},
    "saved layers": {"rank": 2, "targets": ("c_attn",), "modules_to_save": ("ln_f", "lm_head")},
}  # fmt: skip


def small_model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> hg.GPT:
    return hg.GPT(hg.preset("nano", **{**SHAPE, **changes}), seed=seed, dtype=dtype)


def adapted_model(dtype: torch.dtype = torch.float64, tied: bool = True, **options: Any) -> hg.GPT:
    """A small model with an adapter whose trainable parameters are not at their initial values."""
    model = small_model(dtype=dtype, tied=tied)
    lora.inject(model, **options)
    perturb(model)
    return model


def small_batch(seed: int = 0, n: int = 12) -> tuple[Tensor, Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(SHAPE["n_vocab"], (2, n), generator=generator)
    targets[: n // 3] = -100
    return tokens, targets, [n - 5, 5]


def save_and_load_with_transformers(model: hg.GPT, tmp_path: Path) -> Any:
    from transformers import GPT2LMHeadModel

    hg.save(model, tmp_path / "base")
    return GPT2LMHeadModel.from_pretrained(tmp_path / "base", dtype=torch.float64, attn_implementation="eager")


def transformers_logits(network: Any, tokens: Tensor, lengths: list[int]) -> Tensor:
    with torch.no_grad():
        return torch.cat([network(input_ids=ids[None]).logits[0] for ids in tokens.split(lengths)])


# ── exchange with peft ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_peft_loads_our_adapter(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    base = small_model()
    theirs = save_and_load_with_transformers(base, tmp_path)
    lora.inject(base, **KINDS[kind])
    perturb(base)
    lora.save(base, tmp_path / "adapter")
    network = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    tokens, _, lengths = small_batch()
    assert relative_error(base.logits(tokens, lengths), transformers_logits(network, tokens, lengths)) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.some_cases(3)
def test_we_load_peft_adapter_and_take_the_same_step(kind: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    ours = small_model()
    options = {"targets": "all-linear", "alpha": 8, **KINDS[kind]}
    targets = options["targets"]
    theirs = get_peft_model(
        save_and_load_with_transformers(ours, tmp_path),
        LoraConfig(
            r=options["rank"], lora_alpha=options["alpha"], task_type="CAUSAL_LM",
            target_modules=targets if isinstance(targets, str) else list(targets),
            rank_pattern=options.get("rank_pattern", {}), alpha_pattern=options.get("alpha_pattern", {}),
            use_rslora=options.get("rslora", False), use_dora=options.get("dora", False),
            modules_to_save=list(options.get("modules_to_save", ())) or None,
        ),
    ).double()  # fmt: skip
    perturb(theirs, seed=5)
    theirs.save_pretrained(tmp_path / "adapter")
    lora.load(ours, tmp_path / "adapter")
    tokens, labels, lengths = small_batch()
    assert relative_error(ours.logits(tokens, lengths), transformers_logits(theirs, tokens, lengths)) <= 1e-10

    # one step of AdamW from equal weights
    trained = [p for p in ours.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    loss = ours.loss_and_grads(tokens, labels, lengths)
    optimizer.step()
    other = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2)
    logits = torch.cat([theirs(input_ids=ids[None]).logits[0] for ids in tokens.split(lengths)])
    expected = torch.nn.functional.cross_entropy(logits, labels)
    expected.backward()
    other.step()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    theirs.save_pretrained(tmp_path / "after")
    lora.save(ours, tmp_path / "ours")
    from safetensors.torch import load_file

    after, mine = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("after", "ours"))
    assert set(mine) <= set(after) and set(after) - set(mine) <= {"base_model.model.lm_head.base_layer.weight"}
    for name, tensor in mine.items():
        assert relative_error(tensor, after[name]) <= 1e-8, name


@pytest.mark.parametrize("options", [*KINDS.values(), {"rank": 2, "freeze_down": True}], ids=[*KINDS, "freeze_down"])
def test_save_and_load_round_trip_is_bit_identical(options: dict[str, Any], tmp_path: Path) -> None:
    source, other = adapted_model(torch.float32, **options), small_model(dtype=torch.float32)
    lora.save(source, tmp_path / "adapter")
    lora.load(other, tmp_path / "adapter")
    tokens, _, lengths = small_batch()
    assert torch.equal(source.logits(tokens, lengths), other.logits(tokens, lengths))
    trained = {n for n, p in other.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in source.named_parameters() if p.requires_grad}
    assert "freeze_down" not in options or {n.rpartition(".")[2] for n in trained} == {"up"}


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["plain", "dora", "head and more, dora"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.some_cases(6)
def test_gradients_match_finite_differences(kind: str, dropout: float, recompute: str) -> None:
    model = adapted_model(**KINDS[kind], dropout=dropout)
    tokens, targets, lengths = small_batch()
    model.loss_and_grads(tokens, targets, lengths, seed=3, recompute=recompute)

    def loss() -> float:
        grads = {p: p.grad for p in model.parameters()}
        model.zero_grad()
        value = model.loss_and_grads(tokens, targets, lengths, seed=3)
        for p, grad in grads.items():
            p.grad = grad
        return value

    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert p.grad is None, name
            continue
        grad = p.grad.flatten()
        with loss_of(model, [p], loss) as (f, at):  # DoRA's norms are constants there, as in the backward pass
            assert directional_error(f, at, grad, generator) <= 1e-6, name


def test_dropout_depends_on_seed_and_is_off_in_eval() -> None:
    model = adapted_model(rank=4, dropout=0.5)
    tokens, targets, lengths = small_batch()
    plain = model.loss(tokens, targets, lengths)
    losses = [model.loss_and_grads(tokens, targets, lengths, seed=s) for s in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert plain not in losses
    model.eval()
    assert model.loss_and_grads(tokens, targets, lengths, seed=1) == pytest.approx(plain, rel=1e-12)


def test_dropout_preserves_the_mean() -> None:
    model = adapted_model(rank=4, targets=("lm_head",), dropout=0.3)
    adapter = model.lm_head
    assert isinstance(adapter, LoRA)
    a = torch.randn(1, 8).double()
    mean = torch.stack([adapter.forward(a, Pass(dropout_seed=seed)) for seed in range(4000)]).mean(0)
    assert relative_error(mean, adapter.forward(a)) < 0.05


@pytest.mark.parametrize("kind", ["plain", "dora", "head and more, dora"])
def test_uneven_accumulation_equals_one_batch(kind: str) -> None:
    model = adapted_model(**KINDS[kind])
    tokens, targets, _ = small_batch(n=14)
    lengths = [9, 2, 3]
    targets[9] = 3
    total_loss = model.loss_and_grads(tokens, targets, lengths)
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    n_targets = int((targets != -100).sum())
    total = sum(
        model.loss_and_grads(t, y, [length], n_targets=n_targets)
        for t, y, length in zip(tokens.split(lengths), targets.split(lengths), lengths, strict=True)
    )
    assert total == pytest.approx(total_loss, rel=1e-12)
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert relative_error(p.grad, expected[name]) <= 1e-12, name


def test_frozen_weight_gradients_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from handgrad.ops import linear

    model = small_model()
    lora.inject(model, 2)
    monkeypatch.setattr(linear, "grad_w", lambda *a: pytest.fail("the gradient of a frozen weight was computed"))
    model.loss_and_grads(*small_batch())
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("dora", [False, True])
def test_model_with_adapters_passes_verify(dora: bool) -> None:
    model = adapted_model(rank=2, targets=("all-linear", "lm_head"), dora=dora, dropout=0.5)
    assert hg.verify(model, *small_batch()).passed


# ── targets and options ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("targets", "count"),
    [("all-linear", 8), (("all-linear", "lm_head"), 9), ("c_proj", 4), ("mlp.c_proj", 2), ("lm_head", 1),
     (r".*\.h\.0\..*", 4), (("h.0.mlp.c_fc",), 1), (r".*\.(c_attn|c_fc)", 4), ("lm_head|.*c_fc", 3),
     (r"h\.[01]\.attn\.c_attn", 2), ("(?i:C_ATTN|C_FC)", 4), ("(c_attn)|(c_fc)", 4), ("(?i)C_FC", 2)],
)  # fmt: skip
def test_labels_match_name_suffix_or_regex(targets: Any, count: int) -> None:
    assert len(lora.choose(small_model(), targets)) == count


@pytest.mark.parametrize(
    "targets",
    [
        "c_atn",
        ("c_attn", "q_proj"),
        r".*\.(c_attn|c_typo)",
        "c_attn|nothing",
        "wte",
        "ln_1",
        "(",
        (),
        "(c_attn)|(c_typo)",
        r".*\.((attn\.c_attn)|(attn\.c_typo))",
        "[",
        "^c_attn",
    ],
)
def test_unmatched_labels_are_rejected_with_available_layers(targets: Any) -> None:
    with pytest.raises(hg.HandgradError) as error:
        lora.inject(small_model(), targets=targets)
    if targets not in ("(", "[", ()):
        assert "transformer.h.*.attn.c_attn" in str(error.value)


def test_rejected_inject_leaves_the_model_unchanged() -> None:
    model = small_model()
    with pytest.raises(hg.HandgradError, match="larger than"):
        lora.inject(model, rank=2, rank_pattern={"h.1.mlp.c_proj": 99})
    assert not lora.adapters_of(model) and all(p.requires_grad for p in model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_peft_rank_above_layer_width_is_loaded(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    ours = small_model()
    theirs = get_peft_model(
        save_and_load_with_transformers(ours, tmp_path),
        LoraConfig(r=11, target_modules=["c_attn"], task_type="CAUSAL_LM"),
    )
    theirs.save_pretrained(tmp_path / "adapter")
    lora.load(ours, tmp_path / "adapter")
    assert lora.adapters_of(ours)["transformer.h.0.attn.c_attn"].down.shape == (8, 11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank"), ({"rank": True}, "rank"), ({"rank": 9}, "larger than"), ({"alpha": -1}, "alpha"),
        ({"alpha": float("nan")}, "alpha"), ({"dropout": 1.0}, "dropout"), ({"rank_pattern": {"q": 2}}, "'q'"),
        ({"alpha_pattern": {"(": 2}}, "regular expression"), ({"modules_to_save": ("ln_9",)}, "ln_9"),
        ({"rank": 10**9}, "must be"), ({"alpha": 1e308}, "must be"), ({"rank_pattern": {"c_fc": 10**9}}, "must be"),
        ({"alpha_pattern": {"c_fc": float("inf")}}, "must be"), ({"rank_pattern": {"rank": 4}, "rank": 0}, "must be"),
        ({"alpha_pattern": {"alpha": 4}, "alpha": -1.0}, "must be"),
    ],
)  # fmt: skip
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message.replace("(", r"\(")):
        lora.inject(small_model(), **options)


def test_inject_once_and_remove() -> None:
    model = small_model()
    before = {n: p.clone() for n, p in model.named_parameters()}
    tokens, _, lengths = small_batch()
    logits = model.logits(tokens, lengths)
    lora.inject(model, 4, dora=True)
    assert relative_error(model.logits(tokens, lengths), logits) <= 1e-12  # a new adapter has no effect
    with pytest.raises(hg.HandgradError, match="already"):
        lora.inject(model, 4)
    lora.remove(model)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in before.items()}
    assert torch.equal(model.logits(tokens, lengths), logits)


# ── merging ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_merge_and_unmerge_preserve_logits_and_embedding(kind: str, tied: bool) -> None:
    model = adapted_model(tied=tied, **KINDS[kind])
    embedding = model.transformer.wte.weight.detach().clone()
    head = "lm_head" in lora.adapters_of(model)
    tokens, _, lengths = small_batch()
    adapted = model.logits(tokens, lengths)
    merged = lora.merge(model)
    assert not lora.adapters_of(model)
    assert relative_error(model.logits(tokens, lengths), adapted) <= 1e-12
    assert torch.equal(model.transformer.wte.weight, embedding)
    assert model.config.tied == (tied and not head and "saved" not in kind)
    was_tied = merged.tied
    lora.unmerge(model, merged)
    assert relative_error(model.logits(tokens, lengths), adapted) <= 1e-11
    assert torch.equal(model.transformer.wte.weight, embedding)
    assert model.config.tied == was_tied


def test_merge_without_adapter_is_rejected() -> None:
    with pytest.raises(hg.HandgradError, match="no adapter"):
        lora.merge(small_model())


def test_merge_and_unmerge_discard_gradients() -> None:
    model = make_model(n_blocks=2)
    small_batch = make_batch(model, [9])
    lora.inject(model, 2)
    model.loss_and_grads(*small_batch)
    merged = lora.merge(model)
    assert all(p.grad is None for p in model.parameters())
    model.requires_grad_(True)
    model.loss_and_grads(*small_batch)
    lora.unmerge(model, merged)
    assert all(p.grad is None for p in model.parameters())


def test_load_discards_gradients_of_frozen_weights(tmp_path: Path) -> None:
    source, two = make_model(), make_model()
    lora.inject(source, 2)
    lora.save(source, tmp_path / "adapter")
    two.loss_and_grads(*make_batch(two, [9]))
    lora.load(two, tmp_path / "adapter")
    assert all(p.grad is None for p in two.parameters())
