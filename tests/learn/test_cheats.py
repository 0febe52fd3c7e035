"""Answers that let a library differentiate, or look for the solution: each is refused, with a sentence that says why."""

import pytest
from answers import RIGHT

from handgrad.learn.course import COURSE
from handgrad.learn.grading import grade

BY_HAND = "write the gradient by hand"
REFUSED = "is refused: an answer can use torch's functions and methods on tensors"
COMPLEX = "a complex result is refused: an answer computes with real numbers"
COMPLEX_STEP = "h, made = 1e-30, torch.zeros_like(rho)\n"
BY_COLUMNS = """for j in range(rho.shape[1]):
    moved = s.clone()
    moved[:, j] += h * 1j
    e = moved.exp()
    made[:, j] = (e / e.sum(1, keepdim=True) * delta_rho).sum(1).imag / h
return made"""
OURS = "o = print.__globals__\n"

# Bodies of backward(delta_rho, rho), each with words of what is said. The softmax's own scores are log ρ.
CHEATS: list[tuple[str, str]] = [
    ("return torch.autograd.grad(torch.softmax(s, 1), s, delta_rho)[0]", BY_HAND),
    ("return getattr(torch, 'auto' + 'grad').grad(rho, rho, delta_rho)[0]", BY_HAND),
    ("return vars(torch)['autograd']", "KeyError"),
    ("return torch.__dict__['autograd']", "KeyError"),
    ("s = rho.log().requires_grad_()\ntorch.softmax(s, 1).backward(delta_rho)\nreturn s.grad", BY_HAND),
    ("s = rho.log()\ns.requires_grad = True", BY_HAND),
    ("setattr(rho, 'requires' + '_grad', True)", BY_HAND),
    ("s = torch.tensor(rho.tolist(), requires_grad=True)\nreturn s", BY_HAND),
    ("s = torch.zeros(3, **{'requires' + '_grad': True})\nreturn s", BY_HAND),
    ("getattr(rho, 'back' + 'ward')(delta_rho)", BY_HAND),
    ("return rho.grad", BY_HAND),
    ("return rho.grad_fn", BY_HAND),
    ("rho.register_hook(print)\nreturn rho", "torch does not take"),
    ("return torch._softmax_backward_data(delta_rho, rho, 1, torch.float64)", BY_HAND),
    ("return torch.ops.aten._softmax_backward_data(delta_rho, rho, 1, torch.float64)", f"torch.ops {REFUSED}"),
    ("return torch._C._VariableFunctions._softmax_backward_data(delta_rho, rho, 1, torch.float64)", f"torch._C {REFUSED}"),
    ("return torch._VF._softmax_backward_data(delta_rho, rho, 1, torch.float64)", f"torch._VF {REFUSED}"),
    ("return torch.mkldnn_linear_backward_weights(rho, rho, rho, False)", BY_HAND),
    ("return torch.batch_norm_backward_elemt(rho)", BY_HAND),
    ("return torch.func.vjp(lambda s: torch.softmax(s, 1), rho.log())[1](delta_rho)[0]", BY_HAND),
    ("from torch.func import vjp", BY_HAND),
    ("from torch import func", BY_HAND),
    ("import torch.autograd.forward_ad as fwad", BY_HAND),
    ("from torch.autograd import grad", BY_HAND),
    ("return torch.vmap(lambda x: x)(rho)", f"torch.vmap {REFUSED}"),
    ("return torch._make_dual(rho, delta_rho, 0)", BY_HAND),
    ("return torch._C._functorch", f"torch._C {REFUSED}"),
    ("return torch.compile(lambda x: x)(rho)", f"torch.compile {REFUSED}"),
    ("return torch.jit.script(lambda x: x)(rho)", f"torch.jit {REFUSED}"),
    ("return torch.nn.Linear(3, 3)", f"torch.nn.Linear {REFUSED}"),
    ("return torch.nn.functional.torch.autograd", f"torch.nn.functional.torch {REFUSED}"),
    ("return torch.nn.functional.softmax.__globals__['torch']", "has no attribute '__globals__'"),
    ("return torch.softmax.func.__globals__['sys'].modules['torch.autograd']", "KeyError"),
    ("return torch.gradient(rho)[0]", BY_HAND),
    ("return torch.library.Library('a', 'DEF')", f"torch.library {REFUSED}"),
    ("return torch.load('solution.pt')", f"torch.load {REFUSED}"),
    ("return torch.sys.modules['torch']", f"torch.sys {REFUSED}"),
    ("torch.sys.modules['__main__'].__dict__['REFUSED'] = ()", f"torch.sys {REFUSED}"),
    ("return torch.inspect.stack()", f"torch.inspect {REFUSED}"),
    ("return rho.__class__.__mro__[-1].__subclasses__()[9999]", "IndexError"),
    ("return rho._backward_hooks", BY_HAND),
    ("return rho._base", f"a tensor's _base {REFUSED}"),
    ("return rho.__torch_function__", f"a tensor's __torch_function__ {REFUSED}"),
    (f"{COMPLEX_STEP}s = torch.log(rho + 0j)\n{BY_COLUMNS}", COMPLEX),
    (f"{COMPLEX_STEP}s = torch.log(rho).to(torch.complex128)\n{BY_COLUMNS}", COMPLEX),
    ("return torch.complex(rho, rho).imag", COMPLEX),
    ("return torch.view_as_complex(torch.stack([rho, rho], -1)).imag", COMPLEX),
    ("return torch.linalg.eig(rho @ rho.T)[0].real", COMPLEX),
    ("return rho.numpy()", "its result is a ndarray"),
    ("return rho.untyped_storage()", "an answer can use tensors, numbers and text"),
    ("from handgrad.paper.attention import delta_causal", "import handgrad.paper.attention is refused"),
    ("import handgrad.paper.attention", "import handgrad.paper.attention is refused"),
    ("from handgrad.learn.course import COURSE", "import handgrad.learn.course is refused"),
    ("return __import__('importlib').import_module('torch')", "import importlib is refused"),
    (f"{OURS}return o['importlib'].import_module('handgrad.paper.attention').delta_causal(delta_rho, rho)", "uses no files"),
    (f"{OURS}return o['importlib'].import_module('torch._C')", "No module named"),
    (f"{OURS}del o['sys'].modules['torch']\nreturn o['importlib'].import_module('torch')", "uses no files"),
    (f"{OURS}return o['sys'].modules['handgrad.paper.notation'].F.torch", f"torch.nn.functional.torch {REFUSED}"),
    (f"{OURS}return o['sys'].modules['handgrad'].__loader__.get_source('handgrad')", "has no attribute"),
    (f"{OURS}return o['remote_torch'].ask('torch', '_softmax_backward_data', (delta_rho, rho, 1), {{}})", BY_HAND),
    (f"{OURS}return o['remote_torch'].ask('torch.autograd', 'grad', (rho,), {{}})", BY_HAND),
    (f"{OURS}return o['remote_torch'].ask('Tensor', '__getattribute__', (rho, 'grad'), {{}})", REFUSED),
    (f"{OURS}return o['remote_torch'].ask('Tensor', '__setattr__', (rho, 'data', rho), {{}})", REFUSED),
    ("f = next(x for x in ().__class__.__base__.__subclasses__() if x.__name__ == '_EngineBase')", "StopIteration"),
]  # fmt: skip


def answer(body: str) -> str:
    return "import torch\ndef backward(delta_rho, rho):\n    " + body.replace("\n", "\n    ") + "\n"


@pytest.mark.parametrize(("body", "words"), CHEATS, ids=[body[:60].replace("\n", "; ") for body, _ in CHEATS])
def test_a_cheat_is_refused_with_a_plain_sentence(body: str, words: str) -> None:
    made = grade(COURSE["softmax"], answer(body))
    assert made.problem is not None and not made.passed, made
    assert words in made.problem.message and made.problem.line is not None, made.problem
    assert (made.problem.kind == "forbidden") == (words is BY_HAND)


def test_an_answer_that_hides_its_attempts_gains_nothing() -> None:
    """Errors can be caught, the judge's helpers replaced, and the comparison answered: none of that is the right number."""
    bodies = [
        "try:\n    return torch.autograd.grad(rho, rho)\nexcept BaseException:\n    return rho",
        f"{OURS}o['_number'] = lambda name, x: 0\nreturn rho",
        f"{OURS}o['send'](o['remote_torch'].pipe, ['end', {{'printed': [], 'problem': None, 'outputs': [[0], [2]]}}])",
        "class Right:\n    def __eq__(self, other): return True\nreturn Right()",
        "torch.equal = torch.allclose = lambda *a, **k: True\nreturn rho",
        "rho.copy_(delta_rho)\nreturn rho",
    ]
    for body in bodies:
        assert not grade(COURSE["softmax"], answer(body)).passed, body


@pytest.mark.parametrize("name", COURSE)
def test_the_solution_is_not_among_the_modules_of_an_answer(name: str) -> None:
    """What the exercise quotes as its solution cannot be found, whatever modules the answer has loaded."""
    exercise = COURSE[name]
    code = f"""
o = print.__globals__
functions = [x for x in o["importlib"].import_module("gc").get_objects() if isinstance(x, o["types"].FunctionType)]
print([x.__name__ for x in functions if f"{{x.__module__}}.{{x.__name__}}" in {exercise.hidden()!r}])
"""
    made = grade(exercise, code + RIGHT[name][0])
    assert made.passed and made.printed == "[]\n", made
