"""KV-cache compression for stock vLLM. Importing this package does nothing; see `engine.plugin`."""

__version__ = "0.1.0"
