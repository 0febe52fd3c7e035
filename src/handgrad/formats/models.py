"""Find and load the model a user names: a preset, a model directory, a GGUF file, a run folder, an adapter, a model that
`handgrad get` fetches, a name on the hub."""

import importlib.util
import os
import re
import warnings
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import torch

from .. import lora
from ..checks import MIXED, check_choice
from ..errors import HandgradError, HandgradWarning, option, shown
from ..gguf.file import is_gguf, open_gguf
from ..model.config import PRESETS, ModelConfig, preset
from ..model.dtype import as_dtype
from ..model.gpt import GPT
from ..model.precision import why_not_mixed, without_mixing
from ..model.storage.quantize import check_bits, quantize
from ..model.storage.rounded import round_frozen
from ..text import chat_template, downloads, tokenizer
from ..text import format as text_format
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .gguf_model import gguf_config, load_gguf
from .huggingface import load as load_directory
from .huggingface import load_config
from .run_folder import RUNS, model_folder, newest_run

_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "merges.txt"]


@dataclass(frozen=True)
class Found:
    """The model a user named: a preset, which is a shape without weights, or a folder with weights."""

    name: str  # as given, or the run that was chosen
    folder: Path | None  # of the model or the adapter, or a GGUF file; None: a preset
    note: str = ""  # a remark for the user about the choice

    @property
    def is_preset(self) -> bool:
        return self.folder is None

    @property
    def config(self) -> ModelConfig:
        """The model's shape; for an adapter, that of its base model."""
        if self.folder is None:
            return preset(self.name)
        return config_of(base_of(self.folder) if lora.is_adapter(self.folder) else self.folder)


def find_model(name: str | None) -> Found:
    """Resolve a model name, for every command. The first that applies:

    1. no name: the newest run in runs/ that has a checkpoint
    2. the name of a preset: the preset, even if a folder has the same name
    3. a folder or a GGUF file: a model directory, an adapter, or a run (its best checkpoint)
    4. a model that `handgrad get` fetches, such as smollm2
    5. a name on the hub, owner/model, which is downloaded
    """
    if name is None:
        newest = newest_run(with_checkpoint=True)
        if newest is None:
            raise HandgradError(f"no run with a checkpoint in {RUNS}/: name a model with {option('model')}")
        return Found(str(newest), model_folder(newest))
    if not name.strip():
        raise HandgradError("the name of the model is empty: give a preset, a folder or a name on the hub")
    if name in PRESETS:
        both = Path(name).is_dir()
        return Found(
            name, None, f"{name} is the preset here; for the folder of that name write ./{name}" if both else ""
        )
    path = Path(name).expanduser()
    if "/" not in name and name not in downloads.models() and not path.is_dir() and not is_gguf(path):
        raise HandgradError(
            f"{name!r} is neither a preset ({', '.join(PRESETS)}), nor a model to fetch ({', '.join(downloads.models())}),"
            f" nor a directory, nor a .gguf file{_meant(name)}"
        )
    return Found(name, locate(name))


def _meant(name: str) -> str:
    near = get_close_matches(name, [*PRESETS, *downloads.models(), *_folders()], 1)
    return f". Did you mean {near[0]}?" if near else ""


def _folders() -> list[str]:
    """Folders and GGUF files here, and runs: names that a user may have meant."""
    return [
        str(x) for where in (Path(), Path(RUNS)) if where.is_dir() for x in where.iterdir() if x.is_dir() or is_gguf(x)
    ]


def weights_folder(name: str | None) -> Path:
    """The folder or GGUF file of the named model, for commands that need weights."""
    found = find_model(name)
    if found.folder is not None:
        return found.folder
    remedy = f"for the folder of that name write ./{name}" if found.note else "give the folder of a trained model"
    on_hub = f", or openai-community/{name} to download it from the hub" if found.name.startswith("gpt2") else ""
    raise HandgradError(f"{name} is a preset, a shape without weights: {remedy}{on_hub}")


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    packed: bool = False,
    base_dtype: torch.dtype | str | None = None,
    bits: int | None = None,
    precision: str | None = None,
) -> GPT:
    """Load a model: a Hugging Face directory (config.json and safetensors, in one file or several), a GGUF file, a PEFT
    adapter together with its base model, the best checkpoint of a run folder, a model of `handgrad get`, such as "smollm2",
    which is fetched if necessary, or, with huggingface_hub installed, a model on the hub.

    Weights keep their stored dtype unless another is given; float16 becomes float32, and so does what GGUF packs.

    packed       keep the matrices of a GGUF file packed: they are frozen, and unpacked one block at a time when used
    base_dtype   keep the matrices of a directory in two bytes, "bfloat16" or "float16", frozen, and compute in float32
    bits         8 or 4: round the matrices to them, frozen, for fast generation; a GGUF file with as few keeps them
    precision    "mixed": weights and everything else in float32, and operands of products and of attention rounded to
                 bfloat16; "float32": no rounding. Default: the precision of the dtype
    """
    if line := without_mixing(precision):
        warnings.warn(HandgradWarning(line), stacklevel=2)
    return open_folder(
        locate(path), dtype, device, packed=packed, base_dtype=base_dtype, bits=bits, precision=precision
    )


def open_folder(
    folder: Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    *,
    bits: int | None = None,
    packed: bool = False,
    base_dtype: torch.dtype | str | None = None,
    precision: str | None = None,
    rounded: bool = False,
) -> GPT:
    """Load the model or adapter in a folder, or the model in a GGUF file. With `rounded`, matrices that do not stay packed
    are read in bfloat16, frozen, as `round_frozen` stores them."""
    check_choice(precision, dtype)
    dtype = dtype if precision is None else torch.float32
    if bits is not None:
        _check_low_bit(bits, dtype, packed or base_dtype is not None)
    if lora.is_adapter(folder):
        model = open_folder(
            base_of(folder), dtype, device, packed=packed, base_dtype=base_dtype, bits=bits, rounded=rounded
        )
        lora.load(model, folder)
    elif bits is not None:
        load_one = partial(load_gguf, packed=True) if is_gguf(folder) else load_directory
        model = quantize(load_one(folder, dtype=torch.float32, device=device), bits)
    else:
        check_packing(folder, packed, base_dtype)
        if is_gguf(folder):
            model = load_gguf(folder, dtype=dtype, device=device, packed=packed, rounded=rounded)
        else:
            kept = torch.bfloat16 if rounded and base_dtype is None else base_dtype
            model = load_directory(folder, dtype=dtype, device=device, base_dtype=kept)
    if precision is not None:
        model.precision = precision
    texts = tokenizer_folder(folder)
    model.text_source = model.source if texts is None else str(texts.absolute())
    if texts is not None and (not is_gguf(texts) or "tokenizer.ggml.model" in open_gguf(texts).metadata):
        model.read_tokenizer = tokenizer.read
    return model


def open_to_generate(folder: Path, bits: int | None = None, precision: str | None = None) -> GPT:
    """`open_folder` for generation alone. In mixed precision, matrices that are not packed are stored in bfloat16."""
    if precision != MIXED or why_not_mixed() is not None:
        return open_folder(folder, bits=bits, precision=precision)
    whole = bits is None and not lora.is_adapter(folder)  # an adapter may bring its own matrices
    model = open_folder(folder, bits=bits, precision=precision, rounded=whole)
    return round_frozen(model.requires_grad_(False), by_output=True)


def _check_low_bit(bits: object, dtype: torch.dtype | str | None, also_packed: bool) -> None:
    check_bits(bits)
    if also_packed:
        raise HandgradError("bits packs the matrices itself: give bits, packed or base_dtype, one of them")
    if dtype is not None and as_dtype(dtype) != torch.float32:
        raise HandgradError(f"bits={bits} computes in float32: leave out dtype={shown(dtype)}, or bits")


def check_packing(folder: Path, packed: bool, base_dtype: torch.dtype | str | None) -> None:
    """Raise if the weights of this model cannot stay packed in the way that was asked for."""
    if is_gguf(folder) and base_dtype is not None:
        raise HandgradError(
            f"{folder} is a GGUF file, which has its own types: leave out {option('base_dtype')} and keep"
            f" them with {option('packed', True)}"
        )
    if packed and not is_gguf(folder):
        raise HandgradError(
            f"{folder} is not a GGUF file, so nothing is packed in it: leave out {option('packed', True)}, or"
            f" keep two bytes per number with {option('base_dtype', 'bfloat16')}"
        )


def config_of(folder: Path) -> ModelConfig:
    """The configuration of the model in a folder or GGUF file."""
    return gguf_config(folder) if is_gguf(folder) else load_config(folder)


def locate(path: str | Path, download: bool = True) -> Path:
    """The folder of a model or an adapter, or a GGUF file; fetched or downloaded if necessary. With download=False, a model
    on the hub is found only if it has been downloaded before."""
    if not isinstance(path, str | Path) or not str(path):
        raise HandgradError(f"give the folder or the name of a model, not {shown(path)}")
    name = str(path)
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        return model_folder(folder)
    if is_gguf(folder):
        return folder
    if name in downloads.models():
        return downloads.fetch(name)[0]
    if (
        os.path.lexists(folder)
        or len(name) > 200
        or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
        or name.startswith(".")
    ):
        raise HandgradError(
            f"{name} is not a directory: give a folder with config.json, the folder of a run, or a .gguf file"
        )
    if name in PRESETS and not name.startswith("gpt2"):
        raise HandgradError(
            f"{name!r} is a preset, a shape without weights, and no folder has that name: hg.GPT(hg.preset({name!r})) makes"
            " a model of that shape"
        )
    return _from_hub(name, download)


def base_of(adapter: Path) -> Path:
    """The folder of an adapter's base model."""
    name = lora.base_of(adapter)
    if name is None:
        raise HandgradError(
            f"{adapter} does not name its base model: load that first, then the adapter with hg.lora.load"
        )
    try:
        base = locate(name, download=False)
        if not base.exists():
            raise HandgradError(f"there is no file {base}")
    except HandgradError as mistake:
        raise HandgradError(
            f"the base model of {adapter} was not found: {mistake.message}. Put the base model, or a link to it, back to"
            f" {name}"
        ) from None
    if lora.is_adapter(base):
        raise HandgradError(
            f"the base model of {adapter} is {base}, which is an adapter itself: merge that one first (handgrad merge), and"
            " name the result as base_model_name_or_path"
        )
    return base


def tokenizer_folder(folder: Path) -> Path | None:
    """The folder or GGUF file that holds a model's tokenizer: its own, or for an adapter that of its base model."""
    if is_gguf(folder) or os.path.lexists(folder / "tokenizer.json") or os.path.lexists(folder / "vocab.json"):
        return folder
    if lora.is_adapter(folder):
        return tokenizer_folder(base_of(folder))
    return None


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of the model or adapter in a folder."""
    return tokenizer.read(tokenizer_folder(folder) or folder)


def chat_template_of(folder: Path) -> ChatTemplate | None:
    """The chat template for conversations with the model or adapter in a folder, if it has one. Warns if the model was
    fine-tuned on raw text."""
    texts = tokenizer_folder(folder)
    found = None if texts is None else tokenizer.read(texts)
    if found is None or not chat_template.has_template(found.extra_files):
        return None
    how = text_format.choose(found, "chat")
    how.warn(folder, "a conversation (chat, /v1/chat/completions)")
    return how.template


def chat_template_with(adapter: Path, known: Tokenizer) -> ChatTemplate | None:
    """The adapter's own chat template, if it has a tokenizer. Raises if that is not the known one."""
    if tokenizer_folder(adapter) != adapter:
        return None
    if tokenizer_of(adapter).inner.get_vocab() != known.inner.get_vocab():
        raise HandgradError(
            f"{adapter} has another vocabulary than the model in use: give it as the model, with {option('model')}"
        )
    return chat_template_of(adapter)


def _from_hub(name: str, download: bool) -> Path:
    preset = f" ({name!r} is also a preset: a shape without weights)" if name in PRESETS else ""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise HandgradError(f"no folder {name}{preset}; to look for it on the hub, pip install huggingface_hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=not download))
    except Exception as reason:  # several libraries' exceptions
        if not download:
            raise HandgradError(
                f"no folder {name}{preset}, and it was not downloaded from the hub before. Nothing is downloaded because a"
                f" file names it: name it yourself, once, as in {option('model', name)}"
            ) from None
        why = (str(reason).strip() or type(reason).__name__).splitlines()[0].removeprefix("Got: ")
        raise HandgradError(
            f"no folder {name}{preset}, and downloading it from the hub failed: {why}{_meant(name)}"
        ) from None
