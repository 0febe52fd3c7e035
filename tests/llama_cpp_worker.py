"""What llama.cpp computes, for gguf_check.py and llama_cpp_check.py: a program of a separate environment, which has
llama-cpp-python and numpy.

Reads one JSON object per line and answers with one line each:

    {"model": FILE, "texts": […], "tokens": […], "logits": FILE.npy}    {"ids": […], "ends": […], "template": …}
    {"quantize": FILE, "to": FILE, "type": number}                      {}
    … that it does not open                                             {"error": …}

Keys and values are cached in float32, so that a file of float32 is computed in float32. Packed weights are left in the order
of the file: only those are unpacked for OpenBLAS.
"""

import ctypes
import json
import os
import sys
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as library

THREADS = int(os.environ.get("OMP_NUM_THREADS", 2))


default_params = library.llama_model_default_params


def in_order() -> Any:
    params = default_params()
    params.use_extra_bufts = False
    return params


library.llama_model_default_params = in_order


def describe(request: dict[str, Any]) -> dict[str, Any]:
    tokens = request["tokens"]
    llm = llama_cpp.Llama(
        request["model"], n_ctx=max(64, len(tokens)), n_batch=max(64, len(tokens)), n_ubatch=max(64, len(tokens)),
        logits_all=True, verbose=False, type_k=0, type_v=0, flash_attn=False, n_threads=THREADS, n_threads_batch=THREADS,
    )  # fmt: skip
    if tokens:
        llm.eval(tokens)
        np.save(request["logits"], np.array(llm.scores[: len(tokens)]))
    ids = [llm.tokenize(text.encode(), add_bos=False, special=True) for text in request["texts"]]
    model = llm._model.model
    vocab = llama_cpp.llama_model_get_vocab(model)
    n = llama_cpp.llama_vocab_n_tokens(vocab)
    return {
        "ids": ids,
        "ends": [i for i in range(n) if llama_cpp.llama_vocab_is_eog(vocab, i)],
        "with_bos": llm.tokenize(b"a", add_bos=True, special=True),
        "template": llm.metadata.get("tokenizer.chat_template"),
    }


def quantize(request: dict[str, Any]) -> dict[str, Any]:
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread, options.allow_requantize, options.pure = request["type"], 2, True, True
    failed = llama_cpp.llama_model_quantize(request["quantize"].encode(), request["to"].encode(), ctypes.byref(options))
    assert not failed, request
    return {}


for line in sys.stdin:
    asked = json.loads(line)
    try:
        answer = quantize(asked) if "quantize" in asked else describe(asked)
    except ValueError as reason:
        answer = {"error": str(reason)}
    print(json.dumps(answer), flush=True)
