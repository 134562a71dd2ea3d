"""`hvdtrain migrate`: old and new script come to the same weights on two ranks; a wrong new one does not."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from harness import clean_environment
from horovod_scripts import FOLDER

from hvdtrain.migrate.convert import convert
from hvdtrain.migrate.prove import NotProvenError, ScriptProof, ScriptRun, compare, prove, run

TRAINER = "torch_trainer_class.py"
OTHERS = (
    "torch_accumulation.py", "torch_adasum.py", "torch_clipping.py", "torch_fp16_compression.py", "torch_gan.py",
    "torch_gather_predictions.py", "torch_grouped_allreduce.py", "torch_mnist.py --epochs 3",
    "torch_resume.py --epochs 4", "torch_warmup.py",
    "keras_fit.py", "keras_resume.py", "keras_train_step.py", "tensorflow_keras_fit.py",
)  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The proof's ranks see no launcher's variables, and an empty folder."""
    environment = clean_environment({})
    for name in set(os.environ) - set(environment):
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


@functools.cache
def as_it_is(name: str) -> ScriptRun:
    script = FOLDER / name
    return run(script, None, [], updates=20, timeout_s=200, framework=convert(script.read_text()).framework)


def proof_of(name: str, *changes: tuple[str, str]) -> ScriptProof:
    """Of a script and what it becomes, with mistakes put into that."""
    script = FOLDER / name
    found = convert(script.read_text())
    new = found.text
    for old, wrong in changes:
        assert new.count(old) == 1, old
        new = new.replace(old, wrong)
    made = run(script, new, [], updates=20, timeout_s=200, framework=found.framework)
    return compare(as_it_is(name), made)


def migrate(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain", "migrate", *map(str, argv)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("line", [TRAINER, *(pytest.param(one, marks=pytest.mark.thorough) for one in OTHERS)])
def test_the_scripts_are_proven(line: str) -> None:
    name, *argv = line.split()
    result = migrate(FOLDER / name, *argv)
    assert result.returncode == 0, result.stderr
    said = re.search(r"after (\d+) (?:updates|batches of fit) on 2 ranks .* by at most (\S+) of", result.stderr)
    assert (
        said is not None and int(said[1]) >= (12 if name == "keras_train_step.py" else 16) and float(said[2]) < 1e-6
    ), result.stderr


LOOP = "optimizer.backward(loss)"
PREPARE = "model, optimizer = hvt.prepare(model, optimizer)\n"


# What goes wrong in a new script shows in its weights: the negative twins.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        [(PREPARE, ""), (LOOP, "loss.backward()")],
        [(LOOP, "optimizer.backward(2 * loss)"), ("max_norm=0.5", "max_norm=1e9")],
        [("num_replicas=world.size, rank=world.rank", "num_replicas=1, rank=0")],
    ],
    ids=["no average", "another loss", "the same data"],
)
def test_a_wrong_new_script_is_not_proven(changes: list[tuple[str, str]]) -> None:
    try:
        proof = proof_of("torch_clipping.py", *changes)
    except NotProvenError as error:
        assert re.search("as many updates|its own part of the data", str(error))  # hvdtrain's own refusal
    else:
        assert not proof.holds and proof.difference > 1e-3 and "NOT PROVEN" in str(proof)


@pytest.mark.thorough
def test_dropout_of_keras_draws_what_horovod_drew(tmp_path: Path) -> None:
    """Streams that hvdtrain gives each rank are undone, those of a model's layers too."""
    script = tmp_path / "drops.py"
    text = (FOLDER / "keras_fit.py").read_text()
    layer = 'activation="tanh")(inputs)\n'
    assert text.count(layer) == 1
    script.write_text(text.replace(layer, f"{layer}hidden = keras.layers.Dropout(0.5)(hidden)\n"))
    result = migrate(script)
    assert result.returncode == 0, result.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [
        ("LearningRateWarmupCallback(initial_lr=initial_lr, warmup_epochs=1),", ""),
        ("world.rank :: world.size], y[world.rank", "world.rank :: world.size], y[world.rank * 0"),
    ],
    ids=["no warm-up", "other labels"],
)
def test_a_wrong_new_script_of_keras_is_not_proven(change: tuple[str, str]) -> None:
    proof = proof_of("keras_fit.py", change)
    assert not proof.holds and proof.difference > 1e-3


@pytest.mark.parametrize(
    "line, reason",
    [
        ("raise SystemExit('no such data')", "the old script failed with exit code"),
        ("raise SystemExit", "the old script made no update with Horovod's optimizer"),
    ],
)
def test_a_script_that_does_not_run_here_is_not_proven(line: str, reason: str, tmp_path: Path) -> None:
    """The diff is printed, and nothing is written, by the script either."""
    (tmp_path / "m.pt").write_text("mine")
    saves = "open('m.pt', 'w').write('new')"
    (tmp_path / "train.py").write_text(f"import horovod.torch as hvd\nhvd.init()\n{saves}\n{line}\n")
    result = migrate("--in-place", "train.py")
    assert result.returncode == 2 and "+import hvdtrain\n" in result.stdout, result.stderr
    assert f"nothing was proven: {reason}" in result.stderr and "--no-prove" in result.stderr
    assert "no such data" not in line or "no such data" in result.stderr
    assert "horovod" in (tmp_path / "train.py").read_text() and not (tmp_path / "train.py.orig").exists()
    assert (tmp_path / "m.pt").read_text() == "mine"


@pytest.mark.thorough
def test_a_script_that_hangs_is_ended(tmp_path: Path) -> None:
    mark = f"hangs {tmp_path.name}"
    with pytest.raises(NotProvenError, match="the new script did not make 3 updates in 8 s"):
        script = FOLDER / "torch_clipping.py"
        run(script, "import threading\nthreading.Event().wait()", [mark], updates=3, timeout_s=8)
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or ())]


@pytest.mark.thorough
def test_updates_of_an_optimizer_of_one_rank_are_not_counted(tmp_path: Path) -> None:
    """Twenty updates before anything is distributed would prove nothing."""
    script = tmp_path / "pretrains.py"
    script.write_text(
        "import torch\n"
        "import horovod.torch as hvd\n"
        "hvd.init()\n"
        "model = torch.nn.Linear(3, 1)\n"
        "x = torch.full((4, 3), float(hvd.rank() + 1))\n"
        "local = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for _ in range(20):\n"
        "    local.zero_grad()\n"
        "    model(x).pow(2).mean().backward()\n"
        "    local.step()\n"
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    model(x).pow(2).mean().backward()\n"
        "    optimizer.step()\n"
    )
    new = convert(script.read_text()).text
    proof = prove(script, new, [])
    assert proof.updates == 3 and proof.holds


UNSEEDED = """\
import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf

hvd.init()
data = np.random.RandomState(7)
x, y = data.randn(96, 3), data.randn(96, 1)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(96).batch(8)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])


def optimizer():
    return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


def own():
    return [hvd.callbacks.BroadcastGlobalVariablesCallback(0), keras.callbacks.TerminateOnNaN()]


model.compile(optimizer(), loss="mse")
model.fit(dataset, steps_per_epoch=4, epochs=3, callbacks=own(), verbose=0)
for i in range(3):
    model.train_on_batch(x[hvd.rank() :: 8], y[hvd.rank() :: 8])
print("over")
"""


@pytest.mark.thorough
def test_batches_that_are_drawn_unseeded_and_one_by_one(tmp_path: Path) -> None:
    """Twelve of fit, and three of train_on_batch; the script's end is not compared where these are not all."""
    script = tmp_path / "unseeded.py"
    script.write_text(UNSEEDED)
    new = convert(UNSEEDED).text
    proof = prove(script, new, [], framework="keras")
    assert proof.holds and proof.updates == 15 and proof.difference < 1e-6 and proof.whole, proof
    part = prove(script, new, [], updates=14, framework="keras")
    assert part.holds and part.updates == 14 and not part.whole
    wrong = prove(script, new.replace("x[world.rank :: 8]", "x[::8]"), [], framework="keras")
    assert not wrong.holds and wrong.difference > 1e-3


RESUMED = """
import torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
if hvd.rank() == 0:
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])  # with another rate
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
x = torch.randn(64, 5, generator=torch.Generator().manual_seed(hvd.rank()))
for i in range(0, 64, 16):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x[i:i + 16]), x[i:i + 16].sum(1, keepdim=True)).backward()
    optimizer.step()
"""
SAVED = """
import torch
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
model(torch.ones(2, 5)).sum().backward()
optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""


@pytest.mark.thorough
def test_what_rank_0_alone_resumes_is_proven(tmp_path: Path) -> None:
    """As many updates on all ranks: the step by which Horovod makes a state on the others is none."""
    (tmp_path / "train.py").write_text(RESUMED)
    subprocess.run([sys.executable, "-c", SAVED], cwd=tmp_path, check=True, timeout=60)
    done = migrate("train.py")
    assert done.returncode == 0 and "after 4 updates on 2 ranks" in done.stdout + done.stderr, done
