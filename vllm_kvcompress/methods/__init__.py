"""Compression methods: torch only, one file each, looked up by name in `registry`."""
