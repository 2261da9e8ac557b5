"""The model directory, written whole and verified: weights, what lies beside them, card, manifest.

Knows the order of it; what is in a file is its own module's.
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.characters import print_line
from conf.fingerprint import fingerprint_file
from conf.stage import staged, write_manifest
from data_prep.ngrams import TABLE
from train.export.acceptance import Window
from train.export.bundle import write_custom_generate
from train.export.card import render_card, write_card
from train.export.config import ExportConfig
from train.export.ngram_weights import DESCRIBED, NgramFit, describe_fit, fit_directory
from train.export.sidecars import write_sidecars
from train.export.trained import Trained
from train.export.verify import Verified, describe, verify
from train.export.weight_files import write_weights
from train.lora import PlainWeights


def write(config: ExportConfig, trained: Trained, made: Mapping[str, Any], *, kept: bool) -> None:
    """Make the directory, whole and verified, or nothing."""
    data = trained.measurable(config.data.path) if config.verify else None
    with staged(config.out) as out:
        verified, fit = export(config, trained, out, kept=kept, data=data)
        parameters, told = trained.manifest["parameters"], asdict(verified) if verified else None
        step = trained.checkpoint.step
        write_card(out, render_card(out, trained.manifest, step=step, verified=told, push=config.push))
        data_facts = trained.manifest.get("data") or {}
        write_manifest(
            out,
            "model",
            made,
            parameters=parameters,
            step=step,
            verified=told,
            ngrams=fingerprint_file(out / TABLE) if trained.table is not None else None,
            decontaminated=data_facts.get("decontaminated"),
        )
    print_line(f"export: wrote {config.out} ({parameters / 1e6:.1f}M parameters, {config.dtype})")
    print_line(f"export: {describe(verified) if verified else 'not verified'}")
    if fit:
        print_line(f"export: {describe_fit(fit)}")


def export(
    config: ExportConfig, trained: Trained, out: Path, *, kept: bool, data: Path | None
) -> tuple[Verified | None, NgramFit | None]:
    """Write the Transformers directory of a training folder; with `data`, its shards, verify it and fit the
    weights of n-grams, which need adaptive tokens.
    """
    dtype = getattr(torch, config.dtype)
    write_sidecars(
        trained.folder,
        out,
        trained.manifest,
        step=trained.checkpoint.step,
        dtype=dtype,
        chat_template=config.chat_template,
    )
    weights = _plain_weights(trained, out, dtype, kept=kept)
    write_weights(
        trained.config,
        weights,
        out,
        dtype=dtype,
        shard_size=config.shard_size,
        indexed=trained.table is not None,
    )
    if trained.table is not None:
        shutil.copyfile(trained.table, out / TABLE)
    verified, windows, fit = None, list[Window](), None
    if data is not None:
        sequences = config.verify_sequences
        verified, windows = verify(out, trained, data, dtype=dtype, kept=kept, sequences=sequences)
    if (out / DESCRIBED).is_file():
        fit = fit_directory(out, windows)
    write_custom_generate(out)
    if verified and fit:
        verified = replace(verified, drafts=fit.accepted)
    return verified, fit


def _plain_weights(trained: Trained, out: Path, dtype: torch.dtype, *, kept: bool) -> Mapping[str, Tensor]:
    """What is served; an adapter that is kept is written."""
    weights = trained.served_weights(dtype, kept=kept)
    if isinstance(weights, PlainWeights) and kept:
        weights.save_adapter(out / "adapter")
    return weights
