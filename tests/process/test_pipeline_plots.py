"""Pictures of bars and curves. matplotlib starts `fc-list` for the first one that a user draws."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.core.errors import ConfigError
from hvdtrain.pipeline.tuning import plots


def test_pictures_show_what_they_are_given(tmp_path: Path) -> None:
    bars = plots.Bars("a title", {"one": [2.0, 2.2, 1.8], "two": [1.0, 1.2, 0.8]}, "3 batches")
    curve = plots.SplitCurve("t", 32, {1: [3.0, 3.1], 8: [2.0, 2.2]}, {1: 3.3, 4: 2.0, 8: 2.1}, 8, {"naive": 4.0})
    texts = {}
    for name, picture in (("bars", bars), ("curve", curve)):
        path = plots.plot(picture, tmp_path / f"{name}.svg")
        texts[name] = path.read_text()
    shown = {
        "bars": ["a title", "2.00 s ± 0.20", "0.50 × one", "Seconds for 3 batches", "standard deviation of 3 repeats"],
        "curve": ["best: split size 8, 2.10 s", "predicted", "naive: 4.00 s", "(32)", "Split size: samples"],
    }
    for name, its in shown.items():
        for text in its:
            assert f"<!-- {text}" in texts[name] or text in texts[name], (name, text)
    tuning = SimpleNamespace(picture=lambda: curve)
    assert plots.plot(tuning, tmp_path / "deep" / "tuning.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["x.nonsense", "file/x.png"])
def test_no_place_for_a_picture(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a picture needs a file"):
        plots.plot(plots.Bars("t", {"one": [1.0]}), tmp_path / name)
