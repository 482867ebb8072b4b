"""``python -m kvcompress_serving.benchmark``."""

from kvcompress_serving.benchmark.cli import main

if __name__ == "__main__":
    main()
