"""What the command line makes of names that it does not know; JSON; colours."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from harness import clean_environment

from hvdtrain.__main__ import main
from hvdtrain.cluster.launch.output import without_libraries
from hvdtrain.core.errors import ConfigError
from hvdtrain.core.keywords import refuses_other_keywords
from hvdtrain.core.lr import LR


@pytest.mark.parametrize(
    "arguments, expected, fix",
    [
        ("-np 2 -- python b.py", "-np is not a flag of hvdtrain; did you", "fix: hvdtrain launch -np 2 -- python b.py"),
        ("run -np 2 python", "run is not a command of hvdtrain; did you mean", "fix: hvdtrain launch -np 2 python"),
        ("launch --nodes 2", "--nodes is not a flag of hvdtrain launch\n", "hvdtrain launch --help"),
        ("launch --max-restart 1", "launch; did you mean --max-restarts?", "hvdtrain launch --help"),
        ("launch --logdir d", "launch; did you mean --log-dir?", "hvdtrain launch --help"),
        ("launch --np2", "launch; did you mean --np?", "hvdtrain launch --help"),
        ("launch --nproc_per_node 2", "launch; did you mean --np?", "hvdtrain launch --help"),
        ("launch -np 2 -hostfile /no -- true", "a host file must be readable text", "/no"),
        ("launch -np 4 -H a:2,b -- true", "and a slot for each", "fix: -np 3, or more slots: -H a:2,b:2\n"),
        ("launch -np 2 -H localhost -- true", "and a slot for each", "fix: -np 1, or more slots: -H localhost:2\n"),
        ("launch -H localhost:2:gpu -- true", "received: 'localhost:2:gpu'\n", "-H host1:4,host2:4"),
        ("lanch -np 2", "lanch is not a command of hvdtrain; did you mean launch?", "hvdtrain --help"),
        ("launch --hots a:1 python t.py", "--hots is not a flag of hvdtrain launch; did you mean --hosts?", "launch"),
        ("bench tran", "did you mean train?", "hvdtrain bench --help"),
        (
            "bench train --framework keas",
            "--framework must be one of keras, torch, not keas; did you mean keras?",
            "hvdtrain bench train --help",
        ),
        ("doctor --zzzzz", "--zzzzz is not a flag of hvdtrain doctor\n", "hvdtrain doctor --help"),
        ("launch -np 2 train.py 3", "the ranks' command must be a program", "[flags] -- python train.py 3"),
        ("launch -np 0 true", "-np/--np must be a whole number >= 1, not '0'", "hvdtrain launch --help"),
        ("launch -np", "-np/--np needs one argument", "hvdtrain launch --help"),
        ("report", "hvdtrain report needs RUN", "hvdtrain report --help"),
    ],
)
def test_a_mistyped_name_is_refused_with_the_nearest(
    arguments: str, expected: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    message = capsys.readouterr().err
    assert expected in message and fix in message and message.count("\n") < 5


def test_a_keyword_of_another_library_is_refused_with_the_one_to_write() -> None:
    @refuses_other_keywords(batch_size="per_rank_batch=, the samples of each rank")
    def loader(data: object, per_rank_batch: int = 1, shuffle: bool = True) -> tuple[object, int, bool]:
        return data, per_rank_batch, shuffle

    assert loader("x", per_rank_batch=2, shuffle=False) == ("x", 2, False)
    with pytest.raises(ConfigError, match=r"loader\(\) does not take batch_size=\n.*batch_size=8\)\n.*per_rank_batch="):
        loader("x", batch_size=8)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"does not take shufle=; did you mean shuffle\?"):
        loader("x", shufle=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"LR\(\) does not take batch=\n.*batch=8\)\n.*reference_batch="):
        LR(0.1, batch=8)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"LR\(\) needs reference_batch="):
        LR(0.1)  # type: ignore[call-arg]


def test_json_is_all_that_is_printed() -> None:
    command = [sys.executable, "-m", "hvdtrain", "plan", "--model", "resnet18", "--devices", "2x24GiB", "--json"]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["command"] == "plan"


TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 8, in <module>
    loss = model(x)
           ^^^^^^^^
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1, in _call_impl
    return forward_call(*args)
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 2, in forward
    return F.linear(input)
RuntimeError: shapes cannot be multiplied""".splitlines()


def test_a_traceback_is_shown_to_the_users_line() -> None:
    user = [*TRACEBACK[:4], "  ... 2 frame(s) of libraries, see the log", TRACEBACK[-1]]
    assert without_libraries(TRACEBACK) == user
    libraries_only = [TRACEBACK[0], *TRACEBACK[4:]]
    assert without_libraries(libraries_only) == libraries_only, "without a line of the user's, all of it"
    assert without_libraries(["a", "    b", 'File "x"']) == ["a", "    b", 'File "x"']


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_marks_have_a_ranks_colour_on_a_terminal(no_colour: str, tmp_path: Path) -> None:
    terminal, standard_output = pty.openpty()
    command = [sys.executable, "-m", "hvdtrain", "launch", "-np", "2", "--no-checks", "--", "echo", "hi"]
    environment = clean_environment({"NO_COLOR": no_colour})
    with open(terminal, "rb", buffering=0) as reader:
        done = subprocess.run(
            command, stdout=standard_output, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, timeout=120
        )
        os.close(standard_output)
        assert done.returncode == 0, done.stderr
        printed = reader.read(4096).decode()
    for rank, colour in ((0, "36"), (1, "33")):
        assert ("\x1b[" not in printed) if no_colour else (f"\x1b[{colour}m[{rank}] \x1b[0mhi" in printed), printed


@pytest.mark.parametrize(
    "program",
    [
        "import hvdtrain.keras",
        "import hvdtrain; hvdtrain.init('keras')",
        "import hvdtrain.__main__ as it; it._run = lambda argv: __import__('torch'); it.main([])",
    ],
)
def test_a_framework_that_is_not_installed_is_named_with_the_command(program: str, tmp_path: Path) -> None:
    absent = "import sys; sys.modules.update(dict.fromkeys(['torch', 'tensorflow', 'keras'])); "
    done = subprocess.run(
        [sys.executable, "-c", absent + program], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert "adapter needs" in done.stderr and "-m pip install" in done.stderr.splitlines()[-1], done.stderr
