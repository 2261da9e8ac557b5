"""python -m infer.speed: decoders against plain decoding in the same loop, pair by pair.

config      the settings
prepare     what is checked before any weight is read
decoders    every row's decoder, by the settings of infer.methods
pairs       who runs beside whom
units       one prompt's turn, as it is kept
statistics  what pairs say: medians, spread, intervals
aggregate   units to the rows of speed.json
samples     a text of each set, with who produced each token
"""
