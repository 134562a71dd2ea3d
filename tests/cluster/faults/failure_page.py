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
# Failures: what happens, and after how many seconds

`scripts/failures.sh` wrote this page from {count} real runs. Do not edit it. Each run is a training
with PyTorch on 2 ranks, one on each host: 403 samples, 2 epochs. The fault hits rank 1 on host2,
unless the row names another place. {rows}

`hvdtrain launch` started the jobs with its default limits and the flags shown. How to read a
failure of your own job: [why it hung](how-hung.md). The tests are in
`tests/cluster/faults`; `scripts/test.sh -m "" tests/cluster/faults` runs them.

| column | meaning |
|---|---|
| what happens | the job ends, and the same command resumes it; or the job continues |
| seconds | from the fault until no process of the job ran on any host |
| at most | the limit in the tests, which allow 5 s more |
| left | processes of the job on any host, 30 s after the launcher's end |
| lost | samples that were skipped or trained twice in an epoch |
| blamed | what the launcher names as the first failure, or as lost |
| message | the first line that names the cause, without paths |

- **Seconds** of a job that continues: the longest time without a completed update, from the fault to
  the end of the job. An update takes 0.1 s here, in elastic jobs 0.2 to 0.4 s.
- **At most**, for jobs that end: the sums of the [limits](launching.md#when-a-job-ends).
- **Lost** is computed from the final weights. They are compared with those that numpy computes from
  the same global batches (float64, to 1e-10). A job that ended was resumed from the newest
  checkpoint.
- **Blamed**, for a rank that hangs: the rank that noticed it. Its message names the rank that hangs,
  and the line.

The hosts are network namespaces with their own mounts, processes and sshd. They ran on one machine
with {cores} cores (Linux {kernel}, Python {python}, PyTorch {torch}), two jobs at a time.
"""


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
            torch=torch,
            rows=f"{sum(fault.goes_on for fault in FAULTS)} of the {len(FAULTS)} jobs continue without help.",
        )
    ]  # fmt: skip
    for kind in dict.fromkeys(fault.kind for fault in FAULTS):
        lines += [
            f"## {kind[0].upper()}{kind[1:]}",
            "",
            "| fault | what happens | seconds | at most | exit code | left | lost | blamed | message |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_line(fault, found[fault.name]) for fault in FAULTS if fault.kind == kind),
            "",
        ]
    return "\n".join(lines)


def _line(fault: Fault, row: Row) -> str:
    code = signal.Signals(-row.code).name if row.code < 0 else row.code
    what = fault.what + (f", `{' '.join(fault.flags)}`" if fault.flags else "")
    happens = "continues" if fault.goes_on else "ends; resumed"
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
