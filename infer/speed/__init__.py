"""python -m infer.speed: decoders against plain decoding in the same loop, pair by pair.

config      the settings
run         from the settings to the report: what is made, checked and told
prepare     what is checked before any weight is read
place       whether the folder of a run can be had
specs        our specs to decode, by the settings of infer.methods
bench       the models, and every row's decoder
peers       the library's own decoding; vllm_peer vLLM's; peering what of them a run has
pairs       who runs beside whom
batches     texts side by side
units       one prompt's turn, as it is kept
work        all units of a run, and how a rank does one
statistics  what pairs say: medians, spread, intervals
aggregate   units to the rows of speed.json
header      what all units share
limit       the physical limit of a forward; device what this device does at best
profile     where the time of a step goes, and what memory a text takes
samples     a text of each set, with who produced each token
"""
