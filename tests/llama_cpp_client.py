"""What gguf_check.py and llama_cpp_check.py share: the worker program with llama.cpp, and lines of results."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import handgrad as hg


class LlamaCpp:
    """The worker program.

    exact   whether it has OpenBLAS, with which 32 rows or more are multiplied by unpacked weights and not rounded to 8 bits
    """

    def __init__(self, program: str, folder: Path):
        self.exact = any(Path(program).parents[1].glob("lib/python*/site-packages/llama_cpp/lib/libggml-blas*"))
        self.logits = folder / "logits.npy"
        command = [program, str(Path(__file__).with_name("llama_cpp_worker.py"))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, f"llama.cpp ended at {request}"
        answer = dict(json.loads(line))
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def logits_of(self, model: Path, tokens: list[int]) -> Tensor:
        self.ask(model=str(model), tokens=tokens, texts=[], logits=str(self.logits))
        return torch.from_numpy(np.load(self.logits))

    def ids_of(self, model: Path, texts: list[str]) -> list[list[int]]:
        return list(self.ask(model=str(model), tokens=[], texts=texts)["ids"])

    def quantize(self, source: Path, out: Path, kind: int) -> None:
        self.ask(quantize=str(source), to=str(out), type=kind)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Results:
    def __init__(self) -> None:
        self.failed = 0

    def line(self, what: str, fine: bool, found: str) -> None:
        self.failed += not fine
        print(f"{'ok  ' if fine else 'FAIL'}  {what:<58} {found}", flush=True)

    def conclude(self) -> int:
        """Print the result; the exit status."""
        print(f"{self.failed} failed" if self.failed else "llama.cpp agrees")
        return int(self.failed > 0)


def logits(model: hg.GPT, tokens: list[int]) -> Tensor:
    return model.logits(torch.tensor([tokens]))[0]


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def perplexity(found: Tensor, tokens: list[int]) -> float:
    return torch.nn.functional.cross_entropy(found[:-1], torch.tensor(tokens[1:])).exp().item()
