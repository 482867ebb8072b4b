"""Learned soft tokens: vectors that, read after a prompt, attend to it as its answer would.

`model` holds them, `artifact` stores and finds them. `frozen` runs a transformers model over
stored prompts, `prompts` makes prompts of texts, `collect` gathers what training needs, `train`
learns, `report` describes the outcome, `run` is the whole procedure. Only `frozen` and `run` import
transformers.
"""
