"""Model families: one table each of the names, fields and fixed choices that Hugging Face's files use.

Import `FAMILIES`, `HEADS`, `Family` and `full_name`. A new family is a new table, listed here. Tables are data: no family
has code, and this package knows nothing of models, tensors or files.
"""

from .arcee import ARCEE
from .cohere import COHERE
from .cohere2 import COHERE2
from .dots1 import DOTS1
from .ernie4_5 import ERNIE4_5
from .exaone4 import EXAONE4
from .family import Family
from .gemma import GEMMA
from .gemma2 import GEMMA2
from .gemma3 import GEMMA3
from .glm import GLM
from .glm4 import GLM4
from .gpt2 import GPT2
from .gpt_bigcode import GPT_BIGCODE
from .gpt_neox import GPT_NEOX
from .gpt_oss import GPT_OSS
from .gptj import GPTJ
from .granite import GRANITE
from .granite_hybrid import GRANITE_HYBRID
from .helium import HELIUM
from .hyperclovax import HYPERCLOVAX
from .internlm3 import INTERNLM3
from .iquestcoder import IQUESTCODER
from .jais2 import JAIS2
from .lfm2 import LFM2
from .llama import LLAMA
from .minicpm import MINICPM
from .ministral import MINISTRAL
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .nemotron import NEMOTRON
from .olmo2 import OLMO2
from .olmo3 import OLMO3
from .olmoe import OLMOE
from .phi import PHI
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen2_moe import QWEN2_MOE
from .qwen3 import QWEN3
from .qwen3_moe import QWEN3_MOE
from .seed_oss import SEED_OSS
from .smollm3 import SMOLLM3
from .stablelm import STABLELM
from .starcoder2 import STARCODER2
from .vaultgemma import VAULTGEMMA

__all__ = ["FAMILIES", "HEADS", "Family", "full_name"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        GPT2, LFM2, LLAMA, MISTRAL, PHI3, QWEN2, QWEN3, SMOLLM3, COHERE, COHERE2, GEMMA2, GEMMA3, GPT_NEOX,
        GRANITE, GRANITE_HYBRID, MINICPM, OLMO2, OLMO3, STARCODER2, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DOTS1,
        GPT_OSS, ARCEE, ERNIE4_5, GEMMA, GLM, GLM4, GPT_BIGCODE, HELIUM, MINISTRAL, PHI, SEED_OSS, STABLELM,
        EXAONE4, GPTJ, NEMOTRON, HYPERCLOVAX, INTERNLM3, IQUESTCODER, JAIS2, VAULTGEMMA,
    )
}  # fmt: skip


HEADS = frozenset(family.names["head"] for family in FAMILIES.values())  # names of the logits layer


def full_name(name: str) -> str:
    """The name of a tensor with the prefix that some files of its family leave out: wte.weight → transformer.wte.weight."""
    for family in FAMILIES.values():
        prefix = family.may_omit
        layers = [path.removeprefix(prefix) for path in family.names.values() if prefix and path.startswith(prefix)]
        if name.partition(".")[0] in layers:
            return prefix + name
    return name
