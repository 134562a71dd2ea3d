"""Scripts of Horovod's Keras in, hvdtrain scripts out: text to text; and what is refused, each line with its reason."""

from __future__ import annotations

import ast

import pytest

from hvdtrain.migrate.convert import convert

HEAD = "import horovod.tensorflow.keras as hvd\nimport keras\nhvd.init()\nmodel = build()\n"
NEW_HEAD = 'import hvdtrain\nimport hvdtrain.keras as hvk\nimport keras\nhvdtrain.init("keras")\nmodel = build()\n'
WRAP = HEAD + "model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss='mse')\n"
PREPARED = NEW_HEAD + "model.compile(optimizer=keras.optimizers.SGD(0.1), loss='mse')\nhvk.prepare(model)\n"


def moved(text: str) -> str:
    """The new script; it compiles, and has nothing of Horovod's left but callbacks that set the learning rate."""
    found = convert(text)
    assert not found.refused, found.refused
    assert found.framework == "keras"
    names = {node.id for node in ast.walk(ast.parse(found.text)) if isinstance(node, ast.Name)}
    assert "import horovod" not in found.text and "hvd" not in names
    return found.text


def refused(text: str) -> list[tuple[int, str]]:
    """Line and reason of what is refused; the script is as it was."""
    found = convert(text)
    assert found.refused and found.text == text
    return [(finding.line, finding.text) for finding in found.refused]


PLAIN, WRAPPED = "keras.optimizers.SGD(0.1)", "hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))"
AGAIN = f"model.compile({WRAPPED})\nmodel.fit(x)\nmodel.compile({PLAIN})\n"


@pytest.mark.parametrize(
    "text, wanted",
    [
        (
            f"opt = {PLAIN}\nopt = hvd.DistributedOptimizer(opt)\nmodel.compile(opt)\n",
            "compile(opt)\nhvk.prepare(model)",
        ),
        (AGAIN, f"hvk.prepare(model)\nmodel.fit(x)\nmodel.compile({PLAIN})\n"),
        (f"def made():\n    return {WRAPPED}\nopt = made()\nmodel.compile(opt)\n", "compile(opt)\nhvk.prepare(model)"),
        (
            f"class T:\n    def a(self):\n        self.o = {WRAPPED}\n"
            "    def b(self):\n        self.m.compile(self.o)\n",
            "compile(self.o)\n        hvk.prepare(self.m)\n",
        ),
    ],
)
def test_models_are_prepared_behind_compile(text: str, wanted: str) -> None:
    new = moved(HEAD + text)
    assert wanted in new and "DistributedOptimizer" not in new and new.count("hvk.prepare") == 1
    assert not convert(HEAD + text).notes


def test_an_optimizer_that_is_not_always_wrapped_is_noted() -> None:
    text = f"{HEAD}opt = {PLAIN}\nif x:\n    opt = hvd.DistributedOptimizer(opt)\nmodel.compile(opt)\n"
    assert moved(text).endswith("model.compile(opt)\nhvk.prepare(model)\n")
    [note] = convert(text).notes
    assert note.line == 7 and "under a condition" in note.text


def test_passes_are_the_optimizers_own() -> None:
    passes = "backward_passes_per_step=4, average_aggregated_gradients=True"
    new = "keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)"
    text = WRAP.replace("SGD(0.1))", f"SGD(0.1), {passes})")
    assert f"optimizer={new}, loss" in moved(text)
    [note] = convert(text).notes
    assert note.line == 5 and "Horovod counts passes" in note.text
    named = (
        HEAD + f"opt = keras.optimizers.SGD(0.1)\nopt = hvd.DistributedOptimizer(opt, {passes})\nmodel.compile(opt)\n"
    )
    assert f"opt = {new}\nmodel.compile(opt)\nhvk.prepare(model)\n" in moved(named)
    [(line, reason)] = refused(text.replace(", average_aggregated_gradients=True", ""))
    assert line == 5 and "adds gradients up" in reason


def test_loaded_models() -> None:
    text = WRAP + "model.save(path)\nmodel = hvd.load_model(path, custom_objects={'f': f})\n"
    load = "model = keras.models.load_model(path, custom_objects={'f': f})\n"
    assert moved(text) == f"{PREPARED}model.save(path)\n{load}hvk.prepare(model)\n"
    accumulating = text.replace("SGD(0.1))", "SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True)")
    assert f"{load}model.optimizer.gradient_accumulation_steps = None\nhvk.prepare(model)\n" in moved(accumulating)
    alone = "import horovod.keras as hvd\nhvd.init()\nmodel = hvd.load_model(path)\n"
    assert moved(alone).startswith("import keras\nimport hvdtrain\n")


BROADCAST, METRICS = "hvd.callbacks.BroadcastGlobalVariablesCallback(0)", "hvd.callbacks.MetricAverageCallback()"


@pytest.mark.parametrize(
    "old, new",
    [
        (f"model.fit(x, callbacks=[{BROADCAST}])\n", "model.fit(x, callbacks=hvk.callbacks(model))\n"),
        (f"model.fit(x, callbacks=[{BROADCAST}, a])\n", "model.fit(x, callbacks=[*hvk.callbacks(model), a])\n"),
        (
            f"c = [{BROADCAST}, {METRICS}]\nmodel.fit(x, callbacks=c)\n",
            "c = []\nmodel.fit(x, callbacks=[*hvk.callbacks(model), *c])\n",
        ),
        (
            f"c = [{BROADCAST}, a, {METRICS}]\nmodel.fit(x, callbacks=c)\n",
            "c = [a]\nmodel.fit(x, callbacks=[*hvk.callbacks(model), *c])\n",
        ),
        (
            f"c = [a]\nc.insert(0, {BROADCAST})\nc.extend([{METRICS}, d])\nc += [{METRICS}, b]\n"
            "model.fit(x, callbacks=c)\n",
            "c = [a]\nc.extend([d])\nc += [b]\nmodel.fit(x, callbacks=[*hvk.callbacks(model), *c])\n",
        ),
        (
            f"c = []\nif hvd.size() > 1:\n    c.append({BROADCAST})\nmodel.fit(x, callbacks=c)\n",
            "c = []\nif world.size > 1:\n    pass\nmodel.fit(x, callbacks=[*hvk.callbacks(model), *c])\n",
        ),
        (  # elsewhere than in a list one that does nothing stands for it
            f"b = {BROADCAST}\nmodel.fit(x, callbacks=[b] if x else [])\n",
            "b = keras.callbacks.Callback()\nmodel.fit(x, callbacks=[*hvk.callbacks(model), *([b] if x else [])])\n",
        ),
        (  # another model's
            f"c = [{BROADCAST}, a]\nmodel.fit(x, callbacks=c)\nother.compile('sgd')\nother.fit(x, callbacks=c)\n",
            "c = [a]\nmodel.fit(x, callbacks=[*hvk.callbacks(model), *c])\n"
            "other.compile('sgd')\nother.fit(x, callbacks=c)\n",
        ),
        (  # the prepared model under another name
            f"def f(net):\n    net.fit(x, callbacks=[{BROADCAST}])\nf(model)\n",
            "def f(net):\n    net.fit(x, callbacks=hvk.callbacks(net))\nf(model)\n",
        ),
        (  # the comment of what goes goes
            f"c = [\n    a,  # so\n    {BROADCAST},  # rank 0's\n]\nmodel.fit(x, callbacks=c)\n",
            "c = [\n    a,  # so\n]\nmodel.fit(x, callbacks=[*hvk.callbacks(model), *c])\n",
        ),
    ],
)
def test_callbacks(old: str, new: str) -> None:
    head = PREPARED.replace("hvdtrain.init", "world = hvdtrain.init") if "world" in new else PREPARED
    assert moved(WRAP + old) == head + new


@pytest.mark.parametrize("draws", ["d.shuffle(9)", "np.random.permutation(9)", "random.sample(x, 3)"])
def test_ranks_that_seeded_nothing_draw_each_its_own(draws: str) -> None:
    """hvdtrain.init gives all ranks one seed."""
    text = f"import random\nimport numpy as np\n{WRAP}d = {draws}\n"
    seeded = 'world = hvdtrain.init("keras")\nkeras.utils.set_random_seed(world.rank)\n'
    assert seeded in moved(text)
    [note] = convert(text).notes
    assert note.line == 8 and "drawn without a seed" in note.text
    assert "(world.rank)" not in moved(text.replace("model =", "keras.utils.set_random_seed(3)\nmodel ="))


def test_lines_that_pin_a_gpu_go() -> None:
    pin = """\
gpus = tf.config.experimental.list_physical_devices('GPU')
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], 'GPU')
"""
    text = "import tensorflow as tf\n" + WRAP.replace("hvd.init()\n", "hvd.init()\n" + pin)
    kept = "gpus = tf.config.experimental.list_physical_devices('GPU')\n"
    assert moved(text) == "import tensorflow as tf\n" + PREPARED.replace("model =", kept + "model =", 1)
    assert "set_memory_growth" in moved(text.replace("[hvd.local_rank()]", "[0]"))
    hides = "else:\n    tf.config.set_visible_devices([], 'GPU')\n"
    assert f"if gpus:\n    pass\n{hides}" in moved(text.replace("model =", f"{hides}model ="))


@pytest.mark.parametrize(
    "old, new",
    [
        ("hvd.allreduce(x)", 'world.mean({"value": x})["value"]'),
        ("hvd.allreduce(x, name='loss')", "world.mean({'loss': x})['loss']"),
        ("hvd.allreduce(x, average=False)", 'world.sum({"value": x})["value"]'),
        ("hvd.broadcast(x, 0, name='epoch')", "world.broadcast(x)"),
        ("hvd.broadcast(x, root_rank=1)", "world.broadcast(x, 1)"),
        ("500 // hvd.size() if hvd.rank() else 0", "500 // world.size if world.rank else 0"),
    ],
)
def test_numbers_and_ranks(old: str, new: str) -> None:
    assert moved(f"import horovod.keras as hvd\nhvd.init()\ny = {old}\n").endswith(f"\ny = {new}\n")


@pytest.mark.parametrize(
    "line, reason",
    [
        ("o = hvd.DistributedOptimizer(opt)", "which model is compiled with it is not known"),
        ("model.compile(hvd.DistributedOptimizer(opt, op=hvd.Sum))", "op=hvd.Sum"),
        ("models[0].compile(hvd.DistributedOptimizer(opt))", "a model needs a name"),
        (f"c = [{BROADCAST}]", "can be given hvdtrain's callbacks"),
        (f"f({BROADCAST})", "can be given hvdtrain's callbacks"),
        (f"model.fit(x, callbacks=[{BROADCAST.replace('0', '1')}])", "no other rank's, and no part"),
        ("c = hvd.callbacks.BestModelCheckpoint(p)", "save_best_only=True"),
        ("hvd.broadcast_global_variables(0)", "outside of fit there is none"),
        ("hvd.allreduce(x, op=hvd.Adasum)", "a mean, or a sum"),
        ("x = hvd.allgather(y)", "world.gather(value) is a list"),
        ("import horovod.torch as other", "cannot be converted"),
    ],
)
def test_what_cannot_be_moved_is_told_with_its_line(line: str, reason: str) -> None:
    found = refused(HEAD + line + "\n")
    wanted = 1 if line.startswith("import") else 5 + line.count("\n")
    assert any(at == wanted and reason in said for at, said in found), found
