"""docs/failures.md, from what the tests have seen: failure_page.py ROWS."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from failure_rows import FAULTS, Fault  # noqa: E402
from failure_run import Row  # noqa: E402

VARIABLE = "HVDTRAIN_FAILURES"  # names the file that rows are added to, one JSON object a line
PAGE = ROOT / "docs" / "failures.md"
INTRODUCTION = """\
# Failures: what happens, and within how many seconds

Written by `scripts/failures.sh` from {count} real runs: do not edit. Each is a training with PyTorch of 403 samples and 2 epochs by 2 ranks, one a host; rank 1 on host2 is whom the fault
befalls where nothing else is said. The hosts are network namespaces with mounts, processes and an sshd of their own, on one machine with {cores} cores (Linux {kernel}, Python {python}, PyTorch
{torch}), two jobs at a time. Jobs were started by `hvdtrain launch` with its default limits, but for the flags that are shown.

- **seconds**: single runs, from the fault until the launcher had ended and no process of the job ran on any host; of a job that goes on the longest time without a completed update, from the fault to the job's end
  (an update takes 0.1 s here, 0.2 to 0.4 s in elastic jobs). *At most*: what the tests demand, of which they allow 5 s more, for a busy machine; those of jobs that end are the sums of [launching.md](launching.md#when-a-job-ends).
- **left**: processes of the job on any host, 30 s after the launcher's end.
- **lost**: samples that were skipped or trained twice in either epoch by the updates that are in the final weights, which are compared with those that numpy computes from the same global batches (float64: 1e-10). A job
  that the fault ended was started again by the same command, which goes on from the newest checkpoint.
- **blamed**: whom the launcher names as the first that failed, or as lost; of a rank that hangs it is the one that found it out, in whose words is who hangs, and where.
- **said**: the first line that names it, without paths.

{rows} The tests: `tests/cluster/faults` (`scripts/test.sh -m "" tests/cluster/faults`); how to read more of a failure: [how-hung.md](how-hung.md).
"""  # noqa: E501


def note(row: Row) -> None:
    """Adds a row for the page, where one is being written."""
    if os.environ.get(VARIABLE):
        with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(row), "text": ""}) + "\n")


def render(rows: list[Row]) -> str:
    """Returns the page."""
    found = {row.name: row for row in rows}
    torch = version("torch")
    lines = [
        INTRODUCTION.format(
            count=len(rows), cores=os.cpu_count(), kernel=platform.release(), python=platform.python_version(),
            torch=torch, rows=f"{sum(fault.goes_on for fault in FAULTS)} of the {len(FAULTS)} go on by themselves.",
        )
    ]  # fmt: skip
    for kind in dict.fromkeys(fault.kind for fault in FAULTS):
        lines += [
            f"## {kind[0].upper()}{kind[1:]}",
            "",
            "| fault | what happens | seconds | at most | exit code | left | lost | blamed | said |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_line(fault, found[fault.name]) for fault in FAULTS if fault.kind == kind),
            "",
        ]
    return "\n".join(lines)


def _line(fault: Fault, row: Row) -> str:
    code = signal.Signals(-row.code).name if row.code < 0 else row.code
    what = fault.what + (f", `{' '.join(fault.flags)}`" if fault.flags else "")
    happens = "goes on" if fault.goes_on else "ends; resumed"
    said = f"`{row.said}`" if row.said else ""
    seconds = f"{row.seconds:.1f}", f"{fault.within_s:g}"
    cells = (what, happens, *seconds, code, len(row.left), row.lost, row.blamed, said)
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def main() -> int:
    """Returns 0 when every fault has a row."""
    rows = [Row(**json.loads(line)) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    if missing := {fault.name for fault in FAULTS} - {row.name for row in rows}:
        print(f"docs/failures.md not written: no row of {', '.join(sorted(missing))}")
        return 1
    PAGE.write_text(render(rows), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
