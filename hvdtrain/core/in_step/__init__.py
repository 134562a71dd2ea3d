"""Are all ranks at the same place: when they arrive, at each meeting, and while they wait."""
