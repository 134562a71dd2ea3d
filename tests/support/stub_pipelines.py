"""Pipelines whose stages only wait."""

from __future__ import annotations

from hvdtrain.pipeline.plan.costs import Curve, Device, StageCost


def stage(forward: float, backward: float, output: float = 0.0) -> StageCost:
    """Seconds and bytes a sample."""
    return StageCost(
        Device("d"), Curve.per_sample(forward), Curve.per_sample(backward), output_bytes=Curve.per_sample(output)
    )
