"""Muon beside AdamW: torch's own two optimizers, map by map, however a weight is stored, rounded, saved or updated."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import handgrad as hg
from conftest import make_batch, make_model, perturb
from handgrad import optim
from handgrad.model.layers.linear import Affine
from handgrad.optim import OptimizerInBackward, StochasticRounding, restore, state_of
from handgrad.optim.muon import Maps
from handgrad.proof.oracles import relative_error

LENGTHS = [9, 2, 13, 5, 16]
LR, DECAY, BETAS = 0.02, 0.1, (0.9, 0.95)
SHAPES = {
    "gpt2": {},
    "untied": {"tied": False, "logits_bias": True},
    "llama": {
        "family": "llama", "norm": "rms", "positions": "rotary", "gated": True, "activation": "silu", "n_kv_heads": 1,
        "tied": False, "qkv_bias": False, "out_bias": False, "mlp_bias": False,
    },
    "phi3": {
        "family": "phi3", "norm": "rms", "positions": "rotary", "gated": True, "activation": "silu", "n_kv_heads": 1,
        "tied": False, "qkv_bias": False, "out_bias": False, "mlp_bias": False,
    },
}  # fmt: skip


def model_of(name: str, **changes: object) -> hg.GPT:
    return make_model(**{"n_blocks": 2, **SHAPES[name], **changes})  # type: ignore[arg-type]


def make(model: hg.GPT, rounding: StochasticRounding | None = None) -> Callable[..., torch.optim.Optimizer]:
    return optim.maker("muon", LR, DECAY, BETAS, rounding, optim.matrices(model))


def layers(model: hg.GPT) -> list[Affine]:
    return [layer for block in model.blocks for layer in block.modules() if isinstance(layer, Affine)]


class ByHand:
    """torch.optim.Muon on copies of every linear map of the blocks, torch.optim.AdamW on the other parameters."""

    def __init__(self, model: hg.GPT):
        self.copies: list[tuple[Tensor, nn.Parameter, nn.Parameter]] = []  # view (f_out, f_in), its parameter, the copy
        for layer in layers(model):
            plain = layer.plain()
            for letter, p in layer.named_symbols().items():
                if p is None or not p.requires_grad or letter not in "wdu":
                    continue
                w = p if letter != "w" or plain.in_out else p.t()  # (f_in, f_out)
                for columns in torch.split(w.detach(), [w.shape[1]] if letter == "d" else plain.widths, 1):
                    self.copies.append((columns.t(), p, nn.Parameter(columns.t().clone())))
        moved = {p for _, p, _ in self.copies}
        rest = [p for p in model.parameters() if p.requires_grad and p not in moved]
        self.muon = torch.optim.Muon(
            [c for _, _, c in self.copies], lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
        )
        decayed = [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW([g for g in decayed if g["params"]], lr=LR, betas=BETAS) if rest else None

    @torch.no_grad()
    def step(self) -> None:
        for view, p, c in self.copies:
            c.grad = torch.as_strided(p.grad, view.shape, view.stride(), view.storage_offset()).clone()
        self.muon.step()
        for view, _, c in self.copies:
            view.copy_(c)
        if self.adamw is not None:
            self.adamw.step()


def grads(model: hg.GPT, step: int, clip: float | None) -> None:
    model.zero_grad()
    model.loss_and_grads(*make_batch(model, LENGTHS, seed=step, ignored=0.5), LENGTHS)
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)


# ── torch's two optimizers ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", [*SHAPES, "frozen", "adapters", "dora", "kept"])
@pytest.mark.some_cases(3)
def test_equals_torchs_muon_and_adamw(kind: str, clip: float | None) -> None:
    one, two = (model_of(kind if kind in SHAPES else "gpt2") for _ in range(2))
    for model in (one, two):
        if kind == "frozen":
            for name, p in model.named_parameters():
                p.requires_grad_("h.1.attn" in name or "ln_2" in name)
        elif kind not in SHAPES:
            kept = ("mlp.c_proj", "ln_1", "wte") if kind == "kept" else ()
            targets = "attn.c_proj,c_attn" if kind == "kept" else "all-linear"
            hg.lora.inject(model, 2, targets=targets.split(","), dora=kind == "dora", modules_to_save=kept)
            perturb(model)
    start = copy.deepcopy(one)
    ours, theirs = make(one)(one.parameters()), ByHand(two)
    for step in range(4):
        grads(one, step, None)
        norm = optim.length(optim.norm(p.grad) for p in one.parameters() if p.grad is not None)
        optim.step(ours, optim.clip_factor(norm, clip))
        grads(two, step, clip)
        theirs.step()
    for (name, p), q, before in zip(one.named_parameters(), two.parameters(), start.parameters(), strict=True):
        assert relative_error(p.detach(), q.detach()) <= 1e-12, name
        assert torch.equal(p, before) == (not p.requires_grad), name


def test_the_matrices_are_those_of_the_blocks() -> None:
    model = model_of("gpt2")
    names = {p: name for name, p in model.named_parameters()}
    found = {names[p].partition("h.0.")[2]: maps for p, maps in optim.matrices(model).items() if "h.0." in names[p]}
    assert found == {
        "attn.c_attn.weight": Maps(True, (12, 12, 12)), "attn.c_proj.weight": Maps(True),
        "mlp.c_fc.weight": Maps(True), "mlp.c_proj.weight": Maps(True),
    }  # fmt: skip
    assert len(optim.matrices(model)) == 2 * len(found)
    hg.lora.inject(model, 2, targets=["c_attn", "lm_head"], dora=True)
    names = {p: name for name, p in model.named_parameters()}
    ends = {".".join(names[p].split(".")[-2:]).replace("base.", ""): maps for p, maps in optim.matrices(model).items()}
    assert ends["c_attn.down"] == Maps(True) and ends["c_attn.up"] == Maps(True, (12, 12, 12))
    assert not any("lm_head" in names[p] or "magnitude" in names[p] for p in optim.matrices(model))
    fused = set(optim.matrices(model_of("phi3")).values())
    assert fused == {Maps(False, (12, 4, 4)), Maps(False), Maps(False, (48, 48))}


def test_other_parameters_go_to_adamw() -> None:
    """Vectors, matrices that are not listed, and tensors of three dimensions."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((5,), (4, 3), (2, 4, 3), (4, 3))]
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    matrix = parameters[-1]
    ours = optim.maker("Muon", LR, DECAY, BETAS, matrices={matrix: Maps(False)})(parameters)
    theirs = optim.maker("AdamW", LR, DECAY, BETAS)(copies)
    for _ in range(3):
        for p, q in zip(parameters, copies, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    assert [torch.equal(p, q) for p, q in zip(parameters, copies, strict=True)] == [True, True, True, False]
    assert set(ours.state[matrix]) == {"momentum_buffer"}
    assert [set(ours.state[p]) for p in parameters[:3]] == [{"step", "exp_avg", "exp_avg_sq"}] * 3


# ── the layout of a weight ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(1, 7), (7, 5), (13, 13), (24, 96), (96, 24), (128, 128), (576, 1536)])
def test_the_bits_do_not_depend_on_how_a_weight_is_stored(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """As (f_in, f_out), as (f_out, f_in), and with another map beside it in either."""
    f_in, f_out = shape
    start, *steps = torch.randn(4, f_in, f_out).to(dtype)
    beside, *others = torch.randn(4, f_in, 3).to(dtype)
    found = []
    for in_out in (True, False):
        for widths in ((), (f_out, 3), (3, f_out)):

            def stored(x: Tensor, other: Tensor, widths: tuple[int, ...] = widths, in_out: bool = in_out) -> Tensor:
                parts = [x] if not widths else [x, other] if widths[0] == f_out else [other, x]
                w = torch.cat(parts, 1)
                return w if in_out else w.t().contiguous()

            p = nn.Parameter(stored(start, beside))
            optimizer = optim.maker("muon", LR, DECAY, BETAS, matrices={p: Maps(in_out, widths)})([p])
            for x, other in zip(steps, others, strict=True):
                p.grad = stored(x, other)
                optim.step(optimizer, 1.0)
            whole = p.detach() if in_out else p.detach().t()
            found.append(whole[:, 3:] if widths == (3, f_out) else whole[:, :f_out])
    assert all(torch.equal(x, found[0]) for x in found) and not torch.equal(found[0], start)


def test_maps_side_by_side_are_not_one() -> None:
    """q|k|v as one matrix would get another update."""
    p, q = (nn.Parameter(torch.ones(4, 12)) for _ in range(2))
    grad = torch.randn(4, 12)
    for parameter, maps in ((p, Maps(True, (4, 4, 4))), (q, Maps(True))):
        parameter.grad = grad.clone()
        optim.maker("muon", LR, 0.0, BETAS, matrices={parameter: maps})([parameter]).step()
    assert relative_error(p.detach() - 1, q.detach() - 1) > 0.1


@pytest.mark.parametrize("shape", [(48, 48), (24, 96), (16, 576), (576, 1536)])
def test_an_update_is_orthogonal_and_of_the_size_of_adamws(shape: tuple[int, int]) -> None:
    p = nn.Parameter(torch.zeros(shape))
    p.grad = 1e-3 * torch.randn(shape)
    optim.maker("muon", 1.0, 0.0, BETAS, matrices={p: Maps(True)})([p]).step()
    singular = torch.linalg.svdvals(p.detach()) / (0.2 * max(shape) ** 0.5)
    assert singular.min() > 0.2 and singular.max() < 1.4
    assert 0.1 < p.detach().square().mean().sqrt() < 0.3


def test_the_bits_do_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    grads_of = [torch.randn(shape) for shape in ((128, 512), (128, 128), (576, 1536), (576, 192))]
    found = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            parameters = [nn.Parameter(torch.ones_like(x)) for x in grads_of]
            optimizer = optim.maker("muon", LR, DECAY, BETAS, matrices=dict.fromkeys(parameters, Maps(True)))(
                parameters
            )
            for _ in range(2):
                for p, x in zip(parameters, grads_of, strict=True):
                    p.grad = x.clone()
                optim.step(optimizer, 0.5)
            found.append([p.detach() for p in parameters])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(p, q) for other in found[1:] for p, q in zip(found[0], other, strict=True))


# ── every way of a step ───────────────────────────────────────────────────────────────────────────────────────────────


def train(
    model: hg.GPT, inside: bool, clip: float | None, steps: range, state: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Train from this state of the optimizer on, and return the new one."""
    rounding = StochasticRounding(7, model.parameters())
    names = {p: name for name, p in model.named_parameters()}
    maker = make(model, rounding)
    optimizer = OptimizerInBackward(model, maker, clip) if inside else maker(model.parameters())
    restore(optimizer, names, state or {})
    for step in steps:
        rounding.step = step
        for group in optimizer.param_groups:
            group["lr"] = LR / (1 + step)
        batch = make_batch(model, LENGTHS, seed=step)
        if isinstance(optimizer, OptimizerInBackward):
            optimizer.step(*batch, LENGTHS)
            continue
        model.zero_grad()
        model.loss_and_grads(*batch, LENGTHS)
        norm = optim.length(optim.norm(p.grad) for p in model.parameters() if p.grad is not None)
        optim.step(optimizer, optim.clip_factor(norm, clip))
    return state_of(optimizer, names)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt2", "untied", "phi3"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.some_cases(4)
def test_inside_the_backward_pass_and_after_it(kind: str, dtype: torch.dtype, clip: float | None) -> None:
    one, two, start = (model_of(kind, dtype=dtype) for _ in range(3))
    of_one = train(one, False, clip, range(4))
    of_two = train(two, True, clip, range(4))
    assert of_one.keys() == of_two.keys()
    for (name, p), q, r in zip(one.named_parameters(), two.parameters(), start.parameters(), strict=True):
        assert not torch.equal(p, r), name
        if clip is None or dtype != torch.float64:
            assert torch.equal(p, q), name
        else:  # the norms of the layers are summed in another order
            assert relative_error(q.detach(), p.detach()) <= 1e-12, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inside", [True, False])
def test_an_interrupted_run_continues_with_the_same_bits(inside: bool, dtype: torch.dtype) -> None:
    one, two = (model_of("gpt2", dtype=dtype) for _ in range(2))
    train(one, inside, 1.0, range(6))
    state = train(two, inside, 1.0, range(3))
    assert {value.dtype for value in state.values()} == {torch.float32}
    buffers = [name for name in state if name.endswith("momentum_buffer")]
    assert len(buffers) == len(optim.matrices(two)) and not any("wte" in name or "bias" in name for name in buffers)
    resumed = model_of("gpt2", seed=1, dtype=dtype)
    resumed.load_state_dict(two.state_dict())
    train(resumed, inside, 1.0, range(3, 6), state)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), resumed.parameters(), strict=True))


def test_the_expected_update_of_bfloat16_is_that_of_float32() -> None:
    start, grad = torch.randn(2, 6, 9).bfloat16()
    exact = nn.Parameter(start.float())
    reference = optim.maker("muon", 1e-2, 0.1, BETAS, matrices={exact: Maps(True, (4, 5))})([exact])
    exact.grad = grad.float()
    optim.step(reference, 0.25)
    total, seeds = torch.zeros(6, 9, dtype=torch.float64), 400
    for seed in range(seeds):
        p = nn.Parameter(start.clone())
        rounding = StochasticRounding(seed, [p])
        optimizer = optim.maker("muon", 1e-2, 0.1, BETAS, rounding, {p: Maps(True, (4, 5))})([p])
        p.grad = grad.clone()
        optim.step(optimizer, 0.25)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], reference.state[exact]["momentum_buffer"])
        total += p.detach().double()
    gap = exact.detach().abs() / 64  # more than the distance of two numbers of bfloat16
    assert ((total / seeds - exact.detach()).abs() <= 5 * gap / 2 / seeds**0.5).all()


def test_it_can_be_used_as_any_optimizer() -> None:
    """Hooks run once; it can be copied and stored, and its groups have the options of torch's two optimizers."""
    model = model_of("gpt2", dtype=torch.float32)
    fired: list[int] = []
    optimizer = make(model)(model.parameters())
    optimizer.register_step_post_hook(lambda *_: fired.append(1))
    grads(model, 0, None)
    optim.step(optimizer, 0.5)
    assert fired == [1]
    for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert str(copied.state_dict()) == str(optimizer.state_dict())
        copied.step()
    other = make(model)(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    assert str(other.state_dict()) == str(optimizer.state_dict())
    torchs = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]).param_groups[0]
    for group in optimizer.param_groups:
        expected = {"adjust_lr_fn": "match_rms_adamw"} | {
            k: torchs[k] for k in ("momentum", "nesterov", "ns_steps", "eps")
        }
        assert "maps" not in group or {k: group[k] for k in expected} == expected


def test_a_gradient_of_zero_moves_nothing() -> None:
    """The first gradient of LoRA's down factors."""
    p = nn.Parameter(torch.ones(4, 3))
    p.grad = torch.zeros(4, 3)
    optim.maker("muon", LR, 0.0, BETAS, matrices={p: Maps(True)})([p]).step()
    assert (p == 1).all()


def test_without_the_matrices_it_is_refused() -> None:
    with pytest.raises(hg.HandgradError, match=r"Muon needs to know the matrices: give matrices="):
        optim.maker("Muon", LR, DECAY, BETAS)
