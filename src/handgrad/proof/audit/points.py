"""The points of the network at which the audited model and ours are compared, and what computes each of them.

A point is an activation a_i and its error signal Δ_i, under the name that `GPT.loss_and_grads` records: blocks.0.5 stands
for blocks.0.a_5 and blocks.0.delta_5. Outside the blocks there is 11 alone.
"""

from typing import NamedTuple

from ...model.config import ModelConfig


class Point(NamedTuple):
    """Where a tensor is seen, and which modules compute its activation and its error signal."""

    name: str  # blocks.0.5
    module: str  # our name of the module that it passes
    side: str  # "in" or "out" of that module
    made_by: str  # the module that computes a_i
    signal_by: str  # the module whose backward pass computes Δ_i
    what: str  # a_i in words
    part: int = 0  # which half of the module's output, where it computes two at once
    parts: int = 1

    @property
    def value(self) -> str:
        """The recorder's name of the activation."""
        return _named(self.name, "a_")

    @property
    def signal(self) -> str:
        """The recorder's name of the error signal."""
        return _named(self.name, "delta_")


def _named(point: str, letter: str) -> str:
    path, dot, number = point.rpartition(".")
    return f"{path}{dot}{letter}{number}"


def points_of(config: ModelConfig) -> list[Point]:
    """Every point, in the order of the forward pass."""
    n = config.table.names
    found: list[Point] = []
    for i in range(config.n_blocks):
        block = f"{n['blocks']}.{i}"
        norm_1, attn, norm_2, mlp = (f"{block}.{n[part]}" for part in ("norm_1", "attn", "norm_2", "mlp"))
        out, contract = f"{attn}.{n['attn.out']}", f"{mlp}.{n['mlp.contract']}"
        below = n["embed"] if i == 0 else f"{n['blocks']}.{i - 1}"
        above = n["final_norm"] if i == config.n_blocks - 1 else f"{n['blocks']}.{i + 1}"
        b = f"blocks.{i}"
        found += [
            Point(f"{b}.1", block, "in", below, norm_1, "the block's input"),
            Point(f"{b}.2", norm_1, "out", norm_1, attn, "the first norm's output"),
            Point(f"{b}.3", out, "in", attn, out, "the heads' output"),
            Point(f"{b}.4", out, "out", out, block, "the attention's output"),
            Point(f"{b}.5", norm_2, "in", block, norm_2, "the stream after attention"),
            Point(f"{b}.6", norm_2, "out", norm_2, mlp, "the second norm's output"),
        ]
        if "mlp.gate_expand" in n:
            both = f"{mlp}.{n['mlp.gate_expand']}"
            found += [
                Point(f"{b}.{letter}", both, "out", both, mlp, f"the {letter} projection's output", part, 2)
                for part, letter in enumerate(("gate", "up"))
            ]
        else:
            names = {"gate": "mlp.gate", "up": "mlp.expand"} if config.gated else {"7": "mlp.expand"}
            for letter, layer in names.items():
                path = f"{mlp}.{n[layer]}"
                found.append(Point(f"{b}.{letter}", path, "out", path, mlp, "the expanded features"))
        found += [
            Point(f"{b}.8", contract, "in", mlp, contract, "the activated features"),
            Point(f"{b}.9", contract, "out", contract, block, "the feed-forward layer's output"),
            Point(f"{b}.10", block, "out", block, above, "the block's output"),
        ]
    found.append(Point("11", n["final_norm"], "out", n["final_norm"], n["head"], "the final norm's output"))
    return found


def layers_by_signal(config: ModelConfig) -> dict[str, list[str]]:
    """The layers whose gradients become known just after a point's error signal in the backward pass, by the point."""
    n = config.table.names
    found: dict[str, list[str]] = {"": [n["head"]], "11": [n["final_norm"]]}
    for i in range(config.n_blocks):
        b, block = f"blocks.{i}", f"{n['blocks']}.{i}"
        attn, mlp = f"{block}.{n['attn']}", f"{block}.{n['mlp']}"
        last = "gate" if config.gated else "7"
        found[f"{b}.10"] = [f"{mlp}.{n['mlp.contract']}"]
        found[f"{b}.{last}"] = [f"{mlp}.{n[x]}" for x in ("mlp.gate_expand", "mlp.gate", "mlp.expand") if x in n]
        found[f"{b}.6"] = [f"{block}.{n['norm_2']}"]
        found[f"{b}.5"] = [f"{attn}.{n['attn.out']}"]
        inside = ("attn.qkv", "attn.q", "attn.k", "attn.v", "attn.q_norm", "attn.k_norm")
        found[f"{b}.3"] = [f"{attn}.{n[x]}" for x in inside if x in n]
        found[f"{b}.2"] = [f"{block}.{n['norm_1']}"]
    found["blocks.0.1"] = [n[x] for x in ("embed", "positions") if x in n]
    return found
