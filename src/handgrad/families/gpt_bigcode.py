"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 with one head of keys and values for all queries."""

from dataclasses import replace

from .gpt2 import GPT2

GPT_BIGCODE = replace(
    GPT2,
    name="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    stored="out_in",
    defaults={**GPT2.defaults, "activation_function": "gelu_pytorch_tanh"},
    fixed={**GPT2.fixed, "n_kv_heads": 1},
    only={"multi_query": True, "num_key_value_heads": 1, "scale_attn_weights": True},
    no_effect=GPT2.no_effect
    | {
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
        "inference_runner",
        "validate_runner_input",
        "pre_allocate_kv_cache",
        "max_sequence_length",
        "max_batch_size",
        "pad_key_length",
    },
)
