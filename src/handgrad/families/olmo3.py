"""OLMo 3: OLMo 2 with a window in three of four blocks, whose frequencies are not scaled."""

from dataclasses import replace

from .olmo2 import OLMO2

OLMO3 = replace(
    OLMO2,
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={**OLMO2.defaults, "sliding_window": 4096, "rope_theta": 500_000.0},
    windows="pattern",
    pattern=4,
    local_rope=True,
)
