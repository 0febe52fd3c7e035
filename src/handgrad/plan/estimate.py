"""The plan of a training step: its parameters, FLOP and bytes, computed from the model's configuration.

Parameter counts are exact. FLOP are those of the matrix products, two per multiply-add. Bytes are those of the tensors
that exist at the peak of a step. `timing.py` predicts seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from .. import lora
from ..checks import MIXED, check_choice, check_stored
from ..errors import HandgradError, option
from ..formats.gguf_model import packed_kinds
from ..formats.models import Found, base_of, check_packing
from ..lora import peft
from ..model.config import ModelConfig, preset
from ..model.precision import why_not_mixed
from ..model.steps import require
from .flop import Work, flop
from .memory import (
    BYTES,
    cached_per_token,
    float32_copies,
    largest_layer,
    saved,
    temporary,
    tokens_per_piece,
    workspace,
)
from .outline import kinds_of_blocks, outline
from .packing import Kinds, buffers, packed_bytes, packed_count, two_bytes, unpacked_kinds
from .parameters import Ranks, adapter_parameters, parameters, short_names, target_ranks, times
from .update import maps_of, state_bytes, update_flop

# the steps whose products and tensors are counted
COUNTED = ("norm", "attention", "convolution", "linear", "activation", "gated", "add", "router", "experts", "mixture")


@dataclass(frozen=True)
class Plan:
    """The cost of one training step on `batch` sequences of `tokens` tokens."""

    config: ModelConfig
    batch: int
    tokens: int
    dtype: str
    rank: int  # largest rank of an adapter; 0: all weights train
    targets: tuple[str, ...]
    recompute: str

    # parameters
    per_block: int  # of a block with attention
    embedding: int
    final_norm: int
    logits: int
    blocks: int  # all of them
    total: int
    active: int  # that a token uses: k of E experts
    adapters: int
    trainable: int

    # floating-point operations of one step
    forward_flop: int
    backward_flop: int

    # bytes
    bytes_weights: int
    bytes_gradients: int
    bytes_optimizer: int
    bytes_saved: int  # activations saved for the backward pass
    bytes_temporary: int  # buffers of the logits, of a block's backward pass, or of an update in bfloat16
    bytes_cache_per_token: int

    piece: int = 0  # tokens that are processed at once
    rows: int = 0  # tokens of a sequence that have a target
    ranks: Ranks = field(default_factory=dict, repr=False)
    kinds: Kinds = field(default_factory=dict, repr=False)  # types of packed matrices
    mixed: bool = False  # operands of products in two bytes
    optimizer: str = "AdamW"
    update_flop: int = 0  # of the optimizer's matrix products

    @property
    def precision(self) -> str:
        return MIXED if self.mixed else self.dtype

    @property
    def bytes_peak(self) -> int:
        """Bytes of all tensors at the peak of a step."""
        lasting = self.bytes_weights + self.bytes_gradients + self.bytes_optimizer
        return lasting + self.bytes_saved + self.bytes_temporary


def make_plan(
    config: ModelConfig,
    batch: int = 1,
    tokens: int | None = None,
    dtype: str = "float32",
    rank: int = 0,
    targets: str | Sequence[str] = (),
    recompute: str = "none",
    update_inside: bool = False,
    *,
    ranks: Ranks | None = None,
    extra: int = 0,
    kinds: Kinds | None = None,
    rows: int | None = None,
    piece: int | None = None,
    mixed: bool = False,
    optimizer: str = "AdamW",
) -> Plan:
    """Plan a step that trains all weights or, if `rank` is not 0, adapters of that rank on the layers `targets`.

    recompute       as in `GPT.loss_and_grads`
    update_inside   each layer is updated inside the backward pass, and its gradients freed
    ranks           rank by layer of an existing adapter, instead of rank and targets
    extra           its trainable parameters besides the factors: magnitudes, modules_to_save
    kinds           types of the matrices that stay packed, by name
    rows            how many tokens of a sequence have a target (default: all)
    piece           tokens that are processed at once (default: as `GPT.loss_and_grads` groups whole sequences)
    mixed           compute in mixed precision
    optimizer       name of an optimizer of torch.optim; of `extra`, Muon is counted as moving nothing
    """
    tokens = config.n_context if tokens is None else tokens
    if dtype not in BYTES:
        raise HandgradError(f"unknown dtype {dtype!r}; choose one of {', '.join(BYTES)}")
    if recompute not in ("none", "blocks"):
        raise HandgradError(f"{option('recompute')} must be none or blocks, not {recompute!r}")
    if batch < 1 or tokens < 1 or rank < 0:
        raise HandgradError(
            f"batch and tokens must be at least 1 and rank at least 0, not {batch}, {tokens} and {rank}"
        )
    if tokens > config.n_context:
        raise HandgradError(
            f"{tokens} tokens do not fit into a context of {config.n_context}: give {option('tokens')} of at most that"
        )
    if targets and not rank:
        raise HandgradError(
            f"{option('targets')} selects layers for adapters: give {option('rank')} of at least 1 as well"
        )
    if ranks is None:
        ranks = target_ranks(config, rank, targets or "all-linear") if rank else {}

    kinds = kinds or {}
    if kinds and not ranks:
        raise HandgradError(
            f"packed weights are frozen, and a plan without adapters trains them: give {option('rank')} as well"
        )

    for i in kinds_of_blocks(config):
        require(outline(config, i).blocks[0].steps(), COUNTED, "the plan")
    sizes = parameters(config)
    of = {layer: sum(p.count for p in sizes if p.layer == layer) for layer in {p.layer for p in sizes}}
    total = sum(times(config, p) * p.count for p in sizes)
    unused = sum(times(config, p) * (p.count - round(p.count * p.used)) for p in sizes)
    n_adapters = adapter_parameters(config, ranks) + extra
    trainable = n_adapters if ranks else total
    maps = maps_of(config, ranks)
    of_maps = sum(prod(shape) * count for shape, count in maps.items())
    size = BYTES[dtype]
    head_trains = not ranks or config.table.names["head"] in ranks
    piece = tokens_per_piece(batch, tokens, adapted=bool(ranks)) if piece is None else piece
    unpacked = unpacked_kinds(kinds, mixed)
    of_block, of_head = buffers(config, unpacked)
    of_buffers = (of_block / 2, of_head / 2) if mixed else (of_block, of_head)
    bytes_saved = int(size * saved(config, batch, tokens, piece, recompute, bool(unpacked), mixed))
    bytes_temporary = int(size * temporary(config, piece, head_trains, recompute, of_buffers, mixed))
    bytes_temporary += workspace(config, dtype, mixed)
    update = float32_copies(config) if dtype == "bfloat16" and not ranks else 0  # after what was saved is freed
    forward, backward = flop(config, Work.of(tokens, config, rows).times(batch), ranks, recompute)

    return Plan(
        config, batch, tokens, dtype, max(ranks.values(), default=0), short_names(config, ranks), recompute,
        per_block=of.get("block", 0),
        embedding=of["embedding"],
        final_norm=of["final norm"],
        logits=of.get("logits", 0),
        blocks=total - of["embedding"] - of["final norm"] - of.get("logits", 0),
        total=total,
        active=total - unused,
        adapters=n_adapters,
        trainable=trainable,
        forward_flop=forward,
        backward_flop=backward,
        bytes_weights=size * (total - packed_count(config, kinds) + n_adapters) + packed_bytes(config, kinds),
        bytes_gradients=size * (largest_layer(config) if update_inside and not ranks else trainable),
        bytes_optimizer=state_bytes(optimizer, of_maps, trainable - of_maps, size),
        bytes_saved=bytes_saved,
        bytes_temporary=max(bytes_temporary, update - bytes_saved),
        bytes_cache_per_token=size * cached_per_token(config),
        piece=piece,
        rows=tokens if rows is None else rows,
        ranks=ranks,
        kinds=kinds,
        mixed=mixed,
        optimizer=optimizer,
        update_flop=update_flop(optimizer, maps),
    )  # fmt: skip


def plan_model(
    found: Found,
    changes: dict[str, Any],
    rank: int,
    targets: Sequence[str],
    packed: bool = False,
    base_dtype: str | None = None,
    precision: str | None = None,
    **step: Any,
) -> Plan:
    """Plan a step of the model that a user named: a preset with `changes`, a model directory or file, or an existing
    adapter; its matrices may stay `packed`, or be kept in `base_dtype`. With a `precision` of "mixed", on a machine that
    multiplies bfloat16, those that do not train are kept in it. `step` holds the other arguments of `make_plan`."""
    check_choice(precision, step.get("dtype"))
    mixed = step["mixed"] = precision == MIXED and why_not_mixed() is None
    if changes and not found.is_preset:
        shape = option(next(iter(changes)))
        raise HandgradError(f"{shape} needs a preset, and {found.name} is a folder with a fixed shape: leave it out")
    config = preset(found.name, **changes) if found.is_preset else found.config
    kinds = _kinds(found, config, packed, base_dtype)
    adapted = found.folder is not None and lora.is_adapter(found.folder)
    if mixed and (rank or adapted):
        kinds = {**two_bytes(config, "bfloat16"), **kinds}
    if found.folder is not None and adapted:
        if rank or targets:
            raise HandgradError(
                f"{found.name} is an adapter, and the plan is for training it: leave out {option('rank')} and"
                f" {option('targets')}"
            )
        ranks, extra = peft.ranks_of(found.folder, config)
        return make_plan(config, ranks=ranks, extra=extra, kinds=kinds, **step)
    return make_plan(config, rank=rank, targets=targets, kinds=kinds, **step)


def _kinds(found: Found, config: ModelConfig, packed: bool, base_dtype: str | None) -> Kinds:
    """The types of the matrices that stay packed."""
    check_stored(packed, base_dtype)
    if packed and found.folder is None:
        raise HandgradError(f"{found.name} is a preset, and {option('packed', True)} is for a GGUF file: leave it out")
    if found.folder is not None:
        folder = base_of(found.folder) if lora.is_adapter(found.folder) else found.folder
        check_packing(folder, packed, base_dtype)
        if packed:
            return packed_kinds(folder)
    return two_bytes(config, base_dtype) if base_dtype is not None else {}
