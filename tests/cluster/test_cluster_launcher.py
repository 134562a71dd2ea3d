"""What the launcher does when an agent misbehaves: agents made for the test, that follow the protocol up to a point."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hvdtrain.cluster.hosts.hosts import parse_hosts
from hvdtrain.cluster.launch.job import Job, Timeouts
from hvdtrain.cluster.launch.launcher import run
from hvdtrain.cluster.launch.running import Outcome
from hvdtrain.core.errors import LauncherError

AGENT = """#!{python} -S
import sys
sys.path.insert(0, {packages!r})
from hvdtrain.cluster.launch.agent import hello
from hvdtrain.cluster.hosts.protocol import mark_of
from hvdtrain.comm.link import Decoder, encode

MARK = mark_of(sys.argv[-1])

def say(kind, **fields):
    sys.stdout.buffer.write(encode(dict(fields, type=kind), MARK))
    sys.stdout.buffer.flush()

def until(kind):
    decoder = Decoder(MARK)
    while line := sys.stdin.buffer.readline():
        if any(message["type"] == kind for message in decoder.feed(line)):
            return
{body}
"""


def run_with(folder: Path, body: str, hosts: str = "localhost:2", **limits: float) -> Outcome:
    """Run a job whose agent does `body` instead of its work."""
    import hvdtrain

    packages = str(Path(hvdtrain.__file__).resolve().parent.parent)
    agent = folder / "python"
    agent.write_text(AGENT.format(python=sys.executable, packages=packages, body=body))
    agent.chmod(0o755)
    job = Job(["true"], parse_hosts(hosts), 2, python=str(agent), horovod=False, cwd=os.getcwd(),
              timeouts=Timeouts(**{"grace_s": 0.5, **limits}))  # fmt: skip
    return run(job)


def test_an_agent_that_leaves_before_its_ranks_are_started(tmp_path):
    outcome = run_with(tmp_path, "say('hello', **hello()); say('leaving', why='told to'); say('ended')")
    assert outcome.exit_code == 255 and outcome.failed is not None, outcome
    assert outcome.failed.why == "lost, with ranks 0, 1: told to"


@pytest.mark.parametrize("other", ["until('end'); say('ended')", "say('ended')"])
def test_an_agent_that_leaves_while_others_are_waited_for(tmp_path, other):
    """Once a job ran on without the ranks of that host."""
    body = f"""
import os, pathlib
eth0 = {{'name': 'eth0', 'prefix': 24, 'up': True}}
def greet(number): say('hello', **{{**hello(), 'interfaces': [{{**eth0, 'address': f'10.0.0.{{number}}'}}]}})
try:
    os.mkdir({str(tmp_path / "first")!r})
except FileExistsError:
    pathlib.Path({str(tmp_path / "gone")!r}).open().read()  # until the other has left
    greet(2)
    {other}
else:
    greet(1); say('leaving', why='told to'); say('ended')
    sys.stdout.close()
    pathlib.Path({str(tmp_path / "gone")!r}).open('w').close()
"""
    os.mkfifo(tmp_path / "gone")
    outcome = run_with(tmp_path, body, "localhost:1,127.0.0.1:1")
    assert outcome.exit_code == 255 and outcome.failed is not None, outcome


def test_an_agent_that_never_says_hello(tmp_path):
    with pytest.raises(LauncherError, match="ended with 3: no luck"):
        run_with(tmp_path, "print('no luck'); sys.exit(3)")
    with pytest.raises(LauncherError, match="this machine"):
        run_with(tmp_path, "sys.stdin.read()", start_s=0.5)


def test_an_agent_that_falls_silent(tmp_path):
    outcome = run_with(tmp_path, "say('hello', **hello()); until('never')", lost_s=1.0)
    assert outcome.exit_code == 255 and outcome.failed is not None
    assert "sent nothing for 1 s" in outcome.failed.why


def test_an_agent_that_does_not_end(tmp_path):
    """The launcher does not wait for ever, and what it started is gone."""
    body = "say('hello', **hello()); until('start'); say('exit', rank=0, code=1, ago_s=0); until('never')"
    outcome = run_with(tmp_path, body, lost_s=1.0)
    assert outcome.exit_code == 1 and outcome.failed is not None and outcome.failed.rank == 0
