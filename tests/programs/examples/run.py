"""Runs examples in float64, as they stand or as the plain scripts that they were made of, and keeps their weights.

usage: run.py torch|keras FOLDER plain|prepared EXAMPLE...

A plain script is an example without its lines that end in "# +", with the code after "instead of: " in their place: it
must not know of hvdtrain. The world of all examples is one: ranks start once.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import hvdtrain

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EPOCHS = re.compile(r"^(EPOCHS, .* = )\d+", re.MULTILINE)  # two are enough: each ends unevenly
ADDED = re.compile(r"^(?P<indent>\s*).*  # \+(?P<note>( .*)?)$")


def plain(source: str) -> str:
    """Returns the script that an example was made of."""
    lines = []
    for line in source.splitlines():
        found = ADDED.match(line)
        instead = found and found["note"].partition("instead of: ")[2]
        if found is None:
            lines.append(line)
        elif instead:
            lines.append(found["indent"] + instead)
    code = "\n".join(lines) + "\n"
    body = code.partition('"""')[2].partition('"""')[2]
    assert not re.search(r"hvdtrain|hvt\.|hvk\.|world", body), body
    return code


def run_torch(space: dict[str, Any], file: Path, code: Any) -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    exec(code, space)
    models = {name: value for name, value in space.items() if isinstance(value, torch.nn.Module)}
    weights = {f"{name}.{key}": value for name in sorted(models) for key, value in models[name].state_dict().items()}
    torch.save(weights, file)


def run_keras(space: dict[str, Any], file: Path, code: Any) -> None:
    import keras
    import numpy as np

    keras.config.set_floatx("float64")
    exec(code, space)
    np.savez(file.open("wb"), **{str(n): value.numpy() for n, value in enumerate(space["model"].weights)})


def main(framework: Any, folder: str, form: str, *names: str) -> None:
    world = hvdtrain.init(framework) if form == "prepared" else None
    hvdtrain.init = lambda *args, **kwargs: world  # type: ignore[assignment]
    rank = 0 if world is None else world.rank
    for name in names:
        source = EPOCHS.sub(r"\g<1>2", (EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
        code = compile(plain(source) if world is None else source, f"{name} ({form})", "exec")
        run = run_torch if framework == "torch" else run_keras
        run({"__name__": "__main__"}, Path(folder) / f"{name}.{rank}", code)
        print(f"done: {name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
