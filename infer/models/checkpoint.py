"""A model directory: the library's model, the tokenizer, and what adaptive.json says of training."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from logging import getLogger
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from conf import UserError
from conf.errors import Refusing, in_one_line, visible
from conf.files import read_json
from infer.config import check_directory
from infer.engine.families import check_family, check_tree
from infer.engine.memory import is_out_of_memory
from infer.models import parallel
from infer.models.gated import gate_model
from infer.ngrams import ABSENT, FILE, NgramTable, NgramWeights
from infer.text import Infilling, Text

T = TypeVar("T")
ADAPTIVE = "adaptive.json"
SLOW_TOKENIZERS = (
    "vocab.json",
    "vocab.txt",
    "*.model",
)  # files that Transformers converts
INFILLING_PIECES = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")  # CodeLlama's
_reading = (
    Lock()
)  # the library's verbosity, which belongs to the process, changes meanwhile


@dataclass(frozen=True)
class Adaptive:
    """The adaptive ids: one (identical tokens, any k) or several (diverse, k up to their number)."""

    ids: tuple[int, ...]
    L: int
    gated: bool = False  # the adapter of the directory acts on probes alone
    infilling: Infilling | None = None
    bos: int | None = None  # what opened every document in training
    control: frozenset[int] | None = None  # ids that no text became in training
    ngrams: NgramWeights = NgramWeights()  # of the n-grams beside the adaptive tokens
    has_table: bool = False  # the export had a table of n-grams


class ModelDirectory:
    """A Transformers model directory, best an export; each of its files is read when it is first asked for.

    `adaptive_ids` and `L` are those of a fine-tuned model whose directory does not say them (no adaptive.json).
    `setting` is what gave the directory, for errors. Raises UserError for a folder that is no model.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        adaptive_ids: Sequence[int] = (),
        L: int = 0,
        setting: str = "model",
    ) -> None:
        self.path = check_directory(folder, setting)
        self.setting = setting
        self.name = f"{setting}={folder}"
        self._given_ids = tuple(adaptive_ids)
        self._given_L = L
        if self._given_ids and (self.path / ADAPTIVE).is_file():
            raise UserError(
                f"{setting}.adaptive_ids must be unset for a directory that has {ADAPTIVE}, got "
                f"{list(adaptive_ids)}. Leave it out"
            )

    @cached_property
    def rows(self) -> int | None:
        """The rows of the embedding; None where config.json does not say."""
        path = self.path / "config.json"
        rows = read_json(path, "a model's JSON").get("vocab_size")
        if rows is not None and type(rows) is not int:
            raise UserError(
                f"{path}: vocab_size must be a whole number, got {rows!r:.60}"
            )
        return rows

    @cached_property
    def adaptive(self) -> Adaptive | None:
        """The adaptive tokens; None for a model that was not trained with any.

        Raises UserError for ids without a row of the embedding.
        """
        path = self.path / ADAPTIVE
        if self._given_ids:
            adaptive = Adaptive(
                self._given_ids,
                self._given_L,
                infilling=_find_infilling(self._tokenizer),
            )
        elif path.is_file():
            try:
                adaptive = _adaptive(read_json(path, "JSON with adaptive_ids and L"))
            except ValueError as error:
                raise UserError(f"{path}: {error}") from error
        else:
            return None
        _check_adaptive(
            adaptive,
            f"{self.setting}.adaptive_ids" if self._given_ids else str(path),
            self.rows,
        )
        return adaptive

    def need_adaptive(self) -> Adaptive:
        """Return the adaptive tokens. Raises UserError for a model without any."""
        if self.adaptive is None:
            raise UserError(
                f"{self.name} must be fine-tuned with adaptive tokens, got no {ADAPTIVE} in it. For one "
                f"without that file give {self.setting}.adaptive_ids=[ID] {self.setting}.L=L"
            )
        return self.adaptive

    @property
    def gated(self) -> bool:
        """Whether the model's adapter acts on adaptive tokens alone."""
        return self.adaptive is not None and self.adaptive.gated

    @cached_property
    def text(self) -> Text:
        """The tokenizer, with the control ids of training where they are known."""
        adaptive = self.adaptive or Adaptive((), 1)
        control = adaptive.control
        if control is None:
            special = (
                id
                for id, token in self._tokenizer.get_added_tokens_decoder().items()
                if token.special
            )
            infilling = vars(adaptive.infilling).values() if adaptive.infilling else ()
            control = frozenset([*special, *adaptive.ids, *infilling])
        return Text(
            self._tokenizer,
            control=control,
            rows=self.rows,
            bos=adaptive.bos,
            infilling=adaptive.infilling,
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        file = self.path / "tokenizer.json"
        if file.is_file():
            with Refusing(f"{file} must be a tokenizers file, got"):
                return Tokenizer.from_file(str(file))
        if not any(
            [*self.path.glob(name)] for name in SLOW_TOKENIZERS
        ):  # the library would make up an empty one
            raise UserError(f"{self.name} must have a tokenizer at {file}, got none")
        try:
            converted: Any = AutoTokenizer.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False
            )
            return converted.backend_tokenizer
        except Exception as error:  # whatever the library meets first in files that are none of its own
            raise UserError(
                f"{self.name} must have a tokenizer at {file}, got another kind that was not converted "
                f"({in_one_line(error):.120}). Convert it by Transformers, with the packages that it asks for: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            ) from error

    @cached_property
    def ngrams(self) -> NgramTable | None:
        """The table of the training data's n-grams; None, which is logged where the export had one, for none.

        Raises UserError for a table that is damaged or of a larger vocabulary.
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
        """Load the library's model with its adapter, if it has one, ready to decode.

        Under torchrun it is divided over the processes, each on its own GPU or all on CPUs; `whole`: every
        process loads all of it. Raises UserError for a directory that is no model or lacks its adapter, a model
        that trees or so many processes do not suit, and an adapter that would have to be merged into divided
        weights.
        """
        logging.disable_progress_bar()
        ranks = 1 if whole else parallel.processes()
        if ranks > 1 and device:
            ours = f"torchrun, which gives each of its {ranks} processes one"
            raise UserError(f"device must be unset under {ours}, got {device}")
        adapter = self.path / "adapter"
        if ranks > 1 and adapter.is_dir() and not self.gated:
            raise UserError(
                f"{self.name}: adapter must be gated for {ranks} processes, got one that acts on every token. "
                "Export the model with lora=merged."
            )
        with _reading:
            lm = _read_model(self.path, self.name, dtype=dtype, ranks=ranks)
        if self.gated:
            gate_model(lm, adapter)
        elif adapter.is_dir():
            lm = merge_adapter(lm, adapter, described=self.adaptive is not None)
        if ranks == 1:
            lm.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))  # type: ignore[arg-type]
        check_tree(lm.eval(), self.name)
        return lm


def merge_adapter(
    lm: PreTrainedModel, folder: Path, *, described: bool
) -> PreTrainedModel:
    """Return `lm` with the adapter of a folder as peft writes it; of weights, safetensors alone are read.

    Raises UserError for a folder that holds none, or another model's, and for one of adaptive tokens that is
    not `described`, by adaptive.json, as ungated: merged it would change every token.
    """
    weights = folder / SAFETENSORS_WEIGHTS_NAME
    if not weights.is_file() or not (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} must have adapter_config.json and {weights.name}, got not both of them"
        )
    try:
        settings = LoraConfig.from_pretrained(str(folder), inference_mode=True)
        adapted = get_peft_model(lm, settings, autocast_adapter_dtype=False)
        loaded: Any = set_peft_model_state_dict(adapted, load_file(weights))
        merged = adapted.merge_and_unload()
    except (
        Exception
    ) as error:  # whatever the libraries meet first in files that are none of their own
        raise UserError(
            f"{folder} must be a LoRA adapter of this model, got {in_one_line(error)}"
        ) from error
    if not described and settings.trainable_token_indices:
        raise UserError(
            f"{folder.parent} must have adaptive.json, since the adapter trained adaptive tokens, got none"
        )
    absent = [
        key
        for key in loaded.missing_keys
        if "lora_" in key or "trainable_tokens_delta" in key
    ]
    if absent or loaded.unexpected_keys:
        name = [*absent, *loaded.unexpected_keys][0]
        raise UserError(
            f"{weights} must be the adapter that its configuration describes, got {name} amiss"
        )
    return merged


def _read_model(path: Path, name: str, *, dtype: str, ranks: int) -> PreTrainedModel:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # of weights amiss its report is a table
    try:
        config = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        check_family(config, name)
        _check_depth(path, name, config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            distributed_config=parallel.plan(config, ranks) if ranks > 1 else None,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        )
    except (
        Exception
    ) as error:  # whatever the library meets first in files that are none of its own
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        raise UserError(
            f"{name} must be a causal model with weights, got {in_one_line(error)}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    lm, info = loaded
    _check_weights(name, info)
    return lm


def _check_depth(path: Path, name: str, config: PreTrainedConfig) -> None:
    """Raise UserError for more layers than weights: the library would spend hours on making them all."""
    files = [file for file in path.glob("*.safetensors") if file.name != FILE]
    weights = 0
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    for file in files:
        with safe_open(file, "pt") as opened:
            weights += len(opened.keys())
    if files and layers > weights:
        there = f"{weights} weights in all"
        raise UserError(
            f"{name} must have weights of {layers} layers (config.json), got {there}"
        )


def _check_weights(model: str, info: dict[str, Any]) -> None:
    """Raise UserError where a weight is absent or of another size: the library would draw it at random."""
    for name, stored, expected in sorted(info["mismatched_keys"]):
        sizes = f"the sizes in config.json, {tuple(expected)} for {name}"
        raise UserError(f"{model} must have weights of {sizes}, got {tuple(stored)}")
    absent = sorted(info["missing_keys"])
    further = sorted(info["unexpected_keys"])
    if absent:
        raise UserError(
            f"{model} must have every weight of the model, got no {', '.join(absent[:3])}"
        )
    if further:
        names = visible(", ".join(further[:3]))
        getLogger(__name__).warning(
            "%s: %s, ... belong to no part of the model", model, names
        )


def eos_ids(lm: PreTrainedModel) -> frozenset[int]:
    """Return the ids that end a text. Raises UserError for a value that is no id."""
    value: Any = lm.generation_config.eos_token_id if lm.generation_config else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id, int) for id in ids):
        raise UserError(
            f"eos_token_id of generation_config.json must be token ids, got {value}"
        )
    return frozenset(ids)


def _adaptive(value: dict[str, Any]) -> Adaptive:
    """Raise ValueError, in a sentence, for a field of another type, which could draft with wrong tokens."""
    bos = value.get("bos")
    control = value.get("control")
    ngrams = value.get("ngrams")
    return Adaptive(
        _ids(value.get("adaptive_ids"), "adaptive_ids"),
        _expect(value.get("L"), int, "L"),
        gated=_expect(value.get("gated", False), bool, "gated"),
        infilling=_infilling(value.get("infilling")),
        bos=None if bos is None else _expect(bos, int, "bos"),
        control=None if control is None else frozenset(_ids(control, "control")),
        ngrams=NgramWeights() if ngrams is None else NgramWeights.from_json(ngrams),
        has_table=ngrams is not None and ngrams["table"] is not None,
    )


def _infilling(value: Any) -> Infilling | None:
    """Return the infilling ids; None where a tokenizer lacks one of them, which is then null."""
    if value is None or value == {}:
        return None
    ids_by_name = _expect(value, dict, "infilling")
    names = [field.name for field in fields(Infilling)]
    if absent := [name for name in names if name not in ids_by_name]:
        raise ValueError(f"infilling must have {', '.join(names)}, got no {absent[0]}")
    ids = [ids_by_name[name] for name in names]
    return None if None in ids else Infilling(*_ids(ids, "infilling"))


def _find_infilling(tokenizer: Tokenizer) -> Infilling | None:
    """Return the ids of CodeLlama's infilling pieces; None for a tokenizer without them."""
    known = [tokenizer.token_to_id(piece) for piece in INFILLING_PIECES]
    ids = [id for id in known if id is not None]
    return Infilling(*ids) if len(ids) == len(known) else None


def _ids(values: object, name: str) -> tuple[int, ...]:
    return tuple(
        _expect(id, int, f"an id of {name}") for id in _expect(values, list, name)
    )


def _expect(value: Any, kind: type[T], name: str) -> T:
    """Return the value if it has exactly this type: true is no number."""
    if type(value) is not kind:
        raise ValueError(f"{name} must be {kind.__name__}, got {value!r:.60}")
    return value


def _check_adaptive(adaptive: Adaptive, path: str, rows: int | None) -> None:
    if not adaptive.ids or adaptive.L < 1:
        got = f"{list(adaptive.ids)} and {adaptive.L}"
        raise UserError(
            f"{path} must have at least one of adaptive_ids and L from 1 on, got {got}"
        )
    infilling = vars(adaptive.infilling) if adaptive.infilling else {}
    ids = [("adaptive_ids", id) for id in adaptive.ids] + [
        ("bos", adaptive.bos),
        *infilling.items(),
    ]
    for name, id in ids:
        if id is not None and not 0 <= id < (id + 1 if rows is None else rows):
            raise UserError(
                f"{path}: {name} must be among the model's {rows} rows, got {id}"
            )
