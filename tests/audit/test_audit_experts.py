"""Audits of mixtures of experts: sound ones pass, and every seeded fault is found, named and told of its expert."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from audited import EXPERTS, adapted, batch, function_of, model_of, random_model
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import handgrad as hg
from conftest import perturb
from families.members import MEMBERS, transformers_model
from handgrad.auditing.model.balance import Balance
from handgrad.auditing.model.batch import make_batch
from handgrad.auditing.model.folder import audit_folder
from handgrad.auditing.model.observe import observe
from handgrad.auditing.model.subject import make_subject
from handgrad.ops import experts as ops

AUDITS = int(os.environ.get("HANDGRAD_AUDITS", "0"))  # random models; make long: 200
BALANCED = [family for family in EXPERTS if family != "dots1"]  # which has no balance loss
C = 0.3  # coefficient of the balance loss
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns about names of layers


def mixture(family: str, **changes: Any) -> Any:
    return model_of(family, spread=0.3, **changes)


def balanced(family: str = "mixtral", **changes: Any) -> Any:
    """A model that adds the balance loss."""
    return mixture(family, output_router_logits=True, router_aux_loss_coef=C, **changes)


def exact_loss(model: Any, given: dict[str, Tensor]) -> Tensor:
    """transformers' own is in float32."""
    logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"], use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())


# ── sound models ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [name for name in MEMBERS if name.partition(",")[0] in EXPERTS])
@pytest.mark.some_cases(8)
def test_sound_members_pass_in_float64(name: str) -> None:
    ids = torch.randint(29, (2, 9), generator=torch.Generator().manual_seed(2))
    report = hg.audit(transformers_model(name), {"input_ids": ids}, loss=exact_loss, setup=False, dtype="float64")
    assert report.passed, str(report)
    assert not report.notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", BALANCED)
@pytest.mark.some_cases(6)
def test_a_balance_loss_is_audited(family: str, dtype: torch.dtype) -> None:
    report = hg.audit(balanced(family).to(dtype), batch(), setup=dtype == torch.float32)
    assert report.passed, str(report)
    assert report.worst < 0.6, "a sound model is nearly accused"


@pytest.mark.parametrize("family", ["qwen2_moe", "dots1"])
def test_sound_set_ups_pass(family: str) -> None:
    model = mixture(family)
    optimizer = torch.optim.AdamW(model.parameters())
    report = hg.audit(
        model, batch(left=True), optimizer=optimizer,
        grad_norm=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    )  # fmt: skip
    assert report.passed, str(report)
    checked = {x.name for x in report.setup if x.passed}
    assert {
        "experts train alike",
        "the optimizer has every trained tensor",
        "saving and loading changes nothing",
    } <= checked
    assert "the gradient norm counts every tensor" in checked
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("seed", range(AUDITS // 4) if AUDITS else [0, 1, 2, 3, 5, 8])
@pytest.mark.some_cases(3)
def test_random_sound_mixtures_pass(seed: int) -> None:
    name, model, made = random_model(seed, EXPERTS)
    report = hg.audit(model, made, setup=False)
    assert report.passed, f"{name}\n{report}"


def test_experts_without_a_token() -> None:
    model = mixture("mixtral", num_local_experts=17)
    report = hg.audit(model, {"input_ids": torch.tensor([[3, 1, 4]])}, setup=False)
    assert report.passed, str(report)
    idle = [x for x in report.compared if "(expert 16)" in x.name or "(expert 3)" in x.name]
    assert len(idle) == 4
    subject = make_subject(model, None, None, ())
    assert len({t.held.piece.expert for t in subject.tracked if t.held.piece}) == 17


def test_an_adapter_beside_experts() -> None:
    model = mixture("qwen2_moe")
    targets = ["q_proj", "shared_expert.gate_proj", "shared_expert.down_proj", "shared_expert_gate"]
    model = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    report = hg.audit(model, batch(), setup=False)
    assert report.passed, str(report)
    assert sum(".lora_" in x.name for x in report.compared) == 16


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_of_stacked_experts(family: str) -> None:
    """Gate and up of an expert share a factor A, whose gradient is the sum of both."""
    options = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    model = get_peft_model(mixture(family), options)
    perturb(model, seed=5)
    report = hg.audit(model, batch(), setup=family == "mixtral")
    assert report.passed, str(report)
    assert any("lora_A" in x.name and "(expert 2)" in x.name for x in report.compared)
    assert any("lora_B" in x.name and "(up of expert 2)" in x.name for x in report.compared)
    wrong = next(p for name, p in model.named_parameters() if ".experts.base_layer.lora_B" in name)
    wrong.register_hook(lambda grad: -grad)
    report = hg.audit(model, batch(), setup=False)
    assert report.first is not None and "wrong sign" in report.first.sentence()


def test_our_own_adapter_of_a_mixture(tmp_path: Path) -> None:
    mixture("qwen2_moe").save_pretrained(tmp_path / "m")
    ours = hg.load(tmp_path / "m")
    hg.lora.inject(ours, rank=2)
    perturb(ours)
    hg.lora.save(ours, tmp_path / "adapter")
    report = audit_folder(tmp_path / "m", adapter=tmp_path / "adapter", tokens=9, setup=False)
    assert report.passed, str(report)


def test_rounding_may_decide_the_expert() -> None:
    """In bfloat16 some token goes elsewhere than in float64. That is no fault, and no excuse for one."""
    model = mixture("qwen3_moe", num_experts=24).to(torch.bfloat16)
    made = batch(tokens=24, sequences=4)
    subject, checked = make_subject(model, None, None, ()), make_batch(made)
    seen = observe(subject, checked)
    exact = hg.trace(subject.ours, checked.tokens, checked.targets, checked.lengths)
    moved = [
        not torch.equal(theirs[checked.rows].sort(1).values, exact[name.replace("a_gates", "chosen")].sort(1).values)
        for name, theirs in seen.chosen.items()
    ]
    assert any(moved), "rounding decides nothing here: take another batch"
    report = hg.audit(model, made, setup=False)
    assert report.passed, str(report)
    routing(1, lambda router, logits, g, chosen: (logits, g, chosen.flip(1)))(model)
    assert not hg.audit(model, made, setup=False).passed


def test_a_wrong_choice_is_no_tie() -> None:
    model = mixture("mixtral")
    routing(1, lambda router, logits, g, chosen: (logits, g, (chosen + 1) % 5))(model)
    report = hg.audit(model, batch(), setup=False)
    assert report.first is not None and report.first.layer == "model.layers.1.mlp.gate"


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Change = Callable[[Any], None]


def routing(block: int, change: Callable[..., Any], name: str = "gate") -> Change:
    """The router of a block returns change(router, logits, gates, chosen)."""

    def apply(model: Any) -> None:
        router = getattr(model.model.layers[block].mlp, name)
        right = router.forward
        router.forward = lambda x: change(router, *right(x))

    return apply


def double_softmax(router: Any, logits: Tensor, g: Tensor, chosen: Tensor) -> Any:
    p, chosen = torch.softmax(torch.softmax(logits, -1), -1).topk(router.top_k)
    normalized = getattr(router, "norm_topk_prob", True)
    return logits, p / p.sum(-1, keepdim=True) if normalized else p, chosen


def softmax_of_all(router: Any, logits: Tensor, g: Tensor, chosen: Tensor) -> Any:
    return logits, torch.softmax(logits, -1).gather(1, chosen), chosen


def again(router: Any, logits: Tensor, g: Tensor, chosen: Tensor) -> Any:
    return logits, torch.softmax(g, -1), chosen


def detached(router: Any, logits: Tensor, g: Tensor, chosen: Tensor) -> Any:
    return logits, g.detach(), chosen


def detached_sum(router: Any, logits: Tensor, g: Tensor, chosen: Tensor) -> Any:
    p = torch.softmax(logits, -1).gather(1, chosen)
    return logits, p / p.sum(-1, keepdim=True).detach(), chosen


def mixing(weigh: Callable[[Tensor, Tensor], Any] = torch.mul, *, lost: int = -1, frozen: int = -1) -> Change:
    """The experts of block 1 weigh their outputs by `weigh`; one is left out, or frozen."""

    def forward(self: Any, x: Tensor, chosen: Tensor, g: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.num_experts):
            rows, k = (chosen == e).nonzero(as_tuple=True)
            if len(rows) and e != lost:
                first, last = (w[e].detach() if e == frozen else w[e] for w in (self.gate_up_proj, self.down_proj))
                gate, up = F.linear(x[rows], first).chunk(2, -1)
                y = F.linear(self.act_fn(gate) * up, last)
                out = out.index_add(0, rows, weigh(y, g[rows, k, None]))
        return out

    def apply(model: Any) -> None:
        layer = model.model.layers[1].mlp.experts
        layer.forward = MethodType(forward, layer)

    return apply


def unbiased(model: Any) -> None:
    router = model.model.layers[1].mlp.gate
    right = router.forward

    def forward(x: Tensor) -> Any:
        bias = router.e_score_correction_bias.clone()
        router.e_score_correction_bias.zero_()
        found = right(x)
        router.e_score_correction_bias.copy_(bias)
        return found

    router.forward = forward


def biased_gates(router: Any, logits: Tensor, g: Tensor, chosen: Tensor) -> Any:
    p = (torch.sigmoid(logits) + router.e_score_correction_bias).gather(1, chosen)
    return logits, router.routed_scaling_factor * p / p.sum(-1, keepdim=True), chosen


UngatedSignals = function_of(lambda y, g: y * g, lambda delta, y, g: (delta, (delta * y).sum(1, keepdim=True)))
NoSignalOfGates = function_of(lambda y, g: y * g, lambda delta, y, g: (delta * g, torch.zeros_like(g)))


def zeroed(name: str, expert: int) -> Change:
    """A hook that stops the gradient of one expert."""

    def apply(model: Any) -> None:
        p = getattr(model.model.layers[1].mlp.experts, name)
        kept = (torch.arange(len(p)) != expert).float()[:, None, None]
        p.register_hook(lambda grad: grad * kept)

    return apply


def scaled(name: str, expert: int, by: float) -> Change:
    def apply(model: Any) -> None:
        p = getattr(model.model.layers[1].mlp.experts, name)
        factor = torch.where(torch.arange(len(p)) == expert, by, 1.0).view(-1, *[1] * (p.ndim - 1))
        p.register_hook(lambda grad: grad * factor)

    return apply


def shared(compute: Callable[[Tensor, Tensor], Tensor]) -> Change:
    """The shared expert of block 1 adds compute(score of its gate, output)."""

    def apply(model: Any) -> None:
        mlp = model.model.layers[1].mlp

        def forward(h: Tensor) -> Tensor:
            x = h.flatten(0, 1)
            _, g, chosen = mlp.gate(x)
            return (mlp.experts(x, chosen, g) + compute(mlp.shared_expert_gate(x), mlp.shared_expert(x))).view_as(h)

        mlp.forward = forward

    return apply


def from_attribute(owner: str, name: str, value: Any) -> Change:
    return lambda model: setattr(model.get_submodule(owner), name, value)


GATE, SOME, WHOLE = "model.layers.1.mlp.gate", "model.layers.1.mlp.experts", "model.layers.1.mlp"
# the family, the change, the layer that must be named, and words of the sentence
FAULTS: dict[str, tuple[str, Change, str, str]] = {
    "double softmax": ("mixtral", routing(1, double_softmax), GATE, "if softmax were applied twice"),
    "double softmax, not normalized": ("olmoe", routing(1, double_softmax), GATE, "if softmax were applied twice"),
    "softmax of the chosen again": ("qwen3_moe", routing(1, again), GATE, "to the gates of the chosen again"),
    "softmax of the chosen twice": (
        "gpt_oss", routing(1, again, "router"), "model.layers.1.mlp.router", "to the gates of the chosen again",
    ),
    "softmax over all": (
        "gpt_oss", routing(1, softmax_of_all, "router"), "model.layers.1.mlp.router", "over all experts, not over",
    ),
    "not normalized": ("mixtral", routing(1, softmax_of_all), GATE, "if the gates were not normalized"),
    "normalized": ("qwen2_moe", from_attribute(GATE, "norm_topk_prob", True), GATE, "if the gates were normalized, which"),
    "scores that are chances": (
        "mixtral", routing(1, lambda router, s, g, chosen: (torch.softmax(s, 1), g, chosen)), GATE,
        "if softmax were applied to them",
    ),
    "one expert too few": ("olmoe", from_attribute(GATE, "top_k", 1), GATE, "if a token went to one expert too few"),
    "without τ": (
        "dots1", from_attribute(GATE, "routed_scaling_factor", 1.0), GATE, "if the gates were not multiplied by 2.5",
    ),
    "without groups": (
        "dots1", lambda model: [setattr(model.model.layers[1].mlp.gate, x, 1) for x in ("num_group", "topk_group")], GATE,
        "if the groups of experts were ignored",
    ),
    "without the bias that chooses": ("dots1", unbiased, GATE, "if the bias that chooses experts were left out"),
    "the bias in the gates": ("dots1", routing(1, biased_gates), GATE, "were part of the gates"),
    "gates left out": ("mixtral", mixing(lambda y, g: y), WHOLE, "if the gates were left out"),
    "gates twice": ("mixtral", mixing(lambda y, g: y * g * g), WHOLE, "multiplied by their gates twice"),
    "a lost expert": ("mixtral", mixing(lost=2), WHOLE, "lacks the part of expert 2"),
    "ungated error signals": (
        "mixtral", mixing(UngatedSignals.apply), SOME, "if the experts' error signals were not multiplied by the gates",
    ),
    "no signal of the gates": ("mixtral", mixing(NoSignalOfGates.apply), SOME, "so the router learns nothing"),
    "detached gates": ("mixtral", routing(1, detached), GATE, "so the router learns nothing"),
    "a detached sum": ("mixtral", routing(1, detached_sum), GATE, "if the sum of the gates were detached"),
    "a frozen expert": ("mixtral", mixing(frozen=3), SOME, "learns nothing from them"),
    "an expert without a gradient": ("qwen2_moe", zeroed("down_proj", 2), SOME, "went to expert 2, and it learns nothing"),
    "half of an expert's gradient": ("qwen3_moe", scaled("gate_up_proj", 1, 2.0), SOME, "(gate of expert 1) is 2 times too"),
    "an expert's bias": ("gpt_oss", scaled("down_proj_bias", 4, -1.0), SOME, "down_proj_bias (expert 4) has the wrong sign"),
    "no shared expert": ("qwen2_moe", shared(lambda z, y: 0 * y), WHOLE, "if the shared expert were left out"),
    "shared without a gate": ("qwen2_moe", shared(lambda z, y: y), WHOLE, "if the gate of the shared expert were left out"),
    "shared without σ": ("qwen2_moe", shared(lambda z, y: z * y), WHOLE, "if the gate of the shared expert had no sigmoid"),
    "a detached gate of the shared": (
        "qwen2_moe", shared(lambda z, y: torch.sigmoid(z).detach() * y), "model.layers.1.mlp.shared_expert_gate", "detached",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.some_cases(8)
def test_faults_are_named(name: str) -> None:
    family, change, layer, words = FAULTS[name]
    groups = {
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
    }
    model = mixture(family, **(groups if family == "dots1" else {}))
    for bias in (x for x_name, x in model.named_buffers() if x_name.endswith("e_score_correction_bias")):
        bias += torch.randn(bias.shape)
    assert hg.audit(model, batch(), setup=False).passed
    change(model)
    report = hg.audit(model, batch(), setup=False)
    assert report.first is not None
    assert report.first.layer == layer and words in report.first.sentence(), report.first


def without_balance(model: Any, given: dict[str, Tensor]) -> Any:
    return model(**given, use_cache=False, output_router_logits=False).loss


def with_other_balance(make: Callable[[Any, dict[str, Tensor]], Any]) -> Callable[[Any, dict[str, Tensor]], Any]:
    def loss(model: Any, given: dict[str, Tensor]) -> Any:
        out = model(**given, use_cache=False, output_router_logits=True)
        plain = out.loss - C * out.aux_loss
        return plain + C * make(out, given)

    return loss


BALANCE_FAULTS: dict[str, tuple[Any, str, str]] = {
    "not added": (without_balance, "the loss", "if the balance loss were left out"),
    "added twice": (with_other_balance(lambda out, _: 2 * out.aux_loss), "the loss", "were added twice"),
    "without its coefficient": (with_other_balance(lambda out, _: out.aux_loss / C), "the loss", "not multiplied by 0.3"),
    "with padding": (
        with_other_balance(lambda out, _: load_balancing_loss_func(out.router_logits, 5, 2)), "the loss",
        "if padding counted in the balance loss",
    ),
    "block by block": (
        with_other_balance(
            lambda out, given: sum(load_balancing_loss_func((s,), 5, 2, given["attention_mask"]) for s in out.router_logits)
        ),
        "the loss", "if the balance losses of the blocks were added",
    ),
    "detached": (with_other_balance(lambda out, _: out.aux_loss.detach()), GATE, "lacks the balance loss's part"),
}  # fmt: skip


@pytest.mark.parametrize("name", BALANCE_FAULTS)
@pytest.mark.some_cases(4)
def test_faults_of_the_balance_loss_are_named(name: str) -> None:
    loss, layer, words = BALANCE_FAULTS[name]
    report = hg.audit(balanced(), batch(), loss=loss, setup=False)
    assert report.first is not None
    assert report.first.layer == layer and words in report.first.sentence(), report.first


def test_scores_detached_for_the_balance_loss() -> None:
    model = balanced()
    for block in (0, 1):
        routing(block, lambda router, logits, g, chosen: (logits.detach(), g, chosen))(model)
    report = hg.audit(model, batch(), setup=False)
    assert report.first is not None and report.first.layer == GATE
    assert "gate.weight lacks the balance loss's part" in report.first.sentence()


def test_detached_gates_beside_a_balance_loss() -> None:
    model = balanced()
    routing(1, detached)(model)
    report = hg.audit(model, batch(), setup=False)
    assert report.first is not None and report.first.layer == GATE
    assert "lacks the gates' part" in report.first.sentence()


def test_a_balance_loss_that_the_configuration_does_not_have() -> None:
    model = mixture("mixtral", router_aux_loss_coef=C)
    report = hg.audit(model, batch(), loss=with_other_balance(lambda out, _: out.aux_loss), setup=False)
    assert report.passed is False and report.first is not None
    assert "if the balance loss were added, which output_router_logits=False" in report.first.sentence()


def test_a_sequence_without_a_target_counts_in_the_balance_loss() -> None:
    made = batch()
    made["labels"][1] = -100
    with pytest.raises(hg.HandgradError, match="leave the sequence out"):
        hg.audit(balanced(), made, setup=False)
    assert hg.audit(mixture("mixtral"), made, setup=False).passed


def test_the_signal_of_the_balance_loss_is_its_derivative() -> None:
    s = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([3.0, 0.0, 1.0, 8.0, 2.0], dtype=torch.float64)
    balance = Balance(C, tokens, torch.softmax(s, 1).sum(0), 7)
    expected = torch.autograd.grad(C * ops.balance(tokens, balance.p, 7), s, retain_graph=True)[0]
    sent = torch.autograd.grad(balance.added(s).sum(), s)[0] - 1
    for found in (balance.signal(s.detach()), sent):
        assert (found - expected).norm() <= 1e-12 * expected.norm()


# ── the set-up ──────────────────────────────────────────────────────────────────────────────────────────────────────


def failed(model: Any, **given: Any) -> dict[str, str]:
    report = hg.audit(model, batch(), **given)
    return {x.name: x.note for x in report.setup if x.passed is False}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_that_are_partly_frozen(family: str) -> None:
    model = mixture(family)
    model.model.layers[1].mlp.experts.gate_up_proj.requires_grad_(False)
    assert (
        "model.layers.1.mlp.experts.gate_up_proj (gate of expert 0) is frozen" in failed(model)["experts train alike"]
    )
    for p in model.model.layers[1].mlp.experts.parameters():
        p.requires_grad_(False)
    assert not failed(model), "a mixture may be frozen as a whole"


def test_experts_that_the_optimizer_does_not_have() -> None:
    model = mixture("mixtral")
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if ".experts." not in name], lr=1)
    note = failed(model, optimizer=optimizer)["the optimizer has every trained tensor"]
    assert "it lacks model.layers.0.mlp.experts.gate_up_proj (4 of" in note


def norm_of(pick: Callable[[str, Tensor], Tensor | None]) -> Callable[[Any], Tensor]:
    def norm(model: Any) -> Tensor:
        found = [pick(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        return torch.cat([x.flatten() for x in found if x is not None]).norm()

    return norm


@pytest.mark.parametrize(
    ("pick", "words"),
    [
        (lambda name, grad: None if ".experts." in name else grad, "if the experts were left out"),
        (lambda name, grad: grad[2:4] if ".experts." in name else grad, "if only the experts 2–3 of 6 were counted"),
        (lambda name, grad: None if "embed_tokens" in name else grad, "if the embeddings were left out"),
        (lambda name, grad: 2 * grad, "is 2 times too large"),
        (lambda name, grad: None if ".gate." in name else grad, "if the routers were left out"),
    ],
)
@pytest.mark.some_cases(2)
def test_a_norm_that_leaves_gradients_out(pick: Any, words: str) -> None:
    found = failed(mixture("mixtral", num_local_experts=6), grad_norm=norm_of(pick))
    assert words in found["the gradient norm counts every tensor"], found


def test_checks_of_the_set_up_without_the_set_up() -> None:
    with pytest.raises(hg.HandgradError, match="leave out setup=False"):
        hg.audit(mixture("mixtral"), batch(), grad_norm=lambda model: 0.0, setup=False)


# ── a module of its own ─────────────────────────────────────────────────────────────────────────────────────────────


class Expert(nn.Module):
    def __init__(self, first: Tensor, last: Tensor):
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(x.clone()) for x in first.chunk(2))
        self.w2 = nn.Parameter(last.clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.w1)) * F.linear(x, self.w3), self.w2)


class Mixture(nn.Module):
    """Experts that are modules of their own, as many programs have them."""

    def __init__(self, router: Tensor, experts: Iterator[tuple[Tensor, Tensor]]):
        super().__init__()
        self.gate = nn.Linear(router.shape[1], len(router), bias=False)
        self.gate.weight.data = router.clone()
        self.experts = nn.ModuleList(Expert(*x) for x in experts)

    def forward(self, h: Tensor) -> Tensor:
        x = h.flatten(0, 1)
        g, chosen = torch.softmax(self.gate(x), -1).topk(2)
        g = g / g.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, k = (chosen == e).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * g[rows, k, None])
        return out.view_as(h)


def with_modules() -> Any:
    model = mixture("mixtral")
    for layer in model.model.layers:
        own = layer.mlp.experts
        layer.mlp = Mixture(layer.mlp.gate.weight.data, zip(own.gate_up_proj.data, own.down_proj.data, strict=True))
    return model


def in_files(name: str) -> str:
    return f"{name}.weight" if name.rpartition(".")[2] in ("w1", "w2", "w3") else name


def test_experts_that_are_modules() -> None:
    model = with_modules()
    report = hg.audit(model, batch(), names=in_files, setup=False)
    assert report.passed, str(report)
    assert sum("experts" in x.name for x in report.compared) == 2 * 5 * 3
    model.model.layers[1].mlp.experts[3].w1.register_hook(lambda grad: -grad)
    report = hg.audit(model, batch(), names=in_files, setup=False)
    assert report.first is not None and "experts.3.w1 has the wrong sign" in report.first.sentence()


def test_experts_that_are_modules_and_frozen() -> None:
    model = with_modules()
    model.model.layers[0].mlp.experts[2].requires_grad_(False)
    found = hg.audit(model, batch(), names=in_files)
    (check,) = (x for x in found.setup if x.name == "experts train alike")
    assert check.passed is False and "layers.0.mlp.experts.2.w1 is frozen (3 such)" in check.note


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_a_folder_whose_widths_grouped_products_refuse(family: str, tmp_path: Path) -> None:
    balanced(family, hidden_size=20).save_pretrained(tmp_path)
    report = audit_folder(tmp_path, tokens=9, setup=False)
    assert report.passed, str(report)
    if family == "gpt_oss":
        with pytest.raises(hg.HandgradError, match=r"no sdpa attention .* or give eager"):
            audit_folder(tmp_path, attention="sdpa", tokens=9, setup=False)


def test_replaced_parts_beside_experts() -> None:
    model = mixture("qwen2_moe")
    replaced = hg.nn.replace(model)
    assert set(replaced.replaced.values()) == {"linear", "feed-forward", "norm"}
    assert any("no hand-derived Qwen2MoeExperts" in reason for reason in replaced.left.values())
    report = hg.audit(model, batch(), setup=False)
    assert report.passed, str(report)


def test_adapters_of_attention_pass() -> None:
    report = hg.audit(adapted(mixture("olmoe"), "olmoe"), batch(), setup=False)
    assert report.passed, str(report)
