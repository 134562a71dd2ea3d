"""Runs examples in float64, as they stand or as the plain scripts that they were made of, and keeps their weights.

usage: run.py FOLDER plain|prepared EXAMPLE...

A plain script is an example without its lines that end in "# +", with the code after "instead of: " in their place: it
must not know of hvdtrain. The world of all examples is one: ranks start once.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

import hvdtrain

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
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


def weights(space: dict[str, Any]) -> dict[str, Any]:
    """Returns what an example's models hold, by name."""
    models = {name: value for name, value in space.items() if isinstance(value, torch.nn.Module)}
    return {f"{name}.{key}": value for name in sorted(models) for key, value in models[name].state_dict().items()}


def main(folder: str, form: str, *names: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    world = hvdtrain.init("torch") if form == "prepared" else None
    hvdtrain.init = lambda *args, **kwargs: world  # type: ignore[assignment]
    for name in names:
        source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(plain(source) if world is None else source, f"{name} ({form})", "exec"), space)
        if world is None or world.is_main:
            torch.save(weights(space), Path(folder) / f"{name}.pt")
            print(f"done: {name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
