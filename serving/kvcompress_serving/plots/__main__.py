"""``python -m kvcompress_serving.plots``."""

from kvcompress_serving.plots.cli import main

if __name__ == "__main__":
    main()
