"""A GPT-2-like model in the paper's form, head by head, so that tests compare it with `paper/transformer.py`."""

import torch
from torch import Tensor

from handgrad import GPT, ModelConfig
from handgrad.model.layers.linear import Affine
from handgrad.paper.attention import Head
from handgrad.paper.transformer import Block, Network, Options


def options_of(config: ModelConfig) -> Options:
    return Options(config.activation, config.eps, config.causal)


def network_of(model: GPT) -> Network:
    """The model's parameters: views and sums of its tensors."""
    blocks = []
    for block in model.blocks:
        layers = {number: _pair(layer) for number, layer in block.numbered().items() if isinstance(layer, Affine)}
        (w_3, b_3), (w_6, b_6), (w_8, b_8) = (layers[number] for number in "368")
        first, second = block.norm_1, block.norm_2
        blocks.append(
            Block(
                first.weight, first.bias, _heads(model.config, *layers["2"]), w_3, b_3,
                second.weight, second.bias, w_6, b_6, w_8, b_8,
            )
        )  # fmt: skip
    w_11, b_11 = model.head.effective_weight(), model.head.plain().bias
    tied = model.config.tied and not model.head.adapted
    final = model.final_norm
    return Network(
        model.embed.weight, model.positions.weight, blocks, final.weight, final.bias, None if tied else w_11, b_11
    )


def _pair(layer: Affine) -> tuple[Tensor, Tensor]:
    bias = layer.plain().bias
    assert bias is not None
    return layer.effective_weight(), bias


def _heads(config: ModelConfig, weight: Tensor, bias: Tensor) -> list[Head]:
    h, d_rho, d_h = config.n_heads, config.query_width, config.value_width
    widths = [h * d_rho, h * d_rho, h * d_h]
    w = [x.chunk(h, 1) for x in torch.split(weight, widths, 1)]
    if config.key_bias:
        b = [x.chunk(h) for x in torch.split(bias, widths)]
    else:
        b = [x.chunk(h) for x in torch.split(bias, [h * d_rho, h * d_h])]
        b.insert(1, (None,) * h)  # type: ignore[arg-type]
    return [Head(w[0][i], b[0][i], w[1][i], b[1][i], w[2][i], b[2][i]) for i in range(h)]
