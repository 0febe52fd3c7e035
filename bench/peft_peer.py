"""Fine-tuning by transformers + peft. Runs in its own process and imports nothing of handgrad, which would configure the
allocator."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def main() -> None:
    """Take every step of the work in the JSON file named on the command line; print losses and seconds."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with open(sys.argv[1]) as file:
        work = json.load(file)
    dtype = getattr(torch, work["dtype"])
    base = AutoModelForCausalLM.from_pretrained(work["base"], attn_implementation="sdpa", dtype=dtype)
    for module in base.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    base.config.use_cache = False
    network = PeftModel.from_pretrained(base, work["start"], is_trainable=True).train()
    if work["checkpointing"]:
        network.activation_checkpointing_enable({"use_reentrant": False})
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    losses, seconds = [], []
    for lr, examples in zip(work["lrs"], work["steps"], strict=True):
        begin = time.perf_counter()
        optimizer.param_groups[0]["lr"] = lr
        n_targets = sum(target != -100 for _, targets in examples for target in targets)
        optimizer.zero_grad()
        total = 0.0
        for i in range(0, len(examples), work["batch"]):
            ids, targets, mask = padded(examples[i : i + work["batch"]])
            with torch.autocast("cpu", torch.bfloat16, enabled=work["autocast"]):
                logits = network(input_ids=ids, attention_mask=mask).logits
            logits = logits.float()  # as by transformers' loss
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / n_targets
            loss.backward()
            total += loss.item()
            del logits, loss  # or the next batch is computed while they exist
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(total)
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"losses": losses, "seconds": seconds}))


def padded(examples: Sequence[tuple[Any, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, targets and mask of a batch, padded on the right to its longest, as by transformers' trainer."""
    ids, targets = ([torch.as_tensor(x) for x in column] for column in zip(*examples, strict=True))
    mask = [torch.ones_like(x) for x in ids]
    return pad_sequence(ids, True), pad_sequence(targets, True, -100), pad_sequence(mask, True)


if __name__ == "__main__":
    main()
