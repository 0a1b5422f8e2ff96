"""`odb-megatron inspect`: the order of work, and where the findings go.

Must not judge arguments: `options` does. Imports numpy and what reads data only after the arguments
are parsed, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from odb_megatron import __version__
from odb_megatron.inspection.options import (
    check_outputs,
    data_request,
    fill_in,
    make_parser,
    refuse,
    training_setting,
)

if TYPE_CHECKING:
    from odb_megatron.inspection.findings import Findings
    from odb_megatron.inspection.lengths import Reading
    from odb_megatron.inspection.setting import TrainingSetting

__all__ = ["inspect", "main", "parse"]


def main(argv: Sequence[str]) -> int:
    """Inspect, print, write.

    Args:
        argv: arguments behind `odb-megatron inspect`.

    Raises:
        SystemExit: arguments that do not parse or cannot be used (2), or `--help` (0).
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    text_to = sys.stderr if options.json == "-" else sys.stdout
    try:
        check_outputs(options)
        if options.show:
            _show(options, text_to)
            return 0
        findings = inspect(options)
        from odb_megatron.inspection.report import as_json
        from odb_megatron.inspection.text import as_text

        print(as_text(findings), file=text_to)
        if options.json:
            values = {**as_json(findings), "versions": _versions()}
            text = json.dumps(values, indent=1) + "\n"
            if options.json == "-":
                sys.stdout.write(text)
            else:
                Path(options.json).write_text(text, encoding="utf-8")
        _write_pictures(options, findings, argv)
    except BrokenPipeError:
        raise  # the reader of the output has left: no argument is to blame
    except (ValueError, OSError) as error:
        refuse(str(error), parser)
    except RuntimeError as error:  # of the reader: a file or template, not a record, is to blame
        refuse(f"training would stop: {error}", parser)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options for `inspect`; a SystemExit for arguments that do not parse."""
    return make_parser().parse_args(argv)


def inspect(options: argparse.Namespace) -> Findings:
    """Read, plan, advise.

    Args:
        options: as parsed by the command line; defaults are filled in.

    Raises:
        ValueError: an argument or the data cannot be used; says which, and the hint.
    """
    fill_in(options)
    setting = training_setting(options)
    reading = _read(options)
    from odb_megatron.inspection.advice import advise, run_advised
    from odb_megatron.inspection.findings import Findings
    from odb_megatron.inspection.logits import LogitsMemory
    from odb_megatron.inspection.prediction import (
        ADVISED,
        ODB,
        fixed_batch_like,
        predict,
        simulable,
    )
    from odb_megatron.inspection.setting import require_samples
    from odb_megatron.simulation.schedules import Stream

    vocab = _vocab(options, setting, reading)
    if options.max_logits_gib is not None and not vocab:
        raise ValueError(
            f"--max-logits-gib {options.max_logits_gib:g} cannot be kept to: the vocabulary is not "
            "known; give vocab=N in --model-shape"
        )
    if setting.shape is not None:
        setting = replace(setting, shape=replace(setting.shape, vocab=vocab))
    kept = setting.keep(reading.positions)
    cost = setting.cost(kept.lengths)
    simulated = setting.simulated(cost)
    epoch = kept.positions[: options.train_samples or None]
    part = require_samples(epoch[: simulable(simulated, len(epoch))])
    stream = Stream.of_epochs(part, epochs=1, cost=cost, seed=setting.seed)
    runs = predict(stream, simulated, progress=_say)
    logits = None
    if vocab:
        logits = LogitsMemory(
            token_budget=setting.token_budget, vocab=vocab, tp=setting.tp, cp=setting.cp
        )
    advice = None
    if not options.no_advice:
        advice = advise(
            kept.positions,
            setting,
            cost,
            vocab=vocab,
            max_logits_gib=options.max_logits_gib,
            progress=_say,
        )
        if advice.advised.token_budget != setting.token_budget:
            runs[ADVISED] = run_advised(advice, part, setting, cost)
    return Findings(
        reading=reading,
        setting=setting,
        kept=kept,
        stream=stream,
        runs=runs,
        logits=logits,
        advice=advice,
        fixed=fixed_batch_like(runs.get(ADVISED, runs[ODB]), token_budget=setting.token_budget),
        epoch_samples=options.train_samples or reading.num_records,
        is_run=bool(options.train_samples),
    )


def _read(options: argparse.Namespace) -> Reading:
    from odb_megatron.inspection.lengths import read_length_file
    from odb_megatron.inspection.reading import read_data

    if options.lengths is not None:
        return read_length_file(options.lengths).part(
            first=options.train_samples, most=options.max_samples, seed=options.seed
        )
    request = data_request(options)
    from tqdm import tqdm

    with tqdm(
        unit="record", desc="reading", file=sys.stderr, disable=not sys.stderr.isatty()
    ) as bar:

        def start(total: int) -> Callable[[int], None]:
            bar.reset(total)
            return advance

        def advance(num: int) -> None:
            bar.update(num)

        return read_data(request, start=start)


def _vocab(options: argparse.Namespace, setting: TrainingSetting, reading: Reading) -> int:
    """Return the padded vocabulary: as given, or the tokenizer's; 0 for unknown."""
    from odb_megatron.inspection.logits import padded_vocabulary

    vocab = setting.shape.vocab if setting.shape is not None else 0
    vocab = vocab or reading.vocab_size
    if vocab < 1:
        return 0
    return padded_vocabulary(vocab, divisible_by=options.vocab_divisible_by, tp=setting.tp)


def _write_pictures(options: argparse.Namespace, findings: Findings, argv: Sequence[str]) -> None:
    if options.plot is None and options.html is None:
        return
    from odb_megatron.inspection.charts import all_charts
    from odb_megatron.inspection.page import page_of
    from odb_megatron.pages import write_page, write_png

    charts = all_charts(findings)
    if options.plot is not None:
        write_png(Path(options.plot), charts)
    if options.html is not None:
        write_page(Path(options.html), page_of(findings, charts, argv))


def _show(options: argparse.Namespace, text_to: TextIO) -> None:
    """Print records token by token, and write one object for each."""
    from odb_megatron.data.sample import as_lines
    from odb_megatron.inspection.reading import show_records

    fill_in(options)
    objects = []
    for place, shown in show_records(data_request(options), options.show):
        learnt = sum(map(bool, shown["loss"]))
        print(f"{place}: {len(shown['ids'])} tokens, {learnt} learnt (+)", file=text_to)
        print(f"template: {shown['template']}", file=text_to)
        print("\n".join(as_lines(shown, colour=text_to.isatty())), file=text_to)
        objects.append(json.dumps(shown, ensure_ascii=False) + "\n")
    if options.json == "-":
        sys.stdout.write("".join(objects))
    elif options.json:
        Path(options.json).write_text("".join(objects), encoding="utf-8")


def _versions() -> dict[str, str]:
    import numpy

    return {
        "odb_megatron": __version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def _say(name: str) -> None:
    if sys.stderr.isatty():
        print(f"... {name}", file=sys.stderr, flush=True)
