"""Ministral: Mistral with a window in the blocks that the file lists."""

from dataclasses import replace

from .mistral import MISTRAL

MINISTRAL = replace(
    MISTRAL,
    name="ministral",
    architecture="MinistralForCausalLM",
    windows="listed blocks",
)
