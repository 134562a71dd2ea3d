"""`import hvdtrain` is cheap, and every public name is there."""

from __future__ import annotations

import subprocess
import sys

import pytest
from harness import clean_environment

# numpy, frameworks, and what is slow for its size
HEAVY = ("numpy", "torch", "tensorflow", "keras", "horovod", "tqdm", "tensorboardX", "asyncio", "multiprocessing")


def python(code: str) -> str:
    # coverage imports much by itself
    environment = {name: value for name, value in clean_environment().items() if not name.startswith("COVERAGE_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_pulls_in_nothing_heavy() -> None:
    loaded = python("import sys, hvdtrain; print(*sys.modules)").split()
    assert "hvdtrain" in loaded
    assert not set(HEAVY) & set(loaded)
    assert [name for name in loaded if name.startswith("hvdtrain")] == [
        "hvdtrain.core", "hvdtrain.core.version", "hvdtrain",
    ]  # fmt: skip


def test_every_name_of_the_core_comes_without_a_framework() -> None:
    code = "import sys, hvdtrain; [getattr(hvdtrain, name) for name in hvdtrain.__all__]; print(*sys.modules)"
    assert not set(HEAVY) & set(python(code).split())


@pytest.mark.parametrize("program", ["keras_mnist", "torch_resnet", "pipeline_resnet"])
def test_a_program_reads_its_flags_without_a_framework(program: str) -> None:
    code = f"import sys, hvdtrain.{program} as it; it.parser().parse_args([]); print(*sys.modules)"
    assert not set(HEAVY) & set(python(code).split())


def test_beside_keras_the_adapter_imports_nothing_but_itself() -> None:
    """What Keras has not imported by itself (Horovod, PyTorch, tqdm, TensorBoard) waits until it is needed."""
    code = "import sys, keras, tensorflow; before = set(sys.modules); import hvdtrain.keras; print('new', *set("
    loaded = python(code + "sys.modules) - before)").split("new ")[-1].split()
    assert {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) == {"hvdtrain"}
