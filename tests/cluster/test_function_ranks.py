"""`hvdtrain.run`: a user's program, or notebook, that calls a function of its own on ranks; and what can go wrong."""

from __future__ import annotations

import signal
import sys
import textwrap

import cluster_hosts
import pytest
from function_programs import TIMEOUT_S, output, started


@pytest.mark.parametrize(
    "stdin", [pytest.param(False, id="script", marks=pytest.mark.thorough), pytest.param(True, id="notebook")]
)
def test_every_rank_calls_it_and_the_caller_gets_what_each_returned(tmp_path, stdin):
    (tmp_path / "beside.py").write_text("FACTOR = 50\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "elsewhere.py").write_text("FACTOR = 2\n")
    said = output(
        tmp_path,
        """
        sys.path.insert(0, os.path.abspath("lib"))
        import numpy, beside, elsewhere
        class Answer:
            def __init__(self, value): self.value = value
        offset = 7
        def train(start, *, step):
            print("hello from a rank")
            with hvdtrain.init("torch") as world:
                total = world.sum({"rank": world.rank + 1})["rank"]
                value = (start + step * world.rank + offset) * beside.FACTOR * elsewhere.FACTOR
                return Answer(value), total, numpy.full(3, world.rank), os.getcwd()
        # no `if __name__ == "__main__"`
        found = hvdtrain.run(train, (10,), {"step": 1}, np=2)
        assert [type(its[0]) is Answer for its in found] == [True, True], found
        assert [its[0].value for its in found] == [1700, 1800], found
        assert [its[1] for its in found] == [3.0, 3.0], found
        assert [its[2].tolist() for its in found] == [[0, 0, 0], [1, 1, 1]]
        assert {its[3] for its in found} == {os.getcwd()}
        print("SEEN")
        """,
        stdin=stdin,
    )
    assert "SEEN" in said
    assert said.count("[0] hello from a rank") == said.count("[1] hello from a rank") == 1


def test_a_stream_without_a_descriptor_shows_what_ranks_write(tmp_path):
    """A notebook's standard output is an object of its own; of rank 0 alone, or of nobody, if asked."""
    output(
        tmp_path,
        """
        import contextlib, io
        def speak():
            print("out"); print("err", file=sys.stderr)
        for wanted, expected in (("all", {"[0] out", "[1] out"}), ("main", {"out"}), ("none", set())):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                assert hvdtrain.run(speak, np=2, output=wanted) == [None, None]
            assert set(out.getvalue().splitlines()) == expected, out.getvalue()
            assert set(err.getvalue().splitlines()) == {line.replace("out", "err") for line in expected}
        """,
    )


def test_what_a_rank_raised_is_the_cause_and_the_others_are_ended(tmp_path):
    output(
        tmp_path,
        """
        class Mine(Exception):
            pass
        def fail():
            if os.environ["HOROVOD_RANK"] == "1":
                raise Mine("of rank 1")
            __import__("threading").Event().wait()
        try:
            hvdtrain.run(fail, np=2, output="none")
        except hvdtrain.LauncherError as error:
            assert type(error.__cause__) is Mine and str(error.__cause__) == "of rank 1", repr(error.__cause__)
            assert "rank 1 on localhost failed first" in str(error) and "exit code 1" in str(error), error
            assert "Mine: of rank 1" in str(error), error
        else:
            raise SystemExit("no error")
        """,
    )


def test_a_rank_that_returns_nothing_is_named(tmp_path):
    output(
        tmp_path,
        """
        import threading
        def forever():
            threading.Event().wait()
        for function, received in (
            (lambda: sys.exit(0), "ended with exit code 0 before that"),
            (
                lambda: os._exit(0) if os.environ["HOROVOD_RANK"] == "1" else sys.stdin.read() + forever(),
                "rank 1 on localhost failed first",
            ),
            (lambda: (number for number in range(3)), "the function returned what cannot be pickled"),
            (lambda: __import__("no_such_module"), "No module named 'no_such_module'"),
        ):
            try:
                hvdtrain.run(function, np=2, output="none")
            except hvdtrain.LauncherError as error:
                assert received in str(error), error
            else:
                raise SystemExit(received)
        """,
    )


def test_megabytes_travel_both_ways(tmp_path):
    output(
        tmp_path,
        """
        import numpy
        data = numpy.arange(1_000_000, dtype="float64")
        double, empty = hvdtrain.run(lambda: data * 2 if os.environ["HOROVOD_RANK"] == "0" else b"", np=2)
        assert (double == data * 2).all() and empty == b""
        """,
    )


@pytest.mark.parametrize(
    ("number", "handler", "code", "says"),
    [
        (signal.SIGINT, "signal.default_int_handler", 0, "INTERRUPTED"),
        (signal.SIGTERM, "signal.SIG_DFL", -signal.SIGTERM, ""),
        pytest.param(signal.SIGTERM, "lambda *_: sys.exit(42)", 42, "", marks=pytest.mark.thorough),
    ],
)
def test_a_signal_ends_every_rank_and_then_does_what_it_did(tmp_path, number, handler, code, says):
    text = f"""
    import signal, threading
    signal.signal({int(number)}, {handler})
    def wait():
        print("here", flush=True)
        threading.Event().wait()
    try:
        hvdtrain.run(wait, np=2)
    except KeyboardInterrupt:
        print("INTERRUPTED")
    except hvdtrain.LauncherError as error:
        print(error)
    """
    with started(tmp_path, text) as process:
        assert process.stdout is not None
        seen: set[str] = set()
        while not {"[0] here\n", "[1] here\n"} <= seen:
            line = process.stdout.readline()
            assert line, process.communicate()
            seen.add(line)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    said = [line for line in out.splitlines() if not line.startswith("[")]
    assert process.returncode == code and says in out and bool(said) == bool(says), (
        f"{process.returncode}\n{out}\n{err}"
    )


def test_in_a_thread_while_the_main_thread_goes_on(tmp_path):
    output(
        tmp_path,
        """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor() as pool:
            jobs = [pool.submit(hvdtrain.run, lambda at=at: at * 10, np=1, output="none") for at in range(2)]
            assert [job.result() for job in jobs] == [[0], [10]]
        """,
    )


def test_hosts_and_variables(tmp_path):
    with cluster_hosts.cluster(3) as c:
        program = textwrap.dedent("""
            import hvdtrain, os, socket
            def train():
                return int(os.environ["HOROVOD_RANK"]), socket.gethostname(), os.environ["MINE"]
            print(hvdtrain.run(train, hosts="host2:1,host3:1", env={"MINE": "yes"}, output="none"))
        """)
        done = c.run("host1", [sys.executable, "-"], stdin=program, cwd=tmp_path, timeout_s=TIMEOUT_S).check()
        assert c.left_after(10) == []
    assert done.out.strip() == "[(0, 'host2', 'yes'), (1, 'host3', 'yes')]", done.text


def test_what_is_refused_before_anything_starts(tmp_path):
    output(
        tmp_path,
        """
        import threading
        LOCK = threading.Lock()
        for call, rule in (
            (lambda: hvdtrain.run(print), "needs the number of ranks"),
            (lambda: hvdtrain.run(print, np=0), "np=0: a whole number, at least 1"),
            (lambda: hvdtrain.run(print, np='2'), "np='2'"),
            (lambda: hvdtrain.run(None, np=2), "function=None"),
            (lambda: hvdtrain.run(abs, 3, np=2), "args=3: a list or tuple"),
            (lambda: hvdtrain.run(print, np=2, hosts=['a:2']), "hosts=['a:2']"),
            (lambda: hvdtrain.run(print, np=2, output='quiet'), "one of all, main, none"),
            (lambda: hvdtrain.run(print, np=2, env={'A': 1}), "env={'A': 1}: strings"),
            (lambda: hvdtrain.run(print, np=2, timeouts=5), "timeouts=5: an hvdtrain.Timeouts"),
            (lambda: hvdtrain.run(print, np=3, hosts='localhost:2'), "a slot for each"),
            (lambda: hvdtrain.run(print, (LOCK,), np=2), "args[0]: TypeError: cannot pickle"),
            (lambda: hvdtrain.run(lambda: LOCK, np=2), "received: LOCK: TypeError: cannot"),
        ):
            try:
                call()
            except hvdtrain.ConfigError as error:
                assert rule in str(error), error
            else:
                raise SystemExit(rule)
        """,
    )


def test_a_rank_starts_no_ranks(tmp_path):
    said = output(
        tmp_path,
        """
        try:
            hvdtrain.run(lambda: hvdtrain.run(print, np=1), np=1, output="none")
        except hvdtrain.LauncherError as error:
            assert isinstance(error.__cause__, hvdtrain.ConfigError)
            print(error.__cause__)
        """,
    )
    assert "of 1, started by horovodrun" in said and "start the program once" in said
