"""Where the time of a training step went, in plain words: what holds it up, and what to try.

Pure: it reads the seconds by phase that every rank measured (run.json's neighbour `events.jsonl` has them).

Ranks that train together end each step together: whoever is done early waits in "communication". So the rank that
waits least is the one the others wait for, and its waiting is what communication itself costs; anything above it is
waiting for that rank. Where communication cannot be told from the rest of a step ("train_step", of Keras) the same
finds the rank that is slow at its input or at other code, and none that is slow at computing.
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
BETWEEN_S, MOST, MOST_S = 10.0, 0.5, 1.0
# in less time than this, the steps are too few to judge
SHORT_S = 0.5

Kind = Literal["unknown", "input", "communication", "uneven", "other", "compute", "nothing"]


@dataclass(frozen=True)
class Facts:
    """What the advice depends on.

    Attributes:
        workers: loader processes of each rank; 0: the training process decodes by itself; None: the data is in
            memory, and served from there; "unknown": the caller reads it in a way of its own.
        free_cores: cores of this node on which neither ranks nor their loaders run.
        local_size: ranks on this node.
        compression: of the gradients that are sent; None for none.
        accumulate: batches of one update.
    """

    workers: int | None | Literal["unknown"] = "unknown"
    free_cores: int = 0
    local_size: int = 1
    compression: str | None = None
    accumulate: int = 1


@dataclass(frozen=True)
class Verdict:
    """What holds the training up.

    Attributes:
        kind: in one word; "unknown" when nothing was measured, "nothing" when nothing stands out.
        text: in plain words, one finding a line, the most important first.
        shares: of a step, by phase, mean over ranks; they sum to 1. Phases between steps are not among them.
    """

    kind: Kind
    text: str
    shares: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


def verdict(per_rank: Sequence[Mapping[str, float]], facts: Facts = Facts()) -> Verdict:
    """Says what holds a step up.

    Args:
        per_rank: for each rank its seconds by phase, over any number of steps; phases that are not known count
            as "other".
        facts: about the machine and the settings.
    """
    seconds = [_by_phase(phases) for phases in per_rank]
    step_s = [sum(phases[name] for name in STEP) for phases in seconds]
    if not seconds or sum(step_s) <= 0:
        return Verdict("unknown", "no step was measured")
    shares = {name: sum(phases[name] for phases in seconds) / sum(step_s) for name in STEP}
    kind: Kind
    if max(step_s) < SHORT_S:
        kind, finding = "nothing", f"nothing stands out: {max(step_s):.1g} s of steps are too short to judge"
    else:
        kind, finding = _uneven(seconds, step_s) or _bound(shares, len(seconds), facts)
    lines = [finding, *_between(seconds, sum(step_s))]
    return Verdict(kind, "\n".join(lines), shares)


def phases_per_rank(events: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Adds up every rank's seconds by phase from a run's events (`hvdtrain.runs.log.read_events`), without the first
    step, which compiles.

    Only the last start or resumption counts: before it the run may have had another number of ranks.
    """
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


def _uneven(seconds: Sequence[Mapping[str, float]], step_s: Sequence[float]) -> tuple[Kind, str] | None:
    """Whether the ranks wait for one of them, and what it is slower at."""
    waits = [phases["communication"] + phases[TRAIN_STEP] for phases in seconds]
    last = waits.index(min(waits))
    others = [rank for rank in range(len(seconds)) if rank != last]
    if not others:
        return None
    waiting = (statistics.median(waits[rank] for rank in others) - waits[last]) / statistics.median(step_s)
    if waiting < WAITING_SHARE:
        return None
    usual = {name: statistics.median(seconds[rank][name] for rank in others) for name in ("input", *COMPUTE, "other")}
    excess = {name: seconds[last][name] - usual[name] for name in usual}
    cause = max(excess, key=lambda name: excess[name])
    if cause == "input" and usual["input"] >= INPUT_SHARE * statistics.median(step_s):
        return None  # all wait for data; one of them a little longer, and the others then for that one
    doing = {"input": "waiting for data", "other": "outside the training step"}.get(cause, f"in {cause}")
    more = f"spends {seconds[last][cause] / usual[cause]:.1f} times" if usual[cause] > 0 else "alone spends"
    what = f"it {more} {'as long ' if usual[cause] > 0 else 'time '}{doing}"
    remedy = "look at its disk and loader" if cause == "input" else "look at what else runs on its host"
    finding = f"uneven ranks: {_percent(waiting)} of each step is spent waiting for rank {last}"
    return "uneven", f"{finding}; {what}; {remedy}"


def _bound(shares: Mapping[str, float], size: int, facts: Facts) -> tuple[Kind, str]:
    """Which phase holds all ranks up alike."""
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
        compress = "" if facts.compression else "send gradients in 16 bits (compression fp16) or "
        rarer = f"reduce less often (accumulate {2 * facts.accumulate}, or a larger batch on each rank)"
        return "communication", f"{found}; {compress}{rarer}"
    code = "logging, metrics, callbacks or other code of the training loop"
    return "other", f"{share} of each step is spent outside of it: {code}"


def _input_remedy(facts: Facts) -> str:
    if facts.workers == "unknown":
        return "try more workers, or less work for each sample (`hvdtrain bench input` measures which)"
    if facts.workers is None:
        return "the data is in memory: look at what else runs on these cores, or take larger batches"
    each = facts.free_cores // max(1, facts.local_size)
    if each > 0:
        more = each * facts.local_size
        plural = "s" * (more > 1)
        now = facts.workers + each
        return f"{more} more loader worker{plural} fit{'s' * (more == 1)} on this node (--workers {now} for each rank)"
    return "all cores of this node are in use: store smaller pictures, or give each rank more cores"


def _between(seconds: Sequence[Mapping[str, float]], steps_s: float) -> list[str]:
    """A line for each thing between the steps that takes much of the run."""
    spent = {name: sum(phases[name] for phases in seconds) for name in BETWEEN}
    whole = steps_s + sum(spent.values())
    return [
        f"{name} takes {_percent(spent[name] / whole)} of the run: {remedy}"
        for name, remedy in BETWEEN.items()
        if spent[name] / whole >= BETWEEN_SHARES[name]
        and spent[name] / len(seconds) >= (MOST_S if spent[name] / whole >= MOST else BETWEEN_S)
    ]


def _percent(share: float) -> str:
    return f"{round(100 * share)} %"
