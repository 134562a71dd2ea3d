"""`hvdtrain rehearse`: a training on as many ranks as it shall have, on this machine, for a few updates.

The ranks are real ones, on Horovod and on CPU, forked from one process that has imported their libraries. What hvdtrain
refuses, proves and watches while it trains is found here, before a cluster is waited for: ranks that wait for one
another at different places, that hang, or take another number of steps; that train on the same data; too little
memory. A plain Horovod script is watched as `hvdtrain guard` does it.

What hvdtrain would write (run logs, checkpoints) goes into the rehearsal's folder. No checkpoint is restored.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import tokenize
from pathlib import Path

from hvdtrain.cluster.function.rehearsal import Ranks, import_shared, imported_by, slots_of
from hvdtrain.cluster.hosts import probe
from hvdtrain.cluster.launch import processes
from hvdtrain.core import flags, variables
from hvdtrain.core.errors import ConfigError, LauncherError

EPILOG = """\
examples:
  hvdtrain rehearse -np 64 train.py --epochs 90
  hvdtrain rehearse -np 16 --per-host 4 --updates 0 train.py       to the script's end
  hvdtrain rehearse -np 64 -m hvdtrain.keras_mnist
"""
PROGRAM = "hvdtrain rehearse"
UPDATES, LIMIT_S = 5, 170.0
COMPARED_EVERY = 100  # as guard has it by default, beside the first updates
STUCK_S = 15.0
_LOOK_S = 0.2
_LEAST_FREE = 0.05  # of the machine's memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain rehearse`."""
    parser.description, parser.epilog = __doc__, EPILOG
    parser.usage = "hvdtrain rehearse -np N [flags] (SCRIPT | -m MODULE) ..."
    add = parser.add_argument
    # fmt: off
    add("-np", type=flags.whole(1), required=True, metavar="N", help="number of ranks")
    add("--per-host", type=flags.whole(1), metavar="N",
        help="ranks a host, as the ranks see it (default: all on one host)")
    add("--updates", type=flags.whole(0), default=UPDATES, metavar="N",
        help="stop when each rank has done N updates; 0: at the end of the script (default: %(default)s)")
    add("--limit", type=flags.seconds, default=LIMIT_S, metavar="S",
        help="stop after S seconds, with a report so far (default: %(default)g)")
    add("--log-dir", type=Path, metavar="DIR",
        help="folder for one log a rank and for hvdtrain's files (default: the next runs/rehearsal-N)")
    add("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    add("script", metavar="SCRIPT", help="the script that each rank runs")
    add("argv", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    # fmt: on


def run(args: argparse.Namespace) -> int:
    """Rehearses the job; returns the exit code. It also returns in each rank, with the script's exit code.

    This process only waits for another one, which is the ranks' parent, and ends the processes that the parent leaves.
    So whichever of the two is killed, all ranks and all processes that ranks have started end.
    """
    processes.adopt_orphans()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.fork()
    if parent:
        return processes.guard(parent, passes_on=True)
    os.setpgid(0, 0)  # Ctrl-C comes from the guard, once
    processes.die_with_parent(signal.SIGTERM)
    return _rehearse(args)


def _rehearse(args: argparse.Namespace) -> int:
    from hvdtrain.guard import script

    path = script.source_of(args.script, args.module)
    try:
        with tokenize.open(path) as file:  # by its byte-order mark and encoding line
            source = file.read()
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError("a script must be readable Python", f"{path}: {error}") from None
    watched = "hvdtrain" not in source
    cores = len(os.sched_getaffinity(0))
    folder = _folder(args.log_dir)
    own = _variables(args.np, cores, folder)
    os.environ.update(own)
    try:
        names = imported_by(source, os.environ.get("KERAS_BACKEND") or "tensorflow")
    except SyntaxError as error:
        raise ConfigError(
            "a script must be Python that compiles", f"{path}, line {error.lineno}: {error.msg}"
        ) from None
    # guard's hooks are for what is imported after them
    import_shared([name for name in names if not watched or not name.startswith("horovod")])
    what = "watched as by hvdtrain guard" if watched else "on hvdtrain"
    say(f"{args.np} ranks of {args.script}, {what}, on {cores} core(s); logs in {folder}")
    ranks = Ranks(args.np, folder)
    ranks.fork(slots_of(args.np, args.per_host or args.np), own)
    if ranks.number is not None:  # no `finally` is around this: a rank goes on as the program
        if not watched:
            return script.execute(args.script, args.argv, args.module)
        return script.run(args.script, args.argv, args.module, warn=False, report=None, every=COMPARED_EVERY)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell runs in the background
    try:
        return _watch(ranks, args)
    finally:
        ranks.end()


def say(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


def _folder(wanted: Path | None) -> Path:
    from hvdtrain.record.folder import next_folder

    try:
        if wanted is None:
            return next_folder(Path("runs"), "rehearsal").absolute()
        wanted.mkdir(parents=True, exist_ok=True)
        if any(wanted.iterdir()):
            raise ConfigError("--log-dir must be new or empty", str(wanted), "name another folder: --log-dir DIR")
    except OSError as error:
        received = f"{error.filename}: {error.strerror}"
        raise ConfigError("a rehearsal needs a folder to write to", received, "name one: --log-dir DIR") from error
    return wanted.absolute()


def _variables(np: int, cores: int, folder: Path) -> dict[str, str]:
    """Returns variables for ranks with far too few cores: long timeouts, one thread, no GPU, which cannot be forked."""
    from hvdtrain.cluster.launch import environment

    crowd = np / cores
    patience = {
        variables.HANG_S: f"{20 + crowd:.0f}",
        # each rank's thread looks so often for work: at Horovod's own 1 ms they would take all cores
        "HOROVOD_CYCLE_TIME": f"{max(1.0, crowd):.0f}",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": f"{60 + 4 * crowd:.0f}",
        variables.START_TIMEOUT_S: f"{120 + 4 * crowd:.0f}",
    }
    found = environment.defaults(1, 1) | patience
    return {name: os.environ.get(name) or value for name, value in found.items()} | {
        "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", variables.REHEARSAL: str(folder)
    }  # fmt: skip


def _watch(ranks: Ranks, args: argparse.Namespace) -> int:
    from hvdtrain.cluster.launch.failures import as_exit_code, described, first_failure, settled

    shown, came, moved_s = 0, 0, ranks.began_s
    while True:
        time.sleep(_LOOK_S)
        ranks.reap()
        shown = _show(ranks, shown)
        done = ranks.updates()
        if min(done) > came:
            came, moved_s = min(done), time.monotonic()
        ends = list(ranks.ends.values())
        over = len(ends) == ranks.np
        first = first_failure(ends)
        if first is not None and (over or settled(ends, time.monotonic())):
            _show(ranks, shown)
            say(f"rank {first.rank} failed first, after {min(done)} update(s): {described(first.code, first.host)}")
            if first.rank:
                for line in first.lines:
                    print(f"  | {line}", file=sys.stderr)
            say(f"log: {ranks.log(first.rank)}")
            return as_exit_code(first.code)
        if over or 0 < args.updates <= min(done):
            return _well(ranks, done, over)
        if time.monotonic() - ranks.began_s > args.limit:
            return _late(ranks, args.limit, done, time.monotonic() - moved_s)
        _check_room(ranks)


def _show(ranks: Ranks, shown: int) -> int:
    """Passes on what rank 0 has written since; returns how much that is."""
    with ranks.log(0).open("rb") as log:
        log.seek(shown)
        text = log.read()
    sys.stdout.buffer.write(text)
    sys.stdout.flush()
    return shown + len(text)


def _well(ranks: Ranks, done: list[int], over: bool) -> int:
    came = "to the script's end" if over else f"for {min(done)} update(s)"
    say(f"{ranks.np} ranks ran together {came}, and nothing was found in {time.monotonic() - ranks.began_s:.0f} s")
    if not over:
        say("not rehearsed: what comes later in the script (--updates 0: to its end)")
    return 0


def _late(ranks: Ranks, limit_s: float, done: list[int], still_s: float) -> int:
    """The time is over."""
    slow = done.index(min(done))
    if min(done) > 0 and still_s > STUCK_S:
        received = f"rank {slow}: no update for {still_s:.0f} s after {done[slow]} update(s): slow, or hung"
        remedy = f"a larger --limit: the rehearsal reports a rank that hangs\nlog of the rank: {ranks.log(slow)}"
        raise LauncherError(f"all ranks must make updates until {limit_s:g} s are over", received, remedy)
    if min(done) > 0:
        say(f"{limit_s:g} s are over after {min(done)} update(s): nothing was found so far (--limit, --updates)")
        return 0
    raise LauncherError(
        f"each rank must make an update within {limit_s:g} s",
        f"rank {slow}: none yet; last lines of its log: {' | '.join(ranks.last_lines(slow)[-3:]) or 'none'}",
        "a larger --limit, a smaller model or batch, or fewer ranks: all ranks share this machine's cores\n"
        f"see whether the rank waits for something: {ranks.log(slow)}",
    )


def _check_room(ranks: Ranks) -> None:
    memory = probe.memory()
    total, free = memory["MemTotal"], memory["MemAvailable"]
    if free < _LEAST_FREE * total:
        rule = "all ranks must have room in this machine's memory"
        received = f"{ranks.np} ranks have left {free >> 20} of {total >> 20} MiB"
        raise LauncherError(rule, received, "fewer ranks (-np), a smaller model, batch or data set")
