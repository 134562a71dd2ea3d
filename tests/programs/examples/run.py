"""Runs examples in float64, as they stand or as the plain scripts that they were made of, and keeps their weights.

usage: run_torch.py|run_keras.py FOLDER plain|prepared EXAMPLE...

A plain script is an example without its lines that end in "# +", with the code after "instead of: " in their place: it
must not know of hvdtrain. The world of all examples is one: ranks start once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
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


def main(framework: Any, run: Callable[[dict[str, Any], Path, Any], None]) -> None:
    """Runs the examples that the arguments name by `run`, which imports the framework: ranks are forked with it."""
    folder, form, *names = sys.argv[1:]
    world = hvdtrain.init(framework) if form == "prepared" else None
    hvdtrain.init = lambda *args, **kwargs: world  # type: ignore[assignment]
    rank = 0 if world is None else world.rank
    for name in names:
        source = EPOCHS.sub(r"\g<1>2", (EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
        code = compile(plain(source) if world is None else source, f"{name} ({form})", "exec")
        run({"__name__": "__main__"}, Path(folder) / f"{name}.{rank}", code)
        print(f"done: {name}", flush=True)
