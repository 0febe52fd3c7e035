"""VaultGemma: Gemma 2 without norms after its branches."""

from dataclasses import replace

from .gemma2 import GEMMA2
from .llama import without

VAULTGEMMA = replace(
    GEMMA2,
    name="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    names=without(GEMMA2.names, "post_1", "post_2"),
)
