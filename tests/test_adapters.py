"""Adapters: where they go, what they compute, how they are merged; PEFT and finite differences are the judges."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import handgrad as hg
from conftest import make_batch, make_model
from handgrad import adapters
from handgrad.adapters.lora import LoRA
from handgrad.files.manifest import FILE
from handgrad.model.passes import Pass
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
    "whole layers of every block": {"rank": 2, "targets": ("c_fc",), "modules_to_save": ("ln_1", "wte")},
    "whole layers": {"rank": 2, "targets": ("c_attn",), "modules_to_save": ("ln_f", "lm_head")},
}  # fmt: skip


def small(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> hg.GPT:
    return hg.GPT(hg.preset("nano", **{**SHAPE, **changes}), seed=seed, dtype=dtype)


def stirred(model: hg.GPT, seed: int = 1) -> hg.GPT:
    """Every trained parameter away from where it began."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape, generator=generator).to(p.dtype))
    return model


def batch(seed: int = 0, n: int = 12) -> tuple[Tensor, Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(SHAPE["n_vocab"], (2, n), generator=generator)
    targets[: n // 3] = -100
    return tokens, targets, [n - 5, 5]


def their_base(model: hg.GPT, tmp_path: Path) -> Any:
    from transformers import GPT2LMHeadModel

    hg.save(model, tmp_path / "base")
    return GPT2LMHeadModel.from_pretrained(tmp_path / "base", dtype=torch.float64, attn_implementation="eager")


def their_logits(network: Any, tokens: Tensor, lengths: list[int]) -> Tensor:
    with torch.no_grad():
        return torch.cat([network(input_ids=ids[None]).logits[0] for ids in tokens.split(lengths)])


# ── crossing to peft and back ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_peft_opens_what_we_write(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    base = small()
    theirs = their_base(base, tmp_path)
    adapters.inject(base, **KINDS[kind])
    stirred(base)
    adapters.save(base, tmp_path / "adapter")
    network = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    tokens, _, lengths = batch()
    assert relative_error(base.logits(tokens, lengths), their_logits(network, tokens, lengths)) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_we_open_what_peft_writes_and_take_the_same_step(kind: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    ours = small()
    options = {"targets": "all-linear", "alpha": 8, **KINDS[kind]}
    targets = options["targets"]
    theirs = get_peft_model(
        their_base(ours, tmp_path),
        LoraConfig(
            r=options["rank"], lora_alpha=options["alpha"], task_type="CAUSAL_LM",
            target_modules=targets if isinstance(targets, str) else list(targets),
            rank_pattern=options.get("rank_pattern", {}), alpha_pattern=options.get("alpha_pattern", {}),
            use_rslora=options.get("rslora", False), use_dora=options.get("dora", False),
            modules_to_save=list(options.get("modules_to_save", ())) or None,
        ),
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in theirs.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape, generator=generator).double())
    theirs.save_pretrained(tmp_path / "adapter")
    adapters.load(ours, tmp_path / "adapter")
    tokens, targets_, lengths = batch()
    assert relative_error(ours.logits(tokens, lengths), their_logits(theirs, tokens, lengths)) <= 1e-10

    # one step of AdamW each, from the same start
    trained = [p for p in ours.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    loss = ours.loss_and_grads(tokens, targets_, lengths)
    optimizer.step()
    other = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2)
    logits = torch.cat([theirs(input_ids=ids[None]).logits[0] for ids in tokens.split(lengths)])
    expected = torch.nn.functional.cross_entropy(logits, targets_)
    expected.backward()
    other.step()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    theirs.save_pretrained(tmp_path / "after")
    adapters.save(ours, tmp_path / "ours")
    from safetensors.torch import load_file

    after, mine = (load_file(tmp_path / place / "adapter_model.safetensors") for place in ("after", "ours"))
    assert set(mine) <= set(after) and set(after) - set(mine) <= {"base_model.model.lm_head.base_layer.weight"}
    for name, tensor in mine.items():
        assert relative_error(tensor, after[name]) <= 1e-8, name


@pytest.mark.parametrize("kind", KINDS)
def test_our_own_files_bring_everything_back(kind: str, tmp_path: Path) -> None:
    one, other = small(dtype=torch.float32), small(dtype=torch.float32)
    adapters.inject(one, **KINDS[kind])
    stirred(one)
    adapters.save(one, tmp_path / "adapter")
    adapters.load(other, tmp_path / "adapter")
    tokens, _, lengths = batch()
    assert torch.equal(one.logits(tokens, lengths), other.logits(tokens, lengths))
    assert {n for n, p in one.named_parameters() if p.requires_grad} == {
        n for n, p in other.named_parameters() if p.requires_grad
    }


def test_frozen_down_factors_are_remembered(tmp_path: Path) -> None:
    one, other = small(), small()
    adapters.inject(one, 2, freeze_down=True)
    adapters.save(one, tmp_path / "adapter")
    adapters.load(other, tmp_path / "adapter")
    assert {n.rpartition(".")[2] for n, p in other.named_parameters() if p.requires_grad} == {"up"}


# ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["plain", "dora", "head and more, dora"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_every_gradient_against_finite_differences(
    kind: str, dropout: float, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    adapters.inject(model, **KINDS[kind], dropout=dropout)
    stirred(model)
    # DoRA's norms count as constants on the way up, so they have to stay where they are while a factor is nudged
    for adapter in adapters.adapters_of(model).values():
        fixed = adapter.column_norms()
        monkeypatch.setattr(adapter, "column_norms", lambda fixed=fixed: fixed)
    tokens, targets, lengths = batch()
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
        before, grad = p.detach().clone(), p.grad.clone()

        def at(x: Tensor, p: Tensor = p) -> float:
            with torch.no_grad():
                p.copy_(x)
            return loss()

        assert directional_error(at, before, grad, generator) <= 1e-6, name
        with torch.no_grad():
            p.copy_(before)


def test_dropout_drops_by_the_seed_and_only_while_training() -> None:
    model = small()
    adapters.inject(model, 4, dropout=0.5)
    stirred(model)
    tokens, targets, lengths = batch()
    plain = model.loss(tokens, targets, lengths)
    losses = [model.loss_and_grads(tokens, targets, lengths, seed=s) for s in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert plain not in losses
    model.eval()
    assert model.loss_and_grads(tokens, targets, lengths, seed=1) == pytest.approx(plain, rel=1e-12)


def test_dropout_keeps_the_mean() -> None:
    model = small()
    adapters.inject(model, 4, targets=("lm_head",), dropout=0.3)
    adapter = stirred(model).lm_head
    assert isinstance(adapter, LoRA)
    a = torch.randn(1, 8).double()
    mean = torch.stack([adapter.forward(a, Pass(dropout_seed=seed)) for seed in range(4000)]).mean(0)
    assert relative_error(mean, adapter.forward(a)) < 0.05


@pytest.mark.parametrize("kind", ["plain", "dora", "head and more, dora"])
def test_accumulation_over_uneven_parts_is_the_gradient_of_the_whole(kind: str) -> None:
    model = small()
    adapters.inject(model, **KINDS[kind])
    stirred(model)
    tokens, targets, _ = batch(n=14)
    lengths = [9, 2, 3]
    targets[9] = 3
    whole = model.loss_and_grads(tokens, targets, lengths)
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    n_targets = int((targets != -100).sum())
    total = sum(
        model.loss_and_grads(t, y, [length], n_targets=n_targets)
        for t, y, length in zip(tokens.split(lengths), targets.split(lengths), lengths, strict=True)
    )
    assert total == pytest.approx(whole, rel=1e-12)
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert relative_error(p.grad, expected[name]) <= 1e-12, name


def test_nothing_is_computed_for_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from handgrad.ops import linear

    model = small()
    adapters.inject(model, 2)
    monkeypatch.setattr(linear, "grad_w", lambda *a: pytest.fail("a frozen weight's gradient was computed"))
    model.loss_and_grads(*batch())
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("dora", [False, True])
def test_verify_judges_a_model_with_adapters(dora: bool) -> None:
    model = small()
    adapters.inject(model, 2, targets=("all-linear", "lm_head"), dora=dora, dropout=0.5)
    stirred(model)
    assert hg.verify(model, *batch()).passed


# ── choosing ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("targets", "count"),
    [("all-linear", 8), (("all-linear", "lm_head"), 9), ("c_proj", 4), ("mlp.c_proj", 2), ("lm_head", 1),
     (r".*\.h\.0\..*", 4), (("h.0.mlp.c_fc",), 1), (r".*\.(c_attn|c_fc)", 4), ("lm_head|.*c_fc", 3),
     (r"h\.[01]\.attn\.c_attn", 2), ("(?i:C_ATTN|C_FC)", 4), ("(c_attn)|(c_fc)", 4), ("(?i)C_FC", 2)],
)  # fmt: skip
def test_layers_are_chosen_by_name_end_or_expression(targets: Any, count: int) -> None:
    assert len(adapters.choose(small(), targets)) == count


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
def test_what_matches_nothing_or_only_in_part_lists_what_exists(targets: Any) -> None:
    with pytest.raises(hg.HandgradError) as said:
        adapters.inject(small(), targets=targets)
    if targets not in ("(", "[", ()):
        assert "transformer.h.*.attn.c_attn" in str(said.value)


def test_a_refused_adapter_leaves_the_model_alone() -> None:
    model = small()
    with pytest.raises(hg.HandgradError, match="larger than"):
        adapters.inject(model, rank=2, rank_pattern={"h.1.mlp.c_proj": 99})
    assert not adapters.adapters_of(model) and all(p.requires_grad for p in model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_peft_may_waste_ranks(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    ours = small()
    theirs = get_peft_model(
        their_base(ours, tmp_path), LoraConfig(r=11, target_modules=["c_attn"], task_type="CAUSAL_LM")
    )
    theirs.save_pretrained(tmp_path / "adapter")
    adapters.load(ours, tmp_path / "adapter")
    assert adapters.adapters_of(ours)["transformer.h.0.attn.c_attn"].down.shape == (8, 11)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 0}, "rank"), ({"rank": True}, "rank"), ({"rank": 9}, "larger than"), ({"alpha": -1}, "alpha"),
        ({"alpha": float("nan")}, "alpha"), ({"dropout": 1.0}, "dropout"), ({"rank_pattern": {"q": 2}}, "'q'"),
        ({"alpha_pattern": {"(": 2}}, "regular expression"), ({"modules_to_save": ("ln_9",)}, "ln_9"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(hg.HandgradError, match=says.replace("(", r"\(")):
        adapters.inject(small(), **options)


def test_adapters_go_in_once_and_come_out() -> None:
    model = small()
    before = {n: p.clone() for n, p in model.named_parameters()}
    tokens, _, lengths = batch()
    logits = model.logits(tokens, lengths)
    adapters.inject(model, 4, dora=True)
    assert relative_error(model.logits(tokens, lengths), logits) <= 1e-12  # nothing changes at the beginning
    with pytest.raises(hg.HandgradError, match="already"):
        adapters.inject(model, 4)
    with pytest.raises(hg.HandgradError, match="adapter"):
        hg.save(model, "nowhere")
    adapters.remove(model)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in before.items()}
    assert torch.equal(model.logits(tokens, lengths), logits)


# ── merging ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_merging_keeps_the_logits_and_the_embedding(kind: str, tied: bool) -> None:
    model = small(tied=tied)
    adapters.inject(model, **KINDS[kind])
    stirred(model)
    embedding = model.transformer.wte.weight.detach().clone()
    head = "lm_head" in adapters.adapters_of(model)
    tokens, _, lengths = batch()
    adapted = model.logits(tokens, lengths)
    taken = adapters.merge(model)
    assert not adapters.adapters_of(model)
    assert relative_error(model.logits(tokens, lengths), adapted) <= 1e-12
    assert torch.equal(model.transformer.wte.weight, embedding)
    assert model.config.tied == (tied and not head and "whole" not in kind)
    was_tied = taken.tied
    adapters.unmerge(model, taken)
    assert relative_error(model.logits(tokens, lengths), adapted) <= 1e-11
    assert torch.equal(model.transformer.wte.weight, embedding)
    assert model.config.tied == was_tied


def test_merging_wants_an_adapter() -> None:
    with pytest.raises(hg.HandgradError, match="no adapter"):
        adapters.merge(small())


# ── broken files ────────────────────────────────────────────────────────────────────────────────────────────────────


def broken(tmp_path: Path, change: Any) -> Path:
    model = small()
    adapters.inject(model, 2, dora=True)
    adapters.save(model, tmp_path / "adapter")
    (tmp_path / "adapter" / FILE).unlink()  # as if another tool had written it
    change(tmp_path / "adapter")
    return tmp_path / "adapter"


def _config(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _tensors(edit: Any) -> Any:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = folder / "adapter_model.safetensors"
        tensors = {k: v.clone() for k, v in load_file(file).items()}
        edit(tensors)
        save_file(tensors, file)

    return change


A = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json is not valid JSON"),
        (lambda f: (f / "adapter_config.json").write_text("[]"), "object"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x10" * 40), "adapter_model.safetensors"),
        (_config(peft_type="LOHA"), "LOHA"), (_config(bias="all"), "bias"), (_config(lora_bias=True), "lora_bias"),
        (_config(r=3), "lora_A of transformer.h.0.attn.c_attn is (2, 8)"), (_config(r="x"), "rank"),
        (_config(rank_pattern=[1]), "rank_pattern must be a dict"), (_config(init_lora_weights="pissa_niter_4"), "pissa"),
        (_config(modules_to_save=["ln_f"]), "ln_f"), (_config(modules_to_save="ln_f"), "list"),
        (_config(use_dora=False), "use_dora"), (_config(alpha_pattern={"c_attn": "x"}), "alpha"),
        (_tensors(lambda t: t.pop(A)), "lora_B only"),
        (_tensors(lambda t: t.pop(A.replace("lora_A.weight", "lora_magnitude_vector"))), "missing"),
        (_tensors(lambda t: t.update({A: torch.zeros(2, 9)})), "(2, 9)"),
        (_tensors(lambda t: t.update({A: torch.zeros(2, 8, dtype=torch.int32)})), "int32"),
        (_tensors(lambda t: t.update({A.replace("h.0", "h.7"): torch.zeros(2, 8)})), "transformer.h.7.attn.c_attn"),
        (_tensors(lambda t: t.update({"weight": torch.zeros(2)})), "base_model.model."),
        (_tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(3, 8)})), "lm_head.weight is (3, 8)"),
        (_tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(31, 8)})), "does not list in"),
        (_tensors(lambda t: t.update({"base_model.model.transformer.wte.lora_embedding_A": torch.zeros(3, 8)})), "wte"),
        (_tensors(lambda t: t.clear() or t.update({"base_model.model.lm_head.weight": torch.zeros(31, 8)})), "no low-rank"),
    ],
)  # fmt: skip
def test_broken_adapters_are_named_and_leave_the_model_alone(tmp_path: Path, change: Any, says: str) -> None:
    folder = broken(tmp_path, change)
    model = small()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(hg.HandgradError) as said:
        adapters.load(model, folder)
    assert says in str(said.value) and str(folder) in str(said.value)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == dict.fromkeys(before, True)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_an_adapter_is_not_written_over_other_things(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    model = small()
    with pytest.raises(hg.HandgradError, match="no adapter"):
        adapters.save(model, tmp_path / "new")
    adapters.inject(model, 2)
    with pytest.raises(hg.HandgradError, match="choose another path"):
        adapters.save(model, tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["precious"]


def test_merging_leaves_no_gradient_of_other_weights() -> None:
    model = make_model(n_blocks=2)
    batch = make_batch(model, [9])
    adapters.inject(model, 2)
    model.loss_and_grads(*batch)
    taken = adapters.merge(model)
    assert all(p.grad is None for p in model.parameters())
    model.requires_grad_(True)
    model.loss_and_grads(*batch)
    adapters.unmerge(model, taken)
    assert all(p.grad is None for p in model.parameters())


def test_reading_an_adapter_discards_gradients_of_what_it_freezes(tmp_path: Path) -> None:
    one, two = make_model(), make_model()
    adapters.inject(one, 2)
    adapters.save(one, tmp_path / "adapter")
    two.loss_and_grads(*make_batch(two, [9]))
    adapters.load(two, tmp_path / "adapter")
    assert all(p.grad is None for p in two.parameters())
