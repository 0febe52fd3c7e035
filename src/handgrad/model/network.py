"""`Network`: the layers of a model and how they are reached; `gpt.py` has the two passes through them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..checks import MIXED, check_choice, check_integer
from ..errors import HandgradError, NonFiniteError, shown
from ..ops import embedding, rotary
from ..ops.logits import LogitMap
from .block import Block
from .config import ModelConfig, RotaryTable
from .dtype import DTYPES, as_dtype
from .layers.experts import SELECTION
from .layers.hookless import Layers
from .layers.linear import Affine, Embedding, Head, Linear, freeze
from .layers.norms import Norm, norm_of
from .layers.parts import Parts, part
from .passes.arguments import Rotations
from .passes.batch import FROZEN_AT_ONCE, TOKENS_AT_ONCE, Batch, pack
from .passes.readout import Ending
from .precision import check_precision, why_not_mixed
from .storage.weights import STORED, Scratch, Weights


class Network(Parts):
    """Embeddings, blocks, final norm and head, under the family's names."""

    embed: Embedding = part("embed")
    positions: Embedding = part("positions")
    _blocks: Any = part("blocks")
    final_norm: Norm = part("final_norm")
    head: Affine = part("head")

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
        precision: str | None = None,
    ):
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise HandgradError(
                f"GPT takes a ModelConfig, not {shown(config)}: hg.GPT(hg.preset({shown(config)})) makes a model from a"
                " preset, hg.load(path) reads one"
            )
        check_integer("seed", seed)
        dtype = as_dtype(dtype)
        check_choice(precision, dtype)
        self.config = config
        self.adapter: Any = None  # LoRAConfig of the injected adapters; set by handgrad.lora
        self.named_adapters: dict[str, list[str]] = {}  # several adapters by name, with the layers they change
        self.source = ""  # the folder or file it was read from
        self.text_source = ""  # the folder or file with its tokenizer
        self.read_tokenizer: Callable[[Path], Any] | None = None  # reads it; set by handgrad.formats
        self._tokenizer: tuple[str, Any] = ("", None)  # where it was read, and the tokenizer
        self.scratch: Scratch | None = None  # buffers to unpack weights into, if any are packed
        self.rounds_activations = False  # to 8 bits, for products with weights of 8 or 4 bits, when generating
        self._mixed = precision == MIXED
        meta = torch.device("meta")
        self._build(meta)
        self.to(dtype)
        if device is None or torch.device(device).type != "meta":
            try:
                self.to_empty(device=device or torch.get_default_device())
            except (AssertionError, RuntimeError) as reason:
                if "alloc" in str(reason):
                    count = self.size
                    raise HandgradError(f"not enough memory for {count:,} parameters: choose a smaller shape") from None
                raise HandgradError(f"cannot use device {device}: {str(reason).splitlines()[0]}") from None
            if config.tied:
                self.head.plain().weight = self.embed.weight  # to_empty made two of one
            self._initialize(seed)

    def _build(self, device: torch.device) -> None:
        c, names = self.config, self.config.table.names
        self.add("embed", names["embed"], Embedding(c.n_vocab, c.d_model, device, c.embedding_scale))
        if c.positions == "learned":
            self.add("positions", names["positions"], Embedding(c.n_context, c.d_model, device))
        self.add("blocks", names["blocks"], Layers(Block(c, i, device) for i in range(c.n_blocks)))
        self.add("final_norm", names["final_norm"], norm_of(c, device))
        shared = self.embed.weight if c.tied else None  # (V, d), the orientation of w_11ᵗ
        head = Head(c.d_model, c.n_vocab, c.logits_bias, device, stored="out_in", weight=shared)
        self.add("head", names["head"], head)

    @torch.no_grad()
    def _initialize(self, seed: int) -> None:
        """As GPT-2: matrices N(0, 0.02), divided by √(2·n_blocks) where a branch joins the stream; gains 1, others 0"""
        generator = torch.Generator().manual_seed(seed)
        sinks = {id(block.attn.sinks) for block in self.blocks if block.has("attn")}
        joining = {
            id(layer.plain().weight) for block in self.blocks for layer in (block.mixing.out, *block.mlp.joining())
        }
        for name, p in self.named_parameters():
            if name.endswith("bias") or id(p) in sinks:
                p.zero_()
            elif p.ndim == 1:
                p.fill_(1 - self.config.gain_offset)
            else:
                std = 0.02 / math.sqrt(2 * self.config.n_blocks) if id(p) in joining else 0.02
                p.copy_(torch.randn(p.shape, generator=generator) * std)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, with encode, decode and chat, read when it is first needed; None if it has none. Another
        may be set."""
        source, found = self._tokenizer
        if source != self.text_source and self.read_tokenizer is not None:
            found = self.read_tokenizer(Path(self.text_source))
            self._tokenizer = self.text_source, found
        return found

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = self.text_source, tokenizer

    @property
    def blocks(self) -> list[Block]:
        return list(self._blocks)

    @property
    def size(self) -> int:
        """Number of parameters, packed weights and adapters included."""
        matrices = {x.packed for x in self.modules() if isinstance(x, Linear | Embedding) and x.packed is not None}
        return sum(p.numel() for p in self.parameters()) + sum(math.prod(x.shape) for x in matrices)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters and of their gradients."""
        return next(self.parameters()).dtype

    @property
    def precision(self) -> str:
        """ "mixed", or the name of the one dtype of everything. Set it to "mixed", or to "float32" again."""
        return MIXED if self._mixed else str(self.dtype).removeprefix("torch.")

    @precision.setter
    def precision(self, precision: str) -> None:
        self._mixed = check_precision(precision, self.dtype) == MIXED

    @property
    def operand(self) -> torch.dtype | None:
        """The dtype of what products and attention read, if it is not that of everything else. On a machine that does not
        multiply bfloat16, mixed precision is float32."""
        return torch.bfloat16 if self._mixed and self.dtype == torch.float32 and why_not_mixed() is None else None

    def extra_repr(self) -> str:
        return f"{self.size:,} parameters, {str(self.dtype).removeprefix('torch.')}"

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """What `to`, `half`, `double` … call. A dtype in which the model cannot compute is refused."""
        dtype = as_dtype(fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype)
        if self._mixed:
            check_precision(MIXED, dtype)
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def check_parameters(self) -> None:
        """Raise unless all parameters have one dtype, which a model can have, and values on one device."""
        kinds = {(p.dtype, p.device) for p in self.parameters()}
        dtype, device = next(iter(kinds))
        if len(kinds) == 1 and dtype in DTYPES and device.type != "meta":
            return
        for name, p in self.named_parameters():
            if p.is_meta:
                raise HandgradError(f"{name} is on the meta device, without values: load the weights first")
            if p.dtype not in DTYPES or p.dtype is not self.dtype:
                other = f", and the model {self.dtype}" if p.dtype is not self.dtype else ""
                raise HandgradError(
                    f"{name} is {p.dtype}{other}: a model has one dtype, float64, float32 or bfloat16; convert it with"
                    " model.to(torch.float32)"
                )
            if p.device != self.device:
                raise HandgradError(
                    f"{name} is on {p.device}, and the model on {self.device}: move it with model.to(…)"
                )

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train every parameter, or freeze it: then its `.grad` is discarded as well."""
        super().requires_grad_(requires_grad)
        for name, p in self.named_parameters():
            if name.endswith(SELECTION):
                p.requires_grad_(False)
        if not requires_grad:
            freeze(self.parameters())
        return self

    @property
    def logit_map(self) -> LogitMap:
        """What is done with the head's output before the softmax."""
        return LogitMap(self.config.logit_scale, self.config.logit_cap)

    def embeddings_train(self) -> bool:
        return any(table.trains for table in self.tables().values())

    def tables(self) -> dict[str, Embedding]:
        """The embeddings by the paper's names."""
        return {"w_tok": self.embed, **({"w_pos": self.positions} if self.has("positions") else {})}

    def layers(self) -> list[list[nn.Parameter]]:
        """The parameters layer by layer, in the order in which their gradients become final."""
        head = list(self.head.parameters())
        blocks = [list(block.parameters()) for block in reversed(self.blocks)]
        embeddings = [p for table in self.tables().values() for p in table.parameters()]
        if self.config.tied:  # a tied weight is final only when the embedding has added its part
            embeddings += [p for p in head if p is not self.embed.weight]
        layers = [*([] if self.config.tied else [head]), list(self.final_norm.parameters()), *blocks, embeddings]
        last = {
            p: i for i, layer in enumerate(layers) for p in layer
        }  # a shared parameter is final in the last of its layers
        return [[p for p in dict.fromkeys(layer) if last[p] == i] for i, layer in enumerate(layers)]

    def embeddings(self, ids: Tensor, positions: Tensor) -> Tensor:
        """a_0 → a_1"""
        learned = self.positions.w if self.has("positions") else None
        table, rows = self.embed.table(ids)
        return embedding.forward(rows, positions, table, learned, self.embed.scale)

    @property
    def packed(self) -> bool:
        """Whether weights are packed."""
        return self.scratch is not None

    @property
    def unpacks(self) -> bool:
        """Whether a pass has to unpack weights: not those that are stored as what products read."""
        wide = self.operand or self.dtype
        held = (x.packed for x in self.modules() if isinstance(x, Linear) and x.packed is not None)
        return self.packed and any(matrix.tensor().dtype is not wide for matrix in held)

    @contextmanager
    def weights(self, layer: nn.Module, generating: bool = False) -> Iterator[Weights]:
        """The weights of a block or of the head, to use within the context: a packed matrix is unpacked once, instead of at
        every use. Blocks share their buffers, which are freed before the head needs its own. When generating, products of a
        few rows use packed weights directly, and a model that rounds activations does so."""
        if self.scratch is None:
            yield STORED
            return
        alone = layer is self.head
        if alone:
            self.scratch.clear()
        try:
            with self.scratch.fetch(generating, self.operand, generating and self.rounds_activations) as weights:
                yield weights
        finally:
            if alone:
                self.scratch.clear()

    def rotations(
        self,
        positions: Tensor,
        lengths: Sequence[int],
        dtype: torch.dtype | None = None,
        counts: Sequence[int] | None = None,
    ) -> Rotations:
        """cos and sin of these positions, in sequences of these lengths, for every table of frequencies that the blocks
        have; nothing without rotary positions. `counts`: how many of them are of each sequence, if not all."""
        wide = torch.promote_types(self.dtype, torch.float32) if dtype is None else dtype
        rows = [
            n for n, count in zip(lengths, lengths if counts is None else counts, strict=True) for _ in range(count)
        ]
        return tuple(self._rotation(table, positions, rows, wide) for table in self.config.rotary_tables())

    def _rotation(
        self, table: RotaryTable, positions: Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of one table; `lengths` has that of every position's sequence."""
        c, limit = self.config, table.scaling.original_max_position_embeddings
        of = partial(rotary.frequencies, c.rotary_width_of_head, table.base, table.scaling, dtype, self.device)
        theta, factor = of()
        cos, sin = rotary.angles(positions, theta, factor)
        if table.scaling.rope_type == "longrope" and limit is not None and any(n > limit for n in lengths):
            long = torch.tensor([[n > limit] for n in lengths], device=self.device)
            others = rotary.angles(positions, of(long=True)[0], factor)
            cos, sin = (torch.where(long, other, x) for other, x in zip(others, (cos, sin), strict=True))
        return cos, sin

    def shares_prefixes(self, lengths: Sequence[int]) -> bool:
        """Whether sequences of these lengths may have a prefix in common that is computed once: not if its frequencies
        depend on their lengths, or if a convolution reads the rows before a branch."""
        c = self.config
        scaled = [table.scaling for table in c.rotary_tables() if table.scaling.rope_type == "longrope"]
        limits = [n for scaling in scaled if (n := scaling.original_max_position_embeddings) is not None]
        return c.causal and not c.conv_blocks and max(lengths) <= min(limits, default=c.n_context)

    def tokens_at_once(self) -> int:
        """Tokens of a piece, unless a call gives another number."""
        if self.adapter is None or any(isinstance(x, Linear) and x.trains for x in self.modules()):
            return TOKENS_AT_ONCE
        return FROZEN_AT_ONCE

    def ending(self) -> Ending:
        """What follows the last block."""
        return Ending(self.final_norm, self.head, self.logit_map, self.check_finite)

    def lowest_block(self) -> int:
        """The first block that the backward pass has to visit."""
        if self.embeddings_train():
            return 0
        return next((i for i, block in enumerate(self.blocks) if block.trains), len(self.blocks))

    def pack(self, tokens: Tensor, lengths: list[int] | None = None) -> Batch:
        """Check tokens (B, T), or (n) with the lengths of its sequences, and pack them end to end."""
        self.check_parameters()
        if torch.is_autocast_enabled(self.device.type):
            raise HandgradError(
                "torch.autocast is not supported: it changes the dtype of single products, and the gradients are written"
                " for one dtype throughout; remove it, and convert the model instead: model.to(torch.bfloat16)"
            )
        return pack(tokens, lengths, self.config, self.device)

    def dropout_seed(self, seed: int | None) -> int | None:
        """The dropout seed of a pass; None if no layer drops anything."""
        if (
            self.adapter is None
            or not self.training
            or not any(isinstance(x, Affine) and x.dropout for x in self.modules())
        ):
            return None
        return int(torch.randint(1 << 31, ())) if seed is None else seed

    def check_finite(self, a: Tensor) -> Tensor:
        """Return `a`; raise if its sum is not finite, naming the parameter that is broken if one is."""
        if math.isfinite(a.sum().item()):
            return a
        broken = [name for name, p in self.named_parameters() if not torch.isfinite(p).all()]
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            raise NonFiniteError(f"the weights hold NaN or infinity in {broken[0]}{more}: load an intact checkpoint")
        if self.dtype == torch.float64:
            raise NonFiniteError(
                "the activations hold NaN or infinity, even in float64: look for huge weights or an edit"
            )
        raise NonFiniteError(f"the activations overflowed {str(self.dtype).removeprefix('torch.')}: use a wider dtype")

    def tie(self) -> None:
        """Make the logits layer the token embedding transposed, and discard the weight it had."""
        head = self.head.plain()
        if self.embed.packed is not None:
            head.pack(self.embed.packed, self.dtype)
        else:
            head.weight, head.packed = self.embed.weight, None
            self.embed.zero_grad()  # it was the gradient of the embedding alone
        self.config = replace(self.config, tied=True)

    def untie(self) -> None:
        """Give the logits layer a copy of the embedding as its own weight. Packed weights never change and stay shared."""
        head = self.head.plain()
        if self.config.tied and head.weight is not None:
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
            self.embed.zero_grad()  # it was the gradient of both
            self.config = replace(self.config, tied=False)
