"""Resident memory over many small steps."""

import subprocess
import sys

import pytest

SOAK = """
from pathlib import Path
import torch
import handgrad as hg

torch.set_num_threads(1)
config = hg.ModelConfig(n_vocab=17, n_context=64, d_model=8, n_heads=1, n_blocks=1)
model = hg.GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(0)

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

for step in range(1000):  # 1,024 tokens each; sequence lengths vary
    cut = int(torch.randint(1, 64, (1,), generator=generator))
    lengths = [64] * 15 + [cut, 64 - cut]
    tokens, targets = torch.randint(17, (2, 1024), generator=generator)
    optimizer.zero_grad()
    model.loss_and_grads(tokens, targets, lengths, recompute=("none", "blocks")[step % 2])
    optimizer.step()
    if step == 100:
        before = resident()
print(resident() - before)
"""


@pytest.mark.long
def test_memory_does_not_grow_over_a_million_tokens() -> None:
    done = subprocess.run([sys.executable, "-c", SOAK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4096, f"resident memory grew by {done.stdout.strip()} kB over 900 steps"
