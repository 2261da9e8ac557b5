"""python -m infer.quality: what the answers of a model are worth, beside those of the model it was tuned from.

config.py    the settings
work.py      the problems that can be judged here, batches of answers, a model's answers
run.py       from the settings to the report: answers, verdicts, result
result.py    units of work -> quality.json: pass@k, intervals, differences of two models

Its tables on a terminal, in the shape of the paper's tables 1 to 3, are infer/report/terminal.py.
"""
