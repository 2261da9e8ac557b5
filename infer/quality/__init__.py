"""python -m infer.quality: what the answers of a model are worth, beside those of the model it was tuned from.

config.py    the settings
run.py       from the settings to the report: answers, verdicts, result
work.py      which problems can be judged here, and whose answers are wanted
answers.py   which answers are wanted, in batches; a model's answers, and who produced each token
verdicts.py  every distinct answer judged once: executed in the sandbox, or matched exactly
scores.py    pass@k, intervals, differences of two models
result.py    units of work -> quality.json

Its tables on a terminal, in the shape of the paper's tables 1 to 3, are infer/report/terminal.py.
"""
