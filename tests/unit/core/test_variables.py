"""Environment variables that several places read alike."""

from __future__ import annotations

import pytest

from hvdtrain.core.variables import without_none


@pytest.mark.parametrize(("value", "expected"), [(None, None), ("", None), ("none", None), ("fp16", "fp16")])
def test_none_turns_a_tuned_setting_off(value: str | None, expected: str | None) -> None:
    assert without_none(value) == expected
