"""Test the launch scripts with stubs in place of Slurm's commands and Python."""

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.markdown import Command
from tests.test_docs import check

ROOT = Path(__file__).parents[2]

RECORD = """[[ $1 != -c ]] || { echo 2; exit; }  # GPUs
{ printf "%q " "$@"; echo; } >>"$CALLS"
"""


def stub(folder: Path, **scripts: str) -> None:
    """Write executables that replace commands of these names."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with a copy of the launch scripts and an empty virtual environment."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / "launch" / "setup.sh").write_text("")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    return folder


def launch(
    project: Path,
    script: str,
    *arguments: str,
    folder: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script with the stubs in the project's parent folder first in PATH.

    The current folder is `folder`, by default the project.
    """
    variables = ("NODES", "HEAD", "RUN", "RANKS", "OMP_NUM_THREADS")
    inherited = {name: os.environ[name] for name in os.environ if name not in variables}
    path = f"{project.parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(project / "launch" / script), *arguments],
        cwd=folder or project,
        env=inherited | {"PATH": path} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (75, True), (1, False)])
def test_a_job_that_saved_before_its_limit_is_queued_again(
    code: int, requeued: bool, project: Path
) -> None:
    stub(
        project.parent,
        srun=f'echo "srun $* NODES=$NODES HEAD=$HEAD RUN=$RUN"; exit {code}',
        scontrol='[[ $1 != show ]] && echo "scontrol $*" || printf "node7\\nnode8\\n"',
    )
    job = {
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_SUBMIT_DIR": str(project),
        "SLURM_CPUS_ON_NODE": "96",
    }
    run = launch(project, "train_slurm.sh", "out=a b", **job)
    assert run.returncode == code, run.stderr
    assert "train_multinode.sh out=a b NODES=2 HEAD=node7:29400 RUN=42" in run.stdout
    assert "srun --cpus-per-task=96 " in run.stdout, "srun gave the task one core"
    assert ("scontrol requeue 42" in run.stdout) == requeued


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"RANKS": "8"}, "4"),
        ({}, "16"),
        ({"RANKS": "gpu"}, "1"),
    ],
)
def test_every_rank_gets_its_share_of_the_cores(
    environment: dict[str, str], threads: str, project: Path
) -> None:
    """Bug: torchrun sets one thread for each rank, so an offloaded optimizer used one of 32 cores."""
    gpus = {"nvidia-smi": "echo GPU 0; echo GPU 1"}
    python = 'echo "threads $OMP_NUM_THREADS"'
    stub(project.parent, python=python, nproc="echo 32", **gpus)
    run = launch(project, "train.sh", **environment)
    assert run.stdout == f"threads {threads}\n", run.stderr


def called_by(
    project: Path, script: str, *arguments: str, **environment: str
) -> list[str]:
    """Run a recipe with stubs; check that the settings of each call compose; return the modules."""
    stub(project.parent, python=RECORD)
    calls = project.parent / "calls"
    run = launch(project, script, *arguments, CALLS=str(calls), **environment)
    assert run.returncode == 0, run.stderr
    called = []
    for line in calls.read_text().splitlines():
        words = shlex.split(line)
        module, *overrides = words[words.index("-m") + 1 :]
        result = check(Command(module, tuple(overrides)))
        assert result is None, result
        called.append(module)
    return called


TEXT = [
    "train.convert",
    "data_prep",
    "infer.regenerate",
    "infer.regenerate",
    "data_prep",
    "data_prep",
]
MADE = [*TEXT, "train", "train.export"]
DRAFT = ["train.convert", "train", "train.export"]


def test_the_demo_runs_every_stage_with_settings_that_compose(project: Path) -> None:
    called = called_by(project, "demo.sh", str(project.parent / "out"))
    assert called == [*MADE, "infer.bench", "infer.bench", "infer.bench.compare"]


def test_the_long_recipe_also_makes_a_draft_model(project: Path) -> None:
    called = called_by(project, "smollm2.sh", str(project.parent / "out"))
    assert called == [*MADE, *DRAFT, "infer.bench"]


@pytest.mark.parametrize(
    ("ranks", "start"),
    [
        ("1", ""),
        ("3", "{launch}/torchrun.py --standalone --nproc_per_node 3 "),
        ("", "{launch}/torchrun.py --standalone --nproc_per_node 2 "),  # one per GPU
    ],
)
def test_an_evaluation_starts_torchrun_only_for_several_ranks(
    ranks: str, start: str, project: Path
) -> None:
    stub(project.parent, python=RECORD, **{"nvidia-smi": ""})
    calls = project.parent / "calls"
    arguments = ("a/model/", "base", "out=b c", "count=2")
    run = launch(project, "evaluate.sh", *arguments, RANKS=ranks, CALLS=str(calls))
    assert run.returncode == 0, run.stderr
    settings = r"model=a/model out=a/model-report base=base out=b\ c count=2"
    start = start.format(launch=project / "launch")
    assert calls.read_text() == f"{start}-m infer.bench {settings} \n"


@pytest.mark.parametrize("failing", ["", "ruff", "mypy", "lint-imports", "python"])
def test_every_check_has_to_pass(failing: str, project: Path) -> None:
    """mypy and lint-imports run in parallel to the tests; their output follows the tests' output."""
    for name in ("ruff", "mypy", "lint-imports", "python"):
        end = f"echo '{name} ended'; exit {3 if name == failing else 0}"
        stub(project.parent, **{name: f'printf "%q " "$@"\nsleep 0.1\n{end}'})
    run = launch(project, "test.sh", "-k", "a b")
    assert bool(run.returncode) == bool(failing)
    if failing != "ruff":
        *_, tests, types, contracts = run.stdout.splitlines()
        assert tests.endswith("-k a\\ b python ended") and " -n 2 " in tests
        assert types == "mypy ended" or types.endswith(" mypy ended")
        assert contracts == "--no-cache lint-imports ended"


@pytest.mark.parametrize("code", [(), ("data.path=STARCODER", "benchmarks=all")])
def test_qwens_recipe_runs_every_stage_with_settings_that_compose(
    project: Path, code: tuple[str, ...]
) -> None:
    file = project.parent / "model.gguf"
    file.touch()
    out = project.parent / "out"
    files = {"MBPP": "mbpp.jsonl", "INFILLING": "infilling.jsonl.gz"}
    files |= {"CHAT": "chat.jsonl"} if code else {}
    for name in files.values():
        (project / name).touch()
    called = called_by(project, "qwen.sh", str(file), str(out), *code, **files)
    trained = ["train", "train.export"]
    assert called == [
        "train.convert",
        *["data_prep"] * 2,  # sequences of 2,048 tokens, and in pieces
        *["infer.regenerate"] * 3,  # documents, questions, prompts
        *["data_prep"] * 3,
        *trained,
        *trained,
        "infer.bench",
        *["infer.bench"] * 2,  # for base and gated
        "infer.bench.compare",
        "data_prep",  # shorter sequences, since there is no GPU
        *trained,
        *["infer.bench"] * 3,
        "infer.bench.compare",
    ]
    lines = (project.parent / "calls").read_text().splitlines()
    assert f"gguf={file}" in shlex.split(lines[0])
    answering = [line for line in lines if " prompts=" in line and "regenerate" in line]
    assert len(answering) == bool(code)
    assert all("chat.jsonl" in line for line in answering)
    compared = [line for line in lines if "infer.bench.compare" in line]
    for model in ("base", "dual", "gated"):
        assert f"'{out}/tables/{model}'" in shlex.split(compared[-1])[-1]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("demo.sh", ("my out",)),
        ("pipeline.sh", ("demo", "my out", "1", "1", "0.1")),
        ("qwen.sh", ("owner/name", "my out")),
    ],
)
def test_a_recipe_takes_paths_relative_to_the_callers_folder(
    script: str, arguments: tuple[str, ...], project: Path
) -> None:
    """Bug: started in another folder, they wrote to the project's folder, and read MBPP there after hours."""
    folder = project.parent / "elsewhere"
    folder.mkdir()
    (folder / "mbpp.jsonl").touch()
    stub(project.parent, python=RECORD)
    calls = project.parent / "calls"
    given = {"CALLS": str(calls), "MBPP": "mbpp.jsonl"}
    run = launch(project, script, *arguments, folder=folder, **given)
    assert run.returncode == 0, run.stderr
    lines = [shlex.split(line) for line in calls.read_text().splitlines()]
    outs = [[word for word in line if word.startswith("out=")] for line in lines]
    written = [words[-1] for words in outs if words]
    assert all(word.startswith(f"out={folder}/my out/") for word in written)
    read = {word for line in lines for word in line if "mbpp" in word}
    assert read == (
        {f"quality.mbpp={folder}/mbpp.jsonl"} if "qwen" in script else set()
    )
    run = launch(project, "demo.sh", "--out", folder=folder)
    assert run.returncode == 2 and "OUT must be a folder" in run.stderr
    run = launch(project, "qwen.sh", "owner/name", MBPP="absent")
    assert run.stderr == "error: MBPP must be a file, got absent. Check the path\n"


def test_tables_have_both_orders_of_infilling(project: Path) -> None:
    """Bug: for CodeLlama, which has published spm, both runs of tables.sh were in spm."""
    stub(project.parent, python=RECORD)
    calls = project.parent / "calls"
    given = {"CALLS": str(calls), "INFILLING": "lines.jsonl"}
    run = launch(project, "tables.sh", "out", "owner/base", "my/model", **given)
    assert run.returncode == 0, run.stderr
    *measured, compared = map(shlex.split, calls.read_text().splitlines())
    assert [words.count("quality.order=both") for words in measured] == [1, 1]
    folders = [f"'{Path(words[-1].removeprefix('out='))}'" for words in measured]
    assert compared[-1] == f"reports=[{','.join(folders)}]"


def test_models_of_one_name_are_refused_before_the_first_is_measured(
    project: Path,
) -> None:
    """Bug: the second report had the folder of the first, and was refused after hours."""
    run = launch(project, "tables.sh", "out", "base", "a/model", "b/model/")
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert "different folder names" in run.stderr and "a/model b/model" in run.stderr


def test_a_training_without_a_gpu_needs_ranks(project: Path) -> None:
    """Bug: torchrun ended in a traceback, "Cuda is not available"."""
    stub(project.parent, python="[[ $1 != -c ]]", **{"nvidia-smi": "exit 9"})
    run = launch(project, "train.sh", "out=x")
    assert run.returncode == 2 and run.stderr.startswith("error: RANKS must be")
    assert launch(project, "train.sh", "out=x", RANKS="1").returncode == 0


@pytest.mark.parametrize(
    ("script", "arguments", "given", "message"),
    [
        ("evaluate.sh", ("m",), {"RANKS": "0"}, "RANKS must be a number of processes"),
        ("train.sh", ("out=x",), {"RANKS": "x"}, "RANKS must be a number of processes"),
        ("tables.sh", ("it's", "m"), {}, "OUT must be a folder without quotes"),
        ("tables.sh", ("-x", "m"), {}, "OUT must be a folder without quotes"),
        ("tables.sh", ("o", "m"), {"MBPP": "it's"}, "MBPP must be a file without"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(
    script: str,
    arguments: tuple[str, ...],
    given: dict[str, str],
    message: str,
    project: Path,
) -> None:
    """Bug: tracebacks and shell errors, for a folder with a quote after all models were measured."""
    run = launch(project, script, *arguments, **given)
    assert run.returncode == 2 and run.stderr.startswith(f"error: {message}")
    assert run.stderr.count("\n") == 1


def test_a_script_says_what_it_needs(project: Path) -> None:
    """Bug: train.sh --help asked for RANKS; a wrong PYTHON was replaced by another Python."""
    assert launch(project, "train.sh", "--help").stdout.startswith("Train on all GPUs")
    shutil.rmtree(project / ".venv")
    run = launch(project, "train.sh", "out=x", RANKS="1")
    assert run.returncode == 2 and "Run bash launch/setup.sh first" in run.stderr
    shutil.copy(ROOT / "launch" / "setup.sh", project / "launch")
    (project / "requirements.lock").touch()
    run = launch(project, "setup.sh", PYTHON="python9.9")
    assert (
        run.returncode == 2 and "python9.9 must be Python 3.11 or newer" in run.stderr
    )


def torchrun(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run launch/torchrun.py with two processes that execute this code."""
    (folder / "worker.py").write_text(
        f"import os, sys\nrank = os.environ['RANK']\n{code}"
    )
    script = str(ROOT / "launch" / "torchrun.py")
    return subprocess.run(
        [sys.executable, script, "--standalone", "--nproc_per_node=2", "worker.py"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_the_message_of_a_rank_is_the_last_one(tmp_path: Path) -> None:
    """Bug: after a user's mistake torchrun logged an error, printed its own traceback and ended with 1."""
    mistake = """
if rank == "1":
    import time
    time.sleep(30)
print("error: k must be 1", file=sys.stderr)
sys.exit(2)
"""
    run = torchrun(mistake, tmp_path)
    assert (run.returncode, run.stderr) == (2, "error: k must be 1\n")
    run = torchrun("raise RuntimeError('a bug')", tmp_path)
    assert run.returncode == 1
    assert "RuntimeError: a bug" in run.stderr and "ChildFailedError" in run.stderr


@pytest.mark.parametrize("script", ["qwen.sh", "tables.sh"])
def test_a_recipe_without_arguments_prints_one_line(project: Path, script: str) -> None:
    run = launch(project, script)
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert run.stderr.startswith("error: the arguments must be")
    assert launch(project, script, "--help").stdout.count("\n") > 4


def write_wheel(folder: Path, name: str, requires: str = "") -> None:
    """Write version 1 of an empty package."""
    info = f"{name}-1.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{requires}"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")


def test_setup_skips_a_python_that_does_not_start(tmp_path: Path) -> None:
    """pyenv's python3.11 may only print that this version is not selected.

    Setup must also complete a .venv without pip, and only warn if the package that
    model=smollm2 needs cannot be installed.

    Bug: PyTorch's usual build for Linux could not be imported, because setup left out
    its libraries for GPUs: the lock, made with the build for CPUs, does not have them.
    """
    for folder in ("launch", "programs", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    write_wheel(tmp_path, "framework", "Requires-Dist: gpu-libraries\n")
    write_wheel(tmp_path, "gpu_libraries")
    (tmp_path / "requirements.lock").write_text("framework==1\n")
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    script = shutil.copy(ROOT / "launch" / "setup.sh", tmp_path / "launch")
    python = f'exec "{sys.executable}" "$@"'
    stub(tmp_path / "programs", **{"python3.11": "exit 127", "python3.12": python})
    path = f"{tmp_path / 'programs'}:{os.environ['PATH']}"
    packages = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    env = os.environ | packages | {"PATH": path}
    run = subprocess.run(["bash", script], env=env, check=True, stderr=subprocess.PIPE)
    assert b"warning: model=smollm2" in run.stderr
    for name in ("bin/pip", "installed.lock"):
        assert (tmp_path / ".venv" / name).exists()
    assert list((tmp_path / ".venv").glob("lib/*/site-packages/gpu_libraries-1*"))
