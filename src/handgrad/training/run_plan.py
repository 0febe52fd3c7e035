"""The plan of a run that is ready to start."""

from dataclasses import replace
from functools import partial

from .. import lora, optim
from ..errors import option
from ..formatting import duration, size
from ..model.precision import why_not_mixed
from ..plan.estimate import Plan, make_plan
from ..plan.memory import BYTES
from ..plan.packing import kinds_of, two_bytes
from ..plan.timing import matmul_rate
from ..plan.update import state_bytes
from .job import MEASURED, Job

LEAST_SAVED = 0.1  # of the time, for a line about it


def plan_job(job: Job, mixed: bool | None = None) -> Plan:
    """Plan a step of this job; with `mixed`, as if that were its precision. Where examples have different lengths, time and
    FLOP are those of a step with their mean numbers of tokens and targets, and the memory is that of the largest step and of
    the longest example."""
    factors = {id(p) for adapter in lora.adapters_of(job.model).values() for p in (adapter.down, adapter.up)}
    extra = sum(p.numel() for p in job.model.parameters() if p.requires_grad and id(p) not in factors)
    mixes = job.model.operand is not None if mixed is None else mixed
    kinds = kinds_of(job.model)
    if mixes and job.model.adapter is not None:
        trained = {name.replace(".base.", ".") for name, p in job.model.named_parameters() if p.requires_grad}
        frozen = {x: kind for x, kind in two_bytes(job.model.config, "bfloat16").items() if x not in trained}
        kinds = {**frozen, **kinds}
    count, ranks = min(MEASURED, job.training.per_epoch), job.adapter_ranks or None
    tokens, targets = (max(1, round(n / count)) for n in job.training.size(0, count, False))
    make = partial(
        make_plan, job.model.config, dtype=job.options.dtype, recompute=job.options.recompute,
        update_inside=job.options.update_inside, ranks=ranks, extra=extra if ranks else 0, kinds=kinds,
        mixed=mixes, optimizer=job.options.optimizer,
    )  # fmt: skip
    longest = max(job.training.size(i, 1, False)[0] for i in range(count))
    largest = max(job.training.size(i, job.batch)[0] for i in range(0, max(1, count - job.batch + 1), job.batch))
    sharing = job.sharing
    if sharing is None:
        plan, of_largest = make(job.batch, tokens, rows=targets), make(job.batch, -(-largest // job.batch))
    else:
        computed, piece = max(1, round(tokens * (1 - sharing.saved))), sharing.largest_piece
        plan = make(job.batch, computed, rows=min(computed, targets), piece=piece)
        plan = replace(plan, forward_flop=sharing.flop[0], backward_flop=sharing.flop[1])
        of_largest = make(job.batch, -(-sharing.largest_step // job.batch), piece=piece)
        of_largest = replace(of_largest, bytes_temporary=of_largest.bytes_temporary + copied_keys(plan, sharing.keys))
    most = max(of_largest, make(1, longest), key=lambda plan: plan.bytes_saved + plan.bytes_temporary)
    of_maps = sum(p.numel() for p in optim.matrices(job.model) if p.requires_grad)
    state = state_bytes(plan.optimizer, of_maps, plan.trainable - of_maps, job.model.dtype.itemsize)
    return replace(plan, bytes_saved=most.bytes_saved, bytes_temporary=most.bytes_temporary, bytes_optimizer=state)


def copied_keys(plan: Plan, rows: int) -> int:
    """Bytes of keys and values with their prefixes, and of their error signals, while a block computes its attention."""
    c = plan.config
    return 2 * rows * c.kv_heads * (c.query_width + c.value_width) * (2 if plan.mixed else BYTES[plan.dtype])


def saved_by_mixing(job: Job, steps: int, seconds: float) -> str:
    """A line about the time and the memory that mixed precision would save in these steps, which take `seconds` in float32,
    by the rates of products on this machine; "" where it is chosen, saves little or cannot be used."""
    if job.model.precision != "float32" or why_not_mixed() is not None or seconds <= 0:
        return ""
    plan, other = plan_job(job), plan_job(job, mixed=True)
    rate = matmul_rate("float32")
    products = min(seconds, steps * (plan.forward_flop + plan.backward_flop) / rate)  # all else takes as long as before
    less = products * (1 - rate / matmul_rate("mixed"))
    if less < LEAST_SAVED * seconds:
        return ""
    return (
        f"{option('precision', 'mixed')} would take about {duration(less)} less of {duration(seconds)}, and"
        f" {size(plan.bytes_peak - other.bytes_peak)} less memory, on this machine"
    )
