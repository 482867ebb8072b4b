"""Benchmarks: what compression gains and costs in speed and memory, stock vLLM beside it.

``python -m kvcompress_serving.benchmark`` is the command line. Servers are compared one after
another on the same machine and driven by vLLM's own load generators; ``docs/benchmarks.md`` says
how to read what comes out.
"""
