"""Files of models: those of a Hugging Face cache, weights that are pickles, and the cache of one run.

The layout of such a cache is that of huggingface_hub, which nothing here imports.
"""
