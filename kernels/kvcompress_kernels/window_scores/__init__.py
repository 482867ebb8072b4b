"""Attention that a few queries pay to the tokens of a paged prompt; see `api`."""
