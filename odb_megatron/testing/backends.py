"""`python -m odb_megatron.testing.backends --json OUT`: what attention backends do on a machine.

Each is run where it can run, and held to a float64 reference; else its calls are checked against
the recorded signature of its kernel, executed by the reference. Must not report what it has not
done.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from odb_megatron.megatron.attention.registry import BACKENDS, AttentionBackend, select
from odb_megatron.output_files import check_output
from odb_megatron.testing.backend_checks import Difference, contract, measure

__all__ = ["main", "report"]


def report(backend: AttentionBackend) -> dict[str, Any]:
    """Return what a backend does here.

    Returns:
        `installed` and, if not, `why`; the `device` it was checked on; `checked`: `ran`, `contract`
        (on a fake of its kernel) or `skipped`, with a `reason`; `max_abs_diff` of outputs and
        `gradient_diff`, relative, both None unless it ran; `contract_diff`; `ok`.
    """
    why = backend.available()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in backend.named_devices:
        device = "cpu"
    found: dict[str, Any] = {
        "installed": why is None,
        "why": why or "",
        "device": device,
        "max_abs_diff": None,
        "gradient_diff": None,
        "contract_diff": None,
    }
    if why is None and device in backend.named_devices:
        halves = device == "cuda" and backend.limits.dtypes
        dtype = torch.bfloat16 if halves else torch.float32
        result = measure(backend.load(), device=device, dtype=dtype)
        reason = f"{result.num_cases} cases in {dtype}".replace("torch.", "")
        if result.gradient is None:
            reason += ", without gradients: torch has none for it on the CPU"
        return found | {
            "checked": "ran",
            "reason": reason,
            "max_abs_diff": result.output,
            "gradient_diff": result.gradient,
            "ok": result.fits(dtype),
        }
    needs = why or f"needs {' or '.join(backend.named_devices)}"
    faked: Difference | None = contract(backend)
    if faked is None:
        return found | {"checked": "skipped", "reason": needs, "ok": True}
    return found | {
        "checked": "contract",
        "reason": f"{needs}: {faked.num_cases} cases on a fake of its kernel",
        "contract_diff": faked.output,
        "ok": faked.fits(torch.bfloat16),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all backends, print a line for each; return 1 where one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m odb_megatron.testing.backends")
    parser.add_argument("--json", type=Path, default=None, metavar="OUT", help="write this file")
    parser.add_argument("--only", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    options = parser.parse_args(arguments)
    if options.json is not None:
        try:
            check_output("--json", str(options.json))
        except ValueError as error:
            parser.error(str(error))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = select("auto", device_type=device)
        auto = f"{chosen.name}: {chosen.reason}"
    except ValueError as error:
        auto = f"none: {error}"
    results = {}
    for name in options.only:
        results[name] = found = report(BACKENDS[name])
        number = found["max_abs_diff"] if found["checked"] == "ran" else found["contract_diff"]
        figure = "" if number is None else f", largest difference {number:.1e}"
        wrong = "" if found["ok"] else "  WRONG"
        print(f"{name:<11} {found['checked']:<9} {found['reason']}{figure}{wrong}")
    print(f"auto        {auto}")
    whole = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "auto": auto,
        "backends": results,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0 if all(found["ok"] for found in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
