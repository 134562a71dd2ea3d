"""`hvdtrain migrate`: turns a script on Horovod into one on hvdtrain, and proves that both train the same.

It prints the change as a diff, runs the old and the new script for 20 updates on 2 ranks, and compares their weights.
A script with a line that cannot be converted stays as it is: each such line is printed with the reason.
"""

from __future__ import annotations

import argparse
import difflib
import io
import sys
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.core.errors import FAULT_CODE, ConfigError

if TYPE_CHECKING:
    from hvdtrain.migrate.convert import Conversion
    from hvdtrain.migrate.script.source import LineNote

EPILOG = """\
examples:
  hvdtrain migrate train.py --epochs 1                   # the diff; 20 updates of both on 2 ranks, compared
  hvdtrain migrate --in-place train.py --epochs 1        # if proven: written, and the old one kept as train.py.orig
  hvdtrain migrate -o new.py train.py --epochs 1
  hvdtrain migrate --no-prove train.py                   # the diff only: its data or GPUs are elsewhere
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `hvdtrain migrate`."""
    parser.description, parser.epilog = __doc__, EPILOG
    parser.usage = "hvdtrain migrate [--no-prove | --updates N] [--in-place | -o FILE] SCRIPT [ARGS ...]"
    add = parser.add_argument
    # fmt: off
    add("--no-prove", action="store_true", help="convert only, without running the scripts")
    add("--updates", type=int, default=20, metavar="N", help="updates to compare (default: %(default)s)")
    add("--timeout-s", type=float, default=600.0, metavar="S",
        help="seconds for each run of the proof (default: %(default)g)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--in-place", action="store_true",
        help="replace the script, and keep the old one as SCRIPT.orig")
    where.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the new script to this new file")
    add("script", metavar="SCRIPT", type=Path, help="a script for horovod.torch, or for the Keras of Horovod")
    add("argv", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script, for the proof")
    # fmt: on


def run(args: argparse.Namespace) -> int:
    """Converts a script and proves it; returns the exit code. Nothing is written that was not proven.

    Raises:
        ConfigError: no LibCST, no such script, or a file that would be overwritten.
        HvdtrainError: the old script does not run here, so that nothing is proven.
    """
    try:
        from hvdtrain.migrate.convert import convert
    except ModuleNotFoundError as error:
        if error.name != "libcst":
            raise
        raise ConfigError(
            "migrate needs LibCST to change scripts", "no module 'libcst'", "pip install 'hvdtrain[migrate]'"
        ) from error
    script: Path = args.script
    if not script.is_file():
        raise ConfigError("the script must be a file", str(script), "hvdtrain migrate train.py")
    out = _out(args)
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    text, encoding = _read(script)
    found = convert(text)
    _print(script, "note: ", found.notes)
    if found.refused:
        _print(script, "", found.refused)
        _say(f"{script} stays as it is: {len(found.refused)} of its lines cannot be converted")
        return FAULT_CODE
    names = str(script), str(args.out or script)
    sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), found.text.splitlines(True), *names))
    sys.stdout.flush()
    if args.no_prove:
        _say("nothing was proven (--no-prove)")
    elif not _is_proven(args, found, argv):
        return FAULT_CODE
    if out is not None:
        if args.in_place:
            script.with_name(script.name + ".orig").write_bytes(script.read_bytes())
        out.write_bytes(found.text.encode(encoding))
        _say(f"wrote {out}")
    return 0


def _is_proven(args: argparse.Namespace, found: Conversion, argv: list[str]) -> bool:
    """Runs the old and the new script, and prints the proof; returns True if both train the same."""
    from hvdtrain.migrate.prove import NotProvenError, linked, prove

    large = ", ".join(linked())
    writes = f"; not copied, as too large, so that what it writes there stays: {large}" if large else ""
    _say(f"running {args.script} and the new one for {args.updates} updates, each in a copy of this folder{writes}")
    options = {"updates": args.updates, "timeout_s": args.timeout_s, "framework": found.framework}
    try:
        proof = prove(args.script, found.text, argv, **options)
    except NotProvenError as error:
        _say(f"NOT PROVEN: {error}")
        return False
    _say(str(proof))
    return proof.holds


def _say(text: str) -> None:
    print(f"hvdtrain migrate: {text}", file=sys.stderr)


def _read(script: Path) -> tuple[str, str]:
    """Returns a script's text, with its line ends, and its encoding."""
    data = script.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def _out(args: argparse.Namespace) -> Path | None:
    """Returns where the new script is written, None for nowhere; no file is overwritten."""
    if args.updates < 1:
        raise ConfigError("--updates must be 1 or more", str(args.updates))
    kept = args.script.with_name(args.script.name + ".orig") if args.in_place else args.out
    if kept is not None and kept.exists():
        raise ConfigError("migrate cannot overwrite a file", f"{kept} exists", "move it, or give -o another name")
    return args.script if args.in_place else args.out


def _print(script: Path, before: str, findings: Sequence[LineNote]) -> None:
    for finding in findings:
        print(f"{before}{script}:{finding.line}: {finding.text}", file=sys.stderr)
