"""The files beside a tokenizer, damaged: texts decode back with what is written beside the shards, or data_prep
refuses it.
"""

import json
import random
import shutil
from pathlib import Path

from tests.drills.fuzz import mutate, rows, tools

COUNT = 600
TEXTS = ("x = 1\n", "<PRE> a <SUF>", "  é😀\t\r\n", "<s></s><adaptive_1>", "def f():\n    return '漢'\n")
MODEL = {"vocab_size": 420, "bos_token_id": 0, "eos_token_id": 1, "model_type": "llama"}


def run(rng: random.Random, folder: Path) -> str:
    """One change of one file, then a few documents through data_prep."""
    tokenizer, data = folder / "tokenizer", folder / "in"
    shutil.copytree(tools.data_folder() / "tokenizer", tokenizer)
    if rng.random() < 0.5:
        (tokenizer / "config.json").write_text(json.dumps(MODEL))
    _change(rng, rng.choice(sorted(path for path in tokenizer.iterdir() if path.is_file())))
    data.mkdir()
    lines = [json.dumps({"content": text}) for text in (*TEXTS, tools.document(rng).replace("\0", ""))]
    (data / "a.jsonl").write_text("\n".join(lines))
    wanted = [*rows.options(rng), f"tokenizer={tokenizer}", f"data.path={data}", f"out={folder / 'out'}"]
    groups = ("data=jsonl", "vocab=demo", "tokenizer=t")
    ended = tools.prepared(groups, wanted, rng)
    if ended.told:
        assert not (folder / "out").exists(), "a refused folder is visible"
        return "refused"
    expected = {f"a.jsonl:{row}": (rows.text_of(line.encode(), row), "none") for row, line in enumerate(lines)}
    rows.check(folder / "out", expected, split="data.split_chars=null" not in wanted)
    return "fine"


def _change(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    kind = rng.random()
    if kind < 0.05:
        path.unlink()
    elif kind < 0.35 and path.name == "tokenizer.json":
        path.write_bytes(_other_part(data, rng))
    elif kind < 0.75 and path.suffix == ".json":
        path.write_bytes(mutate.changed_json(data, rng))
    else:
        path.write_bytes(mutate.damaged(data, rng))


def _other_part(data: bytes, rng: random.Random) -> bytes:
    """A tokenizer.json of other steps: most damage by chance would be to its vocabulary."""
    tree = json.loads(data)
    part = rng.choice([name for name in tree if name != "model"])
    steps = (
        {"type": "Lowercase"},
        {"type": "NFC"},
        {"type": "Whitespace"},
        {"type": "ByteLevel"},
        None,
        [],
        3,
        {},
    )
    if rng.random() < 0.5:
        tree[part] = rng.choice(steps)
    elif isinstance(tree[part], dict | list) and tree[part]:
        mutate.changed(tree[part], rng)
    else:
        tree["model"][rng.choice([name for name in tree["model"] if name not in ("vocab", "merges")])] = (
            mutate.value(rng)
        )
    return json.dumps(tree).encode()
