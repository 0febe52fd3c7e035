"""`check`: is the backward pass of one function the derivative of its forward pass?"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import HandgradError
from ...model.dtype import STORED_DTYPES, as_dtype
from ..diagnosis import Diagnosis, diagnose
from ..findings import Check, Failure
from .cases import Case, Template, cases_of, make_template, smaller
from .function import Function, as_function, is_float
from .numeric import Judge, allowed_error

DIRECTIONS = 3  # random directions for each output and input
MAX_ENTRIES = 600  # of a gradient that is computed entry by entry for a diagnosis
MAX_ROWS = 12  # of an output whose contributions to a gradient are computed one by one
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
OUTSIDE = "the forward pass reads memory outside its inputs"
LAYOUT = "depends on how the inputs lie in memory"
Terms = Mapping[str, Callable[..., Tensor]]


def check(
    function: Any,
    *inputs: Any,
    backward: Callable[..., Any] | None = None,
    dtypes: Sequence[torch.dtype | str] | None = None,
    terms: Terms | None = None,
    scale: float = 1.0,
    seed: int = 0,
) -> Check:
    """Compare the gradients of a function with differences of its forward pass along random directions: for odd shapes,
    several dtypes, broadcast inputs and memory that is not contiguous.

    function   an autograd.Function, or any function of tensors that autograd differentiates
    inputs     what it takes: tensors, their dimensions as in "n d", or other arguments, which are passed as they are
    backward   the backward pass, if it is a separate function: backward(*deltas, *inputs) → a gradient for each input
    dtypes     dtypes to check (default: those of float64, float32 and bfloat16 that the function takes)
    terms      functions of (*deltas, *inputs) that compute named terms of a gradient, so that a missing one is named
    scale      size of the random inputs that are given by their dimensions
    seed       seed of the inputs and directions
    """
    checked = _Checked(as_function(function, backward), make_template(inputs, scale), seed, terms or {})
    report = Check(checked.function.name)
    wanted = [as_dtype(d, STORED_DTYPES) for d in dtypes or DTYPES]
    usable, refusals = checked.usable(wanted)
    if not usable or (dtypes is not None and refusals):
        raise HandgradError(f"{report.name} does not take these inputs: {next(iter(refusals.values()))}")
    report.notes += [f"not checked in {str(d).removeprefix('torch.')}: {why}" for d, why in refusals.items()]
    checked.judge_dtype = usable[0] if torch.float64 not in usable else torch.float64
    for case in cases_of(checked.template, usable, seed):
        failure, refused = checked.run(case)
        report.results[str(case)] = f"refused: {refused}" if refused else "failed" if failure else "passed"
        if refused == OUTSIDE:  # the backward pass would write outside, and could end the process
            report.notes.append(f"{OUTSIDE} instead of refusing them: {case}")
        if failure is not None:
            report.failures.append(failure if report.failures else checked.diagnosed(case, failure))
            if len(report.failures) == 1:
                report.example = checked.example(case, failure)
    return report


class _Checked:
    """One function, and how to check it in a case."""

    def __init__(self, function: Function, template: Template, seed: int, terms: Terms):
        self.function, self.template, self.seed, self.terms = function, template, seed, terms
        self.judge_dtype = torch.float64

    def usable(self, dtypes: Sequence[torch.dtype]) -> tuple[list[torch.dtype], dict[torch.dtype, str]]:
        """The dtypes that the function takes, and why it refuses the others."""
        good, refusals = [], {}
        for dtype in dtypes:
            case = next(cases_of(self.template, [dtype], self.seed))
            try:
                self.function.outputs(self.template.inputs(case))
                good.append(dtype)
            except Exception as reason:
                refusals[dtype] = f"{type(reason).__name__}: {reason}".splitlines()[0]
        return good, refusals

    # ── one case ────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, case: Case) -> tuple[Failure | None, str]:
        """The first failure in a case, or why the function refuses it."""
        inputs = self.template.inputs(case)
        before = [x.clone() if is_float(x) else x for x in inputs]
        try:
            outputs = self.function.outputs(inputs)
        except Exception as reason:
            why = f"{type(reason).__name__}: {reason}".splitlines()[0]
            return (None, why) if case.may_refuse else (_failure(case, "raised", f"the forward pass raised {why}"), "")
        for i, (x, y) in enumerate(zip(inputs, before, strict=True)):
            if is_float(x) and not torch.equal(x, y):
                return _failure(case, "changed", f"the forward pass changes input {i} in place"), ""
        plain = self.function.outputs(self.template.inputs(case, layout="contiguous"))
        for j, (y, z) in enumerate(zip(outputs, plain, strict=True)):
            if not torch.isfinite(y).all():
                kind = "not finite"
                text = f"output {j} is NaN or infinite: give inputs for which the function is finite, as tensors"
                # z: the same call with other memory around the inputs, or between their numbers
                if torch.isfinite(z).all():
                    kind, text = "memory", OUTSIDE if case.layout == "contiguous" else f"output {j} {LAYOUT}"
                return (None, text) if case.may_refuse else (_failure(case, kind, text), "")
            if not torch.allclose(y, z, rtol=1e-3, atol=1e-6 + 1e-3 * _size(z)):
                kind, how = "random", "changes from call to call: set the seed of random numbers in the function"
                if case.layout != "contiguous":
                    kind, how = "memory", LAYOUT
                return _failure(case, kind, f"output {j} {how}"), ""
        for j in range(len(outputs)):
            failure = self._output(case, inputs, outputs, j)
            if failure is not None:
                return failure, ""
        return None, ""

    def deltas(self, case: Case, outputs: Sequence[Tensor], j: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Random numbers for output j, and zeros for the others."""
        generator = torch.Generator().manual_seed(case.seed + 1)
        made = []
        for k, y in enumerate(outputs):
            shape = y.shape if case.layout != "expanded" else (1,) * y.ndim
            d = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
            d = d.to(dtype or case.dtype) if k == j else torch.zeros(shape, dtype=dtype or case.dtype)
            made.append(d.expand(y.shape))  # with strides of 0 for expanded memory
        return made

    def _output(self, case: Case, inputs: list[Any], outputs: list[Tensor], j: int) -> Failure | None:
        deltas = self.deltas(case, outputs, j)
        before = [x.clone() for x in (*filter(is_float, inputs), *deltas)]
        try:
            grads = self.function.gradients(inputs, deltas)
        except HandgradError:
            raise
        except Exception as reason:
            why = f"{type(reason).__name__}: {reason}".splitlines()[0]
            return _failure(case, "raised", f"the backward pass raised {why}")
        if not all(torch.equal(x, y) for x, y in zip((*filter(is_float, inputs), *deltas), before, strict=True)):
            return _failure(case, "changed", "the backward pass changes an input or the incoming gradient in place")
        judge, bounds = self._judge(case, outputs, j)
        floats = [i for i, x in enumerate(inputs) if is_float(x)]
        for i, grad, bound in zip(floats, grads, bounds, strict=True):
            result = self._along_directions(judge, i, inputs[i], grad, bound)
            if result is not None:
                return Failure(str(case), j, i, result)
        return None

    def _judge(self, case: Case, outputs: list[Tensor], j: int) -> tuple[Judge, list[float]]:
        wide = self.template.inputs(case, self.judge_dtype, "contiguous")
        deltas = [d.contiguous() for d in self.deltas(case, outputs, j, self.judge_dtype)]
        terms = max(1, *(x.numel() for x in (*filter(is_float, wide), *deltas)))
        wide_outputs = self.function.outputs(wide)
        bounds = allowed_error(self.function.gradients, wide, deltas, case.dtype, terms, wide_outputs)
        return Judge(self.function, wide, deltas, self.judge_dtype), bounds

    def _along_directions(self, judge: Judge, i: int, x: Tensor, grad: Tensor | None, bound: float) -> Diagnosis | None:
        """None if the gradient agrees along every direction."""
        if grad is not None and (grad.shape != x.shape or not torch.isfinite(grad).all()):
            return Diagnosis("shape", "has the wrong shape or is not finite", math.inf)
        generator = torch.Generator().manual_seed(self.seed + 2)
        for k in range(DIRECTIONS):
            v = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            v /= v.norm() or 1.0
            if k == 0 and grad is not None and grad.any():
                v += grad.double() / grad.double().norm()
            right = judge.along(i, v)
            claimed = 0.0 if grad is None else (grad.double() * v).sum().item()
            allowed = right.error + bound * v.norm().item() + 1e-13 * abs(right.value)
            if not abs(claimed - right.value) <= allowed:
                return Diagnosis("other", "is wrong along a random direction", abs(claimed - right.value), allowed)
        return None

    # ── after a failure ─────────────────────────────────────────────────────────────────────────────────────────────

    def diagnosed(self, case: Case, failure: Failure) -> Failure:
        """The failure with the whole gradient compared, if it is small enough to be computed entry by entry."""
        i, j = failure.input, failure.output
        if i is None or j is None:
            return failure
        inputs = self.template.inputs(case)
        if inputs[i].numel() > MAX_ENTRIES:
            return failure
        outputs = self.function.outputs(inputs)
        deltas = self.deltas(case, outputs, j)
        number_of = [k for k, x in enumerate(inputs) if is_float(x)].index(i)
        grad = self.function.gradients(inputs, deltas)[number_of]
        judge, bounds = self._judge(case, outputs, j)
        right, error = judge.gradient(i)
        bound = error + bounds[number_of]
        wide, outs = judge.inputs, self.function.outputs(judge.inputs)
        if right.norm() <= bound:  # the gradient is 0 in theory, and what was given is no rounding error
            return replace(failure, diagnosis=diagnose(grad, torch.zeros_like(right), bound))
        result = diagnose(
            grad,
            right,
            bound,
            terms={name: term(*judge.deltas, *wide) for name, term in self.terms.items()},
            mistakes=self._mistakes(judge, i),
            scales=_scales(inputs, outputs),
            unsummed=self._contributions(judge, i, j),
        )
        if result.kind == "other" and grad is not None:
            one, x, y, delta = torch.ones_like(right), wide[i].double(), outs[j].double(), judge.deltas[j]
            bases = {"1": [one], "the input": [x], "the output": [y], "the incoming gradient": [delta],
                     "1 and the input": [one, x]}  # fmt: skip
            hint = _missing_in_rows(grad.double() - right, bound, bases)
            result = replace(result, kind="missing term", sentence=hint, detail="row") if hint else result
        return replace(failure, diagnosis=result)

    def _mistakes(self, judge: Judge, i: int) -> dict[str, Tensor]:
        ones = [torch.where(d != 0, torch.ones_like(d), d) for d in judge.deltas]
        plain = Judge(self.function, judge.inputs, ones, judge.dtype)
        return {"the incoming gradient were taken as 1": plain.gradient(i)[0]}

    def _contributions(self, judge: Judge, i: int, j: int) -> Tensor | None:
        """The gradient before its sum over the rows of the output; None where the rows do not share this input."""
        delta = judge.deltas[j]
        n = math.prod(delta.shape[:-1])
        if judge.inputs[i].shape == delta.shape or not 2 <= n <= MAX_ROWS:
            return None
        rows = []
        for r in range(n):
            only = torch.zeros(n, delta.shape[-1], dtype=delta.dtype)
            only[r] = delta.reshape(n, -1)[r]
            deltas = [*judge.deltas[:j], only.view(delta.shape), *judge.deltas[j + 1 :]]
            rows.append(Judge(self.function, judge.inputs, deltas, judge.dtype).gradient(i)[0])
        return torch.stack(rows)

    def example(self, case: Case, failure: Failure) -> list[str]:
        """The smallest case that fails in the same place."""
        chosen, found = case, failure
        for small in smaller(case, self.template):
            try:
                again, refused = self.run(small)
            except Exception:
                continue
            if again is not None and not refused and (again.input, again.output) == (failure.input, failure.output):
                chosen, found = small, again
                break
        inputs = self.template.inputs(chosen)
        lines = [f"smallest failing case: {chosen}"]
        lines += [f"  input {k} = {_shown(x)}" for k, x in enumerate(inputs)]
        if found.input is None or found.output is None:
            return lines
        outputs = self.function.outputs(inputs)
        deltas = self.deltas(chosen, outputs, found.output)
        floats = [k for k, x in enumerate(inputs) if is_float(x)]
        grad = self.function.gradients(inputs, deltas)[floats.index(found.input)]
        lines.append(f"  incoming gradient of output {found.output} = {_shown(deltas[found.output])}")
        lines.append(f"  gradient of input {found.input} = {_shown(grad)}")
        if inputs[found.input].numel() <= MAX_ENTRIES:
            right = self._judge(chosen, outputs, found.output)[0].gradient(found.input)[0]
            lines.append(f"  right gradient = {_shown(right)}")
        return lines


def _failure(case: Case, kind: str, sentence: str) -> Failure:
    return Failure(str(case), None, None, Diagnosis(kind, sentence, math.inf))


def _size(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _scales(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> dict[str, float]:
    """The sizes of all axes, and their roots."""
    sizes = {n for x in (*inputs, *outputs) if isinstance(x, Tensor) for n in (*x.shape, x.numel()) if n > 1}
    found = {f"the size {n}": float(n) for n in sorted(sizes)}
    return found | {f"√{n}": math.sqrt(n) for n in sorted(sizes)}


def _missing_in_rows(error: Tensor, bound: float, bases: Mapping[str, list[Tensor]]) -> str:
    """Whether the error is, in every row, a combination of simple tensors: then a term with a sum over it is missing."""
    for name, basis in bases.items():
        if error.ndim == 0 or error.shape[-1] < 2 + len(basis) or any(x.shape != error.shape for x in basis):
            continue
        columns = torch.stack(basis, -1)  # (…, row, basis)
        solved = torch.linalg.lstsq(columns, error[..., None]).solution
        if (error - (columns @ solved)[..., 0]).norm().item() <= bound:
            kind = "a combination" if len(basis) > 1 else "a multiple"
            return f"lacks a term: the error is, in every row, {kind} of {name}"
    return ""


def _shown(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    if x.numel() > 24:
        return f"tensor of shape {tuple(x.shape)}"
    rounded = torch.round(x.detach().double() * 1e5) / 1e5 if x.is_floating_point() else x
    return str(rounded.tolist())
