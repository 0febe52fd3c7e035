"""What llama.cpp computes, for tests/gguf_check.py: a program of its own environment, which has llama-cpp-python and numpy.

Reads one JSON object per line and answers with one line each:

    {"model": FILE, "texts": […], "tokens": […], "logits": FILE.npy}    {"ids": […], "ends": […], "template": …}
    {"model": FILE, "greedy": [[ids], …], "n": number}                  {"steps": [[[id, logit, second id, logit], …], …]}
    {"quantize": FILE, "to": FILE, "type": number}                      {}
    … that it does not open                                             {"error": …}

Keys and values are cached in float32, so that a file of float32 is computed in float32.
"""

import ctypes
import json
import sys
from typing import Any

import llama_cpp
import numpy as np


def describe(request: dict[str, Any]) -> dict[str, Any]:
    tokens = request["tokens"]
    llm = llama_cpp.Llama(
        request["model"], n_ctx=max(64, len(tokens)), n_batch=max(64, len(tokens)), n_ubatch=max(64, len(tokens)),
        logits_all=True, verbose=False, type_k=0, type_v=0, flash_attn=False, n_threads=2, n_threads_batch=2,
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


def greedy(request: dict[str, Any]) -> dict[str, Any]:
    longest = max(map(len, request["greedy"])) + request["n"]
    llm = llama_cpp.Llama(
        request["model"], n_ctx=max(64, longest), logits_all=True, verbose=False, type_k=0, type_v=0, flash_attn=False,
        n_threads=2, n_threads_batch=2,
    )  # fmt: skip
    steps = []
    for ids in request["greedy"]:
        llm.reset()
        llm.eval(ids)
        made: list[list[float]] = []
        for _ in range(request["n"]):
            logits = llm.scores[llm.n_tokens - 1]
            first, second = map(int, np.argsort(logits)[:-3:-1])
            made.append([first, float(logits[first]), second, float(logits[second])])
            llm.eval([first])
        steps.append(made)
    return {"steps": steps}


def quantize(request: dict[str, Any]) -> dict[str, Any]:
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread, options.allow_requantize, options.pure = request["type"], 2, True, True
    failed = llama_cpp.llama_model_quantize(request["quantize"].encode(), request["to"].encode(), ctypes.byref(options))
    assert not failed, request
    return {}


for line in sys.stdin:
    asked = json.loads(line)
    try:
        answer = quantize(asked) if "quantize" in asked else greedy(asked) if "greedy" in asked else describe(asked)
    except ValueError as reason:
        answer = {"error": str(reason)}
    print(json.dumps(answer), flush=True)
