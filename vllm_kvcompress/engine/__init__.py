"""The vLLM side: the only package of the plugin that imports vLLM.

`plugin` is loaded in every vLLM process and does nothing but offer the flag; everything else is
imported only when compression is switched on.
"""
