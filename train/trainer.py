"""Run the training loop: step, validate, save a checkpoint.

A step uses data.py (batches), objective.py (layouts), model.py, attention.py and
loss.py (forward), engine.py (backward, optimizer).
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from conf.console import print_line
from conf.devices.dtype import choose_dtype, warn_of_emulation
from conf.errors import (
    DIVERGED,
    DOCS,
    MEMORY,
    QUALITY,
    RankLocalError,
    UserError,
    counted,
    in_one_line,
    is_out_of_memory,
)
from conf.runs.files import write_json
from conf.runs.fingerprint import MANIFEST, fingerprint_file
from conf.runs.stage import write_manifest
from data_prep.ngrams import TABLE, link_table
from train.checkpoint import Checkpoint, Checkpoints
from train.checks import check_ranks
from train.config import DESCRIBED, DIAGNOSTICS, TrainConfig
from train.data import (
    TRAINING,
    TrainingData,
    load_batch,
    rank_batches,
    share_masked_mean,
    trained_on,
)
from train.distributed import Abandoned, StopSignals, broadcast, gather, is_lost_rank
from train.engine import Engine, free_memory, start
from train.flops import peak_flops
from train.inputs import RunInputs
from train.journal import Journal, RunFacts
from train.loss import summarise
from train.metrics import Show, first_and_last, since
from train.model import build_module, write_architecture
from train.pretrained import base_model
from train.schedule import (
    Clock,
    Schedule,
    learning_rate,
    plan_steps,
    read_planned,
    write_planned,
)
from train.spec import ModelSpec
from train.validation import Validation

# A step's loss is compared with the mean of this many steps before it.
RECENT_STEPS = 50
MIN_RECENT = 10  # fewest steps to compare with


class Stopped(Exception):
    """A signal stopped the run; its last complete step is saved."""


def run_rank(
    config: TrainConfig,
    provenance: dict[str, Any],
    inputs: RunInputs,
    spec: ModelSpec,
) -> list[dict[str, float]]:
    """Run one rank, from the start or the newest checkpoint; return the validations.

    Raises the errors of `Trainer.run`, and RankLocalError if memory runs out.
    """
    try:
        return Trainer(config, provenance, inputs, spec).run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RankLocalError(
            f"out of memory with micro_batch={config.micro_batch}: {in_one_line(error)}. "
            "plan=true shows what takes the memory. You can lower loss_chunk and continue "
            "this run; other settings need a new out.",
            page=MEMORY,
        ) from error
    finally:
        free_memory()


def token_loss(metrics: Mapping[str, float]) -> float:
    """Return the mean loss of a step's labelled tokens, standard ones if there are any.

    The training loss is no mean over them: it changes with the share of labelled tokens,
    which in chats are the answers'.
    """
    masked = metrics.get("masked_loss", metrics["loss"])
    return metrics.get("standard_loss", masked)


def why_diverged(
    metrics: Mapping[str, float], recent: Sequence[float], ratio: float
) -> str | None:
    """Return why a step has diverged, or None if it has not.

    A step has diverged if its loss or gradient is not finite. From MIN_RECENT steps on it has
    also diverged if its `token_loss` is above `ratio` times the mean of the last
    RECENT_STEPS steps, `recent`.
    """
    if not math.isfinite(metrics["loss"]):
        return f"the loss is {metrics['loss']}"
    loss = token_loss(metrics)
    if not math.isfinite(metrics["gradient_norm"]):
        return f"the gradient is not finite at a loss of {loss:.4g}"
    before = recent[-RECENT_STEPS:]
    if len(before) < MIN_RECENT:
        return None
    mean = sum(before) / len(before)
    if loss > ratio * mean:
        return f"the loss is {loss:.4g}, above {ratio:g} times the recent mean of {mean:.4g}"
    return None


class Trainer:
    """One rank of a run."""

    def __init__(
        self,
        config: TrainConfig,
        provenance: dict[str, Any],
        inputs: RunInputs,
        spec: ModelSpec,
    ) -> None:
        self.provenance = provenance
        self.rank, self.ranks = start()
        check_ranks(gather(asdict(config)))
        self.out = Path(config.out)
        self.vocab = inputs.vocab
        self.seq_len = inputs.seq_len
        self.data = TrainingData(config)
        self.trained_on = trained_on(inputs, self.data.own_share)
        self.checkpoints = Checkpoints(self.out, provenance, keep_last=config.keep_last)
        self.stop = StopSignals()
        try:
            self._prepare(config, spec)
        except BaseException:
            self._release()
            raise

    def _prepare(self, config: TrainConfig, spec: ModelSpec) -> None:
        """Load the newest checkpoint, or the base model; write a new run's first files."""
        checkpoint = self.checkpoints.newest()
        if checkpoint is not None:
            config.check_steps(checkpoint.step)
        # A continued run keeps its first dtype, also on another machine.
        dtype = checkpoint.state["dtype"] if checkpoint else choose_dtype(config.dtype)
        self.config = config = replace(config, dtype=broadcast(dtype))
        self.module, self.parameters = build_module(
            config, spec.architecture, self.vocab
        )
        self.module.soft = config.objective.soft
        self.base = base_model(None if config.model.random_init else config.model.path)
        universal = checkpoint is not None and not checkpoint.fits(self.ranks)
        self.engine = Engine(self.module, config, universal=universal)
        warn_of_emulation(config.dtype, self.engine.device.type)
        self.peak = peak_flops(self.engine.device_name())
        self.flops = spec.flops
        # Servers draw noise from the rows of config.json.
        self.vocabulary: int = self.module.lm.config.get_text_config().vocab_size
        self.held_out = Validation(
            config,
            self.vocab,
            rank=self.rank,
            ranks=self.ranks,
            device=self.engine.device,
            vocabulary=self.vocabulary,
        )
        self._restore(checkpoint)
        if self.rank == 0:
            write_architecture(
                self.module.lm, Path(config.data.path), self.out / DESCRIBED
            )
            if (table := Path(config.data.path) / TABLE).is_file():
                link_table(table, self.out / TABLE)
        self.journal = Journal(
            config,
            RunFacts(
                base=self.base,
                parameters=self.parameters,
                trained_on=self.trained_on,
                device=self.engine.device_name(),
                ranks=self.ranks,
            ),
            self.validation,
            seq_len=self.seq_len,
            step=self.step,
            writes=self.rank == 0,
        )

    def _restore(self, checkpoint: Checkpoint | None) -> None:
        """Continue after a checkpoint, or begin at step 0; record the run in its folder."""
        state: dict[str, Any] = {"validation": [], "recent": [], "elapsed": 0.0}
        self.step = 0
        if checkpoint is not None:
            self.checkpoints.load(checkpoint, self.engine)
            state |= checkpoint.state
            self.step = checkpoint.step
        self.saved = checkpoint.step if checkpoint else None
        self.schedule = Schedule(self.config.steps)
        if self.config.minutes is not None:
            planned = read_planned(self.out) if self.rank == 0 else None
            self.schedule = Schedule(*broadcast(planned or Schedule(None)))
        self._check_warmup()
        self.clock = Clock(state["elapsed"])
        self.validation: list[dict[str, float]] = state["validation"]
        self.saved_validations = len(self.validation)  # in the newest checkpoint
        self.recent: list[float] = state["recent"]  # token_loss of the last steps
        self.checkpoints.record()

    def run(self) -> list[dict[str, float]]:
        """Train to the last step and finish the folder; return the validations.

        Raises Stopped if a signal came, after saving, and UserError if another rank died.
        """
        try:
            self._run()
        except RuntimeError as error:
            if not is_lost_rank(error):
                raise
            raise UserError(
                f"rank {self.rank} lost the connection to another rank in step "
                f"{self.step + 1}. Repeat the command to continue from step {self.saved or 0}."
            ) from error
        finally:
            self._release()
        return self.validation

    def _release(self) -> None:
        """Unlock the folder, restore the earlier signal handlers and let go of the model."""
        self.checkpoints.release()
        self.stop.restore()
        if "engine" in vars(self):
            self.engine.close()

    def _run(self) -> None:
        if self.rank == 0 and not self._at_the_end():
            # A finished run continues with more steps.
            (self.out / MANIFEST).unlink(missing_ok=True)
        progress = self.journal.progress(self.step, self.schedule.steps)
        with suppress(Abandoned), progress as show:
            self._train(show)
        finished = self._at_the_end() and not self._validation_is_due()
        # Before the first step there is only something to save if the run ends there (steps=0).
        if self.step != self.saved and (self.step or finished):
            self._save()
        elif finished and len(self.validation) > self.saved_validations:
            # A signal had interrupted the last validation. A longer run continues from the checkpoint.
            self.checkpoints.replace_state(self.step, self._state())
        self.journal.write_page(self.step, self.schedule.steps)
        if self.rank == 0 and finished:
            self._finish()
        self.journal.finish()
        dist.barrier()
        if not finished:
            raise Stopped(
                f"stopped by a signal; {self._saved_step()}. "
                "Repeat the command to continue."
            )

    def _saved_step(self) -> str:
        """Return which step is saved, in words."""
        return (
            "no step is saved yet"
            if self.saved is None
            else f"step {self.saved} is saved"
        )

    def _train(self, show: Show) -> None:
        """Take the remaining steps, validate and save. Raises Abandoned after a signal."""
        if self._validation_is_due():  # the first, or one that a signal interrupted
            with self.clock.timing("validation"):
                self._validate(show)
        while not self._at_the_end():
            if self.stop.agreed(self.engine.device):
                raise Abandoned
            with self.clock.timing("step"):
                metrics = self.train_step()
            if self.schedule.steps is None:
                self._plan_steps()
            line = self.journal.add_step(self.step, metrics)
            show(self.step, line, self.schedule.steps)
            if self._validation_is_due():
                with self.clock.timing("validation"):
                    self._validate(show)
            if self.step % self.config.save_every == 0 or self._at_the_end():
                with self.clock.timing("checkpoint"):
                    self._save()

    def _plan_steps(self) -> None:
        """Plan the number of steps from the times of the steps so far, if it is time to."""
        config = self.config
        assert config.minutes is not None
        between = self.clock.last("validation") / config.validate_every
        between += self.clock.last("checkpoint") / config.save_every
        schedule = plan_steps(
            self.step,
            self.clock.seconds["step"],
            elapsed=self.clock.elapsed(),
            total=60 * config.minutes,
            between=between,
        )
        self.schedule = Schedule(*broadcast(schedule))
        if self.schedule.steps is not None and self.rank == 0:
            write_planned(self.out, self.schedule)
            self._check_warmup()

    def _check_warmup(self) -> None:
        """Warn if the planned steps end before the warm-up, below optimizer.lr."""
        steps, warmup = self.schedule.steps, self.config.optimizer.warmup_steps
        if steps and steps <= warmup and self.rank == 0:
            print_line(
                f"warning: optimizer.warmup_steps must be below the {counted(steps, 'step')} of "
                f"the run to reach optimizer.lr, got {warmup}. Lower it.",
                error=True,
            )

    def _at_the_end(self) -> bool:
        return self.schedule.steps is not None and self.step >= self.schedule.steps

    def _validation_is_due(self) -> bool:
        if self.validation and self.validation[-1]["step"] == self.step:
            return False
        return self.step % self.config.validate_every == 0 or self._at_the_end()

    def train_step(self) -> dict[str, float]:
        """Take one optimizer step; return its metrics by name, over all ranks.

        Raises UserError if the step has diverged, and Abandoned after a signal.
        """
        config = self.config
        began = time.perf_counter()
        device = self.engine.device
        parts = rank_batches(
            self.data.order(self.step),
            rank=self.rank,
            ranks=self.ranks,
            micro_batch=config.micro_batch,
        )
        batches = [
            load_batch(
                self.data,
                part,
                self.vocab,
                config.objective,
                seed=(config.seed, TRAINING, self.step),
                device=device,
                standard=self.data.standard(part),
                vocabulary=self.vocabulary,
            )
            for part in parts
        ]
        # The other layouts have no masked term: all their weights are 1/n.
        masked = config.objective.name in ("dual", "branch")
        if masked and config.objective.masked_mean == "masked":
            share_masked_mean(batches, ranks=self.ranks)
        lr = learning_rate(self.step, self.schedule, config.optimizer)
        # Check for signals between micro-batches too: a step may take longer than a
        # scheduler waits.
        losses, tally = self.engine.step(
            batches,
            lr,
            key=(config.seed, self.step),
            stop=lambda: self.stop.agreed(device),
        )
        dist.all_reduce(tally)
        total = losses.double().sum()
        dist.all_reduce(total)
        metrics = summarise(tally) | {
            "loss": float(total) / (len(losses) * self.ranks),
            "lr": lr,
            "gradient_norm": self.engine.gradient_norm(),
            "epoch": (self.step + 1) * self.data.human_sequences / len(self.data.human),
            "memory_gib": self.engine.peak_memory() / 2**30,
        }
        self._check(metrics, parts, losses)
        self.step += 1
        # A coarse clock may return the same time twice.
        seconds = max(time.perf_counter() - began, 1e-6)
        metrics["tokens_per_second"] = config.global_batch * self.seq_len / seconds
        if self.peak is not None:
            metrics["mfu"] = self.flops / (seconds * self.ranks * self.peak)
        return metrics

    def _check(
        self, metrics: dict[str, float], parts: list[np.ndarray], losses: Tensor
    ) -> None:
        """Raise UserError if the step has diverged, after writing diagnostics; save no checkpoint."""
        why = why_diverged(metrics, self.recent, self.config.max_loss_ratio)
        if why is None:
            if {
                "standard_loss",
                "masked_loss",
            } & metrics.keys():  # it has labelled tokens
                self.recent = [*self.recent, token_loss(metrics)][-RECENT_STEPS:]
            return
        micro_batches = [
            {"sequences": part.tolist(), "loss": value}
            for part, value in zip(parts, losses.tolist(), strict=True)
        ]
        diagnostics = {
            "why": why,
            "step": self.step + 1,
            "metrics": metrics,
            "recent_losses": self.recent,
            "micro_batches_by_rank": gather(micro_batches),
        }
        if self.rank == 0:
            write_json(self.out / DIAGNOSTICS, diagnostics)
        self.journal.write_page(self.step, self.schedule.steps)
        raise UserError(
            f"step {self.step + 1}: {why}. See {self.out / DIAGNOSTICS}; "
            f"{self._saved_step()}.",
            page=DIVERGED,
        )

    def _validate(self, show: Show) -> None:
        metrics, texts = self.held_out.run(
            self.engine.forward,
            stop=lambda: self.stop.agreed(self.engine.device),
            show=lambda line: show(self.step, line, self.schedule.steps),
        )
        if "standard_loss" not in metrics:
            raise UserError(
                f"validate_sequences={self.config.validate_sequences} must include an "
                "answer, got only prompts. Raise validate_sequences."
            )
        self.validation.append({"step": self.step, **metrics})
        self.journal.add_validation(metrics, texts, planned=self.schedule.steps)
        first = first_and_last(self.validation)[0]
        rise = metrics["standard_loss"] / first["standard_loss"] - 1
        if rise > self.config.max_loss_rise:
            kept = self.config.model.adapter and not self.config.lora.gated
            base = "the loss before training" if kept else "the base model's"
            than = f"the loss {since(first)}" if first["step"] else base
            self.journal.alarm(
                f"held-out standard-token loss {100 * rise:+.1f} % above {than} "
                f"(max_loss_rise={self.config.max_loss_rise:g}): see {DOCS}/{QUALITY}"
            )

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint has besides the engine's files, the same on every rank."""
        state: dict[str, Any] = broadcast(
            {
                "validation": self.validation,
                "recent": self.recent,
                "dtype": self.config.dtype,
                "elapsed": self.clock.elapsed(),  # of minutes=
                # Position in the order of the data.
                "sequences": self.step * self.config.global_batch,
            }
        )
        return state

    def _save(self) -> None:
        self.checkpoints.save(self.engine, self.step, self._state())
        self.saved = self.step
        self.saved_validations = len(self.validation)

    def _finish(self) -> None:
        objective = self.config.objective
        write_manifest(
            self.out,
            "checkpoint",
            # Provenance does not contain `steps`: a finished run may continue with more.
            self.provenance
            | {"settings": self.provenance["settings"] | {"steps": self.step}},
            step=self.step,
            ranks=self.ranks,
            parameters=self.parameters,
            vocab=self.vocab.to_json(),
            adaptive=list(objective.adaptive_ids(self.vocab.adaptive)),
            mask=objective.described_mask,
            L=objective.L,
            validation=self.validation,
            base=self.base,
            data=self.trained_on,
            tokenizer=fingerprint_file(self.out / DESCRIBED / "tokenizer.json"),
            architecture=fingerprint_file(self.out / DESCRIBED / "config.json"),
        )
