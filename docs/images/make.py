"""Draw the pictures of the README: `make images`. The terminal's own output, as SVG, without fonts from the network."""

import re
from pathlib import Path

from rich.console import Console

from handgrad import ledger

HERE = Path(__file__).parent


def capture(name: str, only: str) -> None:
    console = Console(record=True, width=118, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    console.print(ledger.run(2512, only))
    svg = console.export_svg(title=f"handgrad verify --only '{only}'", unique_id="handgrad")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S).replace(
        "Fira Code, monospace", "ui-monospace, monospace"
    )
    (HERE / name).write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


capture("verify.svg", "T2-D*,R1,R3,R5,R8,R9")
