"""Experiments: one binary a question, each started with `python -m experiments.<name>`."""
