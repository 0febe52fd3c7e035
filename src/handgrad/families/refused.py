"""Kinds of models that are not read, by model_type, and what each needs that is missing here: every model_type of a causal
language model that transformers knows, and some more."""

_ONE_REASON = {
    "an encoder: only models that predict the next token are read": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod
    """,
    "an encoder besides the decoder": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet t5 trocr whisper
    """,
    "images or sound besides text; only models of text are read": """
        emu3 fuyu gemma4_unified git glm4v got_ocr2 granite_speech llava mistral3 mllama moshi moss_transcribe_diarize
        musicgen musicgen_melody paligemma phi4_multimodal qwen2_5_vl qwen2_vl qwen3_vl
    """,
    "state-space layers": "bamba falcon_h1 falcon_mamba jamba mamba mamba2 nemotron_h zamba zamba2",
    "linear attention": """
        bailing_hybrid kimi_linear minimax olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
        qwen4_exp qwen4_exp_text
    """,
    "latent attention (MLA)": """
        axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note dots3_note_text glm4_moe_lite glm_moe_dsa longcat_flash
        minicpm3 youtu
    """,
    "attention that is multiplied by a gate": "afmoe beam hrm_text laguna lfm3",
    "sinks of a family with windows, whose table is not written": "flint granite_swa granitemoe_swa",
    "a table of its mixture of experts, which is not written": """
        aria_text cohere2_moe exaone_moe flex_olmo glm4_moe granitemoe granitemoeshared hy_v3 kolibri1 lfm2_moe mellum
        minimax_m2 solar_open
    """,
    "compressed attention, and several residual streams": "deepseek_v4 hy_v4",
    "embeddings of every block, and keys shared between blocks": "gemma4 gemma4_text gemma4_unified_text",
    "another model, whose tokens it drafts": "gemma4_assistant gemma4_unified_assistant",
    "alternating updates of several streams, and embeddings of every block": "gemma3n gemma3n_text",
    "attention in chunks and scores whose scale grows with the position": "llama4 llama4_text",
    "norms of queries and keys after the rotation": "hunyuan_v1_dense hunyuan_v1_moe",
    "scores that depend on the distance, and convolutions beside every branch": "inkling_text inkling2_text",
    "sinusoidal positions": "ctrl xglm",
}

REFUSED: dict[str, str] = {name: reason for reason, names in _ONE_REASON.items() for name in names.split()} | {
    "apertus": "the activation xIELU, which has parameters",
    "bitnet": "weights of three values and a norm inside each branch",
    "bloom": "ALiBi instead of positions, and a norm of embeddings",
    "biogpt": "positions counted from 2",
    "blt": "patches of bytes instead of tokens",
    "codegen": "queries, keys and values interleaved in one matrix",
    "cohere_compass_text": "a family whose table is not written",
    "cpmant": "scores that depend on the distance by a table",
    "cwm": "windows by a pattern that begins with a block without one",
    "dbrx": "clamped queries, keys and values",
    "diffllama": "differential attention",
    "doge": "masks that depend on the values",
    "ernie4_5_moe": "experts chosen by a biased softmax",
    "falcon": "one matrix with queries grouped by key, ALiBi or parallel branches by version",
    "gemma3": "its text part alone is read, as gemma3_text",
    "gpt-sw3": "its files are GPT-2's: put gpt2 in its place",
    "gpt_neo": "scores without a scale in blocks that alternate with local attention",
    "gpt_neox_japanese": "a bias added after the residual connection",
    "jetmoe": "experts of attention",
    "mimo_v2_flash": "values of another width than keys, with sinks in blocks with a window",
    "minimax_m3_vl_text": "sparse attention, whose keys an indexer chooses",
    "ministral3": "scores whose scale grows with the position",
    "modernbert-decoder": "a norm of embeddings, and a first block without one",
    "mpt": "ALiBi instead of positions",
    "nanochat": "norms without a gain, and queries and keys normalized after the rotation",
    "olmo": "LayerNorm without a gain",
    "openai-gpt": "norms after the residual connection",
    "opt": "positions counted from 2, and a projection of embeddings by version",
    "persimmon": "norms of queries and keys with a bias",
    "phimoe": "sparse mixer routing",
    "recurrent_gemma": "recurrent layers",
    "reformer": "attention by hashing",
    "rwkv": "recurrent layers instead of attention",
    "xlnet": "prediction in permuted orders",
    "xlstm": "recurrent layers instead of attention",
    "zaya": "queries and keys that a convolution computes",
}
