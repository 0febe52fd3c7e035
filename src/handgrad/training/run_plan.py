"""The plan of a run that is ready to start."""

from dataclasses import replace
from functools import partial

from .. import lora
from ..plan.estimate import Plan, make_plan
from ..plan.packing import kinds_of
from .job import Job

EXAMPLES = 1000  # that are measured, of a large set


def plan_job(job: Job) -> Plan:
    """Plan a step of this job. Where examples have different lengths, time and FLOP are those of a step with their mean
    numbers of tokens and targets, and the memory is that of the largest step and of the longest example."""
    factors = {id(p) for adapter in lora.adapters_of(job.model).values() for p in (adapter.down, adapter.up)}
    extra = sum(p.numel() for p in job.model.parameters() if p.requires_grad and id(p) not in factors)
    count, ranks = min(EXAMPLES, job.training.per_epoch), job.adapter_ranks or None
    tokens, targets = (max(1, round(n / count)) for n in job.training.size(0, count, False))
    make = partial(
        make_plan, job.model.config, dtype=job.options.dtype, recompute=job.options.recompute,
        update_inside=job.options.update_inside, ranks=ranks, extra=extra if ranks else 0, kinds=kinds_of(job.model),
    )  # fmt: skip
    longest = max(job.training.size(i, 1, False)[0] for i in range(count))
    largest = max(job.training.size(i, job.batch)[0] for i in range(0, max(1, count - job.batch + 1), job.batch))
    most = max(
        (make(job.batch, -(-largest // job.batch)), make(1, longest)),
        key=lambda plan: plan.bytes_saved + plan.bytes_temporary,
    )
    plan = make(job.batch, tokens, rows=targets)
    return replace(plan, bytes_saved=most.bytes_saved, bytes_temporary=most.bytes_temporary)
