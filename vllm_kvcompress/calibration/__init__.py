"""Calibration of transform coding: statistics of a model over text, and what is made of them.

`texts` reads and cuts the text, `statistics` collects moments while a model runs over it,
`transform` turns them into a basis for each group of KV heads, `distortion` measures what each
channel loses at each width, `codec` holds the result, and `allocation` spends bits on it. `run`
is the whole procedure, `report` describes its outcome. Only `statistics` and `run` import
transformers.
"""
