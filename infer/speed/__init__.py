"""python -m infer.speed: decoders against plain decoding in the same loop, pair by pair.

config      the settings
decoders    the decoders of a run, by the settings of infer.methods
models      what is checked before weights are read; the models, and every row's decoder
peers       the library's own decoding, and vLLM's
work        the order of pairs, the units of a run, and how a rank does one
run         from the settings to the report
statistics  medians, spread and intervals of pairs
aggregate   units to the rows of speed.json
limit       the physical limit of a forward, by what this device does at best
profile     where the time of a step goes, and the memory of a text
"""
