"""Clusters the keys of each chunk and writes the merged entries into a slab; see `api`."""
