"""Calibration: what a scheme's constants are computed from, and how."""
