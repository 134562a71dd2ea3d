"""`hvdtrain launch`: runs a command as N Horovod ranks on many hosts, and ends all of them with the job.

It checks the hosts, finds their network by address (interface names may differ), and starts one agent on each host over
ssh. The agents start the ranks. The first rank that fails ends the job; its last lines are printed last.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.cluster.hosts.hosts import Host
from hvdtrain.cluster.hosts.protocol import BEAT_S
from hvdtrain.cluster.launch import discovery, environment, launcher
from hvdtrain.cluster.launch.failures import Failure, Restarts
from hvdtrain.cluster.launch.job import ElasticOptions, Job, JobPlan, Timeouts
from hvdtrain.cluster.launch.output import Display, Logs, failure_block, report
from hvdtrain.cluster.launch.running import Heard, Outcome
from hvdtrain.commands import host_flags
from hvdtrain.core import flags, launchers, variables
from hvdtrain.core.errors import PREEMPTED_CODE, ConfigError, LauncherError
from hvdtrain.world import startup

EPILOG = """\
examples:
  hvdtrain launch -np 4 -- python train.py                                    4 ranks on this machine
  hvdtrain launch -np 16 -H host1:4,host2:4,host3:4,host4:4 -- python train.py
  hvdtrain launch -np 16 --hostfile hosts --max-restarts 3 -- python -m hvdtrain.torch_resnet --data /data
  hvdtrain launch -H host1:4,host2:4 --dry-run -- python train.py             what would run, and with what
"""
_LOOK_AGAIN_S = 2.0  # at hosts, until they pass the checks for a restart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain launch`."""
    parser.description, parser.epilog = __doc__, EPILOG
    parser.usage = "hvdtrain launch [flags] -- COMMAND ..."
    limits = Timeouts()
    add = parser.add_argument
    # fmt: off
    host_flags.add(parser, "np", "hosts", "hostfile")
    add("-x", dest="variables", action="append", default=[], metavar="NAME[=VALUE]",
        help="also pass this variable to the ranks. Every rank gets this environment, without what looks secret or "
        "belongs to this host")
    add("--env-file", type=Path, metavar="FILE", help="also pass the variables in this file, one NAME=VALUE a line")
    add("--tuned", type=Path, metavar="FILE",
        help="pass the settings that hvdtrain bench train --tune found; the environment wins (default: "
        f"{variables.TUNED})")
    host_flags.add(parser, "network")
    add("--min-np", type=flags.whole(1), metavar="N",
        help="continue if at least N ranks remain (elastic; default: 1)")
    add("--max-np", type=flags.whole(1), metavar="N",
        help="add ranks up to N when slots are free (elastic; default: all slots of -H)")
    add("--host-discovery", metavar="COMMAND",
        help="a command that prints the usable hosts, one host1:4 a line; it runs every second (elastic)")
    add("--elastic-timeout", type=flags.seconds_or_0, default=600.0, metavar="S",
        help="seconds to run with fewer than --min-np ranks (default: %(default)g)")
    add("--quiet", action="store_true", help="show the output of rank 0 only, without marks")
    add("--log-dir", type=Path, metavar="DIR", help="folder for one log a rank (default: the next runs/launch-N)")
    add("--max-restarts", type=flags.whole(0), default=0, metavar="N",
        help="restart a failed job up to N times in a row without progress (default: 0, never)")
    add("--restart-wait", type=flags.seconds_or_0, default=60.0, metavar="S",
        help="seconds for hosts to pass the checks before a restart (default: %(default)g)")
    add("--grace", type=flags.seconds_or_0, default=limits.grace_s, metavar="S",
        help="seconds between SIGTERM and SIGKILL (default: %(default)g)")
    add("--lost-after", type=_silence, default=limits.lost_s, metavar="S",
        help="seconds of silence after which a host is lost (default: %(default)g)")
    add("--stopped-after", type=flags.seconds, default=limits.stopped_s, metavar="S",
        help="seconds after which a stopped rank (SIGSTOP) ends the job (default: %(default)g)")
    add("--hang-timeout", type=flags.seconds_or_0, metavar="S",
        help="seconds after which a rank that blocks the others ends the job, with its name (default: 28, or "
        f"{variables.HANG_S}; 0: never)")
    add("--start-timeout", type=flags.seconds, default=limits.start_s, metavar="S",
        help="seconds for hosts to answer the checks and the launcher (default: %(default)g)")
    host_flags.add(parser, "python", "ssh_port", "identity")
    add("--no-checks", action="store_true", help="start without checking the hosts")
    add("--dry-run", action="store_true", help="print what would run on which host, and exit")
    add("argv", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="the command that every rank runs")
    # fmt: on


def _silence(text: str) -> float:
    seconds = flags.seconds(text)
    if seconds < 1.5 * BEAT_S:
        message = f"must be at least {1.5 * BEAT_S:g}: hosts give a sign of life every {BEAT_S:g} s"
        raise argparse.ArgumentTypeError(f"{message}, not {text}")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Runs the job, again if it fails and may; returns the exit code."""
    named = os.environ.pop(variables.TUNED, None)  # ranks look for no file
    args.tuned = args.tuned or named
    job = job_of(args, os.environ)
    if args.dry_run:
        print(_dry_run(launcher.look(job)))
        return 0
    if not args.no_checks:
        _check(job)
    logs = Logs(args.log_dir)
    attempts: list[dict[str, Any]] = []
    facts = {"format": 1, "command": "launch", "argv": list(job.argv), "hosts": list(map(str, job.hosts))}
    facts |= {"np": job.np, "job": job.env[variables.JOB], "attempts": attempts}
    logs.record(facts)
    try:
        return _attempts(job, logs, args, facts, attempts)
    finally:
        logs.close()


def _attempts(
    job: Job, logs: Logs, args: argparse.Namespace, facts: dict[str, Any], attempts: list[dict[str, Any]]
) -> int:
    """Runs the job until it ends, or may not be started again; returns its exit code."""
    failed: Failure | None = None
    restarts, wait_s = Restarts(args.max_restarts), 0.0
    while True:
        started = time.time()
        try:
            if failed is None:
                outcome = _run_once(job, 0, logs, args)
            else:
                outcome = _run_again(job, len(attempts), logs, args, wait_s)
        except (LauncherError, ConfigError) as error:
            if failed is None:
                raise
            report(f"not started again: {error}")
            return failed.code
        attempts.append(_attempt(outcome, started, elastic=job.elastic is not None))
        logs.record(facts)
        _report_end(outcome, logs.folder)
        failed = outcome.failed
        again_s = None if failed is None else _again_s(failed, outcome, restarts)
        if failed is None or again_s is None:
            return outcome.exit_code
        # a host ends its ranks as late as this one noticed its loss, and then grants them their grace
        wait_s = again_s if failed.rank is not None else max(again_s, job.timeouts.grace_s + 2.0)


def _report_end(outcome: Outcome, folder: Path) -> None:
    for process in outcome.left:
        report(f"still runs, and cannot be ended: {process}")
    if outcome.failed is not None:
        report(failure_block(outcome.failed, folder))
    if outcome.interrupted is not None:  # also while a job that had failed was ending
        report(f"ended by {signal.Signals(outcome.interrupted).name}")
    if outcome.failed is None and outcome.preempted:
        words = "the output of the ranks above shows whether a checkpoint was saved"
        report(f"the job was preempted: exit code {PREEMPTED_CODE}; {words}")


def _again_s(failed: Failure, outcome: Outcome, restarts: Restarts) -> float | None:
    """Returns after how long the job is started again; None: it is not."""
    if outcome.interrupted is not None:
        return None
    if outcome.signalled is not None:
        report(f"not started again: the job got {signal.Signals(outcome.signalled).name}")
        return None
    wait_s, text = restarts.after(failed, outcome.updates)
    if wait_s is not None:
        report(f"{text}, as soon as the hosts pass the checks{f', after {wait_s:g} s' if wait_s else ''}")
    elif text:
        report(text)
    return wait_s


def job_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """Returns the job that the flags, and the Slurm job around, ask for; raises ConfigError for what they lack."""
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise ConfigError("hvdtrain launch needs a command", "none", "hvdtrain launch -np 4 -- python train.py")
    words = shlex.split(argv[0]) if len(argv) == 1 and shutil.which(argv[0]) is None else []
    if len(words) > 1 and shutil.which(words[0]) is not None:
        fix = f"hvdtrain launch [flags] -- {shlex.join(words)}"
        raise ConfigError("the ranks' command must not be one quoted text", repr(argv[0]), fix)
    if argv[0].endswith(".py") and shutil.which(argv[0]) is None:
        fix = f"hvdtrain launch [flags] -- python {shlex.join(argv)}"
        raise ConfigError("the ranks' command must be a program", f"{argv[0]}, a Python file", fix, code=48)
    ours = {variables.JOB: launchers.job_of(environ) or uuid.uuid4().hex[:12]}
    if args.hang_timeout is not None:
        ours[variables.HANG_S] = f"{args.hang_timeout:g}"
    env = environment.passed(environ, args.variables, args.env_file) | ours
    timeouts = Timeouts(args.start_timeout, args.lost_after, args.stopped_after, args.grace)
    job = host_flags.job_of(args, environ, argv, here=lambda: 1, env=env, timeouts=timeouts)
    return _elastic(args, environ, _tuned(job, args.tuned))


def _tuned(job: Job, path: str | Path | None) -> Job:
    """Returns the job with the settings of a file; raises ConfigError if it cannot be read."""
    if not path:
        return job
    found, text = startup.tuned(path, job.env, max(job.ranks.values()))
    report(text)
    return dataclasses.replace(job, env={**job.env, **found})


def _elastic(args: argparse.Namespace, environ: Mapping[str, str], job: Job) -> Job:
    """Returns the job with how it may shrink and grow; raises ConfigError for bad limits, or no hosts in time."""
    if args.min_np is None and args.max_np is None and args.host_discovery is None:
        return job
    command = discovery.command_in(args.host_discovery) if args.host_discovery is not None else None
    if command is not None and not (args.hosts or args.hostfile):
        found = discovery.first(command, args.np or args.min_np or 1, args.elastic_timeout)
        slots = sum(host.slots for host in found)
        job = dataclasses.replace(job, hosts=found, np=args.np or min(slots, args.max_np or slots))
    elif args.max_np is not None and not (args.hosts or args.hostfile) and job.hosts[0].name == "localhost":
        job = dataclasses.replace(job, hosts=[dataclasses.replace(job.hosts[0], slots=max(args.max_np, job.np))])
    minimum, maximum = args.min_np or 1, args.max_np or max(job.np, sum(host.slots for host in job.hosts))
    if not minimum <= job.np <= maximum:
        rule, received = "-np must be from --min-np to --max-np", f"{minimum}, {job.np}, {maximum}"
        raise ConfigError(rule, received, "give -np between the two, or remove one of them")
    return dataclasses.replace(job, elastic=ElasticOptions(minimum, maximum, args.elastic_timeout, command))


def _run_once(job: Job, attempt: int, logs: Logs, args: argparse.Namespace) -> Outcome:
    number = launchers.restarts(os.environ) + attempt  # by which programs go on with the run they had begun
    job = dataclasses.replace(job, env={**job.env, variables.RESTART: str(number)})
    display = Display(job.slots, logs, quiet=args.quiet, with_hosts=not job.one_host)

    def begin(plan: JobPlan) -> None:
        for rank in range(job.np if attempt else 0):
            logs.write(rank, f"--- restart {attempt}")
        one = ["no -np was given: one rank; -np N starts N"] if job.np == 1 and args.np is None else []
        for line in [*_remarks(plan), *one, f"{job.np} rank(s) on {_places(plan)}; logs in {logs.folder}"]:
            report(line, within_s=1.0)  # agents are there already, and wait for signs of life

    return launcher.run(job, on_plan=begin, on_line=display.line, heard=_LaunchReporter(display, job.timeouts.grace_s))


class _LaunchReporter(Heard):
    """Reports to the user what happens while a job runs."""

    def __init__(self, display: Display, grace_s: float) -> None:
        self._display, self._grace_s, self._interrupted = display, grace_s, False

    def interrupt(self, number: int) -> None:
        self._display.interrupt(0.0 if self._interrupted else self._grace_s)
        if not self._interrupted:
            report(f"{signal.Signals(number).name}: ending every rank (a second one kills them)", within_s=0.2)
        self._interrupted = True

    def worker(self, number: int, host: Host) -> None:
        self._display.add(number, host)

    def say(self, text: str) -> None:
        report(text, within_s=0.2)


def _remarks(plan: JobPlan) -> Iterator[str]:
    """Yields what a user may not expect of the ranks' variables."""
    yield from plan.notes
    if not plan.job.one_host and (names := environment.withheld(os.environ, plan.job.env)):
        yield f"not passed to the ranks, because they look secret (-x NAME passes one): {', '.join(names)}"
    for hosts in dict.fromkeys(map(tuple, plan.differing.values())):
        theirs = ", ".join(name for name, its in plan.differing.items() if tuple(its) == hosts)
        others = "the ranks of other hosts have it not, or otherwise (-x NAME=VALUE makes all the same)"
        yield f"set by the log-in on {', '.join(hosts)} itself: {theirs}; {others}"


def _places(plan: JobPlan) -> str:
    return ", ".join(
        f"{host.name}: {len(plan.of_host(host))} ({plan.chosen[host.name].interface} {plan.chosen[host.name].address})"
        for host in plan.hosts
    )


def _attempt(outcome: Outcome, started: float, *, elastic: bool) -> dict[str, Any]:
    failed = outcome.failed
    keys = ("rank", "host", "why", "lines", "after_s")
    failure = failed and {name: getattr(failed, name) for name in keys}
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started))
    facts = {"started": began, "seconds": round(outcome.seconds, 3), "updates": outcome.updates}
    facts |= {"exit_code": outcome.exit_code, "failure": failure}
    return facts | ({"formations": outcome.formations, "lost": outcome.lost} if elastic else {})


# ---- checks


def _check(job: Job) -> None:
    """Examines the hosts: reports warnings, and raises LauncherError for errors."""
    from hvdtrain.cluster.doctor import examine, findings, software

    found = examine.examined(job, fast=True).findings
    found = [  # an error of this launcher; under others it is a warning
        dataclasses.replace(finding, severity="error") if finding.id == software.WITHOUT_GLOO else finding
        for finding in found
    ]
    errors = [finding for finding in found if finding.severity == "error"]
    warnings = [finding for finding in found if finding.severity == "warning"]
    if warnings:
        report(findings.text(warnings))
    if errors:
        rule = "the hosts must pass the checks that come before a job (hvdtrain doctor looks at more; --no-checks)"
        raise LauncherError(rule, findings.text(errors), code=47)


def _run_again(job: Job, attempt: int, logs: Logs, args: argparse.Namespace, rest_s: float) -> Outcome:
    """Runs the job again when the hosts pass the checks, not before `rest_s` is over; raises why they do not pass."""
    its = job.elastic
    if its is not None and its.discovery is not None:
        found = discovery.first(its.discovery, its.minimum, args.restart_wait)
        job = dataclasses.replace(job, hosts=found, np=min(job.np, sum(host.slots for host in found)))
    began = time.monotonic()
    while True:
        try:
            if args.no_checks:
                launcher.look(job)
            else:
                _check(job)
            if (pause_s := rest_s - (time.monotonic() - began)) <= 0:
                return _run_once(job, attempt, logs, args)
        except LauncherError:
            if time.monotonic() - began > args.restart_wait:
                raise
            pause_s = _LOOK_AGAIN_S
        time.sleep(pause_s)


# ---- what would run


def _dry_run(plan: JobPlan) -> str:
    job = plan.job
    lines = [f"command, in {job.cwd} on every host:", f"  {shlex.join(job.argv)}"]
    if (its := job.elastic) is not None:
        lines = [f"elastic: {its.minimum} to {its.maximum} ranks, {job.np} at first", "", *lines]
    for host in plan.hosts:
        chosen, ranks = plan.chosen[host.name], ", ".join(str(slot.rank) for slot in plan.of_host(host))
        place = f"{host.name}: rank(s) {ranks} through {chosen.interface} {chosen.address}"
        lines += ["", f"{place}, {plan.cores[host.name]:g} cores"]
        lines += [f"  {name}={value}" for name, value in sorted(environment.of_host(chosen).items())]
        unless = sorted(set(plan.defaults(host).items()) - {(name, value) for name, value in job.env.items()})
        lines += [f"  {name}={value}   (unless set there)" for name, value in unless if name not in job.env]
    lines += ["", "every rank, in addition to HOROVOD_RANK, _SIZE, _LOCAL_RANK, ...:"]
    job_wide = environment.of_job(plan.first, 0, 0)
    shown = {name: "(free port)" if name.endswith("_PORT") else value for name, value in job_wide.items()} | {
        name: "(not shown)" if environment.is_secret(name, value) else value for name, value in job.env.items()
    }
    lines += [f"  {name}={value}" for name, value in sorted(shown.items())]
    return "\n".join([*lines, "", *_remarks(plan)]).rstrip()
