"""Write adapters as the GGUF file that llama.cpp's `--lora` takes.

llama.cpp adds (alpha/r) b a x to a layer's output, with a (r, f_in) = dᵗ and b (f_out, r) = uᵗ of the layer and one alpha
for the whole file. Scales that differ from alpha/r, because of patterns or rslora, are multiplied into b. Files of
architectures with interleaved rotary positions hold the rows of q and k in another order than Hugging Face's; b follows.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import HandgradError
from ..files.atomic import check_writable, new_file, rename_onto
from ..model.config import ModelConfig
from ..model.gpt import GPT
from ..ops import rotary
from . import peft
from .injection import adapters_of
from .lora import LoRA

Factors = Mapping[str, tuple[Tensor, Tensor, float]]  # layer: down (f_in, r), up (r, f_out), scale

_INTERLEAVED = {"llama": True, "smollm3": True, "qwen2": False, "qwen3": False}  # by general.architecture
_LAYER = re.compile(r"model\.layers\.(\d+)\.(self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)")
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def factors_of(adapters: Mapping[str, LoRA], modules_to_save: Iterable[str] = ()) -> Factors:
    """The factors of a model's adapters by the name of their layer. Raises for what a GGUF adapter cannot hold."""
    for name in modules_to_save:
        raise HandgradError(f"a GGUF adapter cannot hold {name}, trained in full (modules_to_save): merge the adapter")
    for name, adapter in adapters.items():
        if adapter.magnitude is not None:
            raise HandgradError(f"a GGUF adapter cannot hold DoRA's magnitude of {name}: merge the adapter")
    return {name: (adapter.down, adapter.up, adapter.scale) for name, adapter in adapters.items()}


def check(model: GPT) -> None:
    """Raise if the adapters of the model cannot be written as a GGUF file."""
    factors = factors_of(adapters_of(model), model.adapter.modules_to_save if model.adapter is not None else ())
    _check_architecture(_architecture(model.config))
    for layer in factors:
        _gguf_name(layer)


def write(config: ModelConfig, adapter: Path, path: Path) -> None:
    """Write the adapter in a PEFT folder, for a model of this configuration, as a GGUF file."""
    write_gguf_lora(path, peft.read_factors(adapter), _architecture(config), config.n_heads, config.kv_heads)


def _architecture(config: ModelConfig) -> str:
    """GGUF's name of the family."""
    return "llama" if config.family == "mistral" else config.family


def _check_architecture(architecture: str) -> None:
    if architecture not in _INTERLEAVED:
        known = ", ".join(_INTERLEAVED)
        raise HandgradError(f"GGUF adapters for architecture {architecture!r} are not supported; available: {known}")


def write_gguf_lora(path: str | Path, factors: Factors, architecture: str, n_heads: int, n_kv_heads: int) -> None:
    """Write the factors of layers with Hugging Face's names, in float32, atomically. `architecture` is that of the base
    model's GGUF file."""
    _check_architecture(architecture)
    if not factors:
        raise HandgradError("there are no adapters to write: inject or load some first")
    file = Path(path)
    check_writable(file)
    heads = {"attn_q": n_heads, "attn_k": n_kv_heads} if _INTERLEAVED[architecture] else {}
    alpha = _common_alpha(factors)
    tensors: dict[str, Tensor] = {}
    for layer, (down, up, scale) in factors.items():
        name = _gguf_name(layer)
        _check(layer, down, up, scale)
        a, b = down.detach().t(), up.detach().t()
        rank = len(a)
        if scale * rank != alpha:
            b = b.double() * (scale * rank / alpha)
        if name.split(".")[2] in heads:
            b = _interleave(b, heads[name.split(".")[2]], layer)
        tensors[f"{name}.weight.lora_a"] = a.float().contiguous()
        tensors[f"{name}.weight.lora_b"] = b.float().contiguous()
    _write(file.resolve(), tensors, alpha, architecture)


def _common_alpha(factors: Factors) -> float:
    """scale · r of most layers, whose factors are then written unchanged. Never 0, which llama.cpp takes for "no alpha"."""
    products = [scale * up.shape[0] for _, up, scale in factors.values()]
    found = [x for x in products if x]
    alpha = max(found, key=found.count) if found else 1.0
    return torch.tensor(alpha, dtype=torch.float32).item()  # as the file holds it


def _gguf_name(layer: str) -> str:
    match = _LAYER.fullmatch(layer)
    if match is None:
        raise HandgradError(
            f"a GGUF adapter has no name for the layer {layer!r}, only for q_proj, k_proj, v_proj, o_proj, gate_proj,"
            " up_proj and down_proj of model.layers.N: merge the adapter"
        )
    return f"blk.{int(match[1])}.{_NAMES[match[2]]}"


def _check(layer: str, down: Tensor, up: Tensor, scale: float) -> None:
    if down.ndim != 2 or up.ndim != 2 or down.shape[1] != up.shape[0]:
        raise HandgradError(
            f"{layer}: factors of {tuple(down.shape)} and {tuple(up.shape)}; expected (f_in, r) and (r, f_out)"
        )
    if not (down.isfinite().all() and up.isfinite().all() and torch.tensor(scale).isfinite()):
        raise HandgradError(f"{layer}: the adapter is not finite: use an earlier checkpoint")


def _interleave(b: Tensor, heads: int, layer: str) -> Tensor:
    """Rows of each head from half-split to interleaved order."""
    f_out, rank = b.shape
    if f_out % (2 * heads):
        raise HandgradError(f"{layer}: {f_out} outputs do not divide into {heads} heads of even width")
    d_rho = f_out // heads
    order = rotary.half_split_order(d_rho, b.device).argsort()
    return b.reshape(heads, d_rho, rank)[:, order].reshape(f_out, rank)


def _write(path: Path, tensors: dict[str, Tensor], alpha: float, architecture: str) -> None:
    from gguf import GGUFWriter, Keys  # only needed here

    with new_file(path.parent) as partial:
        writer = GGUFWriter(partial.name, architecture)
        try:
            writer.add_type("adapter")
            writer.add_string(Keys.Adapter.TYPE, "lora")
            writer.add_float32(Keys.Adapter.LORA_ALPHA, alpha)
            for name, tensor in tensors.items():
                writer.add_tensor(name, tensor.cpu().numpy())
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
        rename_onto(partial, path)
