"""Results as `handgrad bench --json` writes them, with invented figures, for tests of the table and the plot."""

from dataclasses import asdict, replace
from typing import Any

from bench.cases import COMPILED, EAGER, LEAST_MEMORY, LOOP, MATMULS, PEFT
from bench.finetune import PACKED, RECOMPUTE, name_of
from bench.generate import WITHOUT_CACHE
from bench.row import AUTOCAST, BOUND, Row
from bench.scenarios import TORCH_BFLOAT16, TORCH_FLOAT32

GB = 10**9
OURS = "handgrad finetune"


def rows() -> list[Row]:
    """Rows of every scenario in the table."""
    found = []
    for case, tokens, hand, eager, compiled in (("1×512", 512, 2.0, 2.8, 2.2), ("1×1024", 1024, 4.0, 5.0, 4.4)):
        case = f"GPT-2 124M, {case}"
        found += [
            Row(
                "train",
                case,
                "handgrad",
                tokens,
                hand,
                hand,
                mfu=0.9,
                predicted_seconds=1.9,
                memory=GB,
                memory_ratio=0.2,
            ),
            Row("train", case, EAGER, tokens, eager, eager, memory=5 * GB),
            Row("train", case, COMPILED, tokens, compiled, compiled),
            Row("train", case, LOOP, tokens, 1.01 * hand, hand),
            Row("train", case, MATMULS, tokens, 0.9 * hand, hand),
        ]
    nano = "nano recipe, 12×64"
    found += [
        Row("train", nano, "handgrad", 768, 0.0321, 0.033, mfu=0.45),
        Row("train", nano, EAGER, 768, 0.0271, 0.028),
        Row("train", nano, COMPILED, 768, problem="missing: no C++ compiler"),
        Row("memory", "GPT-2 124M, 4×1024", "handgrad", 4096, 16.0, 16.0, memory=GB, predicted_memory=GB),
        Row("memory", "GPT-2 124M, 4×1024", EAGER, 4096, 22.0, 22.0, memory=5 * GB),
        Row("memory", "GPT-2 124M, 4×1024", LEAST_MEMORY, 4096, 18.0, 18.0, memory=GB // 2),
    ]
    for case, tokens, hand, peer in (("1×256", 256, 0.6, 0.9), ("4×1024", 4096, 11.0, 18.0)):
        found += [
            Row("lora", f"LoRA r=16, {case}", "handgrad", tokens, hand, hand, mfu=0.88, memory=GB // 2),
            Row("lora", f"LoRA r=16, {case}", PEFT, tokens, peer, peer, memory=9 * GB),
        ]
    case = "SmolLM2 shape: LoRA r=16, 1×256"
    found += [
        Row("lora", case, "handgrad", 256, 0.6, 0.6, memory=GB // 2),
        Row("lora", case, PEFT, 256, 0.9, 0.9, memory=4 * GB),
        Row("lora", case, "handgrad, mixed", 256, 0.3, 0.3, memory=GB // 4, gradient_error=0.02, cosine=0.9998),
        Row("lora", case, PEFT + AUTOCAST, 256, 0.66, 0.66, memory=2 * GB, gradient_error=0.03, cosine=0.9995),
        Row("products", "c_fc: a w", "as written", 1024, 0.04, 0.04, 1.0),
    ]
    for n in (256, 4096):
        rates = {"handgrad, mixed": 380.0, TORCH_BFLOAT16: 400.0, TORCH_FLOAT32: 190.0}
        found += [Row("products", f"c_fc: a w, {n} rows", x, n, 1.0, 1.0, gflops=rate) for x, rate in rates.items()]
    for n in (128, 512, 2048, 8192):
        t = 0.3 * n / 128 + (n / 4096) ** 2
        for name, factor in ((OURS, 1.0), (name_of(PACKED | RECOMPUTE), 1.3)):
            memory = int((0.6 + n / 2000 / factor**3) * GB)
            found.append(
                Row("context", f"{n:,} tokens", name, n, factor * t, t, memory=memory, above_torch=memory - GB // 5)
            )
    for shape, tokens, ours, library in (
        ("1×128", 128, 1.8, 1.0),
        ("1×1024", 1024, 20.0, 24.4),
        ("12×64", 768, 2.0, 2.2),
    ):
        for direction in ("backward", "forward"):
            case = f"{direction}, 12 heads of 64, {shape}"
            found += [
                Row("attention", case, "handgrad", tokens, ours / 1e3, ours / 1e3, library / ours, 1e-7),
                Row("attention", case, "library kernel", tokens, library / 1e3, library / 1e3, 1.0),
            ]
    for n, ours in ((32, 0.4), (2048, 0.5)):
        found += [
            Row("generate", f"decode, 8 bits, 1×{n}", "handgrad", 16, ours, ours, 1.25, of_bound=0.9),
            Row("generate", f"decode, 8 bits, 1×{n}", "handgrad, float32", 16, 1.0, 1.0),
            Row("generate", f"decode, 8 bits, 1×{n}", BOUND, 16, 0.9 * ours, ours),
            Row("generate", f"{n} new tokens, {WITHOUT_CACHE}", "handgrad", n, n / 50, n / 50),
            Row("generate", f"{n} new tokens, {WITHOUT_CACHE}", "handgrad, without a cache", n, n**2 / 800, 9.0),
        ]
    found += [
        Row("generate", "16 uneven prompts", "handgrad", 1024, 2.0, 2.0),
        Row("generate", "16 uneven prompts", "transformers", 1024, 5.0, 5.0),
        Row("shared", "1 busy core", "handgrad", 768, 0.05, 0.05, of_idle=0.64),
        Row("shared", "1 busy core", "torch's default threads", 768, 2.0, 2.0, of_idle=0.02),
    ]
    return found


def result(only: str = "", **changes: Any) -> dict[str, Any]:
    """A result of a quiet machine; of one scenario if it is named."""
    figures = [asdict(replace(row)) for row in rows() if row.scenario == only or not only]
    machine = {
        "load": 0.05, "cores": 2, "threads": 2, "cpu": "A Processor", "memory": 8 * GB, "load_after": 1.9, "others": 0.01,
        "busy": False,
    }  # fmt: skip
    versions = {
        "python": "3.11.7",
        "handgrad": "0.1.0",
        "kernels": "compiled",
        "torch": "2.13.0",
        "transformers": "5.0",
        "peft": "0.18",
    }
    return {
        "command": f"handgrad bench {only}".strip(), "date": "2026-01-02", "commit": "0123456789abcdef", "dirty": False,
        "size": "full", "model": "GPT-2 124M", "machine": machine, "versions": versions,
        "rows": [{k: None if v != v else v for k, v in row.items()} for row in figures],
    } | changes  # fmt: skip
