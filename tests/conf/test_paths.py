"""A leading ~ is expanded in every path setting, and in no other setting."""

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from conf.settings.compose import settings
from conf.settings.paths import expand_home
from conf.settings.schema import field_types, union_members
from data_prep.config import DataPrepConfig
from data_prep.inspect import InspectConfig
from infer.bench.compare import CompareConfig
from infer.bench.config import BenchConfig
from infer.config import InferConfig
from infer.regenerate import RegenerateConfig
from tests.conf.conftest import command
from train.config import TrainConfig
from train.convert import ConvertConfig
from train.export import ExportConfig

SCHEMAS = (
    *(DataPrepConfig, InspectConfig, TrainConfig, ConvertConfig, ExportConfig),
    *(InferConfig, BenchConfig, CompareConfig, RegenerateConfig),
)

#: Text settings that have no choices and are no paths. Add a new text setting here, or declare it with
#: setting(path=True).
TEXTS = {
    *(
        "data.include",
        "data.exclude",
        "data.text",
        "data.messages",
        "data.id",
        "data.language",
        "data.split",
        "data.config",
    ),
    *("filters.long_lines", "slurm.partition", "slurm.time", "budget", "shard_size"),
    *(f"vocab.{name}" for name in ("bos", "eos", "pre", "suf", "mid", "eot")),
    *("tracker.project", "tracker.group", "lora.targets", "plan_device"),
    *(
        "prompt",
        "infill.prefix",
        "infill.suffix",
        "decode.probes",
        "decode.stop",
        "device",
    ),
    *("load.endpoint", "load.model", "names", "question", "endpoint", "objective.mask"),
}


def text_settings(schema: Any, group: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the name of each text setting without choices, and whether it is a path."""
    for field in fields(schema):
        kind = field_types(schema)[field.name]
        name = group + field.name
        if is_dataclass(kind):
            yield from text_settings(kind, f"{name}.")
        elif {str, list[str]} & {
            *union_members(kind)
        } and "choices" not in field.metadata:
            yield name, "path" in field.metadata


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_text_setting_is_a_path_or_known_not_to_be(schema: type) -> None:
    """out=~/o created a folder named ~, and data.path=~/src was reported as missing."""
    for name, path in text_settings(schema):
        assert path != (name in TEXTS), name


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_home_is_expanded_only_in_paths_and_lists_of_paths(home: Path) -> None:
    data = settings(
        "data_prep",
        DataPrepConfig,
        [
            "out=~/a (b)",
            "data=jsonl",
            "data.path=~",
            "tokenizer=~/t",
            "decontaminate.others=[~/x, 'y',~/z/~,owner/name]",
            "data.text=~/x",
        ],
    )
    assert data.out == f"{home}/a (b)" and data.data.path == str(home)
    assert data.tokenizer == f"{home}/t" and data.data.text == "~/x"
    others = [f"{home}/x", "y", f"{home}/z/~", "owner/name"]
    assert data.decontaminate.others == others
    given = ["out=o", "model=m", 'prompts=[humaneval,~/p.jsonl,"~/q, r"]', "base=~/b"]
    bench = settings("bench", BenchConfig, given)
    assert bench.prompts == ["humaneval", f"{home}/p.jsonl", f"{home}/q, r"]
    assert (bench.base, bench.draft) == (f"{home}/b", None)
    own = settings(
        "regenerate", RegenerateConfig, ["out=o", "model=m", "prompts=[~/p]"]
    )
    assert own.prompts == [f"{home}/p"]
    infer = settings(
        "infer", InferConfig, ["model=~/m", "prompt=~/x", "decode.stop=[~/x]"]
    )
    assert (infer.model, infer.prompt, infer.decode.stop) == (
        f"{home}/m",
        "~/x",
        ["~/x"],
    )
    file = settings("infer", InferConfig, ["model=m", "prompt_file=~/p.txt"])
    assert file.prompt_file == f"{home}/p.txt"


def test_a_home_that_does_not_exist_is_an_error(home: Path) -> None:
    with pytest.raises(
        UserError, match=r"^out must be a path, got ~no-such-user/o: .*no such home"
    ):
        settings("inspect", InspectConfig, ["out=~no-such-user/o"])
    Path("~lock.txt").touch()  # written by an editor
    infer = InferConfig("m", prompt_file="~lock.txt")
    expand_home(infer)
    assert infer.prompt_file == "~lock.txt"


def test_the_commands_expand_it_and_make_no_folder_of_that_name(
    home: Path, tmp_path: Path
) -> None:
    (home / "yaml" / "experiment").mkdir(parents=True)
    (home / "yaml" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nseed: 7\n"
    )
    code = "from conf.settings.cli import run; from data_prep.config import DataPrepConfig as C\n"
    code += "run('data_prep', C, lambda config: print(config.seed, config.out))"
    for flag in (["--config-dir=~/yaml"], ["--config-dir", "~/yaml"]):
        words = [*flag, "experiment=mine", "data.path=~/d", "tokenizer=~/t", "out=~/o"]
        end = command("-c", code, *words, cwd=tmp_path, HOME=str(home))
        assert end.stdout == f"7 {home}/o\n", end.stderr
    assert os.listdir(tmp_path) == ["home"]
