"""python -m train.inspect: show the sequences of a step in the terminal, as they are trained.

    python -m train.inspect experiment=sdsat_7b_best data.path=DATA

It has the settings of `python -m train`, and the trainer's functions choose the sequences and
draw the windows. It changes no files and reads no weights.

With objective=dual or basic a window replaces tokens. With branch it is an additional branch,
written between angle brackets before the token that it begins at. The input of a window is a1,
a2, ..., or the text of its token with another objective.mask; the replaced tokens are struck
through:

    def f(a1xa2):        dual: the tokens x and ) are replaced
    def f(⟨a1xa2)⟩x):    branch
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from rich.text import Text

from conf.console import PlainConsole, pictures
from conf.errors import counted
from conf.settings.cli import run
from conf.settings.schema import check_settings, setting
from data_prep.encode import Encoder
from data_prep.inspect import append_tokens, sequence_lines
from data_prep.shards import PackedSequence
from data_prep.vocab import TOKENIZER, Vocab, load_tokenizer
from train.config import NOISE, ObjectiveConfig, TrainConfig
from train.inputs import read_inputs
from train.objective import Layout

STYLES = {"input": "bold white on dark_magenta", "replaced": "strike grey50"}


@dataclass
class StepConfig:
    """The sequences to show."""

    #: step to show sequences of; 0 is the first step
    step: int = setting(0, least=0)
    #: number of sequences to show, the first ones of the step
    sequences: int = setting(2, least=1)
    #: number of tokens to show of each sequence
    tokens: int = setting(300, least=1)

    def __post_init__(self) -> None:
        check_settings(self, "inspect")


@dataclass
class TrainInspectConfig(TrainConfig):
    """python -m train.inspect: sequences as `python -m train` would train them."""

    inspect: StepConfig = field(default_factory=StepConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minutes is None and self.inspect.step >= self.steps:
            raise ValueError(
                f"inspect.step must be below steps={self.steps}, got {self.inspect.step}. "
                "Lower it."
            )


def main(config: TrainInspectConfig) -> None:
    """Print sequences of a step with their windows."""
    inputs = read_inputs(config)
    encoder = Encoder(load_tokenizer(f"{config.data.path}/{TOKENIZER}"), inputs.vocab)
    console = PlainConsole()
    own = inputs.own or inputs.data
    for index, sequence, layout, is_own in layouts(config, inputs.vocab):
        languages = (own if is_own else inputs.data)["languages"]
        title = f"step {config.inspect.step}, sequence {index}: {counted(sequence.used, 'token')}"
        console.rule(title, align="left")
        decode = partial(
            windowed_text, sequence.tokens, layout, encoder, config.objective
        )
        tokens = config.inspect.tokens
        for line in sequence_lines(sequence, tokens, languages, decode):
            console.print(line, soft_wrap=True)


def layouts(
    config: TrainInspectConfig, vocab: Vocab
) -> Iterator[tuple[int, PackedSequence, Layout, bool]]:
    """Yield the index, tokens and layout of the step's first sequences, and if they are data.own's."""
    # Imported late, so that errors in the settings are reported before PyTorch is loaded.
    from train.data import TRAINING, TrainingData, lay_out

    data = TrainingData(config)
    step = config.inspect.step
    vocabulary = noise_vocabulary(config, vocab)
    for index in data.order(step)[: config.inspect.sequences]:
        indices = np.array([index])
        sequence = data[int(index)]
        layout = lay_out(
            [sequence],
            indices,
            vocab,
            config.objective,
            seed=(config.seed, TRAINING, step),
            standard=data.standard(indices),
            vocabulary=vocabulary,
        )
        yield int(index), sequence, layout, bool(index >= len(data.human))


def noise_vocabulary(config: TrainConfig, vocab: Vocab) -> int:
    """Return the number of ids that objective.mask=noise draws from; 0 without noise."""
    if config.objective.mask != NOISE:
        return 0
    from train.pretrained import model_config

    architecture = model_config(config.model, vocab=vocab)
    return int(architecture.get_text_config().vocab_size)


def windows(layout: Layout) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first position and the (w,) input ids of each window of one sequence."""
    offsets, positions, ids = (
        array.ravel() for array in (layout.offsets, layout.positions, layout.ids)
    )
    columns = np.flatnonzero(offsets)
    for window in np.split(columns, np.flatnonzero(offsets[columns] == 1)):
        if len(window):
            yield int(positions[window[0]]), ids[window]


def windowed_text(
    tokens: np.ndarray,
    layout: Layout,
    encoder: Encoder,
    objective: ObjectiveConfig,
    start: int,
    stop: int,
) -> Text:
    """Return the text of tokens start:stop of a sequence, with the windows that begin there."""
    begin, end = ("⟨", "⟩") if objective.name == "branch" else ("", "")
    text = Text()
    position = start
    for first, inputs in windows(layout):
        if not start <= first < stop:
            continue
        append_tokens(text, tokens[position:first], encoder)
        text.append(begin, STYLES["input"])
        replaced = tokens[first : first + len(inputs)]
        for offset, (input, token) in enumerate(zip(inputs, replaced, strict=True), 1):
            name = one_line(encoder, input) if objective.mask else f"a{offset}"
            text.append(name, STYLES["input"])
            text.append(one_line(encoder, token), STYLES["replaced"])
        text.append(end, STYLES["input"])
        position = first if objective.name == "branch" else first + len(inputs)
    return append_tokens(text, tokens[position:stop], encoder)


def one_line(encoder: Encoder, id: int) -> str:
    """Return the text of a token in one line."""
    return pictures(encoder.decode([id])).replace("\n", "⏎")


if __name__ == "__main__":
    run("train", TrainInspectConfig, main)
