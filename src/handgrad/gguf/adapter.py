"""Write adapters as the GGUF file that llama.cpp's `--lora` takes.

llama.cpp adds (alpha/r) b a x to a layer's output, with a (r, f_in) = dᵗ and b (f_out, r) = uᵗ of the layer and one alpha
for the whole file. Scales that differ from alpha/r, because of patterns or rslora, are multiplied into b. Files of
architectures with interleaved rotary positions hold the rows of q and k in another order than Hugging Face's; b follows.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import HandgradError
from ..files.atomic import check_writable, new_file, rename_onto
from .architectures import ARCHITECTURES, MATRICES, interleaved_order

Factors = Mapping[str, tuple[Tensor, Tensor, float]]  # layer: down (f_in, r), up (r, f_out), scale

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SUPPORTED = tuple(name for name, architecture in ARCHITECTURES.items() if not architecture.transposed)


def check(layers: Mapping[str, object], architecture: str) -> None:
    """Raise if adapters of these layers cannot be written as a GGUF file."""
    if architecture not in _SUPPORTED:
        known = ", ".join(_SUPPORTED)
        raise HandgradError(f"GGUF adapters for architecture {architecture!r} are not supported; available: {known}")
    for layer in layers:
        _gguf_name(layer)


def write(path: str | Path, factors: Factors, architecture: str, n_heads: int, n_kv_heads: int) -> None:
    """Write the factors of layers with Hugging Face's names, in float32, atomically. `architecture` is that of the base
    model's GGUF file."""
    check(factors, architecture)
    if not factors:
        raise HandgradError("there are no adapters to write: inject or load some first")
    file = Path(path)
    check_writable(file)
    heads = {"attn_q": n_heads, "attn_k": n_kv_heads} if ARCHITECTURES[architecture].permuted else {}
    alpha = _common_alpha(factors)
    tensors: dict[str, Tensor] = {}
    for layer, (down, up, scale) in factors.items():
        name = _gguf_name(layer)
        _check_factors(layer, down, up, scale)
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
    if match is None or match[2] not in MATRICES:
        raise HandgradError(
            f"a GGUF adapter has no name for the layer {layer!r}, only for q_proj, k_proj, v_proj, o_proj, gate_proj,"
            " up_proj and down_proj of model.layers.N: merge the adapter"
        )
    return f"blk.{int(match[1])}.{MATRICES[match[2]]}"


def _check_factors(layer: str, down: Tensor, up: Tensor, scale: float) -> None:
    if down.ndim != 2 or up.ndim != 2 or down.shape[1] != up.shape[0]:
        raise HandgradError(
            f"{layer}: factors of {tuple(down.shape)} and {tuple(up.shape)}; expected (f_in, r) and (r, f_out)"
        )
    if not (down.isfinite().all() and up.isfinite().all() and torch.tensor(scale).isfinite()):
        raise HandgradError(f"{layer}: the adapter is not finite: use an earlier checkpoint")


def _interleave(b: Tensor, heads: int, layer: str) -> Tensor:
    """Rows of each head from half-split to interleaved order."""
    f_out = len(b)
    if f_out % (2 * heads):
        raise HandgradError(f"{layer}: {f_out} outputs do not divide into {heads} heads of even width")
    return b[interleaved_order(f_out, f_out // heads)]


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
