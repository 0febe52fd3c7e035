"""Random changes to a transformers model, for tests that hg.nn.replace takes none of its effect away: each is made by a
seed, so that a plain and a replaced model get the same."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

FIELDS: dict[str, Any] = {
    "vocab_size": 35, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 35, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": None,
    "eos_token_id": None, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", FIELDS), "gpt2": ("gpt2", GPT2), "qwen3": ("qwen3", FIELDS), "phi3": ("phi3", FIELDS),
    "mistral": ("mistral", {**FIELDS, "sliding_window": 5}),
}  # fmt: skip
Change = Callable[[Any, random.Random], None]


def model_of(kind: str, seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    """A small model of transformers, in training; `changes` are those of its configuration."""
    family, fields = KINDS[kind]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**fields, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)
    return model


def with_adapter(model: Any, seed: int) -> Any:
    names = ["c_attn", "c_fc"] if hasattr(model, "transformer") else ["o_proj", "down_proj"]
    torch.manual_seed(seed)
    options = LoraConfig(r=3, task_type="CAUSAL_LM", target_modules=names, fan_in_fan_out="c_fc" in names)
    found = get_peft_model(model, options)
    with torch.no_grad():
        for name, p in found.named_parameters():
            if "lora_B" in name:
                p += 0.05 * torch.randn_like(p)
    return found


def _any(model: Any, rng: random.Random, *ends: str) -> Any:
    """A module, or one whose class's name ends so; a Dropout if there is none."""
    named = sorted((name, m) for name, m in model.named_modules() if not ends or type(m).__name__.endswith(ends))
    return rng.choice(named)[1] if named else nn.Dropout(0.0)


def _scaled(x: Any, factor: float) -> Any:
    if isinstance(x, Tensor):
        return x * factor if x.is_floating_point() else x
    if type(x) is tuple:
        return tuple(_scaled(y, factor) for y in x)
    return x


def _forward_hook(model: Any, rng: random.Random) -> None:
    _any(model, rng).register_forward_hook(lambda m, given, out: _scaled(out, 1.25))


def _silent_hook(model: Any, rng: random.Random) -> None:
    def change(m: Any, given: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            out.data.mul_(1.25)

    _any(model, rng, "Norm", "Linear", "MLP", "Activation", "Conv1D", "SiLU").register_forward_hook(change)


def _silent_pre_hook(model: Any, rng: random.Random) -> None:
    def change(m: Any, given: Any) -> None:
        if given and isinstance(given[0], Tensor) and given[0].is_floating_point():
            given[0].data.mul_(0.75)

    # of a layer whose input no other layer has saved: torch's gradient of that one would be wrong
    named = sorted((n, m) for n, m in model.named_modules() if n.endswith(("down_proj", "mlp.c_proj")))
    rng.choice(named)[1].register_forward_pre_hook(change)


def _pre_hook(model: Any, rng: random.Random) -> None:
    _any(model, rng, "Norm", "Linear", "MLP", "Conv1D").register_forward_pre_hook(lambda m, given: _scaled(given, 0.8))


def _backward_hook(model: Any, rng: random.Random) -> None:
    _any(model, rng, "Norm", "Linear", "Activation", "Conv1D").register_full_backward_hook(
        lambda m, before, after: tuple(None if x is None else 1.5 * x for x in before)
    )


def _backward_pre_hook(model: Any, rng: random.Random) -> None:
    _any(model, rng, "Norm", "Linear", "MLP", "Activation").register_full_backward_pre_hook(
        lambda m, after: tuple(None if x is None else 1.5 * x for x in after)
    )


def _activation(model: Any, rng: random.Random) -> None:
    mlp, new = (
        _any(model, rng, "MLP"),
        ACT2FN[rng.choice(["silu", "gelu", "gelu_new", "relu", "relu2", "tanh", "mish"])],
    )
    for name in ("act_fn", "activation_fn", "act"):
        if hasattr(mlp, name):
            setattr(mlp, name, new)


def _activations_own_forward(model: Any, rng: random.Random) -> None:
    _any(model, rng, "Activation", "SiLU").forward = lambda x: torch.sin(x)


def _activations_setting(model: Any, rng: random.Random) -> None:
    _any(model, rng, "GELUActivation", "GELUTanh", "SiLUActivation").act = torch.sin


def _own_forward(model: Any, rng: random.Random) -> None:
    module = _any(model, rng, "Norm", "Linear", "MLP", "Attention", "Conv1D", "Block", "DecoderLayer")
    plain = module.forward
    module.forward = lambda *args, **kwargs: _scaled(plain(*args, **kwargs), 0.9)


def _epsilon(model: Any, rng: random.Random) -> None:
    norm = _any(model, rng, "Norm")
    for name in ("eps", "variance_epsilon"):
        if hasattr(norm, name):
            setattr(norm, name, 0.3)


def _setting_of_attention(model: Any, rng: random.Random) -> None:
    name, value = rng.choice([("scaling", 0.2), ("is_causal", False), ("layer_idx", 1), ("sliding_window", 3)])
    setattr(_any(model, rng, "Attention"), name, value)


def _config(model: Any, rng: random.Random) -> None:
    name, value = rng.choice([("hidden_act", "relu"), ("activation_function", "relu"), ("use_cache", False)])
    setattr(model.config, name, value)


def _freeze(model: Any, rng: random.Random) -> None:
    rng.choice([p for _, p in sorted(model.named_parameters())]).requires_grad_(False)


def _weight(model: Any, rng: random.Random) -> None:
    layer = _any(model, rng, "Norm", "Linear", "Conv1D")
    if isinstance(getattr(layer, "weight", None), nn.Parameter):
        layer.weight = nn.Parameter(layer.weight.detach().clone() * 1.1)


def _bias(model: Any, rng: random.Random) -> None:
    layer = _any(model, rng, "Linear", "LayerNorm", "Conv1D")
    if not hasattr(layer, "lora_A") and "bias" in layer._parameters:
        f = layer.weight.shape[1 if type(layer).__name__ == "Conv1D" else 0]
        layer.bias = (
            nn.Parameter(torch.linspace(-0.2, 0.2, f, dtype=layer.weight.dtype)) if layer.bias is None else None
        )


def _exchange(model: Any, rng: random.Random) -> None:
    """A norm that does nothing, or a linear layer of another class."""
    named = sorted((n, m) for n, m in model.named_modules() if type(m).__name__.endswith(("Norm", "Linear")))
    named = [(n, m) for n, m in named if "lora" not in n and not hasattr(m, "lora_A")] or [("", nn.Identity())]
    name, module = rng.choice(named)
    if not name:
        return
    parent = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(module, nn.Linear):
        setattr(parent, name.rpartition(".")[2], nn.Identity())
    elif "lm_head" not in name and isinstance(module.weight, nn.Parameter):
        new = type("Halved", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x) * 0.5})
        setattr(parent, name.rpartition(".")[2], new(module.in_features, module.out_features, bias=False))
        parent.get_submodule(name.rpartition(".")[2]).weight = module.weight


def _parametrize(model: Any, rng: random.Random) -> None:
    layers = [m for n, m in sorted(model.named_modules()) if isinstance(m, nn.Linear) and "lm_head" not in n]
    layers = [m for m in layers if not hasattr(m, "parametrizations") and not hasattr(m, "lora_A")]
    if layers:
        parametrizations.weight_norm(rng.choice(layers))


def _loss(model: Any, rng: random.Random) -> None:
    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **others: Any) -> Tensor:
        return logits.float().square().mean() + nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), label_smoothing=0.1
        )

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.loss_function = loss


def _soft_cap(model: Any, rng: random.Random) -> None:
    model.get_output_embeddings().register_forward_hook(lambda m, given, out: 2 * torch.tanh(out / 2))


def _adapters(model: Any, rng: random.Random) -> None:
    layers = [m for _, m in sorted(model.named_modules()) if hasattr(m, "lora_A")]
    if not layers:
        return
    layer = rng.choice(layers)
    choice = rng.randrange(5)
    if choice == 0:
        layer.scaling["default"] = 3.0
    elif choice == 1:
        layer.lora_dropout["default"] = nn.Tanh()
    elif choice == 2:
        layer.lora_B["default"].register_forward_hook(lambda m, given, out: 2 * out)
    elif choice == 3:
        layer.base_layer.register_forward_hook(lambda m, given, out: 2 * out)
    else:
        layer.enable_adapters(False)


def _recompute(model: Any, rng: random.Random) -> None:
    model.activation_checkpointing_enable()


def _dtype(model: Any, rng: random.Random) -> None:
    _any(model, rng, "Norm", "Linear", "Conv1D").double()


def _dropout(model: Any, rng: random.Random) -> None:
    module = _any(model, rng, "Attention", "Dropout")
    for name in ("p", "attention_dropout"):
        if hasattr(module, name):
            setattr(module, name, 0.2)


CHANGES: list[Change] = [
    _forward_hook, _silent_hook, _silent_pre_hook, _pre_hook, _backward_hook, _backward_pre_hook, _activation,
    _activations_own_forward, _activations_setting, _own_forward, _epsilon, _setting_of_attention, _config, _freeze,
    _weight, _bias, _exchange, _parametrize, _loss, _soft_cap, _adapters, _recompute, _dtype, _dropout,
]  # fmt: skip


def batch_of(rng: random.Random) -> dict[str, Any]:
    """Ids with a mask, positions and options of many kinds."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    ids = torch.randint(35, (3, rng.choice([1, 2, 12])), generator=generator)
    found: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    mask = mask_of(rng, *ids.shape)
    if mask is not None:
        found |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if rng.random() < 0.3:
        length = ids.shape[1]
        restart = rng.choice([3, 5, length])
        found["position_ids"] = (torch.arange(length) % restart).expand(3, -1)
    for name, values in {
        "use_cache": [True, False], "num_items_in_batch": [torch.tensor(40)], "output_hidden_states": [True],
        "return_dict": [False],
    }.items():  # fmt: skip
        if rng.random() < 0.2:
            found[name] = rng.choice(values)
    return found


def mask_of(rng: random.Random, batch: int, length: int) -> Tensor | None:
    """Padding on the left, on the right, on both sides, holes, or none."""
    if rng.random() < 0.3 or length < 3:
        return None
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in mask:
        left, right = (rng.choice([0, 0, 1, 3]) for _ in range(2))
        row[:left] = 0
        row[length - right :] = 0
        if rng.random() < 0.15:
            row[length // 2] = 0
    return mask


@contextlib.contextmanager
def surroundings(rng: random.Random, models: list[Any]) -> Iterator[None]:
    """What is changed around a call: autocast, a hook on every module, a forward that another library puts into a class."""
    with contextlib.ExitStack() as stack:
        choice = rng.random()
        if choice < 0.1:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        elif choice < 0.15:
            handle = nn.modules.module.register_module_forward_hook(
                lambda m, given, out: (
                    out * 1.01 if type(m).__name__ in ("SiLUActivation", "NewGELUActivation") else None
                )
            )
            stack.callback(handle.remove)
        elif choice < 0.25:
            names = "MLP", "RMSNorm", "LayerNorm", "SiLUActivation"
            classes = {c for m in models[0].modules() for c in type(m).__mro__ if c.__name__.endswith(names)}
            cls = rng.choice(sorted(classes, key=lambda c: (c.__module__, c.__name__)))
            plain = cls.forward

            def changed(self: Any, x: Tensor) -> Tensor:
                return plain(self, x) * 0.9  # type: ignore[no-any-return]

            stack.enter_context(mock.patch.object(cls, "forward", changed))
        yield
