"""Rules that are checked by reading the source: imports, autograd, sizes of files, names, documentation."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "handgrad"
FILES = sorted(SOURCE.rglob("*.py"))

# A package (or a module at the root) imports those further right only. docs/architecture.md shows the same rule.
RULE = """
__main__ → cli → api → display, explain_page, serve, nn → learn → training, ledger, auditing → proof → plan → per_example
→ formats, inference → lora, optim → text, model → ops → kernels → gguf → files, paper, families → sandbox, checks, web
→ errors, formatting, machine, tolerances
"""
LEVELS = [{name.strip() for name in level.split(",")} for level in reversed(RULE.split("→"))]
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def package_of(file: Path) -> str:
    """The package or root module that a file belongs to."""
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_packages(file: Path) -> set[str]:
    """The packages of handgrad that a file imports."""
    package = ["handgrad", *file.relative_to(SOURCE).parts[:-1]]
    found = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = base + (node.module.split(".") if node.module else [])
            names = [module] if len(module) > 1 or module != ["handgrad"] else [[*module, a.name] for a in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "handgrad" and len(name) > 1}
    return found


def test_imports_go_one_way() -> None:
    for file in (f for f in FILES if package_of(f) != "__init__"):
        here = package_of(file)
        for other in imported_packages(file) - {here, "__version__"}:
            assert LEVEL[other] < LEVEL[here], f"{file}: {here} must not import {other}"


def test_every_package_is_in_the_rule() -> None:
    assert {package_of(f) for f in FILES} - {"__init__"} == set(LEVEL)


def test_few_modules_at_the_root() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 8


def test_a_package_says_what_it_is_for() -> None:
    """What the package is for, what to import from it, what it must not know: at least three sentences."""
    for file in (f for f in FILES if f.name == "__init__.py" and f.parent != SOURCE):
        text = ast.get_docstring(tree_of(file)) or ""
        assert len(re.findall(r"[.;:](\s|$)", text)) >= 3, f"{file}: {text!r}"


def test_a_file_opens_with_what_it_is() -> None:
    assert [file for file in FILES if not ast.get_docstring(tree_of(file))] == [], "files without a docstring"


def test_the_architecture_page_shows_the_rule() -> None:
    assert RULE.strip() in (ROOT / "docs" / "architecture.md").read_text()


def test_paper_imports_torch_alone() -> None:
    for file in (SOURCE / "paper").glob("*.py"):
        assert imported_packages(file) <= {"paper"}, file


def uses_of_autograd(code: str) -> list[str]:
    """Names and calls that differentiate by library instead of by hand."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name.endswith("_backward") or name in (
                "autograd",
                "enable_grad",
                "retain_grad",
                "set_grad_enabled",
                "vjp",
            ):
                found.append(name)
        if isinstance(node, ast.ImportFrom | ast.Import) and "autograd" in ast.dump(node):
            found.append("import autograd")
        # torch's tensor.backward takes no error signal; ours always does
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "backward"
            and not node.args
        ):
            found.append(".backward()")
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("load", "loads"):
            owner = ast.unparse(node.func)
            if owner in ("torch.load", "pickle.load", "pickle.loads"):
                found.append(owner)
    return found


# The oracles, the passes of models and functions that are audited, and the reference with rounding or known mistakes.
ORACLES = [
    SOURCE / name
    for name in (
        "proof/oracles.py",
        "proof/reference.py",
        "proof/recorded_steps.py",
        "proof/reference_model.py",
        "proof/rounding.py",
        "auditing/model/observe.py",
        "auditing/model/heads.py",
        "auditing/model/mixtures.py",
        "auditing/model/balance.py",
        "auditing/gradcheck/function.py",
    )
]
# The bridge defines functions that autograd calls. This is all it may take from autograd: nothing that asks for a gradient.
BRIDGE = {"from torch.autograd import Function"}


def without_bridge(file: Path) -> str:
    """The code of a file; of the bridge, without the names it needs: this one and what a function saves."""
    code = file.read_text()
    if package_of(file) != "nn":
        return code
    kept = (line for line in code.splitlines(True) if line.rstrip() not in BRIDGE)
    return "".join(kept).replace("ctx.save_for_backward(", "ctx.save(")


def test_no_autograd_in_the_product() -> None:
    for file in (f for f in FILES if f not in ORACLES):
        code = without_bridge(file)
        if "ledger" in file.parts:
            assert not re.search(r"torch\.autograd|requires_grad", code), file
        assert uses_of_autograd(code) == [], file


def test_uses_of_autograd_are_found() -> None:
    assert uses_of_autograd("import torch\ntorch.autograd.grad(a, b)")
    assert uses_of_autograd("loss.backward()")
    assert uses_of_autograd("torch.ops.aten.native_layer_norm_backward(x)")
    assert uses_of_autograd("from torch.autograd import Function")
    assert uses_of_autograd("with torch.enable_grad(): pass")
    assert uses_of_autograd("torch.load('x')")
    assert not uses_of_autograd("layer.backward(delta, a)")


def functions_of(code: str) -> list[ast.ClassDef]:
    """The classes that autograd calls."""
    classes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef)]
    return [node for node in classes if any(ast.unparse(base) == "Function" for base in node.bases)]


def test_the_bridge_hands_gradients_over_and_never_asks_for_one() -> None:
    """Functions of autograd are in `nn` alone, and each can be differentiated once: by hand."""
    owners = {package_of(f) for f in FILES if "Function" in f.read_text() and functions_of(f.read_text())}
    assert owners == {"nn"}
    for function in (f for file in (SOURCE / "nn").glob("*.py") for f in functions_of(file.read_text())):
        backward = next(x for x in function.body if isinstance(x, ast.FunctionDef) and x.name == "backward")
        assert [ast.unparse(x) for x in backward.decorator_list] == ["staticmethod", "first_derivative"], function.name
    asked = "from torch.autograd import Function, grad\n", "import torch.autograd\n", "torch.autograd.grad(x, y)\n"
    assert all(uses_of_autograd(line) and line.rstrip() not in BRIDGE for line in asked)


def test_nothing_that_trains_or_runs_a_model_imports_proof() -> None:
    users = {package_of(f) for f in FILES if {"proof", "ledger", "auditing"} & imported_packages(f)}
    assert users <= {"proof", "ledger", "auditing", "learn", "explain_page", "nn", "cli", "__init__"}


def test_new_tensors_name_their_device() -> None:
    makers = {"zeros", "ones", "empty", "full", "arange", "eye", "randn", "rand", "tensor", "linspace"}
    for file in (f for f in FILES if package_of(f) in ("ops", "model")):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{m}" for m in makers}:
                named = {k.arg for k in node.keywords}
                assert named & {"device", "generator"}, f"{file.name}:{node.lineno} assumes a device"


def test_one_name_in_four_places() -> None:
    for op in (SOURCE / "ops").glob("[a-z]*.py"):
        if not any(isinstance(node, ast.FunctionDef) for node in ast.parse(op.read_text()).body):
            continue  # a table of choices has no formula
        assert (SOURCE / "paper" / op.name).exists(), op.name
        assert (ROOT / "tests" / "ops" / f"test_{op.name}").exists(), op.name
        assert (ROOT / "docs" / "layers" / f"{op.stem}.md").exists(), op.name


def test_documentation_points_to_things_that_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, t) for page in pages for t in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())]
    assert len(links) >= 50, "the documentation links to its parts; is it still read rightly?"
    for page, target in links:
        assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_commands_in_the_documentation_choose_checks_that_exist() -> None:
    from handgrad.ledger import select

    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [(page, p) for page in pages for p in re.findall(r"verify --only '?([^\s'`]+)'?", page.read_text())]
    assert len(found) >= 5, "the documentation names checks; is it still read rightly?"
    for page, pattern in found:
        assert select(pattern), f"{page.name}: {pattern}"


# Tables: one entry after another, not code to follow from top to bottom.
TABLES = {"ledger/errata.py", "ledger/head_forward.py"}


def test_files_are_short() -> None:
    for file in FILES:
        lines = len(file.read_text().splitlines())
        assert lines <= 400 or str(file.relative_to(SOURCE)) in TABLES, f"{file} has {lines} lines"


def test_no_block_of_six_lines_stands_twice() -> None:
    seen: dict[str, str] = {}
    for file in [*FILES, *sorted(SOURCE.rglob("*.js"))]:
        numbered = [(i, line.strip()) for i, line in enumerate(file.read_text().splitlines(), 1)]
        code = [(i, s) for i, s in numbered if len(s) > 3 and not s.startswith(("#", "//", "@", "import ", "from "))]
        for k in range(len(code) - 5):
            block = "\n".join(line for _, line in code[k : k + 6])
            where = f"{file.relative_to(SOURCE)}:{code[k][0]}"
            assert block not in seen, f"{where} repeats {seen[block]}"
            seen[block] = where


def test_layers_and_configurations_are_used_through_their_interface() -> None:
    """Only `adapters_of` tells LoRA from Linear, and neither the display nor the command line asks for a type of options."""
    for file in FILES:
        tests = [
            ast.unparse(node.args[1])
            for node in ast.walk(tree_of(file))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        ]
        if file != SOURCE / "lora" / "injection.py":
            assert not any("LoRA" in kind for kind in tests), file
        if package_of(file) in ("cli", "display"):
            assert not any("Options" in kind or "Config" in kind for kind in tests), file
