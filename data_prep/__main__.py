"""python -m data_prep: prepare a data folder."""

from conf.console import PlainConsole, print_line
from conf.runs.stage import read_manifest
from conf.settings.cli import run
from data_prep.config import DataPrepConfig
from data_prep.inspect import print_summary, warnings
from data_prep.pipeline import prepare
from data_prep.vocab import Vocab


def main(config: DataPrepConfig) -> None:
    """Prepare the data, unless the folder already contains them, and print a summary."""
    remark = prepare(config)
    if remark is not None:
        print_line(f"data_prep: {config.out} {remark}")
        return
    manifest = read_manifest(config.out, "shards", "out")
    print_summary(manifest, PlainConsole())
    if config.fim_rate and not Vocab.from_json(manifest["vocab"]).infilling:
        print_line("data_prep: no infilling: the tokenizer has no infilling pieces")
    for warning in warnings(manifest):
        print_line(f"data_prep: warning: {warning}")
    print_line(f"data_prep: wrote {config.out}")


if __name__ == "__main__":
    run("data_prep", DataPrepConfig, main)
