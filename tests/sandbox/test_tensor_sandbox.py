"""The sandbox of Python functions on tensors: arguments, results, files that stay as they are, a replaced child."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from handgrad.learn.course import COURSE
from handgrad.learn.grading import grade
from handgrad.paper.attention import Head
from handgrad.sandbox import tensor_client
from handgrad.sandbox.tensor_client import Run, run

X = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)


def call(body: str, *arguments: object) -> Run:
    names = [f"x{i}" for i in range(len(arguments))]
    code = f"import torch\ndef f({', '.join(names)}):\n    {body}\n"
    return run(code, "f", names, [arguments], [["y"]])


def result(made: Run) -> torch.Tensor:
    assert made.problem is None, made.problem
    value = made.cases[0][0].value
    assert value is not None
    return value


def test_arguments_arrive_as_they_are() -> None:
    assert torch.equal(result(call("return x0 * x1", X, 2)), 2 * X)
    head = Head(*(torch.full((i,), float(i)) for i in range(6)))
    assert result(call("return torch.tensor([len(x) for x in x0] + [x1[1][0][0].item()])", head, [1, [X[1]]])).tolist() == [
        0, 1, 2, 3, 4, 5, 3,
    ]  # fmt: skip
    assert result(call("return x0[::2] + x1.sum()", X.t(), torch.tensor([True, False]))).tolist() == [[1, 4], [3, 6]]
    assert call("return x0", X[:, :0]).cases[0][0].value.shape == (2, 0)  # type: ignore[union-attr]


def test_no_library_can_open_a_file(tmp_path: Path) -> None:
    """torch opens files in its own code, past Python's hooks."""
    precious = tmp_path / "precious"
    precious.write_bytes(bytes(80))
    for body in (
        f"return torch.from_file({str(precious)!r}, shared=True, size=10, dtype=torch.float64).fill_(7)",
        f"torch._C.PyTorchFileWriter({str(precious)!r})",
        f"torch.from_file({str(tmp_path / 'new')!r}, shared=True, size=10)",
    ):
        assert call(body, X).problem is not None, body
    assert precious.read_bytes() == bytes(80) and [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_a_killed_child_is_replaced_and_threads_share_it() -> None:
    result(call("return x0", X))
    assert tensor_client._service.child is not None
    os.kill(tensor_client._service.child._process.pid, signal.SIGKILL)
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda i: result(call("return x0 * x1", X, i)).sum().item(), range(4))
        assert list(found) == [15.0 * i for i in range(4)]


def test_a_reply_that_cannot_be_read_is_a_crash() -> None:
    """The reply comes from a process in which the answer ran."""
    forged = (
        {}, [], {"outputs": [7]}, {"outputs": [], "changed": []}, {"outputs": [[{"shape": [10**30], "dtype": "float64"}]]},
        {"outputs": [[{"shape": [1], "dtype": "os"}]]}, {"outputs": [[{"shape": None}] * 2], "changed": []},
    )  # fmt: skip
    heads = [json.dumps(x).encode() for x in forged]
    for reply in (b"", b"\xff\xff\xff\xff", *(len(x).to_bytes(4, "big") + x + bytes(8) for x in heads)):
        made = tensor_client._decode(reply, tensor_client.Limits(), ["x"], [["y"]])
        assert made.problem is not None and made.problem.kind == "crash"


def test_without_seccomp_python_refuses_and_the_judgment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a package that torch imports, as it does dill, may write a temporary file then."""
    (tmp_path / "pyseccomp.py").write_text("raise ImportError")
    (tmp_path / "dill.py").write_text("import tempfile\ntempfile.gettempdir()\ndef extend(**_): pass\n")
    (tmp_path / "precious").write_text("precious")
    monkeypatch.syspath_prepend(str(tmp_path))
    tensor_client._service.stop()
    try:
        made = call("return x0 * 2", X)
        assert torch.equal(result(made), 2 * X) and not made.kernel
        for escape in (
            f"print.__globals__['os'].remove({str(tmp_path / 'precious')!r})",
            f"print.__globals__['os'].open({str(tmp_path / 'precious')!r}, 1)",
            "print.__globals__['os'].fork()",
            "print.__globals__['os'].kill(1, 9)",
        ):
            problem = call(escape, X).problem
            assert problem is not None and (problem.kind, "uses no files" in problem.message) == ("refused", True)
        assert (tmp_path / "precious").read_text() == "precious"
        judged = grade(COURSE["softmax"], COURSE["softmax"].solution())
        assert judged.passed and "kernel does not confine" in judged.notes[0]
    finally:
        tensor_client._service.stop()


EVERYDAY = """
-x.abs() ** 0.5 if x.any() else x | 2 / (1 + x) - (3 - x) // 2 | x.T @ x | x[None, ..., 1:, [0, 2]] | x[x > 1]
x[-1].flip(0) | x.max(1).values | x.sort(descending=True).indices.double()
torch.stack([r * i for i, r in enumerate(x)]) | sum(r for r in x)
torch.tensor([[float(v) for v in r] for r in x], dtype=torch.double)
torch.zeros(x.shape, dtype=x.dtype) + x.numel() + len(x) | torch.einsum('ij,kj->ik', x, x)
F.gelu(x, approximate='tanh') | torch.linalg.norm(x, dim=1) | torch.where(x > 2, x, -torch.inf)
x.new_full((x.shape[1],), x.sum().item()) | torch.cat([x, x * torch.pi], dim=-1) | x.clone().fill_diagonal_(0)
x.softmax(-1) | torch.var_mean(x, 1)[1] | x.float().double() | x.reshape(-1).unfold(0, 2, 1)
torch.special.entr(x + 1) | x.mT.contiguous() | torch.zeros_like(x).index_add_(0, torch.tensor([1, 1]), x)
F.one_hot(x[0].long(), 4) * x[0].double()[:, None] | x * (x.dim() == 2)
"""


def test_torch_is_what_it_was() -> None:
    """What an answer computes through the other process equals what torch computes here."""
    expressions = [entry for line in EVERYDAY.strip().splitlines() for entry in line.split(" | ")]
    names = [f"y{i}" for i in range(len(expressions))]
    code = f"import torch\nimport torch.nn.functional as F\ndef f(x):\n    return {', '.join(expressions)}\n"
    made = run(code, "f", ["x"], [[X]], [names])
    assert made.problem is None and not made.changed, made
    for expression, output in zip(expressions, made.cases[0], strict=True):
        expected = eval(expression, {"x": X, "torch": torch, "F": torch.nn.functional})
        assert output.value is not None and output.dtype == str(expected.dtype).removeprefix("torch."), expression
        assert torch.equal(output.value, expected.double()), expression
