"""`hvdtrain migrate`: turns a script on Horovod into one on hvdtrain, or on plain PyTorch, and proves that both train
the same.

It prints the change as a diff. A script of which a line cannot be moved is left as it is: each such line is told, with
the reason.
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

from hvdtrain.core.errors import ConfigError

if TYPE_CHECKING:
    from hvdtrain.migrate.script.source import LineNote

EPILOG = """\
examples:
  hvdtrain migrate train.py                              # the diff
  hvdtrain migrate --prove train.py --epochs 1           # and 20 updates of both on 2 ranks, compared
  hvdtrain migrate --in-place train.py                   # what was there is kept as train.py.orig
  hvdtrain migrate -o new.py train.py
  hvdtrain migrate --to ddp --prove train.py             # off Horovod: torch.distributed, started by torchrun
"""

_FLAGS = ("--to", "--prove", "--updates", "--timeout-s", "--in-place", "-o", "--out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain migrate`."""
    parser.description, parser.epilog = __doc__, EPILOG
    parser.usage = "hvdtrain migrate [--to NAME] [--prove [--updates N]] [--in-place | -o FILE] SCRIPT [ARGS ...]"
    add = parser.add_argument
    # fmt: off
    add("--to", choices=("hvdtrain", "ddp"), default="hvdtrain", help="ddp: off Horovod, to plain PyTorch")
    add("--prove", action="store_true", help="run the old and the new script on 2 ranks, and compare their weights")
    add("--updates", type=int, default=20, metavar="N", help="how many updates the proof makes (default: %(default)s)")
    add("--timeout-s", type=float, default=600.0, metavar="S", help="for each run of it (default: %(default)g)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--in-place", action="store_true", help="write the new script, and keep the old as SCRIPT.orig")
    where.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the new script to FILE, a new one")
    add("script", metavar="SCRIPT", type=Path, help="a script that trains on horovod.torch, or on Horovod's Keras")
    add("argv", nargs=argparse.REMAINDER, metavar="ARGS", help="with --prove: the script's own arguments")
    # fmt: on


def run(args: argparse.Namespace) -> int:
    """Converts a script; returns the exit code.

    Raises:
        ConfigError: no LibCST, no such script, or a file that would be written over.
        HvdtrainError: a run of the proof failed.
    """
    try:
        from hvdtrain.migrate.convert import convert
        from hvdtrain.migrate.script.plan import TARGETS
    except ModuleNotFoundError as error:
        if error.name != "libcst":
            raise
        raise ConfigError(
            "scripts are changed by LibCST", "no module 'libcst'", "pip install 'hvdtrain[migrate]'"
        ) from error
    script: Path = args.script
    if not script.is_file():
        raise ConfigError("the script must be a file", str(script), "hvdtrain migrate train.py")
    out = _out(args)
    text, encoding = _read(script)
    found = convert(text, TARGETS[args.to])
    _print(script, "note: ", found.notes)
    if found.refused:
        _print(script, "", found.refused)
        print(
            f"hvdtrain migrate: {script} is left as it is: {len(found.refused)} of its lines cannot be moved",
            file=sys.stderr,
        )
        return 1
    names = str(script), str(args.out or script)
    sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), found.text.splitlines(True), *names))
    sys.stdout.flush()
    if args.prove:
        from hvdtrain.migrate.prove import prove

        argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
        proof = prove(
            script, found.text, argv, updates=args.updates, timeout_s=args.timeout_s, framework=found.framework,
            target=args.to,
        )  # fmt: skip
        print(f"hvdtrain migrate: {proof}", file=sys.stderr)
        if not proof.holds:
            return 1
    if out is not None:
        if args.in_place:
            script.with_name(script.name + ".orig").write_bytes(script.read_bytes())
        out.write_bytes(found.text.encode(encoding))
        print(f"hvdtrain migrate: wrote {out}", file=sys.stderr)
    return 0


def _read(script: Path) -> tuple[str, str]:
    """A script's text, with the line ends that it has, and its encoding."""
    data = script.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def _out(args: argparse.Namespace) -> Path | None:
    """Where the new script goes, None for nowhere; nothing is lost that is there."""
    if args.updates < 1:
        raise ConfigError("--updates is 1 or more", str(args.updates))
    late = [arg for arg in args.argv if arg.split("=")[0] in _FLAGS]
    if late and not args.prove:
        raise ConfigError(
            "flags of migrate stand before the script; what is behind it is the script's own, for --prove",
            f"{late[0]} behind {args.script}",
            f"hvdtrain migrate {' '.join(late)} ... {args.script}",
        )
    if late:
        print(f"hvdtrain migrate: {late[0]} behind {args.script} is the script's own argument", file=sys.stderr)
    kept = args.script.with_name(args.script.name + ".orig") if args.in_place else args.out
    if kept is not None and kept.exists():
        raise ConfigError("nothing is written over", f"{kept} is there", "move it away, or give -o another name")
    return args.script if args.in_place else args.out


def _print(script: Path, before: str, findings: Sequence[LineNote]) -> None:
    for finding in findings:
        print(f"{before}{script}:{finding.line}: {finding.text}", file=sys.stderr)
