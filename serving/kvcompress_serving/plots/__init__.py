"""Pictures of what a method does to one prompt.

``python -m kvcompress_serving.plots prompt`` draws the share of entries that each layer and head
keeps, and writes a page that shows over the text what was merged with what.
"""
