"""Calibration: what a model's keys and values look like on a text, and the constants that schemes make of it."""
