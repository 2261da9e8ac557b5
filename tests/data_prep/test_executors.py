"""Ray really runs, on a cluster of this machine; Slurm's scripts run through a stub of its commands."""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from conf import UserError
from conf.stage import ROOT
from data_prep.executors import _shell_setup, run_ray
from data_prep.job import Job
from tests.conftest import data_settings
from tests.data_prep.conftest import content, run

Args = Callable[..., list[str]]

needs_ray = pytest.mark.skipif(
    " " in sys.executable, reason="Ray starts no worker from a path with a space"
)


@needs_ray
def test_ray_makes_the_same_bytes(
    args: Args, expected: dict[str, bytes], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    run(args("executor=ray", "workers=2"))
    assert content(tmp_path / "out") == expected


@needs_ray
def test_a_task_that_fails_on_ray_is_reported(args: Args, tmp_path: Path) -> None:
    """datatrove keeps a task's error in its log and goes on."""
    pytest.importorskip("ray")
    with pytest.raises(
        UserError, match=r"1 of 1 tasks of phase 'tally' failed. See .*out\.logs"
    ):
        run(args("executor=ray", "max_unreadable=0"))
    assert not (tmp_path / "out").exists()


def test_a_cluster_that_ray_start_made_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside `ray start --head`, and without RAY_ADDRESS, it was a ValueError about num_cpus."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python")
    joined = Mock(
        side_effect=[
            ValueError("num_cpus must not be provided"),
            ConnectionError("here"),
        ]
    )
    monkeypatch.setattr(ray, "init", joined)
    with pytest.raises(UserError, match="got here"):
        run_ray(Job(data_settings("out"), Path("out")))
    assert (
        "num_cpus" in joined.call_args_list[0].kwargs
        and "num_cpus" not in joined.call_args_list[1].kwargs
    )


def test_a_python_that_ray_cannot_start_is_refused(
    args: Args, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a path with a space no worker ever started, and the command waited for ever."""
    monkeypatch.setattr(sys, "executable", "/a b/python")
    with pytest.raises(UserError, match="needs a Python whose path has no space"):
        run(args("executor=ray"))


STUBS = {
    # Runs every task of the array at once; the jobs before it have ended when it is called.
    "sbatch": """#!/bin/bash
script="${@: -1}"; n=$(cat "$STUB/jobs" 2>/dev/null || echo 100); echo $((n + 1)) > "$STUB/jobs"
cp "$script" "$STUB/$n.sh"; echo "$@" > "$STUB/$n.args"
last=$(grep -oP '#SBATCH --array=0-\\K[0-9]+' "$script" || echo 0)
for task in $(seq 0 $last); do
    SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=node1 SLURM_JOB_ID=$n bash "$script" > "$STUB/$n.$task.out" 2>&1
done
echo "Submitted batch job $n"
""",
    "srun": '#!/bin/bash\nwhile [[ "$1" == -* ]]; do [[ "$1" == -n ]] && shift; shift; done; exec "$@"\n',
    "scontrol": "#!/bin/bash\necho node1\n",
    "squeue": "#!/bin/bash\necho 100 cpu data_prep-finish\n",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings for a cluster whose commands are stubs."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB", str(tmp_path))
    return [
        "executor=slurm",
        "workers=2",
        "slurm.partition=cpu",
        "slurm.setup=export SET_UP=1",
    ]


def test_a_folder_of_a_job_in_the_queue_and_a_wrong_partition_are_refused(
    args: Args, tmp_path: Path, slurm: list[str]
) -> None:
    """A second command emptied the folder under the running jobs."""
    (tmp_path / "sbatch").write_text("#!/bin/bash\nexit 1\n")
    with pytest.raises(UserError, match="sbatch refused the jobs"):
        run(args(*slurm))
    (tmp_path / "out.logs" / "slurm_job").write_text("100")
    with pytest.raises(UserError, match="got Slurm job 100 in the queue"):
        run(args(*slurm))


def test_slurm_jobs_make_the_same_bytes(
    args: Args, expected: dict[str, bytes], tmp_path: Path, slurm: list[str]
) -> None:
    """The scripts are those that a cluster would get; the stub runs them on this machine. From a checkout
    whose path has a space, no job found its programs.
    """
    run(args(*slurm))
    assert content(tmp_path / "out") == expected
    scripts = {path.stem: path.read_text() for path in tmp_path.glob("*.sh")}
    encode = next(
        text for text in scripts.values() if "job-name=data_prep-encode" in text
    )
    for line in (
        "--array=0-1\n",
        "--partition=cpu",
        "--mem-per-cpu=2G",
        "export SET_UP=1",
    ):
        assert line in encode
    message = {
        text: (tmp_path / f"{name}.args").read_text() for name, text in scripts.items()
    }
    after = [
        args for text, args in message.items() if "job-name=data_prep-finish" in text
    ]
    assert any("--dependency=afterok:" in args for args in after)


def test_workers_elsewhere_find_the_packages_where_nothing_is_installed() -> None:
    """Their PYTHONPATH was a folder too deep: from a checkout no task of Ray or Slurm found its packages."""
    assert (ROOT / "data_prep" / "executors.py").is_file()
    assert f"PYTHONPATH={shlex.quote(str(ROOT))} " in _shell_setup("")
