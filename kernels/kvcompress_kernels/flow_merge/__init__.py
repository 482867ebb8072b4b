"""Copies chosen tokens of a prompt into a slab, with values that flow in from all others; see
`api`."""
