"""The learning rate: scaling, warm-up and schedule as one pure function of samples seen.

It is the same at any world size with the same global batch, so a job resumes at another size without a jump.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Literal

from hvdtrain.core.errors import ConfigError
from hvdtrain.core.keywords import refuses_other_keywords

# optimizers keep the rate in float32
_SAME_RATE = 1e-5


# to type where a number was given
NOT_LR = "lr=hvdtrain.LR(base=0.1, reference_batch=32); or omit lr=, and keep the optimizer's own rate"


@refuses_other_keywords(
    base="LR(base=0.1, reference_batch=32): the rate that is right at 32 samples per update",
    reference_batch="reference_batch=32: the samples per update that base= was tuned for",
    batch="reference_batch=32: the samples per update that base= was tuned for",
    lr="base=0.1: the rate that is right at reference_batch=",
    warmup_epochs="warmup_samples=5 * len(dataset)",
    epochs="total_samples=90 * len(dataset)",
)
@dataclass(frozen=True)
class LR:
    """A learning rate that was tuned at `reference_batch`, carried to any global batch.

    Example:
        lr = hvdtrain.LR(base=0.1, reference_batch=256, warmup_samples=5 * len(dataset))
        model, optimizer = hvt.prepare(model, optimizer, train, lr=lr)

    Attributes:
        base: the rate that is right at `reference_batch`; make the optimizer with it.
        reference_batch: samples per update that `base` was tuned for.
        scale: how the peak grows with the global batch: "linear" (Goyal et al., arXiv 1706.02677), "sqrt"
            (Krizhevsky, arXiv 1404.5997; for Adam-like optimizers) or "none".
        warmup_samples: samples over which the rate goes linearly from `base` to the peak (Goyal et al. 2.2: 5 epochs).
            A global batch of at most `reference_batch` has no warm-up.
        schedule: what follows: "constant", "step" or "cosine" (Loshchilov & Hutter, arXiv 1608.03983, one cycle).
        total_samples: the end of the cosine, in samples from the start of training; the rate stays there.
        milestones, gamma: at each of these numbers of samples, "step" multiplies the rate by `gamma`.
        final: the cosine's last rate as a fraction of the peak.
    """

    base: float
    reference_batch: int
    scale: Literal["linear", "sqrt", "none"] = "linear"
    warmup_samples: int = 0
    schedule: Literal["constant", "step", "cosine"] = "constant"
    total_samples: int | None = None
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    final: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        self._check(_positive(self.base), "base must be a finite rate > 0", "base")
        self._check(_whole(self.reference_batch, 1), "reference_batch must be samples >= 1", "reference_batch")
        scales = self.scale in ("linear", "sqrt", "none")
        self._check(scales, 'scale must be "linear", "sqrt" or "none"', "scale")
        self._check(_whole(self.warmup_samples, 0), "warmup_samples must be samples >= 0", "warmup_samples")
        rule = 'warm-up needs scale="linear" or "sqrt": with "none" the peak is the base rate'
        self._check(not (self.warmup_samples and self.scale == "none"), rule, "warmup_samples", "scale")
        scheduled = self.schedule in ("constant", "step", "cosine")
        self._check(scheduled, 'schedule must be "constant", "step" or "cosine"', "schedule")
        if self.schedule == "step":
            ordered = list(self.milestones) == sorted(set(self.milestones)) and bool(self.milestones)
            later = all(_whole(m, 1) and m >= self.warmup_samples for m in self.milestones)
            rule = "milestones must be growing numbers of samples, not before the end of the warm-up"
            self._check(ordered and later, rule, "milestones", "warmup_samples")
            self._check(_positive(self.gamma), "gamma must be finite and > 0", "gamma")
        else:
            self._check(not self.milestones, 'milestones need schedule="step"', "schedule")
        if self.schedule == "cosine":
            end = self.total_samples
            far = end is not None and _whole(end, 1) and end > self.warmup_samples
            self._check(far, "a cosine needs total_samples > warmup_samples", "total_samples", "warmup_samples")
            self._check(0 <= self.final <= 1, "final must be a fraction of the peak, 0 to 1", "final")

    def _check(self, ok: bool, rule: str, *names: str) -> None:
        _check(ok, rule, **{name: getattr(self, name) for name in names})

    def factor(self, global_batch: int) -> float:
        """Returns peak / base at `global_batch` samples an update: ranks x per-rank batch x accumulation."""
        _check(_whole(global_batch, 1), "global_batch must be samples >= 1", global_batch=global_batch)
        ratio = global_batch / self.reference_batch
        return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[self.scale]

    def peak(self, global_batch: int) -> float:
        """Returns the rate after warm-up."""
        return self.base * self.factor(global_batch)

    def at(self, samples_seen: int, global_batch: int) -> float:
        """Returns the rate of the update after `samples_seen` samples of all ranks; pure.

        Raises:
            ConfigError: `samples_seen` is not a whole number in range.
        """
        _check(_whole(samples_seen, 0), "samples_seen must be samples >= 0", samples_seen=samples_seen)
        peak = self.peak(global_batch)
        if samples_seen < self.warmup_samples:
            start = min(self.base, peak)
            return start + (peak - start) * samples_seen / self.warmup_samples
        if self.schedule == "step":
            return peak * self.gamma ** sum(samples_seen >= milestone for milestone in self.milestones)
        if self.schedule == "cosine":
            assert self.total_samples is not None
            done = (samples_seen - self.warmup_samples) / (self.total_samples - self.warmup_samples)
            wave = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
            return peak * (self.final + (1 - self.final) * wave)
        return peak

    def described(self, global_batch: int) -> str:
        """Returns the peak in words, with what it is computed from."""
        return (
            f"{self.peak(global_batch):g} = base {self.base:g} x {self.factor(global_batch):g}"
            f" (global batch {global_batch}, reference {self.reference_batch})"
        )

    def check_optimizer(self, current: float, global_batch: int) -> None:
        """Raises `ConfigError` unless the optimizer was made with `base`: only LR scales it."""
        peak = self.peak(global_batch)
        if math.isclose(current, self.base, rel_tol=_SAME_RATE):
            return
        if math.isclose(current, peak, rel_tol=_SAME_RATE):
            raise ConfigError(
                "the learning rate must not be scaled twice: the optimizer needs the base rate, LR scales it",
                f"optimizer {self.described(global_batch)}",
                f"make the optimizer with {self.base:g}, or give LR(base={current:g}, reference_batch={global_batch})",
                code=21,
            )
        raise ConfigError(
            "the optimizer's learning rate must be the base of its LR",
            f"optimizer {current:g}, LR base {self.base:g} (peak {peak:g} at global batch {global_batch})",
            f"make the optimizer with {self.base:g}, or give LR(base={current:g}, ...)",
            code=22,
        )


def _check(ok: bool, rule: str, **received: object) -> None:
    if not ok:
        raise ConfigError(rule, ", ".join(f"{name}={value!r}" for name, value in received.items()))


def _whole(value: object, least: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
