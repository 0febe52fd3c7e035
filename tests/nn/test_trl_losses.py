"""Losses of preferences and rewards, and their gradients, equal to those that TRL's trainers compute from their own batches,
in float64; and mistakes that trainers had, which these comparisons show."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from changes import model_of
from datasets import Dataset
from test_trl import COMMON, tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer import utils

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.model.passes.objective import Objective
from handgrad.ops import preference
from handgrad.proof.oracles import relative_error

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
EQUAL, DIFFERENT = 1e-8, 1e-3
PAIRS = [
    {"prompt": "one and", "chosen": " two make", "rejected": " tw"},
    {"prompt": "a", "chosen": " b", "rejected": " c is not a letter"},
    {"prompt": "what is it?", "chosen": " ten", "rejected": " no"},
]
Batch = tuple[Tensor, Tensor, list[int]]  # tokens, targets and lengths, end to end


class Trainers(NamedTuple):
    """TRL's, each with its first batch, and the same models as handgrad's."""

    network: Any
    model: hg.GPT
    reference: hg.GPT
    dpo: tuple[Any, dict[str, Any]]
    cpo: tuple[Any, dict[str, Any]]
    orpo: tuple[Any, dict[str, Any]]
    kto: tuple[Any, dict[str, Any]]
    grpo: Any


class Exact:
    """What TRL's head without logits returns, which computes in float32."""

    @staticmethod
    def apply(a: Tensor, weight: Tensor, bias: Any, labels: Tensor, *options: Any) -> tuple[Tensor, ...]:
        logits = a @ weight.t()
        log_p = torch.log_softmax(logits, 1)
        found = log_p.gather(1, labels[:, None])[:, 0]
        others = -(log_p.exp() * log_p).sum(1), (2 * log_p).logsumexp(1), logits.mean(1)
        return found, *(x.detach() for x in others), logits.argmax(1) == labels


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    where = tmp_path_factory.mktemp("trl")
    for name, seed in (("model", 0), ("reference", 1)):
        model_of("gpt2", seed, vocab_size=258, eos_token_id=257, pad_token_id=256).save_pretrained(where / name)
    network, reference = (
        AutoModelForCausalLM.from_pretrained(where / name, dtype=torch.float64) for name in ("model", "reference")
    )
    options = {**COMMON, "per_device_train_batch_size": 3}
    given = {"processing_class": tokenizer(), "train_dataset": Dataset.from_list(PAIRS)}
    single = [{"prompt": x["prompt"], "completion": x[f"{kind}"], "label": kind == "chosen"} for x in PAIRS[:2]
              for kind in ("chosen", "rejected")][:3]  # fmt: skip
    one_token = [{**x, "prompt": "a"} for x in PAIRS]  # ORPO's loss of the chosen answer counts the prompt's others

    def out(name: str) -> str:
        return str(where / name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_ChunkedLogProbFunction", Exact)
        patch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
        both = {"model": network, "ref_model": reference}
        made = {
            "dpo": DPOTrainer(**both, args=DPOConfig(out("dpo"), **options), **given),
            "cpo": CPOTrainer(network, args=CPOConfig(out("cpo"), **options), **given),
            "orpo": ORPOTrainer(
                network,
                args=ORPOConfig(out("orpo"), **options),
                **{**given, "train_dataset": Dataset.from_list(one_token)},
            ),
            "kto": KTOTrainer(
                **both,
                args=KTOConfig(out("kto"), **options),
                **{**given, "train_dataset": Dataset.from_list(single)},
            ),
        }
        grpo = GRPOTrainer(
            network,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(out("grpo"), num_generations=3, max_completion_length=9, **options),
            **given,
        )
        grpo.current_gradient_accumulation_steps = 1
        first = {name: (x, next(iter(x.get_train_dataloader()))) for name, x in made.items()}
        models = [hg.load(where / name, dtype=torch.float64) for name in ("model", "reference")]
        yield Trainers(network.train(), *models, **first, grpo=grpo)


def packed(ids: list[Tensor], chosen: list[Tensor]) -> Batch:
    """Sequences, and which of their tokens are of the completion → tokens and targets end to end."""
    targets = [torch.where(mask[1:].bool(), x[1:], -100) for x, mask in zip(ids, chosen, strict=True)]
    return torch.cat([x[:-1] for x in ids]), torch.cat(targets), [len(x) - 1 for x in ids]


def of_padded(ids: Tensor, attention: Tensor, chosen: Tensor) -> Batch:
    rows = attention.bool()
    return packed([x[r] for x, r in zip(ids, rows, strict=True)], [x[r] for x, r in zip(chosen, rows, strict=True)])


def in_turn(x: Tensor) -> Tensor:
    """[chosen, rejected], one after the other → chosen, rejected, chosen, rejected, …"""
    return torch.stack(list(x.chunk(2)), 1).flatten(0, 1)


def error(t: Trainers, batch: Batch, objective: Objective, loss: Callable[[], Tensor]) -> float:
    """The largest relative error of handgrad's loss and gradients against TRL's."""
    t.network.zero_grad()
    expected = loss()
    expected.backward()
    t.model.zero_grad()
    found = t.model.loss_and_grads(*batch, objective=objective, share=True)
    right = {name: p.grad for name, p in t.network.named_parameters()}
    grads = {name: p.grad for name, p in t.model.named_parameters()}
    assert right.keys() == grads.keys() and all(x is not None and x.dtype == torch.float64 for x in right.values())
    return max(
        relative_error(torch.tensor(found, dtype=torch.float64), expected.detach()),
        *(relative_error(grads[name], grad) for name, grad in right.items()),
    )


# ── pairs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_dpo(t: Trainers, objective: Objective, pairs: int | None = None, **settings: Any) -> float:
    trainer, x = t.dpo
    for name, value in {"loss_weights": [1.0], **settings}.items():
        setattr(trainer, name, value)
    inputs = {key: in_turn(value)[: pairs and 2 * pairs] for key, value in x.items()}
    batch = of_padded(inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"])
    reference = t.reference.log_probabilities(*batch)
    apart = {key: torch.cat([value[0::2], value[1::2]]) for key, value in inputs.items()}
    bound = type(objective)(**{**vars(objective), "reference": reference})
    return error(t, batch, bound, lambda: trainer.compute_loss(t.network, apart))


def of_batch_with_labels(t: Trainers, name: str, objective: Objective, **settings: Any) -> float:
    trainer, x = getattr(t, name)
    for key, value in settings.items():
        setattr(trainer, key, value)
    ids, chosen = [], []
    for i in range(len(x["chosen_input_ids"])):
        for kind in ("chosen", "rejected"):
            here = x[f"{kind}_attention_mask"][i].bool()
            ids.append(x[f"{kind}_input_ids"][i][here])
            chosen.append(x[f"{kind}_labels"][i][here] != -100)
    return error(t, packed(ids, chosen), objective, lambda: trainer.compute_loss(t.network, x))


PAIR_LOSSES: dict[str, Callable[[Trainers], float]] = {
    "sigmoid": lambda t: of_dpo(t, hg.DPO(beta=0.3), loss_types=["sigmoid"], beta=0.3),
    "sigmoid and sft": lambda t: of_dpo(
        t, hg.DPO(beta=0.3, sft=0.7), loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.7], beta=0.3
    ),
    "aot of one pair, smoothed": lambda t: of_dpo(
        t, hg.DPO(beta=0.3, smoothing=0.1), pairs=1, loss_types=["aot"], beta=0.3, label_smoothing=0.1
    ),
    "ipo": lambda t: of_dpo(t, hg.IPO(beta=0.4), loss_types=["ipo"], beta=0.4),
    "simpo": lambda t: of_batch_with_labels(
        t, "cpo", hg.SimPO(beta=1.5, gamma=0.6, smoothing=0.1, sft=0.5),
        loss_type="simpo", beta=1.5, simpo_gamma=0.6, label_smoothing=0.1, cpo_alpha=0.5,
    ),
    "orpo": lambda t: of_batch_with_labels(t, "orpo", hg.ORPO(beta=0.3), beta=0.3),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_losses_of_pairs(name: str, trainers: Trainers) -> None:
    assert PAIR_LOSSES[name](trainers) <= EQUAL


# ── single completions ──────────────────────────────────────────────────────────────────────────────────────────────


def of_kto(t: Trainers, rotated: bool = True) -> float:
    """z is estimated from each prompt with the completion of the one before it, as TRL's data has it."""
    trainer, x = t.kto
    trainer.beta, trainer.desirable_weight, trainer.undesirable_weight = 0.3, 1.0, 1.3
    batch = of_padded(x["input_ids"], x["attention_mask"], x["completion_mask"])
    prompts, answers = [], []
    for ids, here, mask in zip(x["input_ids"], x["attention_mask"].bool(), x["completion_mask"].bool(), strict=True):
        prompts.append(ids[here & ~mask])
        answers.append(ids[mask])
    others = answers[-1:] + answers[:-1] if rotated else answers[::-1]
    mismatched = packed(
        [torch.cat(pair) for pair in zip(prompts, others, strict=True)],
        [torch.cat([torch.zeros_like(p), torch.ones_like(y)]) for p, y in zip(prompts, others, strict=True)],
    )
    log_p, ref = (model.log_probabilities(*mismatched).sum().item() for model in (t.model, t.reference))
    z = max(0.0, (log_p - ref) / len(others))
    objective = hg.KTO(
        reference=t.reference.log_probabilities(*batch), desirable=torch.tensor(x["label"]).bool(), z=z,
        beta=0.3, weights=(1.0, 1.3),
    )  # fmt: skip
    found = error(t, batch, objective, lambda: trainer.compute_loss(t.network, x))
    assert z > 0
    return found


def test_losses_of_single_completions(trainers: Trainers) -> None:
    assert of_kto(trainers) <= EQUAL


# ── sampled completions ─────────────────────────────────────────────────────────────────────────────────────────────


def sampled(t: Trainers, masked: bool = False) -> tuple[dict[str, Tensor], Batch, list[Tensor]]:
    """What TRL's trainer gets after sampling; without completions of which nothing is counted, the batch; and log p when
    they were sampled and of the reference, in its shape."""
    g = torch.Generator().manual_seed(4)
    widths = torch.tensor([7, 4, 9, 6])
    prompts, completions = (torch.randint(97, 122, (4, n), generator=g) for n in (5, 9))
    prompts[1], prompts[3] = prompts[0], prompts[2]  # of equal lengths: TRL would give the padding of GPT-2 positions
    prompt_mask = torch.ones_like(prompts)
    mask = (torch.arange(9) < widths[:, None]).long()
    if masked:
        mask[2] = 0
    rows = [i for i in range(4) if mask[i].any()]
    ids = [torch.cat([prompts[i][prompt_mask[i].bool()], completions[i][mask[i].bool()]]) for i in rows]
    chosen = [torch.arange(len(x)) >= prompt_mask[i].sum() for i, x in zip(rows, ids, strict=True)]
    batch = packed(ids, chosen)
    old, ref = (model.log_probabilities(*batch) for model in (t.model, t.reference))
    old += 0.3 * torch.randn(len(old), generator=g, dtype=torch.float64)
    inputs = {
        "prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": completions, "completion_mask": mask,
        "advantages": torch.tensor([0.9, -1.2, 0.7, -0.4], dtype=torch.float64), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    for name, x in (("old", old), ("ref", ref)):
        padded = torch.zeros(4, 9, dtype=torch.float64)
        padded[mask.bool()] = x[batch[1] != -100]
        inputs[f"{name}_per_token_logps"] = padded
    return inputs, batch, [old, ref]


PER = {"grpo": "completion", "bnpo": "token", "dapo": "token", "dr_grpo": "longest"}


def set_grpo(t: Trainers, kind: str, beta: float, corrected: bool, level: str = "token") -> Any:
    trainer = t.grpo
    trainer.loss_type, trainer.beta, trainer.epsilon_low, trainer.epsilon_high = kind, beta, 0.1, 0.25
    trainer.args.use_bias_correction_kl, trainer.importance_sampling_level = corrected, level
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps
    return trainer


def of_grpo(
    t: Trainers, kind: str, beta: float = 0.0, corrected: bool = True, masked: bool = False, items: int = 0
) -> float:
    trainer = set_grpo(t, kind, beta, corrected)
    inputs, batch, (old, ref) = sampled(t, masked)
    if items:
        inputs["num_items_in_batch"] = torch.tensor(items)
    objective = hg.GRPO(
        advantages=inputs["advantages"][inputs["completion_mask"].any(1)], sampled=old, reference=ref if beta else None,
        clip=(0.1, 0.25), beta=beta, corrected=corrected, per=PER[kind], longest=9,
    )  # fmt: skip
    ratio = torch.exp(t.model.log_probabilities(*batch) - old)[batch[1] != -100]
    assert (ratio > 1.25).any() and (ratio < 0.9).any()
    return error(t, batch, objective, lambda: trainer.compute_loss(t.network, inputs))


@pytest.mark.parametrize("beta, corrected", [(0.0, True), (0.2, True), (0.2, False)])
@pytest.mark.parametrize("kind", PER)
def test_losses_of_sampled_completions(kind: str, beta: float, corrected: bool, trainers: Trainers) -> None:
    assert of_grpo(trainers, kind, beta, corrected) <= EQUAL


def test_the_first_step_after_sampling(trainers: Trainers) -> None:
    """r = 1: neither has log p of the sampler, and c = A/N"""
    trainer = set_grpo(trainers, "dapo", 0.0, True)
    inputs, batch, _ = sampled(trainers)
    inputs.pop("old_per_token_logps")
    objective = hg.GRPO(advantages=inputs["advantages"])
    assert error(trainers, batch, objective, lambda: trainer.compute_loss(trainers.network, inputs)) <= EQUAL


def test_a_batch_of_several_calls(trainers: Trainers) -> None:
    """Each divides by the tokens of all: TRL's two micro-batches, and handgrad's two calls"""
    t, trainer = trainers, set_grpo(trainers, "dapo", 0.0, True)
    inputs, batch, (old, _) = sampled(t)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 2
    t.network.zero_grad()
    for half in (slice(0, 2), slice(2, 4)):
        part = {key: x if x.ndim == 0 else x[half] for key, x in inputs.items()}
        trainer.compute_loss(t.network, part).backward()
    trainer.current_gradient_accumulation_steps = 1
    t.model.zero_grad()
    edge, tokens = sum(batch[2][:2]), int((batch[1] != -100).sum()) / 4
    for rows, half in ((slice(0, edge), slice(0, 2)), (slice(edge, None), slice(2, 4))):
        objective = hg.GRPO(
            advantages=inputs["advantages"][half], sampled=old[rows], clip=(0.1, 0.25), tokens=tokens
        )  # fmt: skip
        t.model.loss_and_grads(batch[0][rows], batch[1][rows], batch[2][half], objective=objective, n_targets=4)
    right = dict(t.network.named_parameters())
    assert max(relative_error(p.grad, right[name].grad) for name, p in t.model.named_parameters()) <= EQUAL


# ── mistakes that trainers had ──────────────────────────────────────────────────────────────────────────────────────


def means(s: Tensor, ref: Tensor, beta: float, smoothing: float = 0.0) -> preference.Values:
    """Of DPO, by the mean log-probabilities of completions of 7 tokens (torchtune 1291)"""
    losses, c = DPO(s / 7, ref / 7, beta, smoothing)
    return losses, c / 7


def by_completion(log_p: Tensor, old: Tensor, ref: Tensor, beta: float) -> preference.Values:
    """A corrected divergence with one ratio for all tokens: its slope is a term that does not belong there (trl 6586)"""
    x, r = ref - log_p, torch.exp((log_p - old).mean())
    losses = beta * r * (torch.expm1(x) - x)
    return losses, beta * r * torch.expm1(x) - losses.mean()


DPO = preference.dpo
MISTAKES: dict[str, tuple[dict[str, Any], Callable[[Trainers], float]]] = {
    "means instead of sums": ({"dpo": means}, PAIR_LOSSES["sigmoid"]),
    "a ratio of the completion in the divergence": (
        {"corrected_kl": by_completion}, lambda t: of_grpo(t, "grpo", 0.2),
    ),
    "tokens in the denominator that are not in the sum": (
        {}, lambda t: of_grpo(t, "dapo", masked=True, items=26),  # trl 6439
    ),
    "a denominator of other calls": ({}, lambda t: of_grpo(t, "dapo", items=52)),  # trl 6024
    "a completion with its own prompt in KTO's z": ({}, lambda t: of_kto(t, rotated=False)),  # trl 1911
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_seen(name: str, trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, measure = MISTAKES[name]
    for function, wrong in changes.items():
        monkeypatch.setattr(preference, function, wrong)
    assert measure(trainers) >= DIFFERENT


def test_completions_that_are_left_out_are_not_counted(trainers: Trainers) -> None:
    """TRL masks them, handgrad's batch does not have them"""
    for kind in ("bnpo", "dapo"):
        assert of_grpo(trainers, kind, masked=True) <= EQUAL


def test_advantages_that_are_nan_are_refused(trainers: Trainers) -> None:
    """As they are if a reward is: its whole group would be lost, in silence (trl 5775)"""
    inputs, batch, _ = sampled(trainers)
    advantages = inputs["advantages"].clone()
    advantages[1] = torch.nan
    before = [None if p.grad is None else p.grad.clone() for p in trainers.model.parameters()]
    with pytest.raises(HandgradError, match="advantages must be 4 finite numbers"):
        trainers.model.loss_and_grads(*batch, objective=hg.GRPO(advantages=advantages))
    for p, grad in zip(trainers.model.parameters(), before, strict=True):
        assert p.grad is grad or torch.equal(p.grad, grad)


def test_the_sums_of_trl_are_the_log_probabilities(trainers: Trainers) -> None:
    """Of pairs, with the prompt that they share computed once"""
    trainer, x = trainers.dpo
    batch = of_padded(*(in_turn(x[key]) for key in ("input_ids", "attention_mask", "completion_mask")))
    sums = torch.stack([part.sum() for part in torch.split(trainers.reference.log_probabilities(*batch), batch[2])])
    with torch.no_grad():
        expected = torch.cat(trainer.compute_ref_log_probs(trainer.ref_model, x))
    assert relative_error(sums, in_turn(expected)) <= EQUAL
