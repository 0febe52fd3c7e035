"""handgrad: train, fine-tune, run and see through GPT-style transformers with every gradient derived by hand."""

from . import lora
from .checkpoint import save
from .config import GPTConfig, preset
from .errors import HandgradError, NonFiniteError
from .generation import generate
from .gpt import GPT
from .machine import settle
from .models import load
from .trace import Trace, trace
from .verify import verify

__version__ = "0.1.0"
__all__ = [
    "GPT",
    "GPTConfig",
    "HandgradError",
    "NonFiniteError",
    "Trace",
    "generate",
    "load",
    "lora",
    "preset",
    "save",
    "trace",
    "verify",
]

settle()
