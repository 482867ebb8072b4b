"""What runs against a vLLM server: the demo, benchmarks and evaluations. Imports nothing of vLLM.

Each tool is a module that can be run, ``python -m kvcompress_serving.demo`` for one.
"""

from pathlib import Path

SAMPLE_TEXT = Path(__file__).parent / "data" / "origin_of_species.txt"
"""200 kB of English prose in the public domain, for long prompts without a download."""
