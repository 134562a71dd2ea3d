"""The parts of hvdtrain.cluster that need no processes: hosts, addresses, ssh's errors, variables, lines, failures."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import signal
import sys
from ipaddress import IPv4Interface

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.cluster.doctor.examine import Sessions
from hvdtrain.cluster.hosts.addresses import choose
from hvdtrain.cluster.hosts.hosts import Host, assign, parse_hosts, read_hostfile
from hvdtrain.cluster.hosts.protocol import mark_of
from hvdtrain.cluster.hosts.ssh import Ssh, explain, is_this_machine
from hvdtrain.cluster.launch import environment
from hvdtrain.cluster.launch.failures import RankEnd, Tracebacks, first_failure, left_the_others, settled
from hvdtrain.cluster.launch.job import Job, make_plan
from hvdtrain.cluster.launch.rank import LineSplitter
from hvdtrain.comm.link import Decoder, encode
from hvdtrain.commands import launch
from hvdtrain.core.errors import ConfigError

# ---- hosts


def test_hosts_are_parsed():
    assert parse_hosts("host1:4, me@host2.example:2,10.0.0.3") == [
        Host("host1", 4), Host("me@host2.example", 2), Host("10.0.0.3", 1),
    ]  # fmt: skip
    assert parse_hosts("me@host2:1")[0].address == "host2"


@pytest.mark.parametrize(
    "text",
    ["", ",", ":4", "a:0", "a:-1", "a:x", "a:1:2", "a b:1", "a;reboot:1", "$(id):1", "`id`", "a|b", "a&", "a>b", "a'b",
     'a"b', "a\nb", "-oProxyCommand=id:1", "me@-x:1", "@a:1", "a@b@c:1", "a/b", "a\\b", "a*:1", "a:１", "ä:1"],
)  # fmt: skip
def test_what_is_no_host_is_refused(text):
    with pytest.raises(ConfigError) as error:
        parse_hosts(text)
    assert error.value.remedy


@given(st.text("aZ09._-@: \t\n;|&<>$`'\"\\/*?~!#(){}[]=,%é１", max_size=8))
def test_no_accepted_name_means_anything_to_a_shell_or_to_ssh(text):
    try:
        host = parse_hosts(text)[0]
    except ConfigError:
        return
    assert shlex.quote(host.name) == host.name and not host.name.startswith("-")


def test_a_host_is_named_once():
    with pytest.raises(ConfigError) as error:
        parse_hosts("a:2,b:1,me@a:3")
    assert "a:5" in error.value.remedy


def test_host_files(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\nhost1 slots=4\n\nhost2:2  # the new one\nhost3\n")
    assert read_hostfile(path) == [Host("host1", 4), Host("host2", 2), Host("host3", 1)]
    path.write_bytes("\ufeffhost1 slots=4 max_slots=8\r\nhost2 max-slots = 2 slots = 2\nhost3:1 max_slots=4\n".encode())
    assert read_hostfile(path) == [Host("host1", 4), Host("host2", 2), Host("host3", 1)], (
        "as Windows and Open MPI write"
    )
    path.write_text("node7\nnode9\nnode7\nnode9 slots=2\n")
    assert read_hostfile(path) == [Host("node7", 2), Host("node9", 3)], "as PBS writes: a line a slot"
    for wrong in ("host1 max_slots=some", "host1 slots=4 max_slots=2", "host1 slots=2:3", "host1 cores=4", "a\nme@a\n"):
        path.write_text(wrong)
        with pytest.raises(ConfigError):
            read_hostfile(path)
    path.write_text("host1 slots=4\nhost2 slots=many\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_hostfile(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="none"):
        read_hostfile(path)
    with pytest.raises(ConfigError, match="missing"):
        read_hostfile(tmp_path / "missing")


def test_more_ranks_than_any_machine_has_are_refused_before_they_are_counted_out():
    for hosts in ([Host("localhost", 10**9)], [Host("a", 999_999)] * 1001):
        with pytest.raises(ConfigError, match="cannot have more than 100,000 ranks"):
            assign(hosts, 10**9)
    assert len(assign([Host("a", 100_000)], 100_000)) == 100_000


# ---- addresses


def its(**named: str) -> dict[str, list[IPv4Interface]]:
    found = {name: [IPv4Interface(text) for text in texts.split()] for name, texts in named.items()}
    return {"lo": [IPv4Interface("127.0.0.1/8")], **found}


DOCKER = "172.17.0.1/16"
ONE = its(docker0=DOCKER, eth0="10.0.0.1/24", ib0="10.1.0.1/24")
TWO = its(docker0=DOCKER, ens5="10.0.0.2/24", ib1="10.1.0.2/24")


def test_networks_are_found_by_address_where_names_differ():
    chosen = choose({"a": ONE, "b": TWO})
    assert [(its.interface, its.address) for its in chosen.values()] == [("eth0", "10.0.0.1"), ("ens5", "10.0.0.2")]


def test_an_address_that_every_host_has_is_no_network():
    with pytest.raises(ConfigError, match=r"docker0 172\.17\.0\.1"):
        choose({"a": its(docker0=DOCKER), "b": its(docker0=DOCKER)})


def test_hosts_behind_routers():
    hosts = {"a": its(docker0=DOCKER, eth0="10.0.1.1/24"), "b": its(docker0=DOCKER, ens5="10.0.2.1/24")}
    chosen = choose(hosts, reached={"a": "10.0.1.1", "b": "10.0.2.1"})
    assert [(its.interface, its.network) for its in chosen.values()] == [
        ("eth0", "10.0.1.0/24"),
        ("ens5", "10.0.2.0/24"),
    ]
    with pytest.raises(ConfigError):
        choose(hosts, reached={"b": "10.0.2.1"})


@pytest.mark.parametrize("network", ["10.1.0.0/24", "10.1.0.0/16", "10.1.0.2", "10.1.0.9/24"])
def test_a_network_that_is_asked_for(network):
    chosen = choose({"a": ONE, "b": TWO}, network, {"a": "10.0.0.1", "b": "10.0.0.2"})
    assert [its.address for its in chosen.values()] == ["10.1.0.1", "10.1.0.2"]


@pytest.mark.parametrize("network", ["10.2.0.0/24", "10.2.0.1", "172.17.0.0/16", "ib0"])
def test_a_network_that_is_not_there(network):
    with pytest.raises(ConfigError):
        choose({"a": ONE, "b": TWO}, network)


# ---- ssh


def test_ssh_never_asks_and_never_waives_host_keys(tmp_path):
    key = tmp_path / "k ey"
    key.touch()
    command = Ssh(port=2222, identity=str(key)).command("me@host1", ["python", "-c", "print('a b')"])
    assert command[-2:] == ["me@host1", "python -c 'print('\"'\"'a b'\"'\"')'"] and command[-3] == "--"
    assert shlex.split(command[-1]) == ["python", "-c", "print('a b')"]
    # said to ssh, and not left to a user's configuration, which may waive it
    assert "BatchMode=yes" in command and "StrictHostKeyChecking=yes" in command
    assert command[command.index("-p") + 1] == "2222" and command[command.index("-i") + 1] == str(key)


def test_a_key_that_is_not_there_is_refused(tmp_path):
    """ssh warns, and uses another key."""
    for missing in (tmp_path / "no such key", tmp_path, ""):
        with pytest.raises(ConfigError, match="--identity must name a private key"):
            Ssh(identity=str(missing))


LOGIN = "/home/ada/.bashrc: line 3: module: command not found\n"
LOGGED_IN = 'Authenticated to host2 ([10.0.0.2]:22) using "publickey".\r\n'
PYTHON = "/opt/venv/bin/python"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("unreachable", "ssh: connect to host host2 port 22: No route to host"),
        ("unreachable", "ssh: connect to host host2 port 22: Connection timed out"),
        ("unreachable", "kex_exchange_identification: read: Connection reset by peer\r\nConnection reset by 10.0.0.2"),
        ("refused", "ssh: connect to host host2 port 22: Connection refused"),
        ("unknown_name", "ssh: Could not resolve hostname host2: Name or service not known"),
        ("unknown_host_key", "No ED25519 host key is known for host2 and you have requested strict checking.\r\n"
         "Host key verification failed."),
        ("changed_host_key", "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."),
        ("denied", "root@host2: Permission denied (publickey,password)."),
        ("timeout", "Connection timed out during banner exchange\r\nConnection to 10.0.0.2 port 22 timed out"),
        ("denied", "Received disconnect from 10.0.0.2 port 22:2: Too many authentication failures"),
        ("unreachable", "client_loop: send disconnect: Broken pipe"),
        ("other", "something new"),
    ],
)  # fmt: skip
def test_what_ssh_says_is_explained(kind, said):
    for before in ("", LOGIN):  # what start-up files write must not be taken for ssh's words
        problem = explain("host2", 255, before + said)
        assert problem.kind == kind and "host2" in problem.what and problem.fix


@pytest.mark.parametrize(
    ("kind", "code", "said", "what"),
    [
        ("no_python", 127, f"bash: line 1: {PYTHON}: No such file or directory", "no such Python"),
        ("no_python", 1, f"{PYTHON}: Command not found.", "no such Python"),
        ("no_python", 126, f"bash: line 1: {PYTHON}: Permission denied", "cannot be run"),
        ("no_python", 126, "bash: line 1: /opt/x: cannot execute: required file not found", "cannot be run"),
        ("no_hvdtrain", 1, f"{PYTHON}: Error while finding module specification for 'hvdtrain.cluster.launch.agent'"
         " (ModuleNotFoundError: No module named 'hvdtrain')", "no hvdtrain"),
        ("no_python", 2, "Unknown option: -P\nusage: /usr/bin/python3 [option] ...", "older"),
        ("denied", 1, "This account is currently not available.", "run no commands"),
        ("other", 0, "Sun Nov 22 14:57:07 UTC 2026", "did not run the command"),
        ("other", 1, "MemoryError", "exit code 1: MemoryError"),
        ("other", 137, "Connection refused by something in a log", "exit code 137"),
    ],
)  # fmt: skip
def test_what_a_host_says_is_told_from_what_ssh_says(kind, code, said, what, limit):
    for before in ("", LOGIN):
        problem = explain("host2", code, before + said, python=PYTHON)
        assert problem.kind == kind and what in problem.what and problem.fix, problem
    limit("C12a", f"a host's shell or Python ends with {code} and says: {said[:40]!r}", mended=problem.what[:120])


def test_a_host_that_accepts_and_never_answers(limit):
    problem = explain("host2", None, LOGIN)
    assert problem.kind == "timeout" and "large packets (MTU)" in problem.fix
    answered = explain("host2", None, f"{LOGGED_IN}{LOGIN}", answered=True)
    assert answered == problem, "start-up files are not the cause: they have ended"
    limit("C12b", "packets above a size are lost on the way: ssh hangs", mended=problem.fix)


def test_a_log_in_that_does_not_come_to_the_command():
    problem = explain("host2", None, f"{LOGGED_IN}{LOGIN}")
    assert problem.kind == "start_up_files" and "~/.bashrc" in problem.fix and "MTU" not in problem.fix
    for code in (0, 1):
        problem = explain("host2", code, f"{LOGGED_IN}Transferred: sent 2, received 3 bytes, in 0.1 seconds\r\n")
        assert problem.kind == "other" and problem.what.endswith("no output") and "~/.bashrc" in problem.fix


def test_a_name_that_leads_back_here_is_no_other_host(monkeypatch, limit):
    monkeypatch.setattr("socket.gethostbyname", {"host2": "127.0.0.1", "me.example": "127.0.1.1"}.__getitem__)
    monkeypatch.setattr("socket.gethostname", lambda: "me")
    assert is_this_machine("me.example") and is_this_machine("localhost.localdomain")
    with pytest.raises(ConfigError, match="host2 is 127.0.0.1 here") as error:
        is_this_machine("host2")
    limit("C12c", "/etc/hosts maps host2 to 127.0.0.1", refused=error.value)
    assert "host2 is 127.0.0.1 here" in Sessions(["host2"], sys.executable, Ssh()).lost["host2"].what


# ---- variables


def test_a_job_has_one_environment(tmp_path, limit):
    """All hosts get the same: what the user set, whatever it is called, but for what is one host's own."""
    environ = {"LR": "0.5", "DATA_DIR": "/d", "HF_HOME": "/h", "TOKENIZERS_PARALLELISM": "false", "LC_ALL": "C",
               "OMPI_MCA_btl": "tcp", "HOME": "/root", "SSH_CONNECTION": "x", "TERM": "xterm", "TMPDIR": "/scratch",
               "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "1", "RANK": "2", "BASH_FUNC_module%%": "() {", "_": "x",
               "HOSTNAME": "a", "DATABASE_URL": "postgres://me:secret@db/x", "HF_TOKEN": "x",
               "AWS_SECRET_ACCESS_KEY": "x", "HOROVOD_RANK": "3"}  # fmt: skip
    names = {"LR", "DATA_DIR", "HF_HOME", "TOKENIZERS_PARALLELISM", "LC_ALL", "OMPI_MCA_btl"}
    found = environment.passed(environ)
    assert set(found) == names
    assert environment.withheld(environ, found) == ["AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "HF_TOKEN"]
    file = tmp_path / "env"
    file.write_text("# ours\n\nHF_TOKEN\nLR=0.7\nNEW=a = b\n")
    more = environment.passed(environ, ["LR=0.9"], file)
    assert (more["HF_TOKEN"], more["LR"], more["NEW"]) == ("x", "0.9", "a = b")
    file.write_text("LR=1\nno name=2\n")
    with pytest.raises(ConfigError, match="line 2") as error:
        environment.passed(environ, (), file)
    limit("C1c", "--env-file with a line that sets nothing", refused=error.value)
    with pytest.raises(ConfigError, match="readable"):
        environment.passed(environ, (), tmp_path / "missing")
    for wrong in ("MISSING", "a b=1", "=1", "A;B=1"):
        with pytest.raises(ConfigError):
            environment.passed(environ, [wrong])


def test_variables_that_only_some_log_ins_set_are_told(limit):
    own = {"h1": {}, "h2": {"LR": "d1", "SAME": "x"}, "h3": {"LR": "d2", "SAME": "x"}}
    assert environment.on_some_hosts_only(own, {}) == {"LR": ["h2", "h3"], "SAME": ["h2", "h3"]}
    assert environment.on_some_hosts_only(own, {"LR": "1", "SAME": "1"}) == {}, "what all ranks get wins"
    assert environment.on_some_hosts_only({host: own["h2"] for host in own}, {}) == {}
    limit("C1b", "a log-in file of one host sets a variable", mended="named, with the hosts, before the ranks start")


def hello(name, *addresses):
    interfaces = [{"name": name, "address": address, "prefix": 24, "up": True} for address in addresses]
    return {"cores": 4, "interfaces": interfaces}


def two_hosts(**fields):
    job = Job(argv=["python", "a b.py"], hosts=parse_hosts("h1:2,me@h2:2"), np=4, **fields)
    hellos = {"h1": hello("eth0", "10.0.0.1"), "me@h2": hello("ens5", "10.0.0.2")}
    return job, make_plan(job, hellos, {"me@h2": "10.0.0.2"})


def test_a_plan_for_two_hosts():
    job, plan = two_hosts(env={"HOROVOD_GLOO_RENDEZVOUS_PORT": "1", "MASTER_PORT": "77", "NCCL_SOCKET_IFNAME": "mine"})
    variables = plan.variables(plan.hosts[1], 4321, 29500)
    assert variables["HOROVOD_GLOO_IFACE"] == "ens5" and variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"
    assert variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4321", "another job's rendezvous is never ours"
    assert variables["MASTER_PORT"] == "77" and variables["NCCL_SOCKET_IFNAME"] == "mine", "the user's word wins"
    assert "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in plan.variables(plan.hosts[0], None, 1)
    assert environment.of_rank(job.slots[3])["HOROVOD_HOSTNAME"] == "h2"


def test_an_address_that_is_not_its_interfaces_first_is_told(limit):
    job = Job(argv=["x"], hosts=parse_hosts("h1:1,h2:1"), np=2, network="10.1.0.0/24")
    plan = make_plan(job, {"h1": hello("eth0", "10.0.0.1", "10.1.0.1"), "h2": hello("eth0", "10.1.0.2")}, {})
    assert plan.variables(plan.hosts[0], 1, 2)["HOROVOD_GLOO_ADDRESS"] == "10.1.0.1"
    (note,) = plan.notes
    assert "h1: 10.1.0.1 is not the first address of eth0 (10.0.0.1)" in note
    limit("C3b", "--network asks for another address than its interface's first", mended=note)
    users = dataclasses.replace(plan, job=dataclasses.replace(job, env={"HOROVOD_GLOO_IFACE": "mine"}))
    assert "HOROVOD_GLOO_ADDRESS" not in users.variables(plan.hosts[0], 1, 2), "the user's word wins"


def job_from(*words: str, environ: dict[str, str] | None = None) -> Job:
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    return launch.job_of(parser.parse_args(list(words)), environ or {})


def test_hosts_are_those_given_or_of_the_slurm_job_or_this_machine(tmp_path):
    (tmp_path / "hosts").write_text("h3 slots=3\n")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)",
             "SLURM_RESTART_COUNT": "1"}  # fmt: skip
    assert job_from("-H", "h1:2", "--", "true", environ=slurm).hosts == [Host("h1", 2)]
    assert job_from("--hostfile", str(tmp_path / "hosts"), "true", environ=slurm).hosts == [Host("h3", 3)]
    job = job_from("true", environ=slurm)
    assert (job.hosts, job.np) == ([Host("gpu1", 2), Host("gpu2", 2)], 4)
    assert job.env["HVDTRAIN_JOB"].endswith("-7")
    for words in (["-H", ""], ["-H", " "]):  # "$HOSTS" that is not set, also inside of a Slurm job
        with pytest.raises(ConfigError, match="must name at least one host"):
            job_from(*words, "--", "true", environ=slurm)
    assert job_from("-np", "3", "--", "true").hosts == [Host("localhost", 3)]
    assert job_from("-np", "2", "python", "-c", "--lr", "--", "x").argv == ["python", "-c", "--lr", "--", "x"]


# ---- lines and messages


def split(*pieces: bytes, step_s: float = 0.0) -> list[str]:
    splitter = LineSplitter()
    lines = [line for index, piece in enumerate(pieces) for line in splitter.feed(piece, index * step_s)]
    return lines + splitter.close()


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_lines_do_not_depend_on_how_the_bytes_come(data, cuts):
    data = data.replace(b"\r", b"")
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert split(*(data[a:b] for a, b in zip(bounds, bounds[1:], strict=False))) == split(data)


def test_messages_survive_what_a_login_script_prints():
    token = "0123456789abcdef"
    mark = mark_of(token)
    decoder = Decoder(mark)
    noise = f"Welcome!\n\x1e no newline: python -m agent {token}".encode()
    hello = {"type": "hello", "text": "a\nb\x1e"}
    stream = noise + encode(hello, mark) + encode({"type": "beat"}, mark) + mark + b"{broken\n"
    messages = [message for index in range(len(stream)) for message in decoder.feed(stream[index : index + 1])]
    assert messages == [hello, {"type": "beat"}]
    assert b"Welcome!" in decoder.noise and b"no newline" in decoder.noise


# ---- failures


def test_the_rank_to_blame():
    gone = ("...", "HorovodInternalError: Horovod has been shut down")
    ends = [
        RankEnd(0, "a", 1, at_s=10.0, first_traceback_s=9.0, lines=gone),
        RankEnd(1, "b", 1, at_s=10.5, first_traceback_s=9.2, lines=("ValueError: x",)),
        RankEnd(2, "b", 0, at_s=1.0),
        RankEnd(3, "b", -15, at_s=11.0),
    ]
    assert first_failure(ends) == ends[1]
    assert first_failure(ends[2:3]) is None
    silent = RankEnd(4, "b", 0, at_s=12.0, done=False)
    assert first_failure([ends[0], silent]) == silent and settled([silent], 13.0), "it had more to do"
    assert first_failure([ends[0], ends[3]]) == ends[3], "a consequence never comes first"
    told = RankEnd(5, "b", 1, at_s=9.0, lines=("hvdtrain.core.errors.MainRankError: a checkpoint must be whole",))
    assert first_failure([told, ends[1]]) == ends[1], "what rank 0 raised in `on_main` comes to all"
    assert left_the_others(ends[0], ends) == ends[2], "it ended well before one lacked it"
    assert left_the_others(ends[1], ends) is None and left_the_others(ends[0], [ends[0], silent]) is None
    assert left_the_others(ends[0], [ends[0], RankEnd(2, "b", 0, at_s=10.1)]) is None, "it ended later"


def test_a_traceback_that_was_handled_is_not_blamed(limit):
    traceback = ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: x"]
    seen = Tracebacks()
    seen.note(0, ["step 1", *traceback], 5.0)
    seen.note(0, ["", "During handling of the above exception, another exception occurred:", *traceback], 6.0)
    assert seen.began_s == {0: 5.0}, "one that follows at once belongs to it"
    seen.note(0, [f"step {number}" for number in range(30)], 7.0)
    assert seen.began_s == {}
    seen.note(0, traceback, 90.0)
    assert seen.began_s == {0: 90.0}
    ends = [
        RankEnd(0, "a", 1, at_s=91.0, first_traceback_s=90.0),
        RankEnd(1, "b", 1, at_s=80.5, first_traceback_s=80.0),
    ]
    assert first_failure(ends) == ends[1]
    limit(
        "C12e", "a rank writes a traceback, goes on, and ends after another that failed", mended="the other is blamed"
    )


def test_gloos_abort_is_a_consequence(limit):
    said = ("terminate called after throwing an instance of 'gloo::IoException'", "  what():  ... Connection closed by"
            " peer [10.0.0.2]:4321")  # fmt: skip
    aborted = RankEnd(0, "a", -signal.SIGABRT, at_s=10.0, lines=said)
    silent, other = RankEnd(0, "a", -signal.SIGABRT, 10.0), RankEnd(1, "b", 1, at_s=11.0)
    assert first_failure([aborted, other]) == other
    assert first_failure([silent, other]) == silent
    limit("C12d", "Gloo's exception ends a rank with SIGABRT because another rank failed", mended="the other is blamed")


def test_consequences_give_the_cause_time_to_arrive():
    gone = RankEnd(0, "a", 1, at_s=10.0, lines=("Connection closed by peer [10.0.0.2]:1",))
    own = RankEnd(0, "a", 1, at_s=10.0, lines=("ValueError",))
    assert not settled([gone], 11.0) and settled([gone], 15.1)
    assert settled([own], 11.0) and not settled([own], 10.1) and not settled([], 99.0)
