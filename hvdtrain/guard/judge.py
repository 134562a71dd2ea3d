"""The comparison of all ranks' reports; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.core.errors import by_rank

Report = Mapping[str, Any]


@dataclass(frozen=True)
class GuardFinding:
    """A fault of the script, and the line that has it."""

    kind: str  # one word, for programs that read the report
    line: str  # of the user's script: "train.py:31: optimizer.step()"
    rule: str  # what must hold
    received: str  # per rank
    remedy: str  # what to write

    @property
    def text(self) -> str:
        """Returns the line, and the rule that it breaks."""
        return f"{self.line}\n  {self.rule}"


class Judge:
    """Gathers reports of all ranks, and finds what does not fit together."""

    def __init__(self) -> None:
        self._open: dict[tuple[Any, ...], dict[int, Report]] = {}
        self._apart: set[tuple[Any, ...]] = set()
        self._data: dict[tuple[Any, ...], str] = {}
        self.findings: list[GuardFinding] = []  # each once
        self.compared = 0  # comparisons in which the replicas of an optimizer were equal
        self.averaged: set[int] = set()

    def take(self, rank: int, report: Report) -> GuardFinding | None:
        """Returns what this report, with those before it, shows to be wrong, unless it was found before."""
        if report["kind"] == "finding":
            words = {name: report[name] for name in ("line", "rule", "received", "remedy")}
            words["received"] = f"rank {rank}: {words['received']}"
            return self._new(GuardFinding(kind=report["name"], **words))
        ranks = tuple(report["ranks"])
        key = (report["kind"], ranks, *report["key"])
        group = self._open.setdefault(key, {})
        group[rank] = report
        if len(group) < len(ranks):
            return None
        del self._open[key]
        reports = [group[rank] for rank in ranks]
        if len(reports) < 2:
            return None
        return self._of_data(key, reports) if report["kind"] == "data" else self._of_weights(key, reports)

    def alone(self) -> list[str]:
        """Returns where optimizers were made whose weights some of their ranks never reported."""
        reports = [next(iter(group.values())) for (kind, *_), group in self._open.items() if kind == "weights"]
        return sorted({report["made"] for report in reports if report["key"][0] not in self.averaged})

    def _new(self, finding: GuardFinding | None) -> GuardFinding | None:
        if finding is None or any((known.kind, known.line) == (finding.kind, finding.line) for known in self.findings):
            return None
        self.findings.append(finding)
        return finding

    def _of_data(self, key: tuple[Any, ...], reports: Sequence[Report]) -> GuardFinding | None:
        """Two batches in turn, not the same, that are the same on all ranks, are no accident."""
        values = {report["value"] for report in reports}
        source, number = key[1:-1], key[-1]
        value = values.pop() if len(values) == 1 else ""
        before = self._data.setdefault((source, number), value)
        first = self._data.get((source, 1), "")
        if number == 1 or not before or not first or before == first:
            return None
        remedy = (
            "DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank()) for PyTorch's loader,"
            " dataset.shard(hvd.size(), hvd.rank()) before shuffle() for tf.data, x[hvd.rank()::hvd.size()] for arrays"
        )
        shown = by_rank([f"batches {first[:8]} and {value[:8]}, {report['line']}" for report in reports])
        rule = "each rank must train on its own samples"
        return self._new(GuardFinding("same-data", reports[0]["line"], rule, shown, remedy))

    def _of_weights(self, key: tuple[Any, ...], reports: Sequence[Report]) -> GuardFinding | None:
        first, number, step, when = reports[0], key[2], key[4], key[5]
        which = (key[1], number)
        if which in self._apart:
            return None
        equal = {name: len({str(report[name]) for report in reports}) == 1 for name in ("value", "state", "settings")}
        if all(equal.values()):
            self.compared += 1
            if when == "after":
                self.averaged.add(number)
            return None
        self._apart.add(which)
        if any(report.get("clipped") for report in reports):
            return None  # scaled while Horovod sends it: they part or not as its threads run, and the cause is named
        shown = [f"{report['value'][:8]} {report['line']}" for report in reports]
        # "before" the second step of what runs on TensorFlow all have updated once
        updated_once = step > 1 and first["framework"].startswith("tensorflow")
        if not equal["value"] and (when == "after" or (updated_once and not first["averaged"])):
            return self._new(_not_averaged(first, step, by_rank(shown)))
        if not equal["value"]:
            remedy = (
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0), and"
                " hvd.broadcast_optimizer_state(optimizer, root_rank=0), after a checkpoint was loaded and before the"
                " first step; Keras: BroadcastGlobalVariablesCallback(0); a tape: hvd.broadcast_variables()"
            )
            rule = "all ranks must start with the same weights: rank 0's are to be broadcast"
            if step > 1 and not updated_once:
                rule = "the weights of all ranks must stay the same: something changes them between updates"
                remedy = "what is drawn or loaded on one rank only is to be broadcast"
            return self._new(GuardFinding("broadcast", first["line"], rule, by_rank(shown), remedy))
        if not equal["settings"]:
            shown = [f"{report['settings']} {report['line']}" for report in reports]
            rule, remedy = (
                "learning rate and settings must be the same on all ranks",
                "give every rank the same numbers",
            )
            return self._new(GuardFinding("settings", first["made"], rule, by_rank(shown), remedy))
        shown = [f"{report['state'][:8]} {report['line']}" for report in reports]
        rule = "all ranks must start with the same state of the optimizer: rank 0's is to be broadcast"
        remedy = "hvd.broadcast_optimizer_state(optimizer, root_rank=0) on every rank, after rank 0 has loaded its file"
        return self._new(GuardFinding("optimizer-state", first["line"], rule, by_rank(shown), remedy))


def _not_averaged(report: Report, step: int, shown: str) -> GuardFinding:
    when = "the first update" if step <= 2 else f"update {step}"
    if report["averaged"]:
        why = "Horovod's optimizer is there, and something else changes the weights, or the gradients after it"
        remedy = (
            "change gradients between optimizer.synchronize() and `with optimizer.skip_synchronize():"
            " optimizer.step()`, on all ranks alike"
        )
    else:
        why = "this optimizer is not Horovod's"
        remedy = (
            "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters());"
            " Keras: compile(optimizer=hvd.DistributedOptimizer(optimizer)); a tape: hvd.DistributedGradientTape(tape)"
        )
    rule = f"gradients must be averaged over all ranks: after {when} their weights differ"
    return GuardFinding("not-averaged", report["made"], rule, f"{why}; weights after update {step}:\n{shown}", remedy)


def as_json(judge: Judge, steps: Mapping[str, int]) -> dict[str, Any]:
    """Returns the report that `--report` writes."""
    found = [asdict(finding) for finding in judge.findings]
    return {"format": 1, "findings": found, "comparisons": judge.compared, "updates": dict(steps)}
