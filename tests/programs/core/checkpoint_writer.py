"""Saves while the process that writes is stopped, killed or left alone. Usage: checkpoint_writer.py FOLDER CASE."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from blob import content, state_of
from writing import writer

from hvdtrain import Checkpointer, CheckpointError, HvdtrainError, Progress, RunLog, World
from hvdtrain.checkpoint import writer as writer_module
from hvdtrain.core.errors import exit_with

FOLDER = Path(sys.argv[1])
SIZE_BYTES = 3_000_000


def save(checkpoints: Checkpointer, step: int) -> Path:
    return checkpoints.save(state_of(step, SIZE_BYTES), progress=Progress(step=step))


def restored(checkpoints: Checkpointer) -> int:
    state = state_of(0)
    progress = checkpoints.restore(state)
    assert progress is not None and content(state) == content(state_of(progress.step, SIZE_BYTES))
    return progress.step


def check(checkpoints: Checkpointer, path: Path, content_of: int) -> None:
    """Restore the checkpoint at `path`; its content is that of one step."""
    state = state_of(0)
    checkpoints.restore(state, which=path)
    assert content(state) == content(state_of(content_of, SIZE_BYTES)), path


def held() -> tuple[Checkpointer, psutil.Process]:
    """Returns a process that writes, suspended: the first checkpoint is on disk, and the second one was handed over."""
    checkpoints = Checkpointer(FOLDER)
    save(checkpoints, 1)
    checkpoints.wait()
    process = writer()
    process.suspend()
    save(checkpoints, 2)
    return checkpoints, process


def case_training_waits_for_the_third() -> None:
    checkpoints = Checkpointer(FOLDER, keep=9)
    save(checkpoints, 1)
    checkpoints.wait()
    process = writer()
    process.suspend()
    paths = [save(checkpoints, 2), save(checkpoints, 3)]  # neither waits
    assert not any(path.exists() for path in paths)
    threading.Timer(1.0, process.resume).start()
    started = time.monotonic()
    writer_module._PATIENCE_S = 0.3
    with contextlib.redirect_stderr(io.StringIO()) as said:
        save(checkpoints, 4)
    assert time.monotonic() - started > 0.5 and paths[0].exists(), "it waited for the first of two"
    assert f"training waits for {paths[0]}" in said.getvalue()
    assert [info.progress.step for info in checkpoints.list() if info.ok] == [1, 2, 3, 4]
    assert restored(checkpoints) == 4


def case_each_image_is_of_its_own_moment() -> None:
    """What is changed right after save() is not in it."""
    checkpoints = Checkpointer(FOLDER, keep=9)
    state = state_of(1, SIZE_BYTES)
    for step in range(1, 6):
        for name, part in state_of(step, SIZE_BYTES).items():
            state[name].content = part.content
        checkpoints.save(state, progress=Progress(step=step))
    for info in checkpoints.list():
        check(checkpoints, info.path, info.progress.step)


def case_a_killed_one_is_told_at_the_next_save() -> None:
    checkpoints = Checkpointer(FOLDER, keep=9)
    save(checkpoints, 1)
    checkpoints.wait()
    process = writer()
    process.suspend()
    save(checkpoints, 2)
    save(checkpoints, 3)
    died = writer_module._died

    def late(process: Any) -> list[str]:
        time.sleep(0.5)  # the fault that is tried: late news of the end; nothing here waits for it to be over
        return died(process)

    writer_module._died = late
    process.kill()
    try:
        save(checkpoints, 4)
        raise AssertionError("nobody was told")
    except CheckpointError as error:
        assert "killed by SIGKILL" in error.received, error
    assert restored(checkpoints) == 1
    save(checkpoints, 4)
    assert writer().pid != process.pid and restored(checkpoints) == 4
    assert not [path.name for path in FOLDER.iterdir() if path.name.startswith(".")]


def case_two_directories_share_it() -> None:
    one, other = Checkpointer(FOLDER / "one"), Checkpointer(FOLDER / "other", keep=1)
    os.chdir(FOLDER)
    relative = Checkpointer("one")
    for step in (1, 2):
        save(one, step)
        save(other, step)
    assert restored(relative) == 2 and restored(other) == 2 and len(other.list()) == 1
    assert len(psutil.Process().children()) == 1


def case_a_forked_process_has_its_own() -> None:
    checkpoints = Checkpointer(FOLDER)
    save(checkpoints, 1)
    child = os.fork()
    if child == 0:
        own = Checkpointer(FOLDER / "child")
        save(own, 7)
        os._exit(0 if restored(own) == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0
    save(checkpoints, 2)
    assert restored(checkpoints) == 2


def case_a_path_is_there_when_it_is_restored() -> None:
    checkpoints = Checkpointer(FOLDER, keep=9)
    for step in range(1, 5):
        path = save(checkpoints, step)
        check(checkpoints, path, step)


def case_one_directory_of_two_spellings() -> None:
    (FOLDER / "real").mkdir()
    (FOLDER / "link").symlink_to(FOLDER / "real")
    one, other = Checkpointer(FOLDER / "real", keep=9), Checkpointer(FOLDER / "link" / ".." / "link", keep=9)
    saved = {}
    for content_of, checkpoints in enumerate((one, other, one, other), 1):
        saved[checkpoints.save(state_of(content_of, SIZE_BYTES), progress=Progress(step=1))] = content_of
    for path, content_of in saved.items():
        check(one, path, content_of)
    assert len(saved) == 4


def case_interrupts_lose_nothing() -> None:
    """Ctrl-C at any moment of a save or of the wait for it, caught by the program."""
    checkpoints = Checkpointer(FOLDER, keep=3)
    save(checkpoints, 1)
    interrupted = 0
    for step in range(2, 62):
        timer = threading.Timer(0.0004 * step, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            save(checkpoints, step)
            checkpoints.wait()
            timer.join()
            signal.pthread_sigmask(signal.SIG_BLOCK, [])  # calls the handler here at the latest
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
    checkpoints.wait()
    for info in checkpoints.list():
        check(checkpoints, info.path, info.progress.step)
    assert interrupted > 30


def case_threads_save_at_a_time() -> None:
    def work(number: int) -> None:
        checkpoints = Checkpointer(FOLDER / str(number), keep=9)
        for step in range(1, 6):
            save(checkpoints, step)
        checkpoints.wait()
        done.append([info.progress.step for info in checkpoints.list() if info.ok])

    done: list[list[int]] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [[1, 2, 3, 4, 5]] * 4 and len(psutil.Process().children()) == 1


def case_the_program_goes_elsewhere() -> None:
    os.chdir(FOLDER)
    checkpoints = Checkpointer("here")
    save(checkpoints, 1)
    checkpoints.wait()
    process = writer()
    process.suspend()
    save(checkpoints, 2)
    os.chdir("/")
    process.kill()
    try:
        checkpoints.wait()
        raise AssertionError("nobody was told")
    except CheckpointError as error:
        assert "epoch-0000-step-000002" in error.received, error
    save(checkpoints, 3)
    assert restored(checkpoints) == 3 and (FOLDER / "here" / "epoch-0000-step-000003").exists()


def case_killed_while_it_writes() -> None:
    """This process goes, and its group; its last checkpoints come all the same."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    checkpoints, process = held()
    save(checkpoints, 3)
    print(f"writer {process.pid}", flush=True)
    process.resume()
    os.killpg(os.getpid(), signal.SIGKILL)


def case_killed_once_save_has_returned() -> None:
    """Processes save and kill themselves at once; the thread that hands a checkpoint over is late."""
    send = writer_module.socket.send_fds

    def late(*arguments: Any) -> None:
        time.sleep(0.1)
        send(*arguments)

    writer_module.socket.send_fds = late
    become_subreaper = 36  # PR_SET_CHILD_SUBREAPER of prctl(2): what they leave behind becomes a child of this process
    assert ctypes.CDLL(None).prctl(become_subreaper, 1, 0, 0, 0) == 0
    folders = [FOLDER / str(number) for number in range(4)]
    for number, folder in enumerate(folders):
        child = os.fork()
        if not child:
            checkpoints = Checkpointer(folder)
            for step in range(number % 2 + 1):  # the first one of its process, or one while that is at work
                checkpoints.save(state_of(step, 2 * SIZE_BYTES), progress=Progress(step=step))
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with contextlib.suppress(ChildProcessError):  # there are no more
        while True:
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, "the process that writes ends well"
    found = []
    for folder in folders:
        infos = [info for info in Checkpointer(folder).list() if info.ok]
        for info in infos:
            state = state_of(0)
            Checkpointer(folder).restore(state, which=info.path)
            assert content(state) == content(state_of(info.progress.step, 2 * SIZE_BYTES)), info.path
        found.append([info.progress.step for info in infos])
    assert found == [[0], [0, 1]] * 2


def case_the_last_one_is_waited_for() -> None:
    save(Checkpointer(FOLDER), 1)


def case_a_forked_process_lives_on() -> None:
    """As a worker of a loop over data that was left does, until its trainer has ended."""
    save(Checkpointer(FOLDER), 1)
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.close(writes)
        os.read(reads, 1)
        os._exit(0)
    exit_with("program", HvdtrainError("a rule"), 0)


def case_the_last_one_fails() -> None:
    checkpoints, process = held()
    process.kill()


def case_the_record_of_saves() -> None:
    with RunLog(FOLDER / "run", World.solo(), config={}, progress=False, tensorboard=False) as run:
        checkpoints = Checkpointer(FOLDER, keep=9, run=run)
        save(checkpoints, 1)
        checkpoints.wait()
        process = writer()
        process.suspend()
        save(checkpoints, 2)
        threading.Timer(1.0, process.resume).start()
        checkpoints.wait()
        process.suspend()
        save(checkpoints, 3)
        process.kill()
        try:
            checkpoints.wait()
            raise AssertionError("nobody was told")
        except CheckpointError:
            pass
        checkpoints.asynchronous = False
        save(checkpoints, 4)
        checkpoints.asynchronous = True
        save(checkpoints, 5)  # the end of the record waits for it


def case_an_own_error_and_a_failed_write() -> None:
    case_the_last_one_fails()
    raise ValueError("of its own")


def case_an_own_code_and_a_failed_write() -> None:
    case_the_last_one_fails()
    sys.exit(7)


def case_an_error_ends_the_program() -> None:
    save(Checkpointer(FOLDER), 1)
    exit_with("program", HvdtrainError("a rule"), 0)


def case_signals_of_the_job_are_not_its_own() -> None:
    checkpoints, process = held()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        process.send_signal(number)
    process.resume()
    assert restored(checkpoints) == 2


if __name__ == "__main__":
    globals()[sys.argv[2]]()
    print("passed", flush=True)
