"""One table of exit codes: what --help lists is what the page says, and what the code ends with."""

from __future__ import annotations

import signal

from harness import REPOSITORY

from hvdtrain.__main__ import COMMANDS
from hvdtrain.core import errors
from hvdtrain.core.exit_codes import GUARD_CODE, HOST_LOST, NOT_STARTED, PIPE_CODE, TABLE


def test_the_page_has_the_table() -> None:
    page = (REPOSITORY / "docs" / "cluster.md").read_text(encoding="utf-8")
    rows = page.partition("### Exit codes")[2].partition("|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert rows == [
        f"| {code} | {', '.join(f'`{name}`' for name in commands.split()) or 'all'} | {meaning} |"
        for code, commands, meaning in TABLE
    ]


def test_the_table_has_every_code_and_command() -> None:
    named = {name: code for name, code in vars(errors).items() if name.endswith("_CODE")}
    codes = {*named.values(), GUARD_CODE, HOST_LOST, NOT_STARTED, PIPE_CODE}
    assert {str(code) for code in codes} <= {row.code for row in TABLE}
    assert {name for row in TABLE for name in row.commands.split()} <= set(COMMANDS)
    assert PIPE_CODE == 128 + signal.SIGPIPE
