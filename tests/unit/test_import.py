"""`import hvdtrain` is cheap, and every public name is there."""

from __future__ import annotations

import pytest

import hvdtrain


@pytest.mark.parametrize("name", hvdtrain.__all__)
def test_public_names(name: str) -> None:
    assert getattr(hvdtrain, name) is not None
    assert name in dir(hvdtrain)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        hvdtrain.Trainer  # noqa: B018
