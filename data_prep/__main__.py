"""python -m data_prep: settings in, a data folder out."""

from rich import print

from conf import run
from conf.stage import is_finished, made_from, staged, write_manifest
from data_prep.config import DataPrepConfig
from data_prep.pipeline import prepare


def main(config: DataPrepConfig) -> None:
    """Prepare the data, unless the folder already holds it."""
    made = made_from(config, {})
    if is_finished(config.out, "shards", made):
        print(f"data_prep: {config.out} is finished: nothing to do")
        return
    with staged(config.out) as out:
        facts = prepare(config, out)
        write_manifest(out, "shards", made, **facts)
    for name in ("train", "held_out"):
        print(f"data_prep: {name}", {k: v for k, v in facts[name].items() if k != "shards"})
    print(f"data_prep: dropped {facts['drops']}; wrote {config.out}")


if __name__ == "__main__":
    run("data_prep", DataPrepConfig, main)
