"""The training loop: steps, validation, checkpoints, in that order.

Knows when things happen; what happens is in layout, loss, engine, checkpoint and tracker.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conf import RankLocalError, UserError
from conf.clock import duration
from conf.errors import DIVERGED, DOCS, MEMORY, QUALITY, in_one_line
from conf.files import write_json
from conf.fingerprint import MANIFEST, fingerprint_file
from conf.stage import write_manifest
from data_prep.ngrams import TABLE, link_table
from data_prep.vocab import Vocab
from train.checks import check_ranks
from train.config import TrainConfig
from train.data import TRAINING, TrainingData, adaptive_ids, load_batch, rank_batches
from train.engine.checkpoints import Checkpoints
from train.engine.engine import Abandoned, Engine, check_settings, start
from train.engine.ranks import every_ranks, first_ranks, is_lost_rank
from train.folder import DESCRIBED, DIAGNOSTICS, LOG
from train.model.assemble import assemble, describe, draft_loss_of
from train.monitor.divergence import WINDOW, why_diverged
from train.monitor.drafts import COLUMNS
from train.monitor.exit_code import Stopped
from train.monitor.log import StepLog
from train.monitor.metrics import best, describe_step, describe_validation, summarise
from train.monitor.pulse import Pulse, shared_store
from train.monitor.stop import StopSignals
from train.monitor.tracker import Tracker
from train.plan.flops import peak_flops, step_flops
from train.provenance import base_model, own_text, trained_on
from train.schedule import learning_rate, objective_at
from train.validation import Validation


def train(config: TrainConfig, made: dict[str, Any], data: dict[str, Any]) -> list[dict[str, float]]:
    """One rank of a run, from its start, or from its newest checkpoint; returns the validations, oldest first.

    Raises Stopped as `Trainer.run` does, and UserError where the device is too small, or for settings that
    DeepSpeed does not take.
    """
    check_settings(config.deepspeed)
    try:
        trainer = Trainer(config, made, data)
    except torch.OutOfMemoryError as error:
        raise RankLocalError(
            f"out of memory: wanted room for weights, gradients and optimizer, found {in_one_line(error)}; "
            "plan=true shows what each takes",
            page=MEMORY,
        ) from error
    return trainer.run()


class Trainer:
    """One rank of a run."""

    def __init__(self, config: TrainConfig, made: dict[str, Any], data: dict[str, Any]) -> None:
        self.config, self.made = config, made
        self.rank, self.ranks = start()
        config.accumulations(self.ranks)  # a batch that does not divide is told first
        check_ranks(every_ranks(asdict(config)))
        self.out = Path(config.out)
        self.vocab, self.trained_on = Vocab.from_json(data["vocab"]), trained_on(data)
        if config.data.own:
            self.trained_on["own"] = own_text(config)
        self.data = TrainingData(config)
        self.stop = StopSignals()
        self.checkpoints = Checkpoints(self.out, made, keep_last=config.keep_last, keep_every=config.keep_every)
        found = self.checkpoints.newest()
        if found is not None:
            config.check_steps(found.step)
        self.module, self.parameters = assemble(config, self.vocab)
        if self.rank == 0:
            describe(self.module.lm, Path(config.data.path), self.out / DESCRIBED)
            if (table := Path(config.data.path) / TABLE).is_file():
                link_table(table, self.out / TABLE)
        self.engine = Engine(self.module, config, universal=found is not None and not found.fits(self.ranks))
        self.seq_len: int = data["seq_len"]
        self.flops = step_flops(
            self.module.lm.config,
            config.objective,
            sequences=config.global_batch,
            seq_len=self.seq_len,
            frozen=config.lora.rank > 0,
            gated=config.lora.gated,
        ).model
        self.held_out = Validation(
            config, self.vocab, rank=self.rank, ranks=self.ranks, device=self.engine.device
        )
        if found is not None:
            self.checkpoints.load(found, self.engine)
        state = found.state if found else {"validation": [], "recent": [], "run_id": None}
        self.step = self.saved = found.step if found else 0
        self.validation: list[dict[str, float]] = state["validation"]
        self.recent: list[float] = state["recent"]  # the losses of the last steps
        # Each step from which learning rates were those of a run of so many steps.
        self.schedules: list[list[int]] = state.get("schedules", [])
        if not self.schedules or self.schedules[-1][1] != config.steps:
            self.schedules.append([self.step, config.steps])
        self.log = StepLog(self.out / LOG, step=self.step) if self.rank == 0 else None
        self.tracker = Tracker(
            config.tracker,
            out=self.out,
            name=f"{self.out.name}-{config.objective.name}",
            settings=asdict(config),
            speaks=self.rank == 0,
            run_id=state["run_id"],
        )
        self.tracker.define_axis("tokens_seen")

    def run(self) -> list[dict[str, float]]:
        """Train to the last step and finish the folder; returns the validations, oldest first.

        Raises Stopped, after saving, when a signal came, and UserError when memory ran out or another rank is
        gone.
        """
        # From here on no read of a file keeps a rank from telling that it lives.
        pulse = Pulse(shared_store(), rank=self.rank, ranks=self.ranks)
        try:
            validation = self._run()
        except torch.OutOfMemoryError as error:
            raise RankLocalError(
                f"out of memory: wanted room for micro_batch={self.config.micro_batch} in step "
                f"{self.step + 1}, found {in_one_line(error)}; step {self.saved} is saved",
                page=MEMORY,
            ) from error
        except RuntimeError as error:
            if not is_lost_rank(error):
                raise
            raise UserError(
                f"rank {self.rank} lost another rank in step {self.step + 1}: the launcher names the one that "
                f"failed first; start it again to go on from step {self.saved}"
            ) from error
        finally:
            self.checkpoints.release()
        pulse.finish()
        return validation

    def _run(self) -> list[dict[str, float]]:
        config = self.config
        if not self.validation:
            self._validate()
        name, warmup = config.objective.name, config.optimizer.warmup_steps
        if config.steps <= warmup:
            self.tracker.tell(
                f"warning: in steps={config.steps} the learning rate only rises: its warm-up is {warmup}"
            )
        if self.rank == 0 and self.step < config.steps:
            (self.out / MANIFEST).unlink(missing_ok=True)  # of a run that goes on with more steps
        with self.tracker.progress(name, done=self.step, total=config.steps) as show:
            while self.step < config.steps and not self.stop.agreed(self.engine.device):
                try:
                    metrics = self.train_step()
                except Abandoned:
                    break
                self._track("train", metrics)
                if self.log:
                    self.log.append(self.step, metrics)
                show(self.step, describe_step(metrics))
                if self.step % config.validate_every == 0 or self.step == config.steps:
                    self._validate()
                if self.step % config.save_every == 0 or self.step == config.steps:
                    self._save()
        if self.step < config.steps and self.step > self.saved:
            self._save()
        if self.rank == 0 and self.step == config.steps:
            self._finish()
        self.tracker.finish()
        dist.barrier()
        if self.step < config.steps:
            kept = f"step {self.saved} is saved" if self.saved else "before the first step was saved"
            raise Stopped(f"stopped by a signal; {kept}: start it again to go on")
        return self.validation

    def train_step(self) -> dict[str, float]:
        """Take one step of the optimizer; return its metrics by name, as means over all ranks.

        Raises UserError when the loss has diverged, and Abandoned when a signal came between micro-batches.
        """
        config, began = self.config, time.perf_counter()
        order = self.data.order(self.step)
        parts = rank_batches(order, rank=self.rank, ranks=self.ranks, micro_batch=config.micro_batch)
        seed, device = (config.seed, TRAINING, self.step), self.engine.device
        objective = objective_at(self.step, config.steps, config.objective)
        batches = [
            load_batch(
                self.data,
                part,
                self.vocab,
                objective,
                seed=seed,
                device=device,
                standard=self.data.standard(part),
            )
            for part in parts
        ]
        self.module.draft = draft_loss_of(objective)
        lr = learning_rate(self.step, config.steps, config.optimizer)
        # A step may take longer than a scheduler waits.
        losses, tally = self.engine.step(
            batches, lr, key=(config.seed, self.step), stop=lambda: self.stop.agreed(device)
        )
        metrics = self._metrics(tally) | {
            "loss": self._mean(losses),
            "lr": lr,
            "gradient_norm": self.engine.gradient_norm(),
            "epoch": (self.step + 1) * self.data.human_sequences / len(self.data.human),
            "memory_gib": self.engine.peak_memory() / 2**30,
        }
        self._check(metrics, parts, losses)
        self.step += 1
        return metrics | self._speed(duration(began, time.perf_counter()))

    def _speed(self, seconds: float) -> dict[str, float]:
        """Tokens of data per second, and the share of the devices' peak (MFU) where that is known."""
        found = {"tokens_per_second": self.config.global_batch * self.seq_len / seconds}
        peak = peak_flops(self.engine.device_name(), self.config.peak_tflops)
        return found if peak is None else found | {"mfu": self.flops / (seconds * self.ranks * peak)}

    def _check(self, metrics: dict[str, float], parts: list[Any], losses: torch.Tensor) -> None:
        """Raises UserError, after writing diagnostics, when the step has gone wrong; nothing is saved."""
        loss = metrics["loss"]
        why = why_diverged(loss, metrics["gradient_norm"], self.recent, self.config.max_loss_ratio)
        if why is None:
            self.recent = [*self.recent, loss][-WINDOW:]
            return
        micro_batches = [
            {"sequences": p.tolist(), "loss": x} for p, x in zip(parts, losses.tolist(), strict=True)
        ]
        diagnostics = {
            "why": why,
            "step": self.step + 1,
            "metrics": metrics,
            "weight_norm": self.engine.weight_norm(),
            "recent_losses": self.recent,
            "micro_batches_by_rank": every_ranks(micro_batches),
        }
        told = self.out / DIAGNOSTICS
        if self.rank == 0:
            write_json(told, diagnostics)
        raise UserError(
            f"step {self.step + 1}: {why}: see {told}; the last checkpoint is that of step {self.saved}",
            page=DIVERGED,
        )

    def _mean(self, losses: torch.Tensor) -> float:
        """Of the micro-batches of all ranks."""
        total = losses.double().sum()
        dist.all_reduce(total)
        return float(total) / (len(losses) * self.ranks)

    def _validate(self) -> None:
        metrics, drafts = self.held_out.run(self.engine.forward)
        self.validation.append({"step": self.step, **metrics})
        self._track("validation", metrics)
        # By ourselves: W&B's own min and max forget what was before a resume in offline files.
        self.tracker.summarise({f"best/{name}": value for name, value in best(self.validation).items()})
        self.tracker.log_table(self.step, "validation/drafts", COLUMNS, drafts)
        self.tracker.tell(f"step {self.step} held-out: {describe_validation(metrics)}")
        rise = metrics["standard_loss"] / self.validation[0]["standard_loss"] - 1
        if rise > self.config.max_loss_rise:
            self.tracker.alarm(
                f"held-out standard-token loss {100 * rise:+.1f} % above the base model's "
                f"(max_loss_rise={self.config.max_loss_rise:g}): see {DOCS}/{QUALITY}"
            )

    def _track(self, prefix: str, metrics: dict[str, float]) -> None:
        seen = self.step * self.config.global_batch * self.seq_len
        self.tracker.log(
            self.step, {"tokens_seen": seen} | {f"{prefix}/{name}": value for name, value in metrics.items()}
        )

    def _metrics(self, tally: torch.Tensor) -> dict[str, float]:
        """A tally, summed over ranks, as named means."""
        dist.all_reduce(tally)
        return summarise(tally)

    def _save(self) -> None:
        state = {
            "validation": self.validation,
            "recent": self.recent,
            "schedules": self.schedules,
            "run_id": self.tracker.run_id,
            "sequences": self.step * self.config.global_batch,  # where the sampler stands
        }
        self.checkpoints.save(self.engine, self.step, first_ranks(state))
        self.saved = self.step

    def _finish(self) -> None:
        objective = self.config.objective
        write_manifest(
            self.out,
            "checkpoint",
            # Not in `made`: a run may go on with more steps.
            self.made | {"settings": self.made["settings"] | {"steps": self.step}},
            schedules=self.schedules,
            step=self.step,
            ranks=self.ranks,
            parameters=self.parameters,
            vocab=self.vocab.to_json(),
            adaptive=list(adaptive_ids(self.vocab, objective)),
            L=objective.L,
            validation=self.validation,
            base=base_model(None if self.config.model.random_init else self.config.model.path),
            data=self.trained_on,
            # For an export that measures again; a folder that was moved is named to it.
            places={"data.path": str(Path(self.config.data.path).resolve())},
            tokenizer=fingerprint_file(self.out / DESCRIBED / "tokenizer.json"),
            architecture=fingerprint_file(self.out / DESCRIBED / "config.json"),
        )
