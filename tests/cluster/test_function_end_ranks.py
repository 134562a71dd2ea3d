"""`hvdtrain.run`: when a job ends though its function left something behind, or the caller is an odd process."""

from __future__ import annotations

from function_programs import output


def test_what_a_failing_function_leaves_does_not_hold_up_the_end(tmp_path):
    """A thread, and a process."""
    output(
        tmp_path,
        """
        import multiprocessing, signal, threading
        def f():
            if os.environ["HOROVOD_RANK"] == "1":
                threading.Thread(target=threading.Event().wait).start()
                multiprocessing.get_context("fork").Process(target=signal.pause).start()
                print("last words")
                raise ValueError("boom")
            threading.Event().wait()
        try:
            hvdtrain.run(f, np=2, timeouts=hvdtrain.Timeouts(grace_s=1.0))
        except hvdtrain.LauncherError as error:
            assert "rank 1 on localhost failed first" in str(error) and "exit code 1" in str(error), error
            assert "last words" in str(error) and "boom" in str(error), error
        else:
            raise SystemExit("no error")
        """,
    )


def test_a_child_that_the_function_forks_hands_nothing_back(tmp_path):
    output(
        tmp_path,
        """
        def f(how):
            child = os.fork()
            if child == 0:
                if how == "raise":
                    raise ValueError("of the child")
                return "child"
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert [hvdtrain.run(f, (how,), np=1, output="none") for how in ("return", "raise")] == [[0], [1]]
        """,
    )


def test_a_caller_that_ignores_the_ends_of_its_children(tmp_path):
    """SIGCHLD ignored is inherited: agents must see their ranks end all the same."""
    printed = output(
        tmp_path,
        """
        import signal, subprocess
        from concurrent.futures import ThreadPoolExecutor
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        call = lambda: subprocess.run(["false"]).returncode
        assert hvdtrain.run(call, np=2) == [1, 1]
        with ThreadPoolExecutor() as pool:  # where the launcher cannot change it
            assert pool.submit(hvdtrain.run, call, np=1).result() == [1]
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        try:
            hvdtrain.run(lambda: sys.exit(5), np=1, output="none")
        except hvdtrain.LauncherError as error:
            assert "exit code 5" in str(error), error
        try:
            hvdtrain.run(call, np=1, python="/bin/false")
        except hvdtrain.LauncherError as error:
            assert "ended with 1" in str(error), error
        command = [sys.executable, "-m", "hvdtrain", "launch", "--no-checks", "--", sys.executable, "-c", "exit(3)"]
        assert os.spawnvp(os.P_NOWAIT, command[0], command) and signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
        """,
    )
    assert "no -np was given: one rank" in printed


def test_a_full_disk_under_the_output_costs_the_output(tmp_path):
    said = output(
        tmp_path,
        """
        import contextlib
        def f():
            print("lost")
            print("shown", file=sys.stderr)
            return 3
        full = open("/dev/full", "w")
        with contextlib.redirect_stdout(full):
            assert hvdtrain.run(f, np=2) == [3, 3]
        with contextlib.suppress(OSError):
            full.close()
        """,
    )
    assert "[0] shown" in said and "[1] shown" in said and said.count("no more output: No space left on device") == 1


def test_a_function_that_closes_descriptors_is_told_what_it_closed(tmp_path):
    """Also where another file has got the number since: the result must not go there."""
    output(
        tmp_path,
        """
        def f(reopens):
            os.closerange(3, 200)
            return [os.open(os.devnull, os.O_WRONLY) for _ in range(100 * reopens)] and None
        for reopens in (False, True):
            try:
                hvdtrain.run(f, (reopens,), np=1, output="none")
            except hvdtrain.LauncherError as error:
                assert "it closed descriptor" in str(error) and "Traceback" not in str(error), error
            else:
                raise AssertionError("no error")
        """,
    )
