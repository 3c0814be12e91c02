"""How often to snapshot, and what goodput to expect: the formulas. All times are in seconds.

A job trains for `interval_s`, stands still for `stall_s` while its state is copied, and trains on while the copy is
written for another `write_s`; only then can the snapshot be loaded. Failures come at random, one in `mtbf_s` on average
for the whole job, and memoryless: the job has not aged. After each failure the job does nothing for `recovery_s`, from
the failure to the first new step, and then repeats what was done since the state that it loaded; a failure in that time
lets the recovery begin anew. A snapshot that blocks training until it is on disk has the stall and no write.
"""

import math
from numbers import Integral, Real

from course_lib.engine import UsageError


def young(stall_s: float, mtbf_s: float) -> float:
    """Young's interval, sqrt(2 stall mtbf): the best one to first order, when the stall is much below the MTBF.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM
    17(9), 1974, 530-531.
    """
    refuse_negative(stall_s=stall_s)
    refuse_zero(mtbf_s=mtbf_s)
    return math.inf if math.isinf(mtbf_s) else math.sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Daly's interval, from a perturbation series for the minimum of `wall_time`.

    With x = stall / (2 mtbf) it is sqrt(2 stall mtbf) (1 + sqrt(x)/3 + x/9) - stall when x < 1, else the MTBF.
    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006, 303-312, doi:10.1016/j.future.2004.11.016.
    """
    refuse_negative(stall_s=stall_s)
    refuse_zero(mtbf_s=mtbf_s)
    if math.isinf(mtbf_s) or stall_s >= 2 * mtbf_s:
        return mtbf_s
    x = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - stall_s


def best_interval(stall_s: float, mtbf_s: float, write_s: float = 0.0) -> float:
    """The interval with the highest `goodput`, to the last digits, by bisection.

    Where d(goodput)/d(interval) is 0, u = interval / mtbf solves log(1 - u) + u + stall / mtbf = 0, whose left side
    falls from 0 to 1. Neither the recovery nor the write is in it: they cost the same at any interval, as long as the
    write has come to its end when the next snapshot is due. A shorter interval than the write is no use. What costs
    nothing is best done all the time: without stall and write the interval is 0, which no job can have.
    """
    refuse_negative(stall_s=stall_s, write_s=write_s)
    refuse_zero(mtbf_s=mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:  # until no number is left between them
        if math.log1p(-middle) + middle + stall_s / mtbf_s > 0:
            low = middle
        else:
            high = middle
    return max(low * mtbf_s, write_s)


def goodput(interval_s: float, *, mtbf_s: float, stall_s: float, recovery_s: float, write_s: float = 0.0) -> float:
    """The share of the time, 0 to 1, in which a long job does work that it keeps.

    Between two failures, which are mtbf e^(recovery/mtbf) apart with the recovery's own failures, the n-th snapshot can
    be loaded when training went on for n (interval + stall) + write, of which the chance is e^-(that/mtbf). The sum
    over n is a geometric series, and gives

        goodput = interval e^(-(recovery + write)/mtbf) / (mtbf (e^((interval + stall)/mtbf) - 1))

    With write 0 it is Ts/Tw of Daly 2006 (see `daly`): an asynchronous write costs what a longer recovery does. The
    derivation with the write is our own, and the simulator's tests agree with it.
    """
    refuse_negative(stall_s=stall_s, recovery_s=recovery_s, write_s=write_s)
    refuse_zero(mtbf_s=mtbf_s)
    work_s = spacing(interval_s, write_s)
    cycle_s = work_s + stall_s
    if math.isinf(mtbf_s):
        return work_s / cycle_s
    # The same in factors that cannot overflow.
    failures = cycle_s / mtbf_s
    survives = math.exp(-failures - (recovery_s + write_s) / mtbf_s)
    if survives == 0 or failures == 0:
        return work_s / cycle_s * survives
    return work_s / cycle_s * survives * failures / -math.expm1(-failures)


def wall_time(
    work_s: float, interval_s: float, *, mtbf_s: float, stall_s: float, recovery_s: float, write_s: float = 0.0
) -> float:
    """How long `work_s` of training takes with all stalls, recoveries and repetitions; infinite if never.

    With write 0 it is Daly's Tw = M e^(R/M) (e^((tau + delta)/M) - 1) Ts/tau, for M the MTBF, R the recovery, tau the
    interval, delta the stall and Ts the work.
    """
    refuse_negative(work_s=work_s)
    share = goodput(interval_s, mtbf_s=mtbf_s, stall_s=stall_s, recovery_s=recovery_s, write_s=write_s)
    return work_s / share if share > 0 else math.inf


def longest_recovery(target: float, interval_s: float, *, mtbf_s: float, stall_s: float, write_s: float = 0.0) -> float:
    """The recovery with which `goodput` is just `target`; below 0 when no recovery is short enough.

    Without failures, any is (infinite), or none (minus infinite).
    """
    if not isinstance(target, Real) or not 0 < target < 1:
        raise UsageError(f"target must be between 0 and 1, not {target!r}")
    most = goodput(interval_s, mtbf_s=mtbf_s, stall_s=stall_s, recovery_s=0.0, write_s=write_s)
    if math.isinf(mtbf_s):
        return math.inf if most >= target else -math.inf
    return mtbf_s * math.log(most / target) if most > 0 else -math.inf


def spacing(interval_s: float, write_s: float) -> float:
    """The training between two snapshots: the interval, or as many of them as the write takes.

    Only one write is in flight at a time, so that a job with an interval below the write saves each second, third, …
    time.
    """
    refuse_negative(write_s=write_s)
    refuse_zero(interval_s=interval_s)
    if math.isinf(interval_s):
        raise UsageError("interval_s must be finite")
    if math.isinf(write_s / interval_s):
        raise UsageError(f"interval_s must be longer beside a write of {write_s} s, not {interval_s}")
    return interval_s * max(1, math.ceil(write_s / interval_s - 1e-9))  # 0.3 / 0.1 is a little above 3


def refuse_negative(**values: float) -> None:
    """Refuse what is below 0, infinite or not a number."""
    for name, value in values.items():
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise UsageError(f"{name} must be at least 0 and finite, not {value!r}")


def refuse_zero(**values: float) -> None:
    """Refuse what is not above 0."""
    for name, value in values.items():
        if not isinstance(value, Real) or not value > 0:
            raise UsageError(f"{name} must be above 0, not {value!r}")


def refuse_fraction(least: int, **values: int) -> None:
    """Refuse what is no whole number of at least `least`."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name} must be a whole number of at least {least}, not {value!r}")
