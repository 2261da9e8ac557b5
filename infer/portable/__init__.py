"""The loop behind Transformers' `generate`, with nothing but that library: the entry of every export's
custom_generate/.
"""
