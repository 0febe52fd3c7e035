"""The plan of a run that is ready to start."""

from .. import adapters
from ..plan.estimate import Plan, make_plan
from ..plan.packing import kinds_of
from .job import Job


def plan_job(job: Job) -> Plan:
    """Plan a step of this job; examples of different lengths are planned with their mean length."""
    factors = {id(p) for adapter in adapters.adapters_of(job.model).values() for p in (adapter.down, adapter.up)}
    extra = sum(p.numel() for p in job.model.parameters() if p.requires_grad and id(p) not in factors)
    tokens = job.training.size(0, job.batch, False)[0] // job.batch
    ranks = job.adapter_ranks or None
    return make_plan(
        job.model.config, job.batch, max(1, tokens), job.options.dtype, recompute=job.options.recompute,
        update_inside=job.options.update_inside, ranks=ranks, extra=extra if ranks else 0,
        kinds=kinds_of(job.model),
    )  # fmt: skip
