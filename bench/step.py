"""One full gradient of the nano preset, by hand and by autograd: interleaved rounds, minimum and ratio.

make bench
"""

import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import handgrad as hg
from handgrad.verify import network_of, options_of, twin


def by_autograd(model: hg.GPT, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """The same network written with torch's own functions and differentiated by torch."""
    network, options = network_of(model), options_of(model.config)
    total = sum(twin(network, options, t, y, lambda name, x: x) for t, y in zip(tokens, targets, strict=True))
    loss = total / targets.numel()
    loss.backward()
    return loss.item()


def race(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Each in turn, several times; the minimum of each."""
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    model = hg.GPT(hg.preset("nano"), seed=0)
    tokens = torch.randint(256, (12, 64))
    targets = torch.randint(256, (12, 64))

    model.loss_and_grads(tokens, targets)
    hand = [p.grad for p in model.parameters()]
    model.zero_grad()
    by_autograd(model, tokens, targets)
    worst = max(((a - p.grad).norm() / p.grad.norm()).item() for a, p in zip(hand, model.parameters(), strict=True))
    if worst > 1e-4:
        raise SystemExit(f"the gradients differ by {worst:.1e}: nothing to time")

    def step(run: Callable[..., object]) -> Callable[[], None]:
        def once() -> None:
            model.zero_grad()
            run(tokens, targets)

        return once

    best = race(
        {"by hand": step(model.loss_and_grads), "autograd": step(lambda t, y: by_autograd(model, t, y))}, rounds=20
    )
    table = Table(
        title=f"nano, 12 × 64 tokens, loss and all gradients (they agree to {worst:.0e})", title_justify="left"
    )
    table.add_column("contender")
    table.add_column("best of 20", justify="right")
    table.add_column("autograd / this", justify="right")
    for name, seconds in best.items():
        table.add_row(name, f"{1e3 * seconds:.1f} ms", f"{best['autograd'] / seconds:.2f}×")
    Console().print(table)


if __name__ == "__main__":
    main()
