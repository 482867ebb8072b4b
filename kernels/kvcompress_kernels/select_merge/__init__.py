"""Copies chosen tokens of a prompt into a slab, with the values of their neighbours; see `api`."""
