"""``python -m vllm_kvcompress``: the command ``vllm-kvcompress``."""

from vllm_kvcompress.cli import main

main()
