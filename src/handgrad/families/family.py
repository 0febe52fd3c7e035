"""`Family`: what Hugging Face's files of one kind of model are called and what its members have in common."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# config.json's names of activations → ours
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}


ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Family:
    """The table of a family. Our names of layers are those of `model/block.py` and `model/gpt.py`."""

    name: str  # model_type in config.json
    architecture: str  # the class that opens it in transformers
    stored: str  # how its files hold a linear layer's weight: "in_out" is (f_in, f_out), "out_in" is (f_out, f_in)
    names: Mapping[str, str]  # our name of a layer → Hugging Face's, inside the module that holds it
    fields: Mapping[str, tuple[str, ...]]  # field of config.json → fields of ModelConfig
    defaults: Mapping[str, Any]  # what transformers takes for a field that config.json omits
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of ModelConfig that every member shares
    only: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json with the one value that is supported
    written: Mapping[str, Any] = field(
        default_factory=dict
    )  # fields without effect that transformers cannot do without
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of fields that transformers writes
    no_effect: frozenset[str] = frozenset()  # fields of config.json that change nothing in the computation
    extra_tensors: str = r"lm_head\.weight"  # tensors in its files that a model may leave unread; a regular expression
    forms: Mapping[str, str] = field(default_factory=dict)  # field of config.json → how ours follows from it
    windows: str = ""  # blocks with a sliding window: as `_windowed` of config_json.py reads them; "": none can have
    pattern: int = 0  # every n-th block has no window, unless the file lists them
    reads_pattern: bool = False  # or says another n: sliding_window_pattern
    # those whose queries and keys are not rotated: "listed blocks", "every block without a window", or the same with ", if
    # there is one"
    unrotated: str = ""
    local_rope: bool = False  # blocks with a window have their own frequencies, which are not scaled
    rotary_share: float | None = None  # of a head's features, where the file can say another one
    rope_types: tuple[str, ...] = ROPE_TYPES  # that transformers knows for it; none: its files say no frequencies
    stacked_experts: bool = False  # its files hold all experts of a block in two tensors
    quant_methods: tuple[str, ...] = ()  # in quantization_config, of files that are unpacked when they are read
    block_kinds: tuple[str, ...] = ()  # in layer_types, of a family whose files list them and whose blocks are alike
    own_vocabulary: int = 0  # a smaller vocabulary does not have the tokens that `token_ids` refer to by default
    token_ids: tuple[str, ...] = ("bos_token_id", "eos_token_id", "pad_token_id")
    in_memory: Mapping[str, str] = field(default_factory=dict)  # a module's name in files → in transformers' models
    means: Mapping[str, str] = field(default_factory=dict)  # names of activations that mean another one
    rope_names: Mapping[str, str] = field(default_factory=dict)  # its own names of rope_theta and partial_rotary_factor
    may_omit: str = ""  # prefix of tensor names that some files leave out

    def has(self, layer: str) -> bool:
        """Whether a member can have this layer."""
        return layer in self.names

    def as_in_memory(self, name: str) -> str:
        """The name that transformers' models have for a tensor or module of a file."""
        return _renamed(name, self.in_memory.items())

    def as_in_files(self, name: str) -> str:
        """The name that files have for a tensor or module of transformers' models."""
        return _renamed(name, ((kept, filed) for filed, kept in self.in_memory.items()))


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """The path with other names for some of its modules."""
    new = dict(pairs)
    return ".".join(new.get(part, part) for part in name.split("."))
