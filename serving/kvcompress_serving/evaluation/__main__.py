"""``python -m kvcompress_serving.evaluation``."""

from kvcompress_serving.evaluation.cli import main

if __name__ == "__main__":
    main()
