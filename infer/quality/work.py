"""What there is to do: the problems that can be judged here, batches of answers, and how a model answers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from conf import UserError
from infer.api import Model, TextStep, generate
from infer.benchmarks.reading import fingerprint_problems, kind_of, read_problems, rules
from infer.benchmarks.rows import Problem
from infer.config import DecodeConfig, Infill, decontaminated
from infer.engine.sampling import seed_from
from infer.models.checkpoint import ModelDirectory
from infer.models.draft import base_pieces, lacking
from infer.quality import QualityConfig
from infer.sandbox import missing_toolchain
from infer.text import Text, in_pieces

SHOWN = 2  # problems of a benchmark whose answers are shown
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """Answers that are decoded side by side and kept in a unit; all end with the same texts."""

    who: str  # "model" or "base"
    decoder: str
    benchmark: str
    language: str
    temperature: float  # 0: greedy
    items: tuple[tuple[Problem, int], ...]  # a problem, and which of its answers
    index: int

    @property
    def name(self) -> str:
        """The name of its unit."""
        kind = f"sampled{self.temperature:g}" if self.temperature else "greedy"
        parts = (self.benchmark, self.language, self.who, self.decoder, kind, f"{self.index:04}")
        return "-".join(part for part in parts if part)

    def unit(self, model: Model, config: QualityConfig) -> dict[str, Any]:
        """Return its unit: the answers, and what they have in common."""
        names = ("index", "benchmark", "language", "who", "decoder", "temperature")
        return {name: getattr(self, name) for name in names} | {"answers": answer(model, self, config)}


@dataclass(frozen=True)
class Work:
    """What is judged, by whom, and what is left out."""

    text: Text  # the model's tokenizer, by which both models read the problems
    benchmarks: dict[str, list[Problem]]
    skipped: list[dict[str, str]]  # benchmark, language, reason
    decoders: list[str]  # of those in the settings: the ones that the model has
    batches: list[Batch]

    @property
    def executed(self) -> list[str]:
        """The languages in which answers are executed."""
        problems = (problem for problems in self.benchmarks.values() for problem in problems)
        return list(dict.fromkeys(problem.language for problem in problems if problem.tests))

    def made(self) -> dict[str, Any]:
        """Return what decides the result beside settings and models: the problems as read, in order."""
        digests = {name: fingerprint_problems(problems) for name, problems in self.benchmarks.items()}
        return {"skipped": self.skipped, "problems": digests}

    def facts(self, config: QualityConfig) -> dict[str, Any]:
        """Return what the result says of it, and what is needed to make the result."""
        return {
            "names": {who: Path(name).name for who, name in models(config).items()},
            "skipped": self.skipped,
            "contaminated": contaminated(config, self.benchmarks),
            "rules": {name: rules(kind_of(name, config.benchmarks[name])) for name in self.benchmarks},
            "exact": [name for name, problems in self.benchmarks.items() if not problems[0].tests],
            "batches": len(self.batches),
            "shown": [
                {"benchmark": name, "language": problem.language, "id": problem.id}
                | {"before": getattr(problem.prompt, "prefix", problem.prompt)}
                | {"after": getattr(problem.prompt, "suffix", "")}
                for name, problems in self.benchmarks.items()
                for problem in problems[:SHOWN]
            ],
        }


def models(config: QualityConfig) -> dict[str, str]:
    """Return the directories of the models."""
    return {"model": config.model} | ({"base": config.base} if config.base else {})


def contaminated(config: QualityConfig, benchmarks: Iterable[str]) -> list[str]:
    """Return a sentence for each benchmark that the model's directory says it may have been trained on.

    `lines` are left out: files of the user's own, such as the texts that data_prep held out.
    """
    listed = decontaminated(config.model)
    if listed is None:
        return []
    kinds = {name: kind_of(name, config.benchmarks[name]) for name in benchmarks}
    return [
        f"{name}: the training data of {config.model} must be decontaminated against {kind}, got data "
        f"decontaminated against {', '.join(listed) or 'nothing'}. The score may count problems that the model "
        "was trained on. Prepare data with benchmarks=all"
        for name, kind in kinds.items()
        if kind != "lines" and kind not in listed
    ]


def find_work(config: QualityConfig) -> Work:
    """Read the benchmarks and plan the answers. A base that lacks ids of a benchmark's prompts skips it.

    Raises UserError for what is no model, a base with other token ids, benchmarks that cannot be read, and
    where nothing is left that can be judged.
    """
    directory = ModelDirectory(config.model)
    text, adaptive = directory.text, directory.adaptive
    pieces = base_pieces(config.base, text) if config.base else None
    infills = adaptive is not None and adaptive.infilling is not None
    benchmarks, skipped, not_base = dict[str, list[Problem]](), list[dict[str, str]](), list[dict[str, str]]()
    for name, source in config.benchmarks.items():
        read = read_problems(name, source, seed=config.seed)
        for language in dict.fromkeys(problem.language for problem in read):
            where = {"benchmark": name, "language": language}
            problems = [problem for problem in read if problem.language == language]
            if isinstance(problems[0].prompt, Infill) and not infills:
                skipped.append({**where, "reason": "the model was not trained for infilling"})
                continue
            if problems[0].tests and (lack := missing_toolchain(language)):
                skipped.append({**where, "reason": f"{lack} is missing"})
                continue
            benchmarks.setdefault(name, []).extend(problems)
            prompts = ((problem.id, prompt_ids(text, problem.prompt)) for problem in problems)
            if pieces is not None and (missing := lacking(pieces, prompts)):
                not_base.append({**where, "reason": f"the base is not asked, since it has {missing}"})
    if not benchmarks:
        reasons = "; ".join(f"{row['benchmark']} {row['language']}: {row['reason']}" for row in skipped)
        raise UserError(f"benchmarks: no problems that can be judged here ({reasons})")
    decoders = [name for name in config.decoders if name == "plain" or adaptive]
    apart = {(row["benchmark"], row["language"]) for row in not_base}
    return Work(text, benchmarks, skipped + not_base, decoders, plan(benchmarks, config, decoders, apart))


def plan(
    benchmarks: Mapping[str, Sequence[Problem]],
    config: QualityConfig,
    decoders: Sequence[str],
    apart: Collection[tuple[str, str]] = (),
) -> list[Batch]:
    """Return the model's batches by each decoder, then the base's by plain decoding, except on the benchmarks
    and languages `apart`. Sampled answers are given to problems that are executed.
    """
    decoding = [("model", decoder) for decoder in decoders] + [("base", "plain")] * (config.base is not None)
    batches = list[Batch]()
    for (who, decoder), (benchmark, problems) in product(decoding, benchmarks.items()):
        for temperature, answers in ((0.0, 1), (config.temperature, config.samples)):
            groups: dict[tuple[str, tuple[str, ...]], list[tuple[Problem, int]]] = {}
            for problem, number in product(problems, range(answers)):
                if not temperature or problem.tests:
                    groups.setdefault((problem.language, problem.stop), []).append((problem, number))
            for (language, _), items in groups.items():
                if who == "base" and (benchmark, language) in apart:
                    continue
                for start in range(0, len(items), config.batch):
                    part = tuple(items[start : start + config.batch])
                    batches.append(Batch(who, decoder, benchmark, language, temperature, part, len(batches)))
    return batches


def answer(model: Model, batch: Batch, config: QualityConfig) -> list[Answer]:
    """Return a batch's answers, in its order.

    A prompt that leaves no room for `max_new_tokens` in the model's context gets an empty answer, marked
    `too_long`: the problem stays in the count. The seed of an answer is the same for every model and decoder.
    """
    decode = DecodeConfig(
        method=batch.decoder,
        temperature=batch.temperature,
        top_p=config.top_p if batch.temperature else 1.0,
        max_new_tokens=config.max_new_tokens,
        stop=list(batch.items[0][0].stop),
    )
    prompts = [prompt_ids(model.text, problem.prompt) for problem, _ in batch.items]
    fit = [at for at, ids in enumerate(prompts) if len(ids) + config.max_new_tokens <= model.context]
    seeds = [seed_from(config.seed, batch.benchmark, batch.language, p.id, n) for p, n in batch.items]
    steps: dict[int, list[TextStep]] = {at: [] for at in fit}
    if fit:
        for step in generate(model, [prompts[at] for at in fit], decode, seeds=[seeds[at] for at in fit]):
            steps[fit[step.sequence]].append(step)
    return [
        {
            "id": problem.id,
            "sample": number,
            "tokens": [token for step in steps.get(at, ()) for token in step.tokens],
            "pieces": in_pieces(piece for step in steps.get(at, ()) for piece in zip(step.kinds, step.texts)),
            "too_long": at not in steps,
        }
        for at, (problem, number) in enumerate(batch.items)
    ]


def prompt_ids(text: Text, prompt: str | Infill) -> list[int]:
    """Return a prompt as the tuned model was trained to read it; the base model reads the same ids."""
    return text.encode(prompt) if isinstance(prompt, str) else text.infill(prompt)


def completion(answer: Answer) -> str:
    """Return an answer's whole text, with what ended it."""
    return "".join(text for _, text in answer["pieces"])


def answer_key(benchmark: str, language: str, answer: Answer) -> str:
    """Return what answers of one problem and one text have in common."""
    return f"{seed_from(benchmark, language, answer['id'], completion(answer)):016x}"
