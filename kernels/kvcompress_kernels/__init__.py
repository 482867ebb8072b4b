"""Kernels of vllm-kvcompress: torch, triton and C++ only, no vLLM.

One folder per operation, each with `api.py` (the public door: docstring, validation, dispatch),
`reference.py` (plain torch, defines the result) and `cpu.cpp`. `formats.py` owns every byte layout,
`build.py` compiles the C++ on first use. Importing this package does nothing.
"""
