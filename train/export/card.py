"""README.md of a model directory: the card that a hub shows.

Knows what the manifest of the training says, the files of the directory and a finished report of it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conf.console import markdown
from conf.files import write_bytes
from conf.stage import MANIFEST, commit, read_manifest, versions
from data_prep.ngrams import TABLE
from data_prep.vocab import INFILLING, Vocab
from train.export.adapter import trained_lora
from train.export.report import measured_on, read_report, speed_rows
from train.export.sidecars import infilling_orders

CARD = "README.md"
PLACE = "MODEL"  # in commands, where the directory has no name on a hub
NAMED = re.compile(r"^python -m infer model=(\S+) ", re.MULTILINE)
TAGS = ["sdsat", "adaptive-tokens", "speculative-decoding"]
NAMES = {
    "standard_loss": "loss of a standard token, nats",
    "accuracy_0": "next token right",
    "accepted": "drafts accepted by loop, expected",
}


def write_card(out: Path, card: str) -> None:
    """Write a card, as `render_card` makes it, into the model directory `out`."""
    write_bytes(out / CARD, card.encode("utf-8", "backslashreplace"))


def render_card(
    out: Path,
    manifest: dict[str, Any],
    *,
    step: int,
    verified: Mapping[str, Any] | None,
    report: str | None = None,
    push: str | None = None,
) -> str:
    """The card of the model directory `out`, made of the checkpoint of `step` in a training folder with this
    manifest.

    `verified` is what the directory's own manifest says of its reading back, `report` the folder of a finished
    report of the finished directory, `push` its name on the hub. Raises UserError for another model's report.
    """
    told = read_report(report, out) if report else None
    return (
        _environment()
        .get_template("card.md.j2")
        .render(
            _of_training(manifest),
            **_of_directory(out, manifest, push),
            step=step,
            held_out=_held_out(manifest["validation"], step, verified),
            verified=verified,
            drafts=(verified or {}).get("drafts"),  # absent from exports of earlier versions
            report=told,
            speed=speed_rows(told) if told and told["speed"] else [],
        )
    )


def named(out: Path) -> str | None:
    """The name that the directory has in the first command of its card, None where there is no such command."""
    path = out / CARD
    found = NAMED.search(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    return found[1] if found else None


def _of_training(manifest: dict[str, Any]) -> dict[str, Any]:
    adaptive = manifest["adaptive"]
    return {
        "manifest": manifest,
        "base": manifest.get("base") or {},
        "adaptive": adaptive,
        "identical": len(adaptive) == 1,
        "mask_token_id": adaptive[0] if adaptive else None,
        "k": manifest["L"],
        "gated": trained_lora(manifest).gated,
        "infilling": bool(infilling_orders(manifest)),
        "recipe": list(_recipe(manifest)),
    }


def _of_directory(out: Path, manifest: dict[str, Any], push: str | None) -> dict[str, Any]:
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    base = manifest.get("base") or {}
    return {
        "metadata": _metadata(manifest, base),
        "title": _title(manifest, base, config, push),
        "path": push or PLACE,
        "pushed": push,
        "facts": list(_facts(manifest, config)),
        "kept": (out / "adapter").is_dir(),
        "custom_generate": (out / "custom_generate").is_dir(),
        "table": (out / TABLE).is_file(),
        "exported": {"dtype": config["dtype"], **_exporter(out)},
    }


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"share": share, "span": span, "measured_on": measured_on, "plain": markdown}
    return found


def _exporter(out: Path) -> dict[str, Any]:
    """Commit and versions of what wrote the directory: of this process, while it has no manifest."""
    if not (out / MANIFEST).is_file():
        return {"commit": commit(), "versions": versions()}
    manifest = read_manifest(out, "model", "out")
    return {"commit": manifest["commit"], "versions": manifest["versions"]}


def _metadata(manifest: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """The YAML that a hub reads; license and base model where the base model's folder says them."""
    found: str = ModelCardData(
        base_model=base.get("hub"),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=TAGS if manifest["adaptive"] else None,
        **{name: value for name, value in base.items() if name.startswith("license")},
    ).to_yaml()
    return found


def _title(
    manifest: Mapping[str, Any], base: Mapping[str, Any], config: Mapping[str, Any], push: str | None
) -> str:
    if push:
        return push.rpartition("/")[2]
    family = re.sub("ForCausalLM$|LMHeadModel$", "", config["architectures"][0])
    name = base.get("name") or f"{family} of {_size(manifest['parameters'])} parameters"
    if manifest["adaptive"]:
        return f"{name} with adaptive tokens"
    return f"{name}, fine-tuned" if "name" in base else name


def _facts(manifest: dict[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a reader asks first."""
    adaptive, vocab = manifest["adaptive"], Vocab.from_json(manifest["vocab"])
    yield (
        "model",
        f"{config['architectures'][0]}, {_size(manifest['parameters'])} parameters, {config['dtype']}",
    )
    yield "context", f"{config['max_position_embeddings']:,} tokens"
    yield "vocabulary", f"{config['vocab_size']:,} rows"
    if adaptive:
        kind = "identical, id" if len(adaptive) == 1 else "diverse, ids by place"
        ids = ", ".join(map(str, adaptive))
        yield "adaptive tokens", f"{kind} {ids}; trained to draft up to {manifest['L']} tokens"
    if orders := infilling_orders(manifest):
        ids = ", ".join(f"{name} {getattr(vocab, name)}" for name in INFILLING)
        yield "infilling", f"{' and '.join(map(str.upper, orders))}; ids: {ids}"
    if data := manifest.get("data"):
        languages = _listed(data["languages"])
        yield "trained on", f"{data['documents']:,} documents, {data['tokens']:,} tokens: {languages}"
        if own := data.get("own"):
            share = f"{100 * own['share']:g} % of the sequences"
            yield (
                "own text",
                f"{share}, for the drafts alone: {own['documents']:,} documents, {own['tokens']:,} tokens",
            )
        if data.get("decontaminated"):
            yield "decontaminated against", ", ".join(data["decontaminated"])


def _held_out(
    validation: Sequence[Mapping[str, float]], step: int, verified: Mapping[str, Any] | None
) -> dict[str, list[Any]]:
    """The held-out figures: before, after where this step was validated, and of the directory itself with its
    95 % interval.
    """
    before, after = validation[0], [row for row in validation if row["step"] == step]
    offsets = sorted(int(name.removeprefix("accuracy_")) for name in before if name.startswith("accuracy_"))
    names = ["standard_loss", *(f"accuracy_{offset}" for offset in offsets), "accepted"]
    rows = []
    for name in filter(before.__contains__, names):
        row = [NAMES.get(name) or f"draft of adaptive token {name.removeprefix('accuracy_')} right"]
        row += [_shown(name, one[name]) for one in (before, *after)]
        if verified:
            ends = verified["intervals"].get(name)
            row.append(_shown(name, verified["measured"][name], ends))
        rows.append(row)
    again = ["this directory (95 %)"] if verified else []
    return {"head": ["", "before", *(["after"] if after else []), *again], "after": after, "rows": rows}


def _shown(name: str, value: float, ends: Sequence[float] | None = None) -> str:
    """A figure, accuracies in percent, with the interval that it lies in."""
    if name.startswith("accuracy_"):
        return share(value, ends)
    return f"{value:.3f}" if ends is None else f"{value:.3f} ({span(ends, '.3f')})"


def _recipe(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings of training that decide what a model becomes."""
    settings = manifest["settings"]
    objective, lora = dict(settings["objective"]), settings.get("lora") or {}
    name = objective.pop("name")
    yield "objective", f"{name}: {_told(objective)}" if manifest["adaptive"] else name
    yield "steps", f"{settings['steps']:,} of {settings['global_batch']:,} sequences; seed {settings['seed']}"
    yield "optimizer", f"AdamW: {_told(settings['optimizer'])}"
    if lora.get("rank"):
        yield "LoRA", _told({name: value for name, value in lora.items() if value != []})


def _told(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _listed(names: Sequence[str], most: int = 12) -> str:
    told = ", ".join(names[:most])
    return told if len(names) <= most else f"{told} and {len(names) - most} more"


def share(value: float | None, ends: Sequence[float] | None = None, sign: str = "") -> str:
    """A share of one, or a difference of shares, in percent with its interval; nothing where there is none."""
    if value is None:
        return ""
    told, form = f"{100 * value:{sign}.1f} %", f"{sign}.1f"
    return told if ends is None else f"{told} ({span([100 * end for end in ends], form)})"


def span(pair: Sequence[float] | None, form: str = ".2f") -> str:
    """An interval; nothing where there is none."""
    between = " to " if form.startswith("+") else "–"
    return "" if pair is None else between.join(format(value, form) for value in pair)
