"""The plan of a run that is ready to start."""

from .. import adapters
from ..plan.estimate import Plan, make_plan
from ..plan.packing import kinds_of
from .job import Job

EXAMPLES = 1000  # that are measured, of a large set


def plan_job(job: Job) -> Plan:
    """Plan a step of this job; examples of different lengths are planned with their mean numbers of tokens and targets."""
    factors = {id(p) for adapter in adapters.adapters_of(job.model).values() for p in (adapter.down, adapter.up)}
    extra = sum(p.numel() for p in job.model.parameters() if p.requires_grad and id(p) not in factors)
    count = min(EXAMPLES, job.training.per_epoch)
    tokens, targets = (max(1, round(n / count)) for n in job.training.size(0, count, False))
    ranks = job.adapter_ranks or None
    return make_plan(
        job.model.config, job.batch, tokens, job.options.dtype, recompute=job.options.recompute,
        update_inside=job.options.update_inside, ranks=ranks, extra=extra if ranks else 0,
        kinds=kinds_of(job.model), rows=targets,
    )  # fmt: skip
