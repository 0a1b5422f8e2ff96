"""What `odb-megatron doctor` says of given facts, row by row.

Facts are made up here, so that every finding can be seen on any machine. Flags and data as Megatron
reads them are in test_doctor_command.py, how a command line is read in test_doctor_reading.py.
"""

from __future__ import annotations

import importlib.machinery
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.doctor import command
from odb_megatron.doctor.command import Facts, check, main
from odb_megatron.doctor.command_facts import (
    CommandFacts,
    DataFacts,
    FlagFacts,
    gather_command,
)
from odb_megatron.doctor.command_line import check_command
from odb_megatron.doctor.finding import Finding, Status, as_json, exit_code, fine, render
from odb_megatron.doctor.host import UNLIMITED, HostFacts, Load, check_host, gather_host
from odb_megatron.doctor.kernels import KernelFacts, TorchFacts, check_kernels
from odb_megatron.doctor.network import (
    Interface,
    NetworkFacts,
    _nccl_takes,
    check_network,
    gather_network,
)
from odb_megatron.doctor.packages import (
    MegatronFacts,
    PackageFacts,
    _megatron,
    _satisfies,
    check_packages,
)
from odb_megatron.doctor.quirks import QUIRKS, check_quirks
from odb_megatron.doctor.started import Started, read_command
from odb_megatron.megatron.attention.registry import BACKENDS

OK, WARNING = Status.OK, Status.WARNING
FAILURE, NOT_APPLICABLE = Status.FAILURE, Status.NOT_APPLICABLE
GIB = 1 << 30
MIB = 1 << 20

LO = Interface(name="lo", address="127.0.0.1", is_loopback=True)
ETH = Interface(name="eth0", address="10.0.0.7")
IB = Interface(name="ib0", address="10.1.0.7")

MEGATRON = MegatronFacts(version="0.19.2", folder="/site/megatron/core", has_training=True)
VERSIONS = dict.fromkeys(("numpy", "tqdm", "torch", "transformers", "psutil"), "9.9")
PACKAGES = PackageFacts(python=(3, 12, 1), versions=VERSIONS, megatron=MEGATRON)
TORCH = TorchFacts(
    version="2.13", cuda="13.0", devices=("H100",) * 8, capability=(9, 0), nccl="2.29"
)
KERNELS = KernelFacts(torch=TORCH, driver="580", unavailable=dict.fromkeys(BACKENDS, ""))
HOST = HostFacts(
    shared_total=64 * GIB,
    shared_free=63 * GIB,
    open_files=(1 << 16, 1 << 16),
    locked_memory=UNLIMITED,
    infiniband=("mlx5_0",),
    num_cores=128,
)
NETWORK = NetworkFacts(interfaces=(LO, ETH), host="node7", resolved="10.0.0.7")
FLAGS = FlagFacts(
    described="--odb",
    has_odb=True,
    backend="te",
    num_workers=2,
    replicas=8,
    context=64,
    token_budget=64,
    limit=64,
    data=(DataFacts(path="a.jsonl", num_records=9, num_read=9, longest=60, longest_at=4),),
)
STARTED = Started(
    by="torchrun",
    processes=8,
    script="odb_megatron.megatron.pretrain",
    is_module=True,
    flags=("--odb",),
)
COMMAND = CommandFacts(started=STARTED, processes=8, flags=FLAGS)
GOOD = Facts(packages=PACKAGES, kernels=KERNELS, host=HOST, network=NETWORK, command=COMMAND)


def only(findings: list[Finding], status: Status) -> list[str]:
    """Subjects of the findings of one status."""
    return [finding.subject for finding in findings if finding.status is status]


def text_of(findings: list[Finding]) -> str:
    return "\n".join(f"{one.seen}|{one.expected}|{one.way_out}" for one in findings)


def test_nothing_to_say() -> None:
    findings = check(GOOD)
    assert only(findings, FAILURE) == only(findings, WARNING) == []
    assert exit_code(findings) == 0
    subjects = {finding.subject for finding in findings}
    assert {"megatron-core", "CUDA", "NCCL", "gloo", "attention", "shared memory"} <= subjects
    assert {"open files", "GLOO_SOCKET_IFNAME", "command", "flags", "data"} <= subjects


def changed(path: str, **values: Any) -> Facts:
    """The good facts with some of a part changed: `command.flags` for a part of a part."""
    first, _, second = path.partition(".")
    part: Any = getattr(GOOD, first)
    if second:
        inner = replace(getattr(part, second), **values)
        return replace(GOOD, **{first: replace(part, **{second: inner})})
    return replace(GOOD, **{first: replace(part, **values)})


TWO = (LO, ETH, IB)
OVERLONG = DataFacts(
    path="a.jsonl", num_records=9, num_read=9, longest=99, longest_at=4, num_overlong=2
)


@pytest.mark.parametrize(
    ("facts", "status", "subject", "words"),
    [
        # packages
        (changed("packages", python=(3, 9, 1)), FAILURE, "python", "3.10 or later"),
        (
            changed("packages", python=(3, 10, 4), megatron=MegatronFacts()),
            WARNING,
            "python",
            "3.12 or later for megatron.training",
        ),
        (
            changed("packages", python=(3, 11, 4), megatron=MegatronFacts()),
            FAILURE,
            "megatron-core",
            "on Python 3.12 (here: pip install 'megatron-core<0.17', the core alone)",
        ),
        (changed("packages.megatron", version="0.15.3"), FAILURE, "megatron-core", "0.16 to 0.19"),
        (changed("packages.megatron", version="0.20.0"), WARNING, "megatron-core", "0.16 to 0.19"),
        (changed("packages.megatron", version=""), FAILURE, "megatron-core", "not installed"),
        (changed("packages.megatron", foreign="/x.py"), FAILURE, "megatron-core", "pip uninstall"),
        (
            changed("packages.megatron", has_training=False),
            FAILURE,
            "megatron.training",
            "train_core_only.py",
        ),
        (changed("packages", python=(3, 11, 7)), WARNING, "megatron.training", "Python 3.12"),
        (
            changed("packages.megatron", has_helpers=False),
            FAILURE,
            "dataset helpers",
            "/site/megatron/core/datasets has no compiled helpers",
        ),
        (changed("packages", versions={"numpy": "2"}), FAILURE, "torch", "not installed"),
        (changed("packages", versions={"torch": "2"}), FAILURE, "numpy", "pip install numpy"),
        (changed("packages", versions={"torch": "2"}), WARNING, "checkpoints", "psutil"),
        (
            changed("packages", wanted={"torch": ">=10"}),
            WARNING,
            "torch",
            "pip install 'torch>=10'",
        ),
        (changed("packages.megatron", version="0.17.1"), WARNING, "Megatron 0.17", "NaN"),
        # kernels
        (changed("kernels", torch=None, torch_error="libcudart"), FAILURE, "torch", "libcudart"),
        (changed("kernels.torch", nccl=""), FAILURE, "NCCL", "torch has none"),
        (changed("kernels.torch", has_gloo=False), FAILURE, "gloo", "plans go over gloo"),
        (changed("kernels.torch", gloo_error="no device"), FAILURE, "gloo", "no device"),
        (changed("kernels.torch", devices=()), FAILURE, "CUDA", "sees no device"),
        (changed("kernels.torch", devices=(), cuda=""), FAILURE, "CUDA", "build without CUDA"),
        (
            changed("kernels", unavailable=dict.fromkeys(BACKENDS, "not there")),
            FAILURE,
            "attention",
            "not there",
        ),
        # host
        (changed("host", shared_free=64 * MIB), FAILURE, "shared memory", "--shm-size=1g"),
        (changed("host", shared_free=GIB), WARNING, "shared memory", "8 ranks × 128 MiB"),
        (changed("host", open_files=(300, 4096)), WARNING, "open files", "ulimit -n 4096"),
        (changed("host", open_files=(100, 4096)), FAILURE, "open files", "2 workers"),
        (changed("host", open_files=(100, 100)), FAILURE, "open files", "raise the hard limit"),
        (changed("host", locked_memory=65536), WARNING, "locked memory", "mlx5_0"),
        (changed("host", num_cores=4), WARNING, "cores", "16 workers"),
        # network, on several nodes
        (
            replace(
                changed("network", interfaces=TWO),
                command=replace(COMMAND, started=replace(STARTED, nodes=2)),
            ),
            WARNING,
            "GLOO_SOCKET_IFNAME",
            "not set, 2 interfaces",
        ),
        (
            replace(
                changed("network", interfaces=TWO, resolved="127.0.1.1"),
                command=replace(COMMAND, started=replace(STARTED, nodes=2)),
            ),
            FAILURE,
            "GLOO_SOCKET_IFNAME",
            "127.0.1.1",
        ),
        (
            replace(changed("network", interfaces=TWO), command=None),
            WARNING,
            "GLOO_SOCKET_IFNAME",
            "export GLOO_SOCKET_IFNAME=eth0",
        ),
        (changed("network", gloo="eth9"), FAILURE, "GLOO_SOCKET_IFNAME", "one of eth0, lo"),
        (changed("network", nccl="=eth"), FAILURE, "NCCL_SOCKET_IFNAME", "a prefix of eth0"),
        # the command line
        (changed("command", script_exists=False), FAILURE, "script", "no module"),
        (changed("command", python_differs=True), WARNING, "interpreter", sys.executable),
        (changed("command", processes=16), FAILURE, "processes", "8 GPUs here"),
        (changed("command", flags=None, error="boom"), FAILURE, "flags", "boom"),
        (
            changed(
                "command.flags", problems=("--odb needs --calculate-per-token-loss: without it",)
            ),
            FAILURE,
            "flags",
            "add --calculate-per-token-loss",
        ),
        (changed("command.flags", problems=("a and b: drop b",)), FAILURE, "flags", "|drop b"),
        (changed("command.flags", problems=("alone",)), FAILURE, "flags", "mend what it names"),
        (changed("command.flags", unknown="unrecognized --x"), FAILURE, "flags", "--x"),
        (changed("command.flags", has_odb=False), WARNING, "--odb", "nothing of ODB runs"),
        (
            changed("command.flags", backend="", backend_problem="too small"),
            FAILURE,
            "--odb-attention",
            "too small",
        ),
        (changed("command.flags", data=(OVERLONG,)), FAILURE, "data", "a.jsonl:4"),
        (
            changed("command.flags", data=(OVERLONG,), overlong="truncate"),
            WARNING,
            "data",
            "(22 % of those read)",
        ),
        (
            changed("command.flags", data=(OVERLONG,), overlong="solo"),
            FAILURE,
            "data",
            "--odb-overlong truncate, drop",
        ),
        (
            changed("command.flags", data=(DataFacts(path="b", error="no data at b: mend"),)),
            FAILURE,
            "data",
            "b: no data at b",
        ),
        (
            changed("command.flags", data=(replace(OVERLONG, num_overlong=0, num_bad=3),)),
            FAILURE,
            "data",
            "--odb-bad-record skip",
        ),
        (
            changed(
                "command.flags",
                data=(replace(OVERLONG, num_overlong=0, num_bad=3),),
                bad_record="skip",
            ),
            WARNING,
            "data",
            "3 bad records",
        ),
    ],
)
def test_finding(facts: Facts, status: Status, subject: str, words: str) -> None:
    findings = check(facts)
    found = [one for one in findings if (one.subject, one.status) == (subject, status)]
    assert words in text_of(found), render(findings)
    assert exit_code(findings) == (status is FAILURE or bool(only(findings, FAILURE)))


def test_on_a_machine_without_gpus() -> None:
    torch = replace(TORCH, devices=(), capability=())
    kernels = replace(KERNELS, torch=torch, driver="")
    facts = replace(
        GOOD,
        kernels=kernels,
        command=replace(COMMAND, flags=replace(FLAGS, model_parallel=2, backend_problem="no GPU")),
    )
    findings = check(facts)
    assert only(findings, FAILURE) == []
    assert only(findings, WARNING) == ["processes", "CUDA_DEVICE_MAX_CONNECTIONS"]
    on_cpu = replace(COMMAND, started=replace(STARTED, on_cpu=True))
    facts = replace(facts, command=on_cpu, packages=changed("packages").packages)
    assert only(check(facts), WARNING) == only(check(facts), FAILURE) == []


def test_hidden_gpus() -> None:
    kernels = replace(KERNELS, torch=replace(TORCH, devices=()), visible="")
    (finding,) = [f for f in check_kernels(kernels, on_gpu=True) if f.subject == "CUDA"]
    assert (finding.status, finding.way_out) == (WARNING, "unset CUDA_VISIBLE_DEVICES")


def test_without_torch() -> None:
    findings = check(replace(GOOD, kernels=KernelFacts(), command=None))
    assert "CUDA, NCCL, gloo" in only(findings, NOT_APPLICABLE)
    command_facts = replace(COMMAND, flags=None, error="torch not installed")
    (flags,) = [f for f in check_command(command_facts, num_gpus=8) if f.subject == "flags"]
    assert flags.status is NOT_APPLICABLE


PADDED = Load(ranks=2, readers=2, num_workers=8, uses_nccl=False)


@pytest.mark.parametrize(
    ("load", "free", "status"),
    [
        (Load(ranks=8, num_workers=4), 400 * MIB, WARNING),  # NCCL might do with less
        (Load(ranks=1, num_workers=4), 64 * MIB, OK),  # one rank has nobody to talk to
        (Load(ranks=8, num_workers=4, uses_nccl=False), 64 * MIB, OK),  # gloo uses sockets
        (Load(ranks=8, num_workers=4, uses_nccl=False), 3 * MIB, FAILURE),
        (Load(ranks=2, readers=2, num_workers=0, uses_nccl=False), 0, OK),
        # 2 readers × 8 workers × 3 batches × 28 bytes × 65536 tokens = 84 MiB
        (replace(PADDED, batch_tokens=1 << 16), 64 * MIB, FAILURE),
        (replace(PADDED, batch_tokens=1 << 16), 96 * MIB, OK),
        (None, 64 * MIB, WARNING),
        (None, GIB, OK),
    ],
)  # fmt: skip
def test_shared_memory(load: Load | None, free: int, status: Status) -> None:
    host = replace(HOST, shared_free=free, shared_total=max(free, 1))
    finding = check_host(host, load)[0]
    assert (finding.subject, finding.status) == ("shared memory", status), finding


@given(
    ranks=st.integers(1, 8),
    workers=st.integers(0, 16),
    free=st.integers(0, 4 * GIB),
    more=st.integers(1, GIB),
)
def test_more_shared_memory_is_never_worse(ranks: int, workers: int, free: int, more: int) -> None:
    rank = {OK: 0, WARNING: 1, FAILURE: 2}
    load = Load(ranks=ranks, readers=ranks, num_workers=workers)
    less, plenty = (
        rank[check_host(replace(HOST, shared_free=size), load)[0].status]
        for size in (free, free + more)
    )
    assert plenty <= less


@pytest.mark.parametrize(
    ("network", "nodes", "status"),
    [
        (NETWORK, 4, OK),  # the host's name is its one interface
        (NETWORK, 1, OK),
        (replace(NETWORK, resolved=""), 2, FAILURE),
        (replace(NETWORK, resolved="127.0.0.1"), None, OK),
        (replace(NETWORK, interfaces=TWO, gloo="ib0"), 2, OK),
        (replace(NETWORK, interfaces=TWO, resolved="127.0.0.1"), 1, OK),
    ],
)
def test_gloo_interface(network: NetworkFacts, nodes: int | None, status: Status) -> None:
    finding = check_network(network, num_nodes=nodes)[1]
    assert (finding.subject, finding.status) == ("GLOO_SOCKET_IFNAME", status), finding


@pytest.mark.parametrize(
    ("rule", "name", "takes"),
    [
        ("ib", "ib0", True),
        ("=ib", "ib0", False),
        ("=ib0,eth0", "eth0", True),
        ("^docker,lo", "docker0", False),
        ("^docker,lo", "eth0", True),
        ("^=eth0", "eth0", False),
        ("eth0:1", "eth0", True),
    ],
)
def test_nccl_rule(rule: str, name: str, takes: bool) -> None:
    assert _nccl_takes(rule, name) is takes


def test_quirks_are_warned_of_where_flags_bring_them_about() -> None:
    (full,) = [quirk for quirk in QUIRKS if "--full-validation" in quirk.flags]
    for flags, status in (
        (["--full-validation"], WARNING),
        (["--full-validation", "--odb"], OK),
        ([], OK),
        (None, OK),
    ):
        (found,) = [f for f in check_quirks((0, 17), flags) if full.seen in f.seen]
        assert found.status is status, flags
    (shared,) = [quirk for quirk in QUIRKS if "--ckpt-format=torch" in quirk.flags]
    saves = ["--save", "a", "--context-parallel-size", "2"]
    for flags, status in (
        ([*saves, "--ckpt-format", "torch"], WARNING),
        ([*saves, "--ckpt-format=torch"], WARNING),
        ([*saves, "--ckpt-format", "torch_dist"], OK),
        (["--ckpt-format", "torch"], OK),
    ):
        (found,) = [f for f in check_quirks((0, 19), flags) if shared.seen in f.seen]
        assert found.status is status, flags
    assert [finding.status for finding in check_quirks((0, 20), [])] == [OK]


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cu130", ">=2.6", True),
        ("2.5.1", ">=2.6", False),
        ("0.20.0", "<0.20,>=0.16", False),
        ("0.19.2", "<0.20,>=0.16", True),
        ("1.0", "", True),
        ("0.9.0", "==0.9", True),
        ("1.0", "!=1.0", True),  # not looked at
    ],
)
def test_version_bounds(version: str, wanted: str, fits: bool) -> None:
    assert _satisfies(version, wanted) is fits


def test_which_megatron_is_found(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign" / "megatron"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").write_text("")
    assert _megatron([str(foreign.parent)]).foreign == str(foreign / "__init__.py")
    checkout = tmp_path / "checkout" / "megatron"
    for name in ("core/datasets", "training"):
        (checkout / name).mkdir(parents=True)
        (checkout / name / "__init__.py").write_text("")
    (checkout / "core" / "datasets" / "Makefile").write_text("all:\n")
    (checkout / "core" / "package_info.py").write_text(
        "MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = 'rc0'\n"
    )
    found = _megatron([str(checkout.parent)])
    assert found == MegatronFacts(
        version="0.20.1rc0", folder=str(checkout / "core"), has_training=True, has_helpers=True
    )
    (checkout / "core" / "datasets" / "Makefile").unlink()
    assert not _megatron([str(checkout.parent)]).has_helpers
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (checkout / "core" / "datasets" / f"helpers_cpp{suffix}").touch()
    assert _megatron([str(checkout.parent)]).has_helpers


# --- a command's script ---------------------------------------------------------------------


def test_a_script_without_odb_in_it(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("from megatron.training import pretrain\n")
    started = read_command(["torchrun", str(script), "--odb"])
    facts = gather_command(started, {}, num_gpus=1, num_records=1, missing="torch")
    (found,) = [f for f in check_command(facts, num_gpus=1) if f.subject == "script"]
    assert found.status is FAILURE
    assert "odb_megatron.run" in found.way_out
    own = script.rename(tmp_path / "mine.py")
    started = read_command(["torchrun", str(own), "--odb"])
    facts = gather_command(started, {}, num_gpus=1, num_records=1, missing="torch")
    assert only(check_command(facts, num_gpus=1), WARNING) == ["script"]
    own.write_text("from odb_megatron.megatron.host_script import with_odb\n")
    facts = gather_command(started, {}, num_gpus=1, num_records=1, missing="torch")
    assert only(check_command(facts, num_gpus=1), WARNING) == []
    gone = gather_command(
        replace(started, script=str(tmp_path / "gone.py")),
        {},
        num_gpus=1,
        num_records=1,
        missing="x",
    )
    assert only(check_command(gone, num_gpus=1), FAILURE) == ["script"]


@pytest.mark.parametrize(
    ("text", "is_checked"),
    [
        ("from megatron.training import pretrain\npretrain()", True),
        ("import argparse\nfrom megatron.training import get_args\nArgumentParser()", True),
        ("from mine import train\ntrain()", True),
        ("args = ArgumentParser().parse_args()  # no megatron.training", False),
        ("from megatron.bridge.recipes import x", False),
    ],
)
def test_scripts_whose_flags_are_not_megatrons(text: str, is_checked: bool, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(text)
    started = read_command(["torchrun", "--nproc-per-node", "8", str(script), "--odb=1"])
    facts = gather_command(started, {}, num_gpus=8, num_records=1, missing="torch")
    assert (facts.unchecked == "") is is_checked
    (found,) = [one for one in check_command(facts, num_gpus=8) if one.subject == "flags"]
    assert found.status is NOT_APPLICABLE
    assert ("torch not installed" in found.seen) is is_checked


def test_the_recipes_of_bridge_have_no_flags_of_megatrons() -> None:
    """Its flags and data are not judged; the machine is, `megatron.training` aside."""
    text = "torchrun --nproc-per-node 8 -m odb_megatron.bridge.run_recipe --recipe x train.a=1"
    started = read_command(shlex.split(text))
    gathered = gather_command(started, {}, num_gpus=8, num_records=1)
    findings = check(replace(GOOD, command=gathered))
    assert only(findings, FAILURE) == only(findings, WARNING) == []
    (found,) = [one for one in findings if one.subject == "flags"]
    assert (found.status, "--dry-run" in found.seen) == (NOT_APPLICABLE, True)
    assert {"open files", "CUDA", "processes"} & {one.subject for one in findings}
    core = replace(MEGATRON, has_training=False)
    findings = check(replace(GOOD, command=gathered, packages=replace(PACKAGES, megatron=core)))
    assert only(findings, FAILURE) == []


@pytest.mark.parametrize(
    ("text", "num_gpus", "expected"),
    [
        ("torchrun --nproc-per-node 2 a.py", 0, "run doctor on a node of the job (srun --pty)"),
        ("srun -N2 -n4 python a.py", 0, "run doctor on a node of the job (srun --pty)"),
        ("sbatch a.sbatch --odb", 0, "run doctor on a node of the job (srun --pty)"),
        (
            "odb-megatron pretrain --odb",
            0,
            "run doctor on a node of the job (srun --pty), or add --device cpu to try it",
        ),
        ("srun -n 16 python a.py", 8, "--ntasks-per-node 8, and -N for the number of nodes"),
        ("torchrun --nproc-per-node 16 a.py", 8, "--nproc-per-node 8"),
    ],
)
def test_the_way_out_is_one_of_that_launcher(text: str, num_gpus: int, expected: str) -> None:
    started = read_command(shlex.split(text))
    facts = CommandFacts(started=started, processes=started.processes or 1, flags=FLAGS)
    findings = check_command(facts, num_gpus=num_gpus)
    (found,) = [one for one in findings if one.subject == "processes"]
    assert found.way_out == expected


# --- the command itself ----------------------------------------------------------------------


def test_facts_of_this_machine() -> None:
    host = gather_host()
    assert host.num_cores >= 1
    assert host.open_files[0] > 0
    network = gather_network({"GLOO_SOCKET_IFNAME": "lo"})
    assert "lo" in {one.name for one in network.interfaces if one.is_loopback}
    assert check_network(network, num_nodes=2)[1].status is OK


def test_main(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def gather(environment: Any, *, started: Started | None, num_records: int) -> Facts:
        seen.append((started, num_records))
        return replace(changed("host", shared_free=MIB), command=COMMAND if started else None)

    monkeypatch.setattr(command, "gather", gather)
    assert main([]) == 0
    assert seen == [(None, 2000)]
    assert "warning" not in capsys.readouterr().out.splitlines()[-1]
    out = tmp_path / "found.json"
    assert main(["--json", str(out), "--records", "5", "--", "torchrun", "a.py", "--odb"]) == 1
    assert seen[1] == (Started(by="torchrun", script="a.py", flags=("--odb",)), 5)
    assert "doctor: " in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["command"] == ["torchrun", "a.py", "--odb"]
    assert (report["exit_code"], report["counts"]["failure"]) == (1, 1)
    (shared,) = [one for one in report["checks"] if one["status"] == "failure"]
    assert shared["subject"] == "shared memory"
    assert shared["seen"].startswith("1 MiB free")
    assert main(["--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["command"] == []
    assert "doctor: " in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["torchrun", "a.py"], "a command to check comes behind --"),
        (["--", "make", "train"], "make train: expected torchrun"),
        (["--records", "0"], "not a whole number of at least 1"),
        (["--json", "no/such/folder/x.json"], "there is no folder 'no/such/folder'; make it"),
        (["--json", "/tmp"], "--json /tmp is a folder: name a file in it"),
        (["--json", "/proc/foo"], "--json /proc/foo cannot be written ("),
    ],
)
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_rendering_and_counting() -> None:
    findings = [
        fine("a", "word " * 40),
        Finding(subject="long subject", status=WARNING, seen="b", expected="c", way_out="d"),
        Finding(subject="e", status=NOT_APPLICABLE, seen="f"),
    ]
    lines = render(findings).splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert lines[-1] == "doctor: 1 ok, 1 warning, 1 not applicable"
    assert "way out:  d" in [line.strip() for line in lines]
    assert as_json(findings)["counts"] == {
        "ok": 1,
        "warning": 1,
        "failure": 0,
        "not applicable": 1,
    }
    with pytest.raises(AssertionError):
        Finding(subject="x", status=FAILURE, seen="y")


def test_packages_of_a_core_only_loop() -> None:
    core = replace(PACKAGES, megatron=replace(MEGATRON, version="0.16.1", has_training=False))
    findings = check_packages(core, on_gpu=False, needs_training=False)
    assert only(findings, WARNING) == ["megatron.training"]
