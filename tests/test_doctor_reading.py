"""How `odb-megatron doctor` reads a command line: word by word, and every command of the pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from readme import README, commands

from odb_megatron.doctor.command_facts import gather_command, job_options
from odb_megatron.doctor.started import Started, read_command

ROOT = README.parent

PRETRAIN = "odb_megatron.megatron.pretrain"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "torchrun --nnodes 2 --nproc_per_node=8 --rdzv-backend c10d --rdzv-endpoint h:1 "
            "-m odb_megatron.run ./pretrain_gpt.py --odb --x 1",
            Started(
                by="torchrun",
                nodes=2,
                processes=8,
                script="./pretrain_gpt.py",
                via="odb_megatron.run",
                flags=("--odb", "--x", "1"),
            ),
        ),
        (
            "NCCL_DEBUG=INFO torchrun --standalone --nproc-per-node gpu a.py -m",
            Started(
                by="torchrun",
                processes=0,
                script="a.py",
                flags=("-m",),
                environment={"NCCL_DEBUG": "INFO"},
            ),
        ),
        (
            "torchrun --nnodes 1:4 --nproc-per-node 2 a.py",
            Started(by="torchrun", nodes=4, processes=2, script="a.py"),
        ),
        (
            "/opt/bin/python3 -u -X dev -m torch.distributed.run --nproc-per-node 2 a.py --b",
            Started(
                by="torchrun",
                processes=2,
                script="a.py",
                flags=("--b",),
                python="/opt/bin/python3",
            ),
        ),
        (
            "python train.py --odb",
            Started(script="train.py", flags=("--odb",), python="python"),
        ),
        ("./train.py --odb", Started(script="./train.py", flags=("--odb",))),
        (
            f"python -m {PRETRAIN} --odb",
            Started(script=PRETRAIN, is_module=True, flags=("--odb",), python="python"),
        ),
        (
            "odb-megatron pretrain --device cpu --nproc-per-node 2 --odb -- --seed 1",
            Started(
                by="odb-megatron pretrain",
                processes=2,
                script=PRETRAIN,
                is_module=True,
                on_cpu=True,
                flags=("--odb", "--seed", "1"),
            ),
        ),
        (
            "python -m odb_megatron launch --torchrun-args='--nnodes 2' -m odb_megatron.run "
            "a.py --odb",
            Started(
                by="odb-megatron launch",
                nodes=2,
                script="a.py",
                via="odb_megatron.run",
                flags=("--odb",),
                python="python",
            ),
        ),
        (
            "srun -N 2 --ntasks-per-node=4 --mpi=none env A=1 python a.py --odb",
            Started(
                by="srun",
                nodes=2,
                processes=4,
                script="a.py",
                flags=("--odb",),
                python="python",
                environment={"A": "1"},
            ),
        ),
        (
            "srun --nodes 2 -n 8 python a.py",
            Started(by="srun", nodes=2, processes=4, script="a.py", python="python"),
        ),
        (
            "srun --nodes=4 torchrun --nnodes 4 --nproc-per-node 8 a.py",
            Started(by="torchrun", nodes=4, processes=8, script="a.py"),
        ),
        (
            "sbatch --nodes 4 --gres=gpu:h100:8 launch/odb_pretrain.sbatch --odb --seed 3",
            Started(
                by="sbatch",
                nodes=4,
                processes=8,
                script="launch/odb_pretrain.sbatch",
                flags=("--odb", "--seed", "3"),
                is_job=True,
            ),
        ),
        *(
            (
                f"srun {options} python a.py --nodes 3",
                Started(
                    by="srun",
                    nodes=nodes,
                    processes=processes,
                    script="a.py",
                    flags=("--nodes", "3"),
                    python="python",
                ),
            )
            for options, nodes, processes in (
                ("-N2 -n16", 2, 8),
                ("-n16 -N 2", 2, 8),
                ("-N 2 -n 15", 2, 8),
                ("--nodes=2 --ntasks=16", 2, 8),
                ("--ntasks 16 --ntasks-per-node=8", 2, 8),
                ("-N 2-4 --ntasks-per-node 8 --", 4, 8),
                ("-lN2 -uvv", 2, 1),
                ("-p gpu -J train.py -N 2", 2, 1),
                ("-pgpu -Jtrain.py -t 4:00:00 --mem 0 -c 8 -w n1,n2", 1, 1),
                ("--job-name torchrun --output python.log -K -k -I5 --exclusive", 1, 1),
                ("--container-image a.sqsh --container-mounts /a:/b --gpu-bind=none", 1, 1),
                ("--of-a-plugin=3 -n 4", 1, 4),
            )
        ),
        (
            "srun --export=ALL,A=1,B --mpi pmix env B=2 ./a.py",
            Started(by="srun", script="./a.py", environment={"A": "1", "B": "2"}),
        ),
        (
            "sbatch -J a.sh -W --gres=nvme:3,gpu:a100:4(S:0) launch/odb_pretrain.sbatch --odb",
            Started(
                by="sbatch",
                processes=4,
                script="launch/odb_pretrain.sbatch",
                flags=("--odb",),
                is_job=True,
            ),
        ),
        (
            "torchrun -r3 -t 3 --tee=1 --nproc_per_node=2 --max-restarts 0 -m a.mod --x_y=a_b",
            Started(
                by="torchrun", processes=2, script="a.mod", is_module=True, flags=("--x_y=a_b",)
            ),
        ),
        *(
            (
                f"{wrapper} python a.py -u x",
                Started(script="a.py", flags=("-u", "x"), python="python"),
            )
            for wrapper in (
                *(
                    "nohup",
                    "exec",
                    "time -p",
                    "command",
                    "nice -n 5",
                    "ionice -c2 -n 7",
                    "setsid -w",
                ),
                *("timeout 60", "timeout -s INT --kill-after=5 60", "taskset -c 0-3", "stdbuf -oL"),
                *("numactl --cpunodebind=0 -m 0", "numactl -N0 --membind 0 --", "uv run"),
                *("uv run --frozen --python 3.12 --extra gpu", "timeout 9 nohup numactl -l"),
            )
        ),
        (
            "env -u FOO --unset=BAR A=1 python -um torch.distributed.run a.py",
            Started(
                by="torchrun",
                script="a.py",
                python="python",
                environment={"FOO": None, "BAR": None, "A": "1"},
            ),
        ),
        (
            "uv run -m odb_megatron.megatron.pretrain --odb",
            Started(script=PRETRAIN, is_module=True, flags=("--odb",), python="python"),
        ),
    ],
)
def test_read_command(text: str, expected: Started) -> None:
    assert read_command(shlex.split(text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no command: expected torchrun, odb-megatron launch"),
        ("make train", "make train: expected torchrun"),
        ("odb-megatron simulate --lengths x", "odb-megatron simulate: it trains nothing"),
        ("torchrun --nproc-per-node 2", "torchrun: expected a script behind its options"),
        ("torchrun --nproc-per-node x a.py", "--nproc-per-node x: expected a number, or gpu"),
        ("torchrun --nnodes none a.py", "--nnodes none: expected a number, or MIN:MAX"),
        ("torchrun --no-python a.sh", "torchrun --no-python: it starts no Python script"),
        ("python -c pass", "python -c: expected a script or -m module"),
        ("python -m odb_megatron.run", "-m odb_megatron.run: expected the script's path"),
        ("python -m odb_megatron.testing.run_script --x", "--x: expected a script or -m module"),
        ("srun -N 2 hostname", "hostname: expected torchrun"),
        ("srun -N 2", "nothing that it starts was found"),
        ("srun -N two python a.py", "srun: 'two' is no number of nodes"),
        ("srun -n 0 python a.py", "srun: '0' is no number of tasks"),
        ("srun --frobnicate 3 python a.py", "srun --frobnicate: not an option known here"),
        ("srun -Ny2 python a.py", "srun: 'y2' is no number of nodes"),
        ("srun -y python a.py", "srun -y: not an option known here"),
        ("srun -ly python a.py", "srun -ly (-y): not an option known here"),
        ("srun -N", "srun -N: expected a value behind it"),
        ("srun --multi-prog a.conf", "tasks start different programs"),
        ("srun -D /x python a.py", "srun -D: paths go by that folder"),
        ("srun --help", "srun --help: with it no program is started"),
        ("srun -N2 -n16 torchrun a.py", "srun starts 8 launchers on each node (torchrun)"),
        ("sbatch --wrap 'python a.py'", "sbatch --wrap: give the command in it alone"),
        ("sbatch --pty a.sbatch", "sbatch --pty: not an option known here"),
        ("torchrun --nporc-per-node=8 a.py", "torchrun --nporc-per-node: not an option known"),
        ("torchrun --nproc-per-node", "torchrun --nproc-per-node: expected a value behind it"),
        ("odb-megatron launch --torchrun-args='--x 1' a.py", "torchrun --x: not an option known"),
        ("python -y a.py", "python -y: not an option known here"),
        ("python --version", "python --version: it starts nothing"),
        ("mpirun -n 8 python a.py", "mpirun -n 8: expected torchrun"),
        ("nsys profile -o x python a.py", "nsys profile -o: expected torchrun"),
        ("env -i python a.py", "env -i: run odb-megatron doctor itself behind it"),
        ("numactl --frob python a.py", "numactl --frob: not an option known here"),
        ("timeout 60", "no command: expected torchrun"),
    ],
)
def test_what_is_no_command(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        read_command(shlex.split(text))
    assert message in str(refused.value)


def test_variables_that_are_taken_away() -> None:
    started = read_command(shlex.split("env -u A B=2 python a.py"))
    assert started.in_environment({"A": "1", "C": "3"}) == {"B": "2", "C": "3"}


def test_a_job_script_says_what_the_command_line_does_not(tmp_path: Path) -> None:
    script = tmp_path / "odb_pretrain.sbatch"
    script.write_text(
        "#!/bin/bash\n# About it\n\n#SBATCH --nodes=3\n#SBATCH -J x --gpus-per-node=8 # all\n"
        "set -e\n#SBATCH --nodes=7\n"
    )
    started = read_command(["sbatch", str(script), "--odb"], job_options=job_options)
    assert (started.nodes, started.processes) == (3, 8)
    words = ["sbatch", "-N2", "--gpus-per-node=h100:4", str(script), "--odb"]
    started = read_command(words, job_options=job_options)
    assert (started.nodes, started.processes) == (2, 4)
    assert read_command(["sbatch", "gone.sbatch", "--odb"], job_options=job_options).nodes == 1
    script.write_text("#SBATCH --comment='x\n")
    with pytest.raises(ValueError, match="No closing quotation"):
        read_command(["sbatch", str(script)], job_options=job_options)


def test_what_is_started_is_told() -> None:
    told = str(read_command(shlex.split("torchrun --nnodes 2 --nproc-per-node gpu a.py")))
    assert told == "torchrun starts a.py; processes: one per GPU on each; on 2 nodes"
    told = str(read_command(shlex.split("odb-megatron pretrain --device cpu --nproc-per-node 2")))
    assert told == f"odb-megatron pretrain starts -m {PRETRAIN}, on the CPU; processes: 2"


# --- the commands of the pages ---------------------------------------------------------------

PAGES = {
    "README.md": 5,
    "docs/quickstart.md": 1,
    "docs/slurm.md": 2,
    "docs/nemo.md": 1,
    "docs/modelopt.md": 5,
    "docs/patches.md": 1,
    "docs/versions.md": 1,
    "docs/doctor.md": 2,
    "examples/README.md": 13,
}
"""Pages, and the fewest commands that start a training in each."""


def launches(page: Path) -> list[list[str]]:
    """Commands of a page that start a training, without doctor before them."""
    found = commands(page)
    found += map(shlex.split, re.findall(r"\| `(torchrun [^`]*)` \|", page.read_text()))
    found = [
        words[words.index("--") + 1 :] if "doctor" in words and "--" in words else words
        for words in found
    ]
    own = ("launch", "pretrain")
    return [
        words
        for words in found
        if words[:1] in (["torchrun"], ["sbatch"], ["srun"])
        or (words[:1] == ["odb-megatron"] and words[1] in own)
        or "odb_megatron.elastic" in words
    ]


@pytest.mark.parametrize("name", PAGES)
def test_commands_of_the_pages_are_read_as_they_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Script, processes, nodes, flags; whether the flags are Megatron's to judge."""
    monkeypatch.chdir(ROOT)
    found = launches(ROOT / name)
    assert len(found) >= PAGES[name]
    for words in found:
        if words == ["odb-megatron", "pretrain", "..."]:
            continue
        started = read_command(words, job_options=job_options)
        text = " ".join(words)
        per_node = re.search(r"--nproc-per-node[ =](\d+)", text)
        assert started.processes == (int(per_node[1]) if per_node else 8 if started.is_job else 1)
        nodes = re.search(r"--n?nodes[ =](\d+)", text)
        assert started.nodes == (int(nodes[1]) if nodes else 1)
        assert started.on_cpu is ("--device cpu" in text)
        if started.flags != ("...",):
            assert (
                list(started.flags)
                == [word for word in words[len(words) - len(started.flags) - 1 :] if word != "--"][
                    -len(started.flags) :
                ]
            )
        facts = gather_command(started, {}, num_gpus=0, num_records=1, missing="torch")
        is_own = "pretrain_gpt.py" in started.script and started.via
        assert facts.script_exists or is_own or started.script == "...", words
        is_bridge = "bridge" in started.script
        is_core_only = "train_core_only" in started.script
        assert bool(facts.unchecked) is (is_bridge or is_core_only), words
