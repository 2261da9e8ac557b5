"""README.md of a model directory: the model card that a hub shows.

Made from the training's manifest, the directory's files and, if given, a report of infer.bench.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conf import UserError
from conf.console import markdown
from conf.files import read_result, write_bytes
from conf.fingerprint import fingerprint
from conf.stage import MANIFEST, commit, read_manifest, versions
from data_prep.ngrams import TABLE
from data_prep.vocab import INFILLING, Vocab
from train.export import trained_lora
from train.export.sidecars import infilling_orders

CARD = "README.md"
UNNAMED = "MODEL"  # in commands, for a directory without a name on a hub
UNNAMED_NOTE = f"`{UNNAMED}` stands for this directory, or for its name on a hub.\n\n"
NAME_IN_CARD = re.compile(r"^python -m infer model=(\S+) ", re.MULTILINE)
TAGS = ["sdsat", "adaptive-tokens", "speculative-decoding"]
METRICS = {
    "standard_loss": "loss of a standard token, nats",
    "accuracy_0": "next token right",
    "accepted": "drafts accepted by loop, expected",
}


def write_card(out: Path, card: str) -> None:
    """Write a card into the model directory `out`."""
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
    """Return the card of the model directory `out`, exported from a training's checkpoint of `step`.

    `manifest` is the training's, `verified` from the directory's own; `report` is the folder of a report of the
    finished directory, `push` its name on the hub. Raise UserError for a report of another model.
    """
    figures = read_report(report, out) if report else None
    adaptive = manifest["adaptive"]
    base = manifest.get("base") or {}
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    template = _environment().get_template("card.md.j2")
    return template.render(
        manifest=manifest,
        base=base,
        adaptive=adaptive,
        identical=len(adaptive) == 1,
        mask_token_id=adaptive[0] if adaptive else None,
        k=manifest["L"],
        gated=trained_lora(manifest).gated,
        infilling=bool(infilling_orders(manifest)),
        recipe=list(_recipe(manifest)),
        metadata=_metadata(manifest, base),
        title=_title(manifest, base, config, push),
        path=push or UNNAMED,
        note="" if push else UNNAMED_NOTE,
        facts=list(_facts(manifest, config)),
        kept=(out / "adapter").is_dir(),
        custom_generate=(out / "custom_generate").is_dir(),
        table=(out / TABLE).is_file(),
        exported={"dtype": config["dtype"], **_exporter(out)},
        step=step,
        held_out=_held_out(manifest["validation"], step, verified),
        verified=verified,
        drafts=(verified or {}).get(
            "drafts"
        ),  # absent from exports of earlier versions
        report=figures,
        speed=_speed_rows(figures) if figures and figures["speed"] else [],
        scores=_scores(figures) if figures and figures["quality"] else [],
    )


def rename_card(out: Path, repo: str) -> bool:
    """Put another name into the commands of a card, which may have been edited; return whether it changed."""
    path = out / CARD
    card = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    match = NAME_IN_CARD.search(card)
    if match is None or match[1] == repo:
        return False
    title, new_title = (f"\n# {name.rpartition('/')[2]}\n" for name in (match[1], repo))
    card = card.replace(UNNAMED_NOTE, "").replace(title, new_title, 1)
    write_card(out, re.sub(rf"(?<![\w/-]){re.escape(match[1])}(?![\w/-])", repo, card))
    return True


def read_report(folder: str | Path, model: Path) -> dict[str, Any]:
    """Return the finished report in `folder`. Raise UserError unless it is of the model directory `model`."""
    path = Path(folder) / "report.json"
    if not path.is_file():
        raise UserError(
            f"report={folder} must be a folder that infer.bench wrote, got no {path.name} in it."
        )
    report = read_result(path)
    for kind in ("speed", "quality"):
        if report[kind]:
            measured = read_manifest(Path(folder) / kind, kind, "report")
            if measured["inputs"].get("model") != fingerprint(model):
                raise UserError(
                    f"report={folder} must be of {model}, got a report of another model."
                )
    return report


def _speed_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fastest drafting decoder of each prompt set and temperature, beside plain decoding."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in report["speed"]["rows"]:
        groups.setdefault((row["prompt_set"], row["temperature"]), []).append(row)
    best_rows = []
    for rows in groups.values():
        ours = [
            row
            for row in rows
            if row["verifications"] and not row["decoder"].startswith("hf ")
        ]
        if ours:
            best = max(ours, key=lambda row: row["speedup"])
            best_rows.append(best | {"plain": rows[0]["output_tokens_per_second"]})
    return best_rows


def _scores(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the model's scores by plain decoding, each with the base's."""
    rows = [
        row
        for row in report["quality"]["rows"]
        if row["decoder"] == "plain" and row["value"] is not None
    ]
    named = {
        (row["who"], row["benchmark"], row["temperature"], row["metric"]): row
        for row in rows
    }
    return [
        row | {"base": named.get(("base", *key[1:]), {}).get("value")}
        for key, row in named.items()
        if key[0] == "model"
    ]


def _measured_on(part: Mapping[str, Any]) -> str:
    """Return machine, versions and day of a part of a report."""
    machine = part["hardware"]
    versions = part["versions"]
    device = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread(s)"
    libraries = ", ".join(
        f"{name} {versions[name]}"
        for name in ("torch", "transformers")
        if name in versions
    )
    return f"{device}; {libraries}; {part['date'][:10]}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "share": _share,
        "span": _span,
        "measured_on": _measured_on,
        "plain": markdown,
    }
    return environment


def _exporter(out: Path) -> dict[str, Any]:
    """Return commit and versions of the directory's export; this process's if it has no manifest yet."""
    if not (out / MANIFEST).is_file():
        return {"commit": commit(), "versions": versions()}
    manifest = read_manifest(out, "model", "out")
    return {"commit": manifest["commit"], "versions": manifest["versions"]}


def _metadata(manifest: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Return the YAML front matter that a hub reads."""
    return ModelCardData(
        base_model=base.get("hub"),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=TAGS if manifest["adaptive"] else None,
        **{name: value for name, value in base.items() if name.startswith("license")},
    ).to_yaml()


def _title(
    manifest: Mapping[str, Any],
    base: Mapping[str, Any],
    config: Mapping[str, Any],
    push: str | None,
) -> str:
    if push:
        return push.rpartition("/")[2]
    family = re.sub("ForCausalLM$|LMHeadModel$", "", config["architectures"][0])
    name = base.get("name") or f"{family} of {_size(manifest['parameters'])} parameters"
    if manifest["adaptive"]:
        return f"{name} with adaptive tokens"
    return f"{name}, fine-tuned" if "name" in base else name


def _facts(
    manifest: dict[str, Any], config: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the rows of the card's first table."""
    adaptive = manifest["adaptive"]
    vocab = Vocab.from_json(manifest["vocab"])
    size = _size(manifest["parameters"])
    yield "model", f"{config['architectures'][0]}, {size} parameters, {config['dtype']}"
    yield "context", f"{config['max_position_embeddings']:,} tokens"
    yield "vocabulary", f"{config['vocab_size']:,} rows"
    if adaptive:
        kind = "identical, id" if len(adaptive) == 1 else "diverse, ids by place"
        ids = ", ".join(map(str, adaptive))
        yield (
            "adaptive tokens",
            f"{kind} {ids}; trained to draft up to {manifest['L']} tokens",
        )
    if orders := infilling_orders(manifest):
        ids = ", ".join(f"{name} {getattr(vocab, name)}" for name in INFILLING)
        yield "infilling", f"{' and '.join(map(str.upper, orders))}; ids: {ids}"
    if data := manifest.get("data"):
        languages = _list(data["languages"])
        yield (
            "trained on",
            f"{data['documents']:,} documents, {data['tokens']:,} tokens: {languages}",
        )
        if own := data.get("own"):
            size = f"{own['documents']:,} documents, {own['tokens']:,} tokens"
            yield (
                "own text",
                f"{100 * own['share']:g} % of the sequences, for the drafts alone: {size}",
            )
        if data.get("decontaminated"):
            yield "decontaminated against", ", ".join(data["decontaminated"])


def _held_out(
    validation: Sequence[Mapping[str, float]],
    step: int,
    verified: Mapping[str, Any] | None,
) -> dict[str, list[Any]]:
    """Return the held-out table: before, after if this step was validated, and again by the directory."""
    before = validation[0]
    after = [row for row in validation if row["step"] == step]
    offsets = sorted(
        int(name.removeprefix("accuracy_"))
        for name in before
        if name.startswith("accuracy_")
    )
    names = ["standard_loss", *(f"accuracy_{offset}" for offset in offsets), "accepted"]
    rows = []
    for name in filter(before.__contains__, names):
        label = (
            METRICS.get(name)
            or f"draft of adaptive token {name.removeprefix('accuracy_')} right"
        )
        row = [label, *(_figure(name, metrics[name]) for metrics in (before, *after))]
        if verified:
            row.append(
                _figure(
                    name, verified["measured"][name], verified["intervals"].get(name)
                )
            )
        rows.append(row)
    head = [
        "",
        "before",
        *(["after"] if after else []),
        *(["this directory (95 %)"] if verified else []),
    ]
    return {"head": head, "after": after, "rows": rows}


def _figure(name: str, value: float, interval: Sequence[float] | None = None) -> str:
    """Return a metric with its interval, accuracies in percent."""
    if name.startswith("accuracy_"):
        return _share(value, interval)
    return (
        f"{value:.3f}"
        if interval is None
        else f"{value:.3f} ({_span(interval, '.3f')})"
    )


def _recipe(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings of training that decide what a model becomes."""
    settings = manifest["settings"]
    objective = dict(settings["objective"])
    lora = settings.get("lora") or {}
    name = objective.pop("name")
    yield (
        "objective",
        f"{name}: {_settings(objective)}" if manifest["adaptive"] else name,
    )
    yield (
        "steps",
        f"{settings['steps']:,} of {settings['global_batch']:,} sequences; seed {settings['seed']}",
    )
    yield "optimizer", f"AdamW: {_settings(settings['optimizer'])}"
    if lora.get("rank"):
        yield (
            "LoRA",
            _settings({name: value for name, value in lora.items() if value != []}),
        )


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _size(count: int) -> str:
    return (
        f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"
    )


def _list(names: Sequence[str], most: int = 12) -> str:
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def _share(value: float | None, interval: Sequence[float] | None = None) -> str:
    """Return a share in percent with its interval; nothing for None."""
    if value is None:
        return ""
    text = f"{100 * value:.1f} %"
    return (
        text
        if interval is None
        else f"{text} ({_span([100 * end for end in interval], '.1f')})"
    )


def _span(interval: Sequence[float] | None, form: str = ".2f") -> str:
    """Return an interval; nothing for None."""
    return "" if interval is None else "–".join(format(end, form) for end in interval)
