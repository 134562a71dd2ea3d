"""Measured, predicted, chosen: how to split a model."""
