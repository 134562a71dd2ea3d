"""One table of exit codes: what --help lists is what the page says, and what the code ends with."""

from __future__ import annotations

import signal

from harness import REPOSITORY

from hvdtrain.__main__ import COMMANDS
from hvdtrain.core import errors
from hvdtrain.core.errors import EXIT_CODES, PIPE_CODE


def test_the_page_has_the_table() -> None:
    page = (REPOSITORY / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    rows = page.partition("|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert rows == [
        f"| {code} | {', '.join(f'`{name}`' for name in commands.split()) or 'all'} | {meaning} |"
        for code, commands, meaning in EXIT_CODES
    ]


def test_the_table_has_every_code_and_command() -> None:
    assert {str(code) for name, code in vars(errors).items() if name.endswith("_CODE")} <= {
        row.code for row in EXIT_CODES
    }
    assert {name for row in EXIT_CODES for name in row.commands.split()} <= set(COMMANDS)
    assert PIPE_CODE == 128 + signal.SIGPIPE
