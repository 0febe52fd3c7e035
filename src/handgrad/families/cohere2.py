"""Command R7B: Command R with a window in three of four blocks; the others do not rotate queries and keys."""

from dataclasses import replace

from .cohere import COHERE

COHERE2 = replace(
    COHERE,
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    defaults={**COHERE.defaults, "sliding_window": 4096, "rope_theta": 10_000.0},
    only={},
    no_effect=frozenset(
        {
            "head_dim",
            "order_of_interleaved_layers",
            "position_embedding_type",
            "rotary_pct",
            "use_embedding_sharing",
            "use_gated_activation",
            "use_parallel_block",
            "use_parallel_embedding",
            "use_qk_norm",
        }
    ),
    windows="pattern",
    pattern=4,
    reads_pattern=True,
    unrotated="every block without a window",
)
