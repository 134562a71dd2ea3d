"""Finds the bottleneck of a training step, in plain words: where its time went, and what to try.

Pure: it reads the seconds by phase that every rank measured (run.json's neighbour `events.jsonl` has them).

Ranks that train together end each step together: a rank that is done early waits in "communication". So the others
wait for the rank that waits least. Its own waiting is the cost of communication itself; any excess on the others is
waiting for that rank. If communication cannot be separated from the rest of a step ("train_step", of Keras), the same
method finds a rank that is slow at its input or at other code, but not one that is slow at computing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# the phases of a step; what else is measured (checkpoint, evaluation) lies between steps
COMPUTE = ("forward", "backward", "optimizer")
# all of these and the communication together: what Keras does in one call
TRAIN_STEP = "train_step"
STEP = ("input", *COMPUTE, TRAIN_STEP, "communication", "other")
BETWEEN = {
    "checkpoint": "save less often, or to a faster disk",
    "evaluation": "evaluate less often, or with a larger batch",
}
# shares of a step from which on a phase is worth a word: below, nothing is gained by working on it
INPUT_SHARE = 0.10
COMMUNICATION_SHARE = 0.20
WAITING_SHARE = 0.10
OTHER_SHARE = 0.15
# above it the model itself is what a step is made of
COMPUTE_SHARE = 0.75
# shares of the whole run, and the seconds that they must come to: fewer are worth a word where they are most of it
BETWEEN_SHARES = {"checkpoint": 0.05, "evaluation": 0.30}
BETWEEN_S = ((10.0, 0.05), (2.0, 0.25), (0.5, 0.5))  # seconds, and the share that makes them worth a word
# in less time than this, the steps are too few to judge
SHORT_S = 0.5
# a rank that the others wait for is named from so many seconds on: shorter ones are noise
NAMED_S = 0.5

Kind = Literal["unknown", "input", "communication", "uneven", "other", "compute", "nothing"]


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that the advice depends on; None: not known."""

    # loader processes of each rank; 0: the training process decodes; None: the data is served from memory;
    # "unknown": the caller reads it in a way of its own
    workers: int | None | Literal["unknown"] = "unknown"
    free_cores: int | None = None  # of this node, on which neither ranks nor their loaders run
    local_size: int = 1
    compression: str | None = None  # of the gradients that are sent; None for none
    accumulate: int = 1  # batches of one update
    hosts: int = 1


@dataclass(frozen=True)
class Bottleneck:
    """The bottleneck of a training.

    Attributes:
        kind: "unknown" if nothing was measured, "nothing" if nothing stands out.
        text: one finding a line, the most important first.
        shares: of a step, by phase, mean over ranks; they sum to 1.
    """

    kind: Kind
    text: str
    shares: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


def verdict(per_rank: Sequence[Mapping[str, float]], facts: RunFacts = RunFacts()) -> Bottleneck:
    """Returns what holds a step up, from each rank's seconds by phase (unknown ones count as "other")."""
    seconds = [_by_phase(phases) for phases in per_rank]
    step_s = [sum(phases[name] for name in STEP) for phases in seconds]
    if not seconds or sum(step_s) <= 0:
        return Bottleneck("unknown", "no step was measured")
    shares = {name: sum(phases[name] for phases in seconds) / sum(step_s) for name in STEP}
    kind: Kind
    if max(step_s) < SHORT_S:
        kind, finding = "nothing", f"nothing stands out: {max(step_s):.1g} s of steps are too short to judge"
    else:
        kind, finding = _uneven(seconds, step_s, facts) or _bound(shares, len(seconds), facts)
    lines = [finding, *_between(seconds, sum(step_s))]
    return Bottleneck(kind, "\n".join(lines), shares)


def phases_per_rank(events: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Returns every rank's seconds by phase from the events since the last start, without the first step."""
    total: list[dict[str, float]] = []
    for event in events:
        if event.get("kind") in ("start", "resume"):
            total = []
        elif event.get("kind") == "epoch":
            ranks = event.get("ranks") or []
            total += [{} for _ in ranks[len(total) :]]
            for sign, its in ((1, ranks), (-1, event.get("first_step") or [])):
                for mine, phases in zip(total, its, strict=False):
                    for name, value in phases.items():
                        mine[name] = mine.get(name, 0.0) + sign * value
    return total


def _by_phase(phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds of every known phase; negative ones (a clock that was set back) count as 0."""
    known = dict.fromkeys((*STEP, *BETWEEN), 0.0)
    for name, value in phases.items():
        known[name if name in known else "other"] += max(0.0, value)
    return known


def _uneven(
    seconds: Sequence[Mapping[str, float]], step_s: Sequence[float], facts: RunFacts
) -> tuple[Kind, str] | None:
    """Returns the finding on a rank that the others wait for, and on the phase it is slower at; None without one."""
    waits = [phases["communication"] + phases[TRAIN_STEP] for phases in seconds]
    last = waits.index(min(waits))
    others = [rank for rank in range(len(seconds)) if rank != last]
    if not others:
        return None
    waiting_s = statistics.median(waits[rank] for rank in others) - waits[last]
    waiting = waiting_s / statistics.median(step_s)
    if waiting < WAITING_SHARE or waiting_s < NAMED_S:
        return None
    usual = {name: statistics.median(seconds[rank][name] for rank in others) for name in ("input", *COMPUTE, "other")}
    excess = {name: seconds[last][name] - usual[name] for name in usual}
    cause = max(excess, key=lambda name: excess[name])
    if cause == "input" and usual["input"] >= INPUT_SHARE * statistics.median(step_s):
        return None  # all wait for data; one of them a little longer, and the others then for that one
    doing = {"input": "waiting for data", "other": "outside the training step"}.get(cause, f"in {cause}")
    more = f"spends {seconds[last][cause] / usual[cause]:.1f} times" if usual[cause] > 0 else "alone spends"
    what = f"it {more} {'as long ' if usual[cause] > 0 else 'time '}{doing}"
    computing = "look at what only this rank computes, or at what else runs on its " + (
        "host" if facts.hosts > 1 else "cores"
    )
    remedy = {
        "input": "look at its disk and loader",
        "other": f"look at what only rank {last} runs between steps (logging, metrics, saves, callbacks)",
    }.get(cause, computing)
    finding = f"uneven ranks: {_percent(waiting)} of each step is spent waiting for rank {last}"
    return "uneven", f"{finding}; {what}; {remedy}"


def _bound(shares: Mapping[str, float], size: int, facts: RunFacts) -> tuple[Kind, str]:
    """Returns the finding on the phase that holds all ranks up alike."""
    over = {
        "input": shares["input"] / INPUT_SHARE,
        "communication": shares["communication"] / COMMUNICATION_SHARE,
        "other": shares["other"] / OTHER_SHARE,
    }
    worst = max(over, key=lambda name: shares[name] if over[name] >= 1 else 0.0)
    share = _percent(shares[worst])
    if over[worst] < 1:
        waits = f", {_percent(shares['input'])} waits for data"
        computes = shares[TRAIN_STEP] + sum(shares[name] for name in COMPUTE)
        if computes < COMPUTE_SHARE:
            waits += f", {_percent(shares['communication'])} for other ranks" if size > 1 else ""
            step = f"{_percent(computes)} of each step computes{waits}, {_percent(shares['other'])} is other code"
            return "nothing", f"nothing stands out: {step}"
        if shares[TRAIN_STEP] > sum(shares[name] for name in COMPUTE):
            bound = "compute or communication" if size > 1 else "compute"
            ranks = ", waiting for other ranks included" if size > 1 else ""
            step = f"{_percent(shares[TRAIN_STEP])} of each step is the model's forward, backward and update{ranks}"
            return "compute", f"{bound} bound: {step}{waits}"
        waits += f", {_percent(shares['communication'])} for other ranks" if size > 1 else ""
        busy = sum(shares[name] for name in COMPUTE)
        return "compute", f"compute bound: {_percent(busy)} of each step computes{waits}"
    if worst == "input":
        return "input", f"input bound: {share} of each step waits for data; {_input_remedy(facts)}"
    if worst == "communication":
        found = f"communication bound: {share} of each step waits for gradients"
        compress = "" if facts.compression or facts.hosts == 1 else "send large gradients in 16 bits (fp16) or "
        rarer = f"reduce less often (accumulate {2 * facts.accumulate}, or a larger batch on each rank)"
        return "communication", f"{found}; {compress}{rarer}"
    code = "logging, metrics, callbacks or other code of the training loop"
    if shares["input"] < 0.001:
        code = f"data that no loader of hvdtrain reads, {code}"
    return "other", f"{share} of the training is spent outside of its steps: {code}"


def _input_remedy(facts: RunFacts) -> str:
    if facts.workers is None:
        return "the data is in memory: look at what else runs on these cores, or take larger batches"
    each = (facts.free_cores or 0) // max(1, facts.local_size)
    if facts.workers != "unknown" and each > 0:
        more = each * facts.local_size
        plural = "s" * (more > 1)
        now = facts.workers + each
        return f"{more} more loader worker{plural} fit{'s' * (more == 1)} on this node (--workers {now} for each rank)"
    return "try more workers, or less work for each sample (`hvdtrain bench input` measures which)"


def _between(seconds: Sequence[Mapping[str, float]], steps_s: float) -> list[str]:
    """A line for each thing between the steps that takes much of the run."""
    spent = {name: sum(phases[name] for phases in seconds) for name in BETWEEN}
    whole = steps_s + sum(spent.values())
    return [
        f"{name} takes {_percent(spent[name] / whole)} of the run: {remedy}"
        for name, remedy in BETWEEN.items()
        if spent[name] / whole >= BETWEEN_SHARES[name]
        and any(spent[name] / len(seconds) >= long and spent[name] / whole >= share for long, share in BETWEEN_S)
    ]


def _percent(share: float) -> str:
    return f"{round(100 * share)} %"
