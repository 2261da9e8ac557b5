"""Read a model directory: the Transformers model, the tokenizer, and adaptive.json."""

import os
import warnings
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from conf.adapter import ADAPTIVE_FILE, CONFIG, FOLDER, HEAD, WEIGHTS
from conf.console import print_once, torchrun_rank
from conf.devices.bfloat16 import bfloat16_kernel
from conf.devices.dtype import (
    AUTO,
    INT8,
    choose_dtype,
    cpu_has_bfloat16,
    warn_of_emulation,
)
from conf.devices.memory import check_fits, describe_shortage, machine_memory
from conf.errors import UserError, as_user_error
from conf.runs.files import read_json
from conf.text.encoding import prefix_ids
from conf.text.infilling import Infilling, find_infilling, with_stops
from infer.config import check_directory, export_manifest
from infer.engine.families import check_family, check_tree
from infer.engine.fused import fuse_rotary, has_operations
from infer.engine.memory import enough_memory
from infer.engine.packed import pack
from infer.engine.rounded import to_bfloat16, to_int8
from infer.engine.smoothing import SAMPLE, TOKENS
from infer.models import parallel
from infer.models.gated import NO_HEAD, gate_model
from infer.ngrams import ABSENT, FILE, NgramTable, NgramWeights
from infer.text import Text
from infer.trees.mask_tokens import MaskTokens, mask_tokens

#: Values of `mask` in adaptive.json; other values are ids of existing tokens.
TRAINED = "adaptive"
NOISE = "noise"
MAX_L = 1024  # the maximum number of adaptive tokens in a row
#: The message for weights or a configuration that Transformers cannot read.
NO_MODEL = "must be a causal model with weights, got"
#: A warning for an adaptive.json without n-gram weights; its argument is the path.
NO_WEIGHTS = (
    "%s lost its ngrams: default weights are used, and fewer drafts may be accepted"
)
#: The files that Transformers can convert to a tokenizer. Without any it returns an empty one.
SLOW_TOKENIZERS = ("vocab.json", "vocab.txt", "*.model")


@dataclass(frozen=True)
class Adaptive:
    """The content of adaptive.json: how a model drafts with adaptive tokens."""

    #: One id: identical tokens, any k; several ids: diverse tokens; () with noise.
    ids: tuple[int, ...]
    L: int  # the largest window in training
    noise: bool = (
        False  # windows have uniformly drawn tokens instead of adaptive tokens
    )
    #: The ids were added for training and never occur in text; False for an existing token
    #: and for noise.
    trained: bool = True
    gated: bool = False  # the directory's adapter acts on probes only
    infilling: Infilling | None = None
    bos: int | None = None  # the first id of every document in training
    #: Ids that encoding text never produced in training.
    control: frozenset[int] | None = None
    ngrams: NgramWeights = NgramWeights()
    has_table: bool = False  # the export had an n-gram table
    has_head: bool = False  # the export had a previous-token head

    def mask(self, vocabulary: int) -> MaskTokens:
        """Return the mask tokens of the model, with `vocabulary` rows in its embedding."""
        return mask_tokens(self.ids, noise=self.noise, vocabulary=vocabulary)


def read_adaptive(path: Path, rows: int | None) -> Adaptive:
    """Read the adaptive.json of a model with `rows` rows in its embedding.

    rows=None, for an unknown number, skips the check of the ids against it. Raises UserError
    for invalid content and for ids without a row.
    """
    values = read_json(path, "JSON with adaptive_ids and L")
    with as_user_error(f"{path} must have the adaptive_ids and L of training, got"):
        infilling = values.get("infilling") or {}  # null for a tokenizer without it
        if not isinstance(infilling, dict):
            raise ValueError(f"infilling of type {type(infilling).__name__}")
        complete = None not in (infilling.get("pre"), infilling.get("suf"))
        if complete and "orders" in infilling:
            infilling = infilling | {"orders": tuple(infilling["orders"])}
        control = values.get("control")
        ngrams = values.get("ngrams")
        gated = values.get("gated", False)
        mask = values.get("mask", TRAINED)
        numbers = [*values["adaptive_ids"], values["L"], *(control or ())]
        if wrong := [n for n in numbers if type(n) is not int]:
            raise ValueError(f"{wrong[0]!r:.60}, which is not an integer")
        if type(gated) is not bool:
            raise ValueError(f"gated={gated!r:.60}")
        existing = type(mask) is int and values["adaptive_ids"] == [mask]
        if not existing and mask not in (TRAINED, NOISE):
            raise ValueError(f"mask={mask!r:.60}")
        adaptive = Adaptive(
            ids=tuple(values["adaptive_ids"]),
            L=values["L"],
            noise=mask == NOISE,
            trained=mask == TRAINED,
            gated=gated,
            infilling=Infilling(**infilling) if complete else None,
            bos=values.get("bos"),
            control=None if control is None else frozenset(control),
            ngrams=NgramWeights.from_json(ngrams) if ngrams else NgramWeights(),
            has_table=bool(ngrams and ngrams["table"] is not None),
            has_head=values.get("head", False) is True,
        )
        if bool(adaptive.ids) == adaptive.noise or not 1 <= adaptive.L <= MAX_L:
            raise ValueError(f"adaptive_ids={list(adaptive.ids)} and L={adaptive.L}")
        ids = [*adaptive.ids, adaptive.bos]
        ids += adaptive.infilling.ids if adaptive.infilling else ()
        for id in ids:
            if id is None:
                continue
            if type(id) is not int or not 0 <= id < (id + 1 if rows is None else rows):
                raise ValueError(f"id {id}, which is not among the model's {rows} rows")
    if (
        "ngrams" not in values and "schema" in values
    ):  # a file written by hand has no schema
        getLogger(__name__).warning(NO_WEIGHTS, path)
    return adaptive


class ModelDirectory:
    """A Transformers model directory, possibly an export. Each file is read on first use.

    `setting` is the setting's name in errors. Raises UserError for a folder that is not a model.
    """

    def __init__(self, folder: str | Path, *, setting: str = "model") -> None:
        self.path = check_directory(folder, setting)
        self.name = f"{setting}={folder}"

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json", "a model's JSON")

    @cached_property
    def rows(self) -> int | None:
        """Return the number of embedding rows; None if config.json does not have it."""
        return self._config.get("vocab_size")

    @cached_property
    def context(self) -> int | None:
        """Return the context length in tokens; None if config.json does not have it."""
        length = self._config.get("max_position_embeddings")
        return length if isinstance(length, int) else None

    @cached_property
    def adaptive(self) -> Adaptive | None:
        """Return the content of adaptive.json; None for a model without adaptive tokens."""
        path = self.path / ADAPTIVE_FILE
        return read_adaptive(path, self.rows) if path.is_file() else None

    def need_adaptive(self) -> Adaptive:
        """Return the content of adaptive.json. Raises UserError for a model without it."""
        if self.adaptive is None:
            raise UserError(
                f"{self.name} must be fine-tuned with adaptive tokens, got no {ADAPTIVE_FILE} "
                'in it. Add the file: {"adaptive_ids": [ID], "L": L}'
            )
        return self.adaptive

    def choose_dtype(self, requested: str, device: str | None = None) -> str:
        """Return the dtype for `requested` on a device. See conf.devices.dtype.

        On a CPU without instructions for bfloat16, "auto" is bfloat16 all the same if the weights are
        stored in it and native.c decodes the model: the numbers are the model's own.
        """
        on_cpu = device == "cpu" if device else not torch.cuda.is_available()
        alone = parallel.processes() == 1
        if requested == AUTO and on_cpu and alone and not cpu_has_bfloat16():
            with as_user_error(f"{self.name} {NO_MODEL}"):
                config = self._read_config()
            stored = config.dtype == torch.bfloat16
            if stored and has_operations(config) and bfloat16_kernel():
                print_once(
                    "dtype=auto: bfloat16 (the type of the model's weights)", error=True
                )
                return "bfloat16"
        return choose_dtype(requested, device)

    def _read_config(self) -> PretrainedConfig:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            self.path, local_files_only=True, trust_remote_code=False
        )
        return config

    @property
    def gated(self) -> bool:
        """Return True if the model's adapter acts on adaptive tokens only."""
        return self.adaptive is not None and self.adaptive.gated

    @cached_property
    def text(self) -> Text:
        """Return the tokenizer, with training's control ids if adaptive.json has them."""
        adaptive = self.adaptive or Adaptive((), 1)
        tokenizer = self._tokenizer
        infilling = of_tokenizer = find_infilling(tokenizer, self.rows)
        if adaptive.infilling:
            infilling = with_stops(adaptive.infilling, of_tokenizer)
        control = adaptive.control
        if control is None:
            tokens = tokenizer.get_added_tokens_decoder().items()
            special = (id for id, token in tokens if token.special)
            unused = adaptive.ids if adaptive.trained else ()
            control = frozenset(chain(special, unused))
        if infilling:
            control |= infilling.ids
        file = self.path / "tokenizer_config.json"
        described = read_json(file, "a tokenizer's JSON") if file.is_file() else {}
        bos = adaptive.bos
        if bos is None and len(opened := prefix_ids(tokenizer, described)) == 1:
            bos = opened[0]
        return Text(
            tokenizer, control=control, rows=self.rows, bos=bos, infilling=infilling
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        file = self.path / "tokenizer.json"
        with as_user_error(
            f"{self.name} must have a tokenizer.json, got",
            ". Convert another kind of tokenizer with Transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        ):
            if file.is_file():
                return Tokenizer.from_file(str(file))
            if not any(any(self.path.glob(name)) for name in SLOW_TOKENIZERS):
                raise FileNotFoundError("no tokenizer")
            converted: Any = AutoTokenizer.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False
            )
            tokenizer: Tokenizer = converted.backend_tokenizer
        return tokenizer

    @cached_property
    def ngrams(self) -> NgramTable | None:
        """Return the n-gram table of the training data; None for a directory without it.

        Logs a warning if the table is missing but the export had one. Raises UserError for a
        damaged table and for a table of a larger vocabulary.
        """
        path = self.path / FILE
        if not path.is_file():
            if self.adaptive and self.adaptive.has_table:
                getLogger(__name__).warning(ABSENT, path)
            return None
        try:
            return NgramTable(path, self.rows)
        except ValueError as error:
            raise UserError(str(error)) from error

    def load(
        self, *, dtype: str, device: str | None = None, whole: bool = False
    ) -> PreTrainedModel:
        """Load the Transformers model with its adapter, ready to decode.

        Under torchrun the model is split over the processes (tensor parallelism), each on its
        own GPU or all on CPUs; with whole=True each process loads the whole model. Raises
        UserError for a directory that is not a model, for a model that does not support trees,
        for a number of processes that cannot divide it, for too little memory, and for an
        adapter that would have to be merged into split weights.
        """
        ranks = 1 if whole else parallel.processes()
        adapter = self.path / FOLDER
        int8 = dtype == INT8
        if ranks > 1 and int8:
            raise UserError(
                f"dtype must not be int8 under torchrun with {ranks} processes. "
                "Set dtype=float32, or run one process."
            )
        if ranks > 1 and device:
            raise UserError(
                f"device must be unset under torchrun, which gives each of its {ranks} "
                f"processes a device, got {device}. Omit device."
            )
        if ranks > 1 and adapter.is_dir() and not self.gated:
            raise UserError(
                f"{self.name} must have a gated adapter for {ranks} processes, got an "
                "adapter that acts on every token. Export the model with lora=merged."
            )
        if self._keeps_adapter() and not adapter.is_dir():
            raise UserError(
                f"{self.name} must have its folder {FOLDER}/, got only the base model's weights. "
                "Copy the folder, or export the model again."
            )
        logging.disable_progress_bar()
        with (
            as_user_error(f"{self.name} {NO_MODEL}"),
            enough_memory("Set dtype=bfloat16 or use a smaller model"),
        ):
            lm = self._read("float32" if int8 else dtype, ranks, device)
            if self.gated:
                gate_model(lm, adapter)
                if self.need_adaptive().has_head and not (adapter / HEAD).is_file():
                    getLogger(__name__).warning(NO_HEAD, adapter / HEAD)
            elif adapter.is_dir():
                lm = merge_adapter(lm, adapter)
            if ranks == 1:
                default = "cuda" if torch.cuda.is_available() else "cpu"
                lm.to(device or default)  # type: ignore[arg-type]
            lm.eval()
            # check_tree compares two forwards, which round differently in int8.
            if int8:
                check_tree(lm, self.name)
                to_int8(lm, self._sample())
            elif lm.device.type == "cpu":
                free, _ = machine_memory()
                if ranks > 1 or not to_bfloat16(lm, free):
                    warn_of_emulation(dtype, "cpu")
                    if ranks == 1:
                        pack(lm, free // 2)
            fuse_rotary(lm)
            if not int8:
                check_tree(lm, self.name)
        return lm

    def _sample(self) -> list[int]:
        """Return the ids of a text that shows how large the inputs of the model's products are."""
        return self.text.encode(SAMPLE)[: min(TOKENS, self.context or TOKENS)]

    def _keeps_adapter(self) -> bool:
        """Return True for an export that keeps the adapter in its own folder (lora=kept)."""
        settings = (export_manifest(self.path) or {}).get("settings")
        return isinstance(settings, dict) and settings.get("lora") == "kept"

    def _read(self, dtype: str, ranks: int, device: str | None) -> PreTrainedModel:
        config = self._read_config()
        check_family(config, self.name)
        check_weights(config, self.name, dtype=dtype, device=device, ranks=ranks)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            self.path,
            config=config,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
            distributed_config=parallel.plan(config, ranks) if ranks > 1 else None,
            output_loading_info=True,
        )
        lm: PreTrainedModel
        lm, info = loaded
        # Transformers initializes missing weights at random.
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"no weight {missing[0]}")
        return lm


def check_weights(
    config: PretrainedConfig, name: str, *, dtype: str, device: str | None, ranks: int
) -> None:
    """Raise UserError if a model's weights need more than the free memory.

    Otherwise Linux would kill the process without a message. Without a `device` it checks the
    first GPU, or the CPU on a machine without a GPU. With several `ranks` each rank holds a share of
    the weights. On a CPU, weights in the dtype of their files are memory-mapped and too
    little memory only makes them slow, so the function only warns. Quantized weights are
    not checked.
    """
    if getattr(config, "quantization_config", None):
        return
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    size = getattr(torch, dtype).itemsize
    needed = lm.num_parameters() * size
    purpose = f"the weights of {name} in {dtype}"
    cure = "use a smaller model" if size < 4 else "set dtype=bfloat16"
    gpu = torch.cuda.is_available() and device != "cpu"
    if gpu:
        index = device if ranks == 1 else torchrun_rank()[2]
        free = torch.cuda.mem_get_info(index)
        check_fits(purpose, needed / ranks, free, "GPU", cure)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks > 1 else 1
    machine = (needed * local / ranks, machine_memory(swap=True), "machine")
    if config.dtype != getattr(torch, dtype):
        if (
            not gpu or ranks == 1
        ):  # to one GPU, weights also pass through the CPU's memory
            check_fits(purpose, *machine, cure)
    elif not gpu and (sentence := describe_shortage(purpose, *machine, cure)):
        print_once(
            f"warning: {sentence}; else every token reads them from the disk again",
            error=True,
        )


def merge_adapter(lm: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return `lm` with the LoRA adapter of a folder merged into its weights.

    Raises UserError for a folder without an adapter of this model.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():  # peft would ask the hub for it
            raise UserError(
                f"{folder} must be a LoRA adapter of this model, got no {name} in it. "
                "Copy the file, or export the model again."
            )
    with as_user_error(f"{folder} must be a LoRA adapter of this model, got"):
        # For weights that the model lacks, or the file, peft only warns.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
            adapted = PeftModel.from_pretrained(
                lm, str(folder), autocast_adapter_dtype=False
            )
        # safe_merge refuses values that are not finite.
        merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    return merged


def eos_ids(lm: PreTrainedModel) -> frozenset[int]:
    """Return the EOS ids of a model. Raises UserError for values that are not integers."""
    value: Any = lm.generation_config.eos_token_id if lm.generation_config else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [id for id in ids if type(id) is not int]:
        raise UserError(
            f"generation_config.json must have integers as eos_token_id, got {wrong[0]!r:.60}. "
            "Correct it, or copy the file again"
        )
    return frozenset(ids)
