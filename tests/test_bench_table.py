"""The tables of results of handgrad bench: what they contain, what is refused, and that the pages have them."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench import __main__, machine, picture, table

import handgrad as hg
from bench_results import result

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "bench" / "results.json"


def write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md"])
def test_the_page_has_the_table_of_the_committed_results(name: str) -> None:
    page = ROOT / name
    assert table.replace_table(page, table.read([RESULTS])) == page.read_text(), (
        "run: handgrad bench table docs/bench/results.json --into README.md --into docs/benchmarks.md"
    )


def test_the_readme_has_five_lines_of_speed() -> None:
    """One line for each headline, and one for mixed precision if that was measured; docs/benchmarks.md has all results."""
    lines = table.render(table.read([RESULTS]), short=True).split("\n\n")[0].splitlines()[2:]
    lines = [line for line in lines if not line.startswith("| the same, mixed precision |")]
    assert len(lines) == len(table.HEADLINES) == 5, lines
    assert not any("plan" in line or "torch's products" in line or "the same" in line for line in lines)


def test_table_of_several_files_is_written_into_a_page(tmp_path: Path) -> None:
    train, lora = (write(tmp_path / f"{name}.json", result(name)) for name in ("train", "lora"))
    later = result("lora", date="2026-01-03", commit="fedcba9876543210", dirty=True)
    for row in later["rows"]:
        row["seconds"] *= 2 if row["contender"] == "handgrad" else 1
    again = write(tmp_path / "again.json", later)
    page, merged, plot = tmp_path / "page.md", tmp_path / "all.json", tmp_path / "plot.svg"
    page.write_text(f"above\n\n{table.BEGIN}\nold\n{table.END}\n\nbelow\n")
    (short := tmp_path / "short.md").write_text(f"{table.BEGIN_SHORT}\nold\n{table.END}\n")
    given = [train, lora, again, "--into", str(page), "--into", str(short), "--json", str(merged), "--plot", str(plot)]
    __main__.main(["table", *given])
    headlines = [line for line in short.read_text().splitlines() if line.startswith("| ")]
    assert headlines[1:] == [
        "| training step, GPT-2 124M, 1×512 | 2.00 s, 1.00 GB | eager autograd 2.80 s, 5.00 GB, torch.compile 2.20 s |"
        " 1.40×, 1.10×, 0.20 of the memory | `handgrad bench train` |"
    ]
    text = page.read_text()
    assert text.startswith(f"above\n\n{table.BEGIN}\n| case |") and text.endswith(f"{table.END}\n\nbelow\n")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    assert [line[4] for line in lines[1:]].count("`handgrad bench train`") == 1
    of = {line[0]: line[1:4] for line in lines}
    assert of["training step, GPT-2 124M, 1×512"] == [
        "2.00 s, 0.90× torch's products, 1.00 GB (plan: 1.90 s)",
        "eager autograd 2.80 s, 5.00 GB, torch.compile 2.20 s",
        "1.40×, 1.10×, 0.20 of the memory",
    ]
    assert of["training step, nano recipe, 12×64"][1:] == [
        "eager autograd 27.1 ms, torch.compile: missing: no C++ compiler", "0.84×",
    ]  # fmt: skip
    assert of["GPT-2 124M, LoRA r=16, 1×256"][2] == "0.75×, 0.06 of the memory", "the last file decides"
    measured = (
        "Measured on 2026-01-02 to 2026-01-03: A Processor, 2 cores, 8 GB, 2 threads; load at most 0.05 before each run"
    )
    assert measured in text and "torch 2.13.0" in text and "commit 0123456789, fedcba9876 with changes." in text
    assert table.render(table.read([merged])) in text, "the merged file gives the same table"
    ElementTree.parse(plot)


def test_every_scenario_of_the_table_has_lines() -> None:
    text = table.render([result()])
    for part in (
        "| memory of a step, GPT-2 124M, 4×1024 | 16.0 s, 1.00 GB (plan: 1.00 GB) |",
        "| the same, least memory | 18.0 s, 0.50 GB | handgrad 16.0 s | 12.5 % more time, 0.50 of the memory |",
        "| the same, by the loop of `handgrad train` | 2.02 s | handgrad 2.00 s | 1.0 % more time |",
        "| SmolLM2 shape: LoRA r=16, 1×256 | 600 ms, 0.50 GB | transformers + peft 900 ms, 4.00 GB |"
        " 1.50×, 0.12 of the memory |",
        "| the same, mixed precision | 300 ms, 0.25 GB | transformers + peft, autocast 660 ms, 2.00 GB, float32 600 ms |"
        " 2.20×, 2.00×, 0.12 of the memory |",
        "| product a w, mixed precision, float32 operands, 256 / 4096 rows | 380 / 380 GFLOP/s |"
        " torch in bfloat16 400 / 400, in float32 190 / 190 | 0.95 / 0.95×, 2.00 / 2.00× | `handgrad bench products` |",
        "| attention alone, backward, 12 heads of 64, 1×128 / 1×1024 / 12×64 | 1.8 / 20.0 / 2.0 ms |",
        " | torch's kernel | 0.56 / 1.22 / 1.10× | `handgrad bench attention` |",
        "| decode, 8 bits, 1×32 / 2048 | 40 / 32 tokens/s, 90 / 90 % of the bandwidth bound |",
        " | handgrad, float32 | 2.50 / 2.00× | `handgrad bench generate` |",
        "| 32 / 2048 new tokens, with and without a cache | 50 / 50 tokens/s | handgrad, without a cache | 2.00 / 128.00× |",
        "| 16 uneven prompts | 512 tokens/s | transformers | 2.50× |",
        "| nano recipe, 1 busy core | 50 ms, 64 % of its speed on the idle machine |",
        "`handgrad finetune` on one example of 128 / 512 / 2,048 / 8,192 tokens",
    ):  # fmt: skip
        assert part in text


BUSY = result()["machine"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "quick"}, "its size is quick: only full sizes are published"),
        ({"machine": BUSY | {"load": 1.5}}, "the machine was busy, load 1.50 on 2 cores"),
        ({"machine": BUSY | {"others": 0.7}}, "other processes used 0.70 cores meanwhile"),
        ({"machine": BUSY | {"threads": 1}}, "results of different machines: threads is 2 in one and 1 in another"),
        ({"machine": BUSY | {"memory": 9 * 10**9}}, "results of different machines: memory is "),
        ({"versions": {"torch": "2.0"}}, "results with different versions of Python or packages"),
        (
            {"rows": [{"scenario": "lora", "case": "c", "contender": "handgrad", "problem": "failed: why"}]},
            "failed: why",
        ),
        ({"rows": [{"scenario": "lora"}]}, "is not a result of handgrad bench --json"),
        ({"rows": [result("lora")["rows"][0] | {"seconds": "fast"}]}, "is not a result of handgrad bench --json"),
        ({"rows": []}, "it has no measurements; measure again"),
        ({"results": []}, "it has no measurements; measure again"),
        ({"machine": None}, "is not a result of handgrad bench --json"),
    ],
)
def test_unpublishable_results_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write(tmp_path / "good.json", result("train")), write(tmp_path / "bad.json", result("lora") | changes)
    page = tmp_path / "page.md"
    page.write_text(f"{table.BEGIN}\n{table.END}\n")
    before = page.read_text()
    with pytest.raises(SystemExit) as ended:
        __main__.main(["table", good, bad, "--into", str(page)])
    assert ended.value.code == 1 and message in capsys.readouterr().err and page.read_text() == before


def test_a_page_without_a_place_for_the_table_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{table.END}\n{table.BEGIN}\n")
    for given in (page, tmp_path / "missing.md"):
        with pytest.raises(hg.HandgradError, match=r"has no place for the table: add two lines to it, <!-- begin"):
            table.replace_table(given, [])
    with pytest.raises(hg.HandgradError, match=r"cannot read .*missing.json: No such file"):
        table.read([tmp_path / "missing.json"])


def test_models_are_not_mixed_in_a_plot(tmp_path: Path) -> None:
    """Cases of two models have the same names."""
    other = result("context", model="smollm2", command="handgrad bench context --model smollm2")
    for row in other["rows"]:
        row["seconds"] *= 10
    files = [write(tmp_path / "a.json", result("context")), write(tmp_path / "b.json", other)]
    __main__.main(["table", *files, "--plot", str(tmp_path / "plot.svg")])
    shown = list(ElementTree.parse(tmp_path / "plot.svg").getroot().itertext())
    slopes = [text.partition(": slope ")[::2] for text in shown if "finetune: slope" in text]
    assert [name for name, _ in slopes] == ["handgrad finetune", "smollm2: handgrad finetune"] * 2
    assert slopes[0][1] == slopes[1][1]


def test_slope_is_the_exponent() -> None:
    assert picture.slope([(n, 3.0 * n**1.5) for n in (128, 512, 8192)]) == pytest.approx(1.5)


def test_processor_time_of_others_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds in which all processes used 12 and ours 9 processor seconds."""
    times = iter([machine.CpuTime(100.0, 5.0, 1000.0), machine.CpuTime(112.0, 14.0, 1010.0)])
    monkeypatch.setattr(machine, "cpu_time", lambda: next(times))
    before = machine.Machine.now()
    after = before.after()
    assert before.others is None and after.others == pytest.approx(0.3) and after.load_after is not None
    assert "other processes used 0.30 cores meanwhile" in after.state
