import json
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf import UserError
from data_prep.config import DataConfig
from data_prep.fim import Mode
from data_prep.pipeline import prepare
from data_prep.shards import Shards
from data_prep.sources import documents
from data_prep.vocab import Encoder, Vocab, load_tokenizer
from tests.conftest import data_settings


def test_shards_decode_back_to_the_source_text(data_folder: Path) -> None:
    """Plain documents and both infilling modes, whole and cut, held out or not."""
    manifest = json.loads((data_folder / "manifest.json").read_text())
    vocab = Vocab.from_json(manifest["vocab"])
    encoder = Encoder(load_tokenizer(data_folder / "tokenizer"), vocab)
    parts: dict[int, list[tuple[int, int, np.ndarray]]] = {}
    for split in ("train", "held_out"):
        for sequence in Shards(data_folder, split):
            for span in sequence.spans:
                ids = sequence.tokens[span["start"] : span["stop"]]
                parts.setdefault(int(span["document"]), []).append((int(span["offset"]), span["mode"], ids))
    texts = []
    for pieces in parts.values():
        pieces.sort(key=lambda piece: piece[0])
        ids = np.concatenate([piece[2] for piece in pieces]).tolist()
        texts.append(_text(ids, Mode(pieces[0][1]), vocab, encoder))
    joined = "".join(texts)
    root = Path(sysconfig.get_path("stdlib"))
    sources = [p for name in ("json", "email", "logging") for p in (root / name).glob("*.py")]
    assert sum(len(p.read_text()) for p in sources) == len(joined) > 100_000
    for path in sources:
        assert all(line in joined for line in path.read_text().splitlines())


def _text(ids: list[int], mode: Mode, vocab: Vocab, encoder: Encoder) -> str:
    ids = [i for i in ids if i not in (vocab.bos, vocab.eos)]
    if mode is Mode.PLAIN:
        return encoder.decode(ids)
    suf, mid, eot = (ids.index(x) for x in (vocab.suf, vocab.mid, vocab.eot))
    first, suffix, last = ids[1:suf], ids[suf + 1 : mid], ids[mid + 1 : eot]
    return encoder.decode(first) + encoder.decode(last) + encoder.decode(suffix)


def test_held_out_files_are_never_trained_on(data_folder: Path) -> None:
    rows = [json.loads(line) for line in (data_folder / "held_out.jsonl").read_text().splitlines()]
    trained = {int(s["document"]) for q in Shards(data_folder, "train") for s in q.spans}
    held = {int(s["document"]) for q in Shards(data_folder, "held_out") for s in q.spans}
    assert rows and not trained & held
    assert len(held) == len(rows)


def test_modes_padding_and_starts_are_recorded(data_folder: Path) -> None:
    manifest = json.loads((data_folder / "manifest.json").read_text())
    modes = manifest["train"]["modes"]
    assert min(modes["PSM"], modes["SPM"]) > 0.15 * manifest["train"]["documents"]
    assert manifest["train"]["filled"] > 0.98
    for sequence in Shards(data_folder, "train"):
        assert (sequence.documents >= 0).sum() == sequence.used
        for span in sequence.spans[sequence.spans["offset"] == 0]:
            assert sequence.tokens[span["start"]] == manifest["vocab"]["bos"]


def test_the_same_settings_give_the_same_bytes(data_folder: Path, tmp_path: Path) -> None:
    prepare(data_settings(tmp_path), tmp_path)
    for path in [*data_folder.glob("*.npy"), data_folder / "held_out.jsonl"]:
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(UserError, match=r"wanted source documents \(\*\.py\), found none"):
        prepare(data_settings(tmp_path, f"data.path={tmp_path / 'in'}", "data.include=['*.py']"), tmp_path)
    with pytest.raises(UserError, match="found no such folder"):
        prepare(data_settings(tmp_path, f"data.path={tmp_path / 'absent'}"), tmp_path)


def test_a_document_too_long_for_infilling_stays_plain(tmp_path: Path) -> None:
    for index in range(12):
        (tmp_path / f"{index}.py").write_text(f"x{index} = 1\n" * 200)
    overrides = [f"data.path={tmp_path}", "data.include=['*.py']", "data.split_chars=null"]
    facts = prepare(data_settings(tmp_path / "out", *overrides), tmp_path / "out")
    for name in ("train", "held_out"):
        assert facts[name]["modes"] == {"PLAIN": facts[name]["documents"]}


def test_files_that_are_no_text_are_counted(tmp_path: Path) -> None:
    from collections import Counter

    (tmp_path / "a.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.py").write_text("  \n")
    (tmp_path / "c.py").write_text("x" * 200)
    (tmp_path / "d.py").write_bytes(b"y = 1\r\n")
    drops: Counter[str] = Counter()
    found = list(documents(DataConfig(path=str(tmp_path), max_bytes=100), drops))
    assert [document.text for document in found] == ["y = 1\r\n"]
    assert drops == {"undecodable": 1, "empty": 1, "too large": 1}


def test_starcoder_parquet_is_read_and_its_metadata_stripped(tmp_path: Path) -> None:
    from collections import Counter

    rows = {
        "content": ["<reponame>a/b<gh_stars>1\nx = 1\n", "y = 2\n<filename>kept\n", " "],
        "id": ["1", "2", "3"],
        "max_stars_repo_name": ["a/b"] * 3,
        "max_stars_repo_path": ["x.py", "y.py", "z.py"],
    }
    (tmp_path / "python").mkdir()
    pq.write_table(pa.table(rows), tmp_path / "python" / "train-0.parquet")
    drops: Counter[str] = Counter()
    found = list(documents(DataConfig(path=str(tmp_path), kind="starcoder"), drops))
    assert [(d.text, d.language) for d in found] == [
        ("x = 1\n", "python"),
        ("y = 2\n<filename>kept\n", "python"),
    ]
    assert drops == {"empty": 1}
