"""The model directory: weights, the files beside them, verification, card and manifest, in this order."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from conf.console import print_line
from conf.fingerprint import fingerprint_file
from conf.stage import staged, write_manifest
from data_prep.ngrams import TABLE
from train.export import ExportConfig
from train.export.card import render_card, write_card
from train.export.ngram_weights import fit_directory
from train.export.sidecars import ADAPTIVE, write_custom_generate, write_sidecars
from train.export.trained import check_trained, open_trained
from train.export.verify import Window, verify
from train.export.weights import return_large_blocks, write_weights
from train.lora import PlainWeights


def write(config: ExportConfig, origin: Mapping[str, Any], *, keep_adapter: bool) -> None:
    """Write the model directory, complete and verified, or nothing."""
    return_large_blocks()
    trained = open_trained(config.checkpoint, keep_adapter=keep_adapter)
    check_trained(trained)
    data = None
    if config.verify:
        _ = trained.validation  # raises before anything is written
        data = trained.shards(config.data.path)
    manifest, step, dtype = trained.manifest, trained.checkpoint.step, getattr(torch, config.dtype)
    verified, windows, fit = None, list[Window](), None
    with staged(config.out) as out:
        template = config.chat_template
        write_sidecars(trained.folder, out, manifest, step=step, dtype=dtype, chat_template=template)
        weights, indexed = trained.served_weights(dtype), trained.table is not None
        if isinstance(weights, PlainWeights) and keep_adapter:
            weights.save_adapter(out / "adapter")
        write_weights(trained.config, weights, out, dtype=dtype, shard_size=config.shard_size, indexed=indexed)
        if trained.table:
            shutil.copyfile(trained.table, out / TABLE)
        if data:
            verified, windows = verify(out, trained, data, dtype=dtype, sequences=config.verify_sequences)
        if (out / ADAPTIVE).is_file():
            fit = fit_directory(out, windows)
        write_custom_generate(out)
        if verified and fit:
            verified = replace(verified, drafts=fit.accepted)
        comparison = asdict(verified) if verified else None
        write_card(out, render_card(out, manifest, step=step, verified=comparison, push=config.push))
        write_manifest(
            out,
            "model",
            origin,
            parameters=manifest["parameters"],
            step=step,
            verified=comparison,
            ngrams=fingerprint_file(out / TABLE) if trained.table else None,
            decontaminated=(manifest.get("data") or {}).get("decontaminated"),
        )
    print_line(f"export: wrote {config.out} ({manifest['parameters'] / 1e6:.1f}M parameters, {config.dtype})")
    print_line(f"export: {verified.describe() if verified else 'not verified'}")
    if fit:
        print_line(f"export: {fit.describe()}")
