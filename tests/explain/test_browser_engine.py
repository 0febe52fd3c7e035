"""The engine of assets/engine/, run by node: equal to Python in float64 on every tensor, gradient and step, and its own
checks, which fail when a formula is broken."""

import ast
import json
import math
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import handgrad as hg
from conftest import ROUNDING, need_node, perturb
from handgrad import paper
from handgrad.errors import HandgradError
from handgrad.explain_page import engine_data as engine_module
from handgrad.explain_page.engine_data import check_config, data_of_run, engine_data
from handgrad.explain_page.export import bundle
from handgrad.explain_page.page_files import asset, served
from handgrad.explain_page.session.session import Session
from handgrad.explain_page.views.step import take_step
from handgrad.lora import inject
from handgrad.model.passes.objective import MeanLoss
from handgrad.proof.oracles import relative_error
from handgrad.proof.wide_layers import float64_copy
from handgrad.text import tokenizer
from handgrad.tolerances import ENTRY_FLOOR, TOLERANCE

FILES = [name.removeprefix("engine/") for name in served() if name.startswith("engine/")]
TEXT = "to be, or not"
CHARACTERS = "to be,rn'hf\n"  # more than the text has
LIMIT = TOLERANCE[torch.float64]
SMALL = {
    "n_vocab": len(CHARACTERS),
    "n_context": 17,
    "d_model": 6,
    "n_heads": 2,
    "n_blocks": 2,
    "d_rho": 3,
    "d_head": 5,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"d_hidden": 7},
    "own head": {
        "tied": False,
        "logits_bias": True,
        "key_bias": False,
        "activation": "gelu",
        "n_heads": 3,
        "n_blocks": 1,
    },
    "few biases": {"mlp_bias": False, "out_bias": False, "norm_bias": False, "activation": "relu2", "d_rho": 1},
    "no biases": {"qkv_bias": False, "logits_bias": True, "causal": False, "activation": "relu", "n_blocks": 1},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sentence": {"kind": "sentence"},
    "position": {"kind": "position", "position": 4},
    "difference": {"kind": "difference", "position": 12, "token": 2, "against": 7},
}
FORWARD = {  # what an edit multiplies, in a tensor of 13 tokens: of all heads, or of one
    "blocks.0.a_1": {"rows": [1, 3], "columns": [0, 6], "factor": 1.5},
    "blocks.0.q": {"rows": [2, 9], "columns": [1, 2], "factor": 0.5},
    "blocks.0.k": {"head": 0, "rows": [2, 9], "columns": [0, 2], "factor": -1},
    "blocks.0.v": {"head": 1, "rows": [0, 5], "columns": [3, 5], "factor": 2},
    "blocks.0.rho": {"head": 1, "rows": [6, 7], "columns": [3, 4], "factor": 0},  # an attention weight
    "blocks.0.a_3": {"rows": [0, 13], "columns": [5, 10], "factor": 0},  # a head
    "blocks.0.skip_5": {"rows": [4, 13], "columns": [0, 6], "factor": 0},
    "blocks.0.a_8": {"rows": [0, 13], "columns": [3, 4], "factor": 0},  # a neuron
    "blocks.1.a_2": {"rows": [0, 4], "columns": [0, 3], "factor": 0.3},
    "blocks.1.a_4": {"rows": [0, 4], "columns": [0, 3], "factor": 0.3},
    "blocks.1.a_5": {"rows": [2, 5], "columns": [0, 3], "factor": 0.3},
    "blocks.1.a_6": {"rows": [0, 4], "columns": [2, 3], "factor": 0.3},
    "blocks.1.a_7": {"rows": [0, 4], "columns": [0, 3], "factor": -0.3},
    "blocks.1.a_9": {"rows": [3, 4], "columns": [0, 3], "factor": 3},
    "blocks.1.skip_10": {"rows": [9, 11], "columns": [0, 6], "factor": 0},
    "blocks.1.a_10": {"rows": [5, 8], "columns": [1, 3], "factor": 0.3},
    "a_11": {"rows": [0, 4], "columns": [0, 3], "factor": 0.3},
    "a_12": {"rows": [0, 4], "columns": [0, 3], "factor": 0.3},
}
BACKWARD = {
    "delta_12": {"rows": [2, 4], "columns": [0, 3], "factor": 0},
    "delta_11": {"rows": [2, 4], "columns": [0, 3], "factor": 0},
    **{f"blocks.1.delta_{x}": {"rows": [1, 9], "columns": [1, 3], "factor": 0.5} for x in (10, 8, 6, 4, 2)},
    **{f"blocks.0.delta_{x}": {"rows": [1, 9], "columns": [1, 3], "factor": 0.5} for x in (9, 7, 5, 3, 1)},
    **{f"blocks.0.delta_{x}": {"head": 1, "rows": [2, 9], "columns": [0, 2], "factor": 0.5} for x in "qkv"},
    "blocks.0.delta_skip_5": {"rows": [0, 13], "columns": [0, 6], "factor": 0},
    "blocks.0.delta_skip_10": {"rows": [0, 5], "columns": [0, 6], "factor": 0},
    "blocks.1.delta_rho": {"head": 0, "rows": [5, 9], "columns": [0, 2], "factor": 2},
    "blocks.1.delta_causal": {"head": 1, "rows": [5, 9], "columns": [0, 4], "factor": -1},
    "blocks.1.delta_raw": {"head": 0, "rows": [8, 9], "columns": [3, 4], "factor": 0},  # a score
}
EDITS: dict[str, dict[str, Any]] = {"none": {}, "forward": FORWARD, "backward": BACKWARD}
STEPS = [["SGD", 0.1], ["Adam", 0.01], ["Adam", 0.02], ["SGD", 0.03], ["Adam", 0.01]]  # each forgets the other's state
FAULTS = {  # a line of a formula, what replaces it, and some of the checks that must fail
    "linear": ("product(delta, t(w))", "product(delta, map(t(w), Math.abs))", {"blocks.1.delta_3", "delta_11"}),
    "linear.js": ("product(t(a), delta)", "product(t(a), map(delta, Math.abs))", {"transformer.h.0.mlp.c_fc.weight"}),
    "embedding": ("product(t(ohe(ids, n_rows)), delta)", "product(t(ohe(ids.map((id) => ids.indexOf(id)), n_rows)), delta)",
                  {"transformer.wte.weight", "grad_w_tok"}),
    "layernorm": ("minus(minus(scaled(d, g), mean_part), spread_part)", "minus(scaled(d, g), mean_part)",
                  {"blocks.0.delta_1", "blocks.1.delta_5"}),
    "layernorm.js": ("minus(scaled(d, g), mean_part)", "scaled(d, g)", {"blocks.0.delta_10", "blocks.0.delta_5"}),
    "activation": ("(1 - t * t) *", "(1 - t) *", {"blocks.0.delta_7"}),
    "attention": ("minus(delta_rho, tilde_columns(row_dot(delta_rho, rho), rho.cols))", "delta_rho",
                  {"blocks.0.delta_causal", "blocks.1.delta_raw", "blocks.1.delta_k"}),
    "attention.js": ("scale(delta_scaled, q.cols)", "delta_scaled", {"blocks.0.delta_raw", "blocks.0.delta_q"}),
    "attention.heads": ("product(t(delta_raw), q)", "product(delta_raw, q)",
                        {"blocks.0.delta_k", "transformer.h.1.attn.c_attn.weight"}),
    "attention.mask": ("out.data.fill(-Infinity, ", "out.data.fill(-1, ", {"blocks.0.rho"}),
    "loss": ("minus(y_pred, y_gt(targets, y_pred.cols))", "y_pred", {"delta_12"}),
    "objective": ("scaled(1 / count(targets), loss", "scaled(1, loss", {"delta_12", "blocks.0.delta_1"}),
    "transformer": ('plus(at("delta_skip_5", delta_5), through_1)', "through_1", {"blocks.0.delta_1"}),
    "transformer.js": ("plus(grad, t(linear.grad_w(delta_12, f.a_11)))", "grad", {"transformer.wte.weight", "grad_w_tok"}),
}  # fmt: skip
REFUSED = {"model: other": "té", "model: quote": 't"\x85o', "model: tab": "t\to", "model: far": "t😀"}

Answers = dict[str, Any]


def make_model(dtype: torch.dtype = torch.float32, **shape: Any) -> hg.GPT:
    """Of odd shape, with weights large enough that no gradient is nearly 0, and that float32 has exactly."""
    model = hg.GPT(hg.preset("nano", **{**SMALL, **shape}), seed=0)
    perturb(model, scale=0.25)
    return model if dtype is torch.float32 else float64_copy(model)


def characters(text: str = CHARACTERS) -> tokenizer.Tokenizer:
    return tokenizer.make("chars", [text])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What the engine answers to all cases of this file, computed by one process."""
    node, folder = need_node(), tmp_path_factory.mktemp("engine")
    known = characters()
    models = {name: engine_data(make_model(**shape), known) for name, shape in SHAPES.items()}
    cases: Answers = {}
    short = {"text": TEXT[:7]}
    for name in SHAPES:
        for objective, given in OBJECTIVES.items():
            cases[f"{name}, {objective}"] = {"task": "pass", "model": name, "text": TEXT, "objective": given}
        cases[f"{name}, again"] = {"task": "round_trip", "model": name}
        cases[f"{name}, checks"] = {"task": "checks", "model": name, **short}
    tied = {"model": "tied", "text": TEXT}
    for name, edits in {"forward": FORWARD, "backward": BACKWARD}.items():
        cases[f"edits {name}"] = {**tied, "task": "pass", "objective": OBJECTIVES["position"], "edits": edits}
    cases["forward only"] = {**tied, "task": "pass", "edits": FORWARD, "forwardOnly": True}
    cases["steps"] = {**tied, "task": "steps", "steps": STEPS, "objective": OBJECTIVES["position"]}
    cases["diverging"] = {**tied, "task": "steps", "steps": [["SGD", 100.0]] * 8 + [["Adam", 100.0]] * 3}
    cases["bundle"] = {**tied, "task": "pass", "version": "bundle"}
    cases["difference, checks"] = {
        **tied,
        **short,
        "task": "checks",
        "objective": {**OBJECTIVES["difference"], "position": 5},
    }
    cases["docs"] = {"task": "docs", "model": "tied"}
    cases |= messages(tied)
    write_versions(folder)
    for fault in FAULTS:
        cases[f"fault: {fault}"] = {
            **tied,
            **short,
            "task": "checks",
            "version": fault,
            "only": sorted(FAULTS[fault][2]),
        }
    (folder / "package.json").write_text(json.dumps({"type": "module"}))
    (folder / "run_engine.js").write_text((Path(__file__).parent / "js" / "run_engine.js").read_text())
    done = subprocess.run(
        [node, "run_engine.js"],
        input=json.dumps({"folder": str(folder), "models": models, "cases": cases}),
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: Answers = json.loads(done.stdout)
    return found


def messages(tied: Answers) -> Answers:
    """Cases that are refused."""
    wrong = {
        "kind": {"kind": "word"}, "far": {"kind": "position", "position": 13}, "last": {"kind": "position", "position": 12},
        "same": {**OBJECTIVES["difference"], "against": 2}, "id": {**OBJECTIVES["difference"], "against": 99},
    }  # fmt: skip
    found = {f"objective: {name}": {**tied, "task": "pass", "objective": given} for name, given in wrong.items()}
    found |= {name: {"task": "pass", "model": "tied", "text": text} for name, text in REFUSED.items()}
    for name, ids in {"short": [1], "long": [1] * 18, "outside": [1, 12]}.items():
        found[f"ids: {name}"] = {"task": "pass", "model": "tied", "ids": ids}
    return {
        **found,
        "characters": {"task": "tokens", "vocabulary": ["b", "é", "😀"], "text": "😀éb"},
        "edit: name": {**tied, "task": "pass", "edits": {"blocks.0.a_33": FORWARD["a_12"]}},
        "edit: shape": {**tied, "task": "wrong_edit"},
        "edit: later": {**tied, "task": "pass", "edits": BACKWARD, "forwardOnly": True},
        "trace: name": {**tied, "task": "asked", "name": "a_13"},
        "trace: forward": {**tied, "task": "asked", "name": "delta_12", "forwardOnly": True},
        "trace: head": {**tied, "task": "asked", "name": "blocks.0.q"},
        "step: kind": {**tied, "task": "steps", "steps": [["Muon", 0.1]]},
        "step: rate": {**tied, "task": "steps", "steps": [["SGD", 0]]},
        "step: forward": {**tied, "task": "step_of_forward"},
    }


def write_versions(folder: Path) -> None:
    """Write the engine, the same as a script of an exported page has it, and once with each fault."""
    for version in ("engine", *FAULTS):
        (folder / version).mkdir()
        for name in FILES:
            (folder / version / name).write_text(asset(f"engine/{name}"), encoding="utf-8")
    for fault, (line, broken, _) in FAULTS.items():
        file = folder / fault / f"{fault.partition('.')[0]}.js"
        text = file.read_text(encoding="utf-8")
        assert text.count(line) == 1, f"{file.name} does not have, or has twice: {line}"
        text = text.replace(line, broken).replace("import { plus,", "import { map, plus,")
        file.write_text(text, encoding="utf-8")
    scopes = [
        f"(() => {{ {bundle(f'engine/{name}.js')}\nreturn engine_{name}Module; }})()"
        for name in ("transformer", "weights")
    ]
    (folder / "example.js").write_text(example(), encoding="utf-8")
    (folder / "bundle.js").write_text(f"export default {{ ...{', ...'.join(scopes)} }};", encoding="utf-8")


def example() -> str:
    """The lines of the documentation, which also print the first entry of everything that they name."""
    page = (Path(__file__).parents[2] / "docs" / "explain-engine.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```js\n(.*?)^```", page, re.M | re.S)
    shown = re.sub(r"^(trace\.|check_|identities|run\()(.*?);", r"shown.push(\1\2);", code, flags=re.M)
    return f"export const shown = [];\n{shown}"


def matrix(x: Any) -> torch.Tensor:
    """A matrix of an answer, or one per head."""
    if isinstance(x, list):
        return torch.stack([matrix(head) for head in x])
    return torch.tensor([float(v) for v in x["data"]], dtype=torch.float64).view(x["rows"], x["cols"])


def compared(answer: Answers, expected: Mapping[str, torch.Tensor], limit: float = LIMIT) -> None:
    """Every tensor of a trace and nothing else, each relative to the largest of its kind or to a share of it."""
    assert "error" not in answer, answer
    assert answer["values"].keys() == expected.keys()
    for kind in ("delta", "grad", "a"):
        names = [name for name in expected if kind_of(name) == kind]
        largest = max((expected[name].abs().max().item() for name in names), default=0.0)
        for name in names:
            ours = matrix(answer["values"][name]).view(expected[name].shape)
            error = relative_error(ours, expected[name], ENTRY_FLOOR * largest)
            assert error <= limit, f"{name}: {error:.1e}"


def kind_of(name: str) -> str:
    """delta or grad; a of everything else"""
    kind = name.rpartition(".")[2].partition("_")[0]
    return kind if kind in ("delta", "grad") else "a"


def edit(rows: list[int], columns: list[int], factor: float, head: int | None = None) -> Any:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        x[... if head is None else head, slice(*rows), slice(*columns)] *= factor
        return x

    return multiply


@cache
def traced(
    shape: str, objective: str = "sentence", edits: str = "none", dtype: torch.dtype = torch.float64
) -> hg.Trace:
    """What Python computes of the same case."""
    ids = characters().encode(TEXT)
    given = {name: edit(**what) for name, what in EDITS[edits].items()}
    tokens, targets = torch.tensor([ids]), torch.tensor([[*ids[1:], -100]])
    return hg.trace(
        make_model(dtype, **SHAPES[shape]), tokens, targets, objective=python_objective(objective), edit=given
    )


def python_objective(name: str) -> Any:
    rest = {key: value for key, value in OBJECTIVES[name].items() if key != "kind"}
    return {"sentence": MeanLoss, "position": hg.PositionLoss, "difference": hg.LogitDifference}[name](**rest)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_and_gradient_is_pythons(answers: Answers, shape: str, objective: str) -> None:
    found, expected = answers[f"{shape}, {objective}"], traced(shape, objective)
    compared(found, expected)
    assert found["value"] == pytest.approx(expected.loss, rel=LIMIT)
    mean = traced(shape)
    assert found["loss"] == pytest.approx(mean.loss, rel=LIMIT) and len(found["losses"]) == len(TEXT) - 1
    assert found["losses"][4] == pytest.approx(traced(shape, "position").loss, rel=LIMIT)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_have_the_names_of_the_files(answers: Answers, shape: str) -> None:
    model = make_model(torch.float64, **SHAPES[shape])
    ids = torch.tensor([characters().encode(TEXT)])
    model.loss_and_grads(ids, torch.cat([ids[:, 1:], ids.new_full((1, 1), -100)], 1))
    found, again = answers[f"{shape}, sentence"]["grads"], answers[f"{shape}, again"]
    parameters = dict(model.named_parameters())
    assert found.keys() == again.keys() == parameters.keys()
    for name, p in parameters.items():
        assert p.grad is not None
        assert relative_error(matrix(found[name]).view(p.shape), p.grad, ENTRY_FLOOR) <= LIMIT, name
        assert torch.equal(matrix(again[name]).view(p.shape), p), f"{name} is cut into heads and joined"


def test_float32(answers: Answers) -> None:
    compared(answers["tied, sentence"], traced("tied", dtype=torch.float32), ROUNDING[torch.float32])


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_edits(answers: Answers, which: str) -> None:
    """All at once: one at another place would change what is after it."""
    found, expected = answers[f"edits {which}"], traced("tied", "position", which)
    compared(found, expected)
    assert found["value"] == pytest.approx(expected.loss, rel=LIMIT)
    assert (found["value"] == answers["tied, position"]["value"]) == (which == "backward")


def test_a_forward_pass_alone(answers: Answers) -> None:
    found = answers["forward only"]
    whole = traced("tied", edits="forward")
    compared(found, {name: x for name, x in whole.items() if kind_of(name) == "a"})
    assert found["value"] == pytest.approx(whole.loss, rel=LIMIT) and found["grads"] == {}


def test_steps(answers: Answers) -> None:
    model = make_model(torch.float64, **SHAPES["tied"])
    session = Session(model, characters(), "small", "for a test", TEXT)
    sentence = session.sentence(TEXT, 0, python_objective("position"))
    found = answers["steps"]
    for (optimizer, rate), taken in zip(STEPS, found["taken"], strict=True):
        made = take_step(session, sentence, rate, optimizer)
        for name in ("loss", "predicted", "measured"):
            assert taken[name] == pytest.approx(made[name], rel=LIMIT, abs=LIMIT), (optimizer, rate)
        sentence = session.find(made["id"])
    weights = session.version(sentence.version).weights
    for name, p in model.named_parameters():
        assert relative_error(matrix(found["weights"][name]).view(p.shape), weights[name]) <= LIMIT, name


def test_steps_that_diverge(answers: Answers) -> None:
    losses = [float(step["measured"]) for step in answers["diverging"]["taken"]]
    assert max(losses) > 10 * losses[0] or any(map(math.isnan, losses))


def test_the_checks_pass(answers: Answers) -> None:
    """Every error signal, every gradient, and every identity that Python's trace and model have."""
    for case in (*(f"{shape}, checks" for shape in SHAPES), "difference, checks"):
        found, shape = answers[case], case.partition(",")[0]
        shape = shape if shape in SHAPES else "tied"
        every = [*found["signals"], *found["parameters"], found["together"], *found["identities"]]
        assert [x for x in every if not x["passed"]] == [], case
        assert {x["name"] for x in found["signals"]} == {name for name in traced(shape) if kind_of(name) == "delta"}
        names = {name for name, _ in make_model(**SHAPES[shape]).named_parameters()}
        assert {x["name"] for x in found["parameters"]} == names
        for x in found["signals"]:
            assert abs(x["predicted"]) > 1e-3, f"{case}: {x['name']} is nearly 0, so its check says little"
    assert {x["what"] for x in answers["tied, checks"]["identities"]} == {
        "each row sums to 0", "each row sums to 0 (26)", "each row sums to 1 (14)", "0 above the diagonal",
        "each column sums to 0, so ∂b_k is 0 (29)", "the sum of the gradients of both uses (R9)",
        "the last row is 0, because the last token has no target",
    }  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checks_find_a_broken_formula(answers: Answers, fault: str) -> None:
    found = answers[f"fault: {fault}"]
    assert "error" not in found, found
    failed = {x["name"] for kind in ("signals", "parameters", "identities") for x in found[kind] if not x["passed"]}
    assert FAULTS[fault][2] <= failed, sorted(failed)


def test_as_one_script(answers: Answers) -> None:
    assert answers["bundle"] == answers["tied, sentence"]


def test_the_example_of_the_documentation(answers: Answers) -> None:
    value, delta, rho, gradient, edited, signal, parameters, identities = answers["docs"]
    expected = traced("tied", "position")
    assert value == pytest.approx(expected.loss)
    assert torch.allclose(matrix(delta), expected["blocks.1.delta_5"])
    assert torch.allclose(matrix(rho), expected["blocks.0.rho"][1])
    assert torch.allclose(matrix(gradient), expected["grad_w_tok"])
    assert edited != value and all(x["passed"] for x in (signal, parameters, *identities))


def test_characters(answers: Answers) -> None:
    assert answers["characters"] == {"ids": [2, 1, 0], "text": "😀éb"}
    for case, text in REFUSED.items():
        with pytest.raises(HandgradError) as refused:
            characters().encode(text)
        assert answers[case] == {"error": str(refused.value), "kind": "EngineError"}


def test_messages(answers: Answers) -> None:
    for name, given in {"far": hg.PositionLoss(13), "last": hg.PositionLoss(12), "same": hg.LogitDifference(12, 2, 2),
                        "id": hg.LogitDifference(12, 2, 99)}.items():  # fmt: skip
        ids = torch.tensor([characters().encode(TEXT)])
        with pytest.raises(HandgradError) as refused:
            make_model(**SHAPES["tied"]).loss(
                ids, torch.cat([ids[:, 1:], ids.new_full((1, 1), -100)], 1), objective=given
            )
        assert answers[f"objective: {name}"] == {"error": str(refused.value), "kind": "EngineError"}
    expected = {
        "objective: kind": "unknown objective 'word': choose one of sentence, position, difference",
        "ids: short": "a sentence needs at least two tokens: one to read and one to predict",
        "ids: long": "18 tokens do not fit into a context of 17: shorten the sequence",
        "ids: outside": "token id 12 is outside the vocabulary of 12",
        "edit: name": "there is nothing to edit at 'blocks.0.a_33'",
        "edit: shape": "the edit of blocks.0.a_3 must return a matrix 13 × 10",
        "edit: later": "there is nothing to edit at 'delta_12'",
        "trace: name": "the trace has no 'a_13'",
        "trace: forward": "the trace has no 'delta_12'",
        "trace: head": "blocks.0.q has 2 heads: choose one from 0 to 1",
        "step: kind": "unknown optimizer 'Muon': choose SGD or Adam",
        "step: rate": "the learning rate must be above 0 and at most 100, not 0",
        "step: forward": "a forward pass has no gradients: run the model without forwardOnly",
    }
    assert {case: answers[case] for case in expected} == {
        case: {"error": message, "kind": "EngineError"} for case, message in expected.items()
    }


def test_every_formula_has_the_name_that_paper_gives_it() -> None:
    """In the same order, so that a file can be read beside the Python one."""
    for name in FILES:
        beside = Path(paper.__file__).with_name(name.replace(".js", ".py"))
        if beside.exists():
            python = [x.name for x in ast.parse(beside.read_text()).body if isinstance(x, ast.FunctionDef)]
            ours = re.findall(r"^export (?:const|function) (\w+)", asset(f"engine/{name}"), re.M)
            shared = [x for x in ours if x in python]
            assert shared == [x for x in python if x in ours], name
            assert [x for x in ours if x not in python] == {"loss.js": ["NO_TARGET"], "transformer.js": ["run"]}.get(
                name, []
            )


def test_the_data_of_a_run(tmp_path: Path) -> None:
    model, known = make_model(), characters()
    hg.save(model, tmp_path / "model")
    known.write(tmp_path / "model")
    assert data_of_run(tmp_path / "model") == engine_data(model, known)


def test_other_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = characters()
    with pytest.raises(HandgradError, match="is of the family llama"):
        check_config(hg.preset("nano-llama"))
    with pytest.raises(HandgradError, match="does not compute window=4"):
        check_config(hg.preset("nano", window=4))
    assert {hg.preset("nano", **{**SMALL, **shape}).activation for shape in SHAPES.values()} == {
        *engine_module.ACTIVATIONS
    }
    with monkeypatch.context() as patch, pytest.raises(HandgradError, match="does not compute activation='gelu_tanh'"):
        patch.setattr(engine_module, "ACTIVATIONS", ("relu",))
        check_config(hg.preset("nano"))
    with pytest.raises(HandgradError, match="this model reads bytes by 256 ids: train one with tokenizer='chars'"):
        engine_data(make_model(n_vocab=256), tokenizer.make("bytes", ()))
    with pytest.raises(HandgradError, match="this model reads characters by 13 ids"):
        engine_data(make_model(n_vocab=13), known)
    with pytest.raises(HandgradError, match="load it as float32"):
        engine_data(make_model(torch.float64), known)
    adapted = make_model()
    inject(adapted, 1)
    with pytest.raises(HandgradError, match="without adapters or packed matrices"):
        engine_data(adapted, known)
