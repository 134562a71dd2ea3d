"""Schedules, costs, simulation, partition and search: pure functions, no framework."""
