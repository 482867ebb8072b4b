"""Evaluation: what a method costs in quality for the memory it saves, the full cache beside it.

``python -m kvcompress_serving.evaluation`` is the command line; `fidelity` and `retrieval` are the
functions under it. ``docs/evaluation.md`` defines every task and number.
"""
