"""Everything that a user can set of ODB: one table, from which each host makes its own settings.

Megatron's flags are made here (`add_odb_arguments`), Bridge's `dataset.odb.*` in `bridge.settings`,
the table in README.md and `--help` from the same texts.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from odb_megatron.data.chat_record import template_arguments
from odb_megatron.data.sample import (
    MAX_WEIGHT,
    LossPer,
    SampleRules,
    count_scale,
)
from odb_megatron.errors import SettingError, host_names
from odb_megatron.megatron.topology import sync_of
from odb_megatron.plan.cost import CostCoefficients, CostModel, ModelShape
from odb_megatron.plan.padding import (
    OverlongPolicy,
    SizeRule,
    budget_length,
    shared_length,
    size_rule,
)
from odb_megatron.plan.record import Sync

__all__ = ["SETTINGS", "OdbConfig", "Setting", "add_odb_arguments", "given"]

_MAX_WARN_S = 60.0

_OVERHEAD_SHARE = 0.05
"""Overhead of a micro-batch as a share of a full one's linear cost, where nothing was measured."""


class Setting(NamedTuple):
    """What a user is told about one field, and what they give.

    Attributes:
        read: makes the field's value; a ValueError's text follows the setting's name. What Bridge
            gives has any type that YAML has, what Megatron gives is text.
        value: what holds where nothing is given.
        metavar: what stands for it in help texts; empty for a switch.
        default: `value` in words, where it does not say it itself.
        many: whether several are given.
        baseline: whether it holds without `--odb` too.
        in_bridge: whether Megatron-Bridge has it.
        dest: name among Megatron's arguments, where it is not `odb_` and the field's.
    """

    read: Callable[[Any], Any]
    value: Any = None
    metavar: str = ""
    default: str = ""
    many: bool = False
    baseline: bool = False
    in_bridge: bool = True
    dest: str = ""


def _setting(*values: Any, **more: Any) -> Any:
    return field(metadata={"setting": Setting(*values, **more)})


def _count(value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not re.fullmatch(r" *-?\d+ *", str(value)):
        raise ValueError(f"is {value!r}: expected a whole number")
    if int(value) < least:
        raise ValueError(f"must be at least {least}, got {value}")
    return int(value)


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"is {value!r}: expected a number of seconds") from None
    if not 0 < seconds < math.inf:
        raise ValueError(f"must be above 0 seconds, got {seconds:g}")
    return seconds


def _switch(value: Any) -> bool:
    if value is not True:
        raise ValueError(f"is {value!r}: give true or false")
    return True


def _one_of(choices: type[Enum], value: Enum | None) -> tuple[Callable[[Any], Enum], Any, str]:
    values = [one.value for one in choices]

    def read(word: Any) -> Enum:
        if word not in values:
            raise ValueError(f"is {word!r}: expected {', '.join(values)}")
        return choices(word)

    return read, value, "|".join(values)


def _sizes(value: Any) -> tuple[int, ...]:
    words = value if isinstance(value, (list, tuple)) else [value]
    try:
        return tuple(0 if word == "budget" else _count(word) for word in words)
    except ValueError:
        text = " ".join(map(str, words))
        raise ValueError(f"{text}: each must be a token count of at least 1, or budget") from None


def _template_args(value: Any) -> dict[str, Any]:
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        return template_arguments(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error


_HELP = {
    "enabled": "Form variable-size packed micro-batches under a token budget, online, and even "
    "out replicas' work. A step has exactly the samples that Megatron's own sampler gives it. "
    "What it needs of Megatron's flags it sets, and prints. Without it the same data is trained "
    "in Megatron's padded micro-batches.",
    "token_budget": "Most tokens of a micro-batch on one replica, padding included. Memory "
    "follows it.",
    "overlong": "What happens to a sample longer than the sequence length or the token budget: "
    "error names it and stops; truncate cuts its end; drop leaves it out; solo gives it a "
    "micro-batch of its own, over the budget but not over the sequence length. All are counted.",
    "max_bad_records": "Most records of the training data that may be left out because they "
    "cannot become samples (bad JSON, wrong types, empty, nothing to learn), over all replicas "
    "and resumes; one more ends the run, naming file and line. Evaluations, and runs without "
    "--odb, leave out any number unless it is 0. All are counted.",
    "epochs": "Passes over the training data, in place of --train-samples or --train-iters.",
    "pad_to": "Pad every micro-batch to the nearest of these token counts, by segments without "
    "loss: a few shapes, for compilers and allocators. The token budget is always one of them; "
    "budget alone gives all one shape, as CUDA graphs need it. The metrics count the padding.",
    "share_long": "Most replicas that train one sample together, each a part of it, where it is "
    "longer than the token budget or would keep the others waiting; 1 for none. At the start a "
    "check proves that the model can be shared, or the run ends.",
    "cost": "Predicted cost of a token, a token squared (summed over each sample's own length), a "
    "micro-batch and an image patch, in one unit of your choice; what is left out is 0. share is "
    "what a sample costs more where replicas share it, as a part of its cost. "
    "'odb-megatron trace LOGS --fit-cost' finds them from the times of a run.",
    "max_patches": "Most image patches of a micro-batch. A sample with more gets one of its own, "
    "counted.",
    "template_args": "Further variables of the tokenizer's chat template, as a JSON object, such "
    "as '{\"enable_thinking\": false}'. A record's own chat_template_kwargs come before them.",
    "loss_per": "What counts once in a step's loss, sum(weight * loss) / sum(weight): token takes "
    f"the data's weights (loss_mask, from 0 to {MAX_WEIGHT:g}) as they are; sample divides those "
    "of each sample by their sum, so that long answers count no more than short ones.",
    "log_dir": "Write one JSON line per optimizer step and replica into this folder: ids and "
    "lengths of samples by micro-batch, loss, gradient norm, cost, waits; and run.json, with the "
    "flags and what the run chose for itself. A resumed run goes on in the same files. Shown by "
    "'odb-megatron trace' and 'compare'.",
    "dry_run": "Check the flags and this machine, read and plan three steps by the run's own "
    "loaders, print what was found, and end with exit code 0, or 2 where something does not fit. "
    "Nothing is trained, and no checkpoint, log or series written.",
    "timeout_s": "Seconds that the trainer may wait for data that other ranks have to agree on, "
    "and that a data-loader worker has to fetch a sample. Who is waited for is named after a "
    "quarter of them, 60 at most. A rank that evaluates, saves or computes for longer trips "
    "nothing; the loss of one is noticed at once, whatever this is.",
}
"""What each setting is for, for `--help` and the documentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OdbConfig:
    """What holds in a run: the settings with defaults filled in, and what of Megatron's they need.

    Attributes:
        pad_to: ascending, with the budget; empty where micro-batches are as long as their samples.
        cost: None for what follows from the model's shape.
        max_patches: 0 for no cap.
        loss_per: None for `TOKEN` with whole weights.
        epochs: None when the run length is given in Megatron's terms.
        log_dir: None for none, and in a dry run.
        timeout_s: seconds that the trainer waits for an exchange, and a worker has for a fetch.
        sync: where replicas wait for each other.
        context: `--seq-length`.
        batch_size: `--global-batch-size`.
    """

    enabled: bool = _setting(_switch, False, baseline=True, in_bridge=False, dest="odb")
    token_budget: int = _setting(_count, None, "N", "the sequence length")
    overlong: OverlongPolicy = _setting(
        *_one_of(OverlongPolicy, OverlongPolicy.ERROR), baseline=True
    )
    max_bad_records: int = _setting(partial(_count, least=0), 0, "N", "0", baseline=True)
    epochs: int | None = _setting(_count, None, "N", in_bridge=False)
    pad_to: tuple[int, ...] = _setting(_sizes, (), "TOKENS", "as long as their samples", many=True)
    share_long: int = _setting(_count, 1, "K", "1", in_bridge=False)
    cost: CostCoefficients | None = _setting(
        lambda value: CostCoefficients.parse(str(value)),
        None,
        "linear=X,quadratic=X,overhead=X,patch=X,share=X",
        "FLOPs of the model's shape, and 5 per cent of a full micro-batch as its overhead",
    )
    max_patches: int = _setting(_count, 0, "N", "no cap")
    template_args: Mapping[str, Any] = _setting(_template_args, {}, "JSON", baseline=True)
    loss_per: LossPer | None = _setting(
        *_one_of(LossPer, None),
        "token, and weights that are no whole numbers are refused",
        baseline=True,
    )
    log_dir: str | None = _setting(str, None, "DIR", baseline=True)
    dry_run: bool = _setting(_switch, False)
    timeout_s: float = _setting(
        _seconds, None, "SECONDS", "the timeout of Megatron's process groups"
    )
    sync: Sync
    context: int
    batch_size: int

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> OdbConfig:
        """Fill in defaults.

        Raises:
            ValueError: settings that would do nothing, or values out of range: one line each.
        """
        minutes = getattr(args, "distributed_timeout_minutes", 10)  # Megatron's own default
        values = {name: setting.value for name, setting in SETTINGS.items()}
        values |= {"token_budget": args.seq_length, "timeout_s": 60.0 * minutes, **given(args)}
        budget, sizes = values["token_budget"], values["pad_to"]
        if max(sizes, default=0) > budget:
            raise SettingError(
                "{odb_pad_to} {sizes} must not be above the token budget {budget}, which is one of "
                "them always: change them, or raise {odb_token_budget}",
                sizes=" ".join(map(str, sizes)),
                budget=budget,
            )
        values["pad_to"] = tuple(sorted({*sizes, budget} - {0})) if sizes else ()
        if values["dry_run"]:
            values["log_dir"] = None
        return cls(
            **values,
            sync=sync_of(args)[0],
            context=args.seq_length,
            batch_size=getattr(args, "global_batch_size", None) or 1,
        )

    @property
    def pads_to_budget(self) -> bool:
        """Whether all micro-batches have one length."""
        return self.pad_to == (self.token_budget,)

    @property
    def warn_s(self) -> float:
        """Seconds after which a rank that does not answer is named in a warning."""
        return min(_MAX_WARN_S, self.timeout_s / 4)

    def micro_batch_length(self, multiple: int) -> int:
        """Return the tokens that every micro-batch is padded to; 0 for none."""
        return budget_length(self.token_budget, multiple) if self.pads_to_budget else 0

    def size_rule(self, multiple: int) -> SizeRule:
        """Return what samples and micro-batches are padded to."""
        return size_rule(
            self.pad_to,
            token_budget=self.token_budget,
            context=self.context,
            multiple=multiple,
        )

    @property
    def count_scale(self) -> int:
        """What weights are multiplied by; 1 without `--odb-loss-per`: nothing changes."""
        if self.loss_per is None:
            return 1
        return count_scale(self.loss_per, batch_size=self.batch_size, context=self.context)

    def sample_rules(self, *, multiple: int, max_share: int = 1) -> SampleRules:
        """Return the policies for records; without `--odb` only the context limits a sample."""
        longest = shared_length(self.token_budget, multiple, max_share)
        return SampleRules(
            context=self.context,
            token_budget=longest if self.enabled else self.context,
            multiple=multiple,
            overlong=self.overlong,
            skip_bad=self.max_bad_records > 0,
            loss_per=self.loss_per or LossPer.TOKEN,
            count_scale=self.count_scale,
            whole_weights=self.loss_per is None,
            name=host_names(),
        )

    def cost_model(self, args: argparse.Namespace) -> CostModel:
        """Return the cost model.

        Args:
            args: Megatron's, the padded vocabulary's size among them; a script whose model has a
                vision tower sets `odb_patch_tokens`, what a patch costs beside a token.
        """
        if self.cost is not None:
            return self.cost.model()
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        shape = ModelShape(
            num_layers=args.num_layers,
            hidden=args.hidden_size,
            ffn_hidden=args.ffn_hidden_size,
            query=args.num_attention_heads * args.kv_channels,
            key_value=groups * args.kv_channels,
            vocab=args.padded_vocab_size,
            gated_mlp=args.swiglu,
        )
        return CostModel.from_ratios(
            quadratic=shape.quadratic_ratio,
            fixed_tokens=_OVERHEAD_SHARE * self.token_budget,
            patch_tokens=getattr(args, "odb_patch_tokens", 0.0),
        )

    def describe(self) -> str:
        """Return the flags that reproduce this configuration, defaults included."""
        flags = ["--odb"]
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if not value or not setting.metavar or name == "log_dir":
                continue
            words = ["budget"] if name == "pad_to" and self.pads_to_budget else _words(value)
            flags += ["--" + _dest(name).replace("_", "-"), *words]
        return " ".join(flags)


SETTINGS: Mapping[str, Setting] = {
    one.name: one.metadata["setting"] for one in fields(OdbConfig) if one.metadata
}
"""The settings by their fields' names, in the order in which they are shown."""


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the settings that were given.

    Raises:
        ValueError: settings that would do nothing, or values out of range: one line each.
    """
    found = {name: getattr(args, _dest(name), None) for name in SETTINGS}
    found = {k: value for k, value in found.items() if value is not None and value is not False}
    useless = [f"{{{_dest(name)}}}" for name in found if not SETTINGS[name].baseline]
    if useless and not args.odb:
        raise SettingError(
            f"{', '.join(useless)} would do nothing without {{odb}}: add {{odb}}, or drop "
            f"{'it' if len(useless) == 1 else 'them'}"
        )
    problems: list[str] = []
    for name, value in found.items():
        try:
            found[name] = SETTINGS[name].read(value)
        except ValueError as error:
            problems.append(str(SettingError(f"{{{_dest(name)}}} {{error}}", error=error)))
    if problems:
        raise ValueError("\n".join(problems))
    return found


def _dest(name: str) -> str:
    return SETTINGS[name].dest or f"odb_{name}"


def _words(value: Any) -> list[str]:
    if isinstance(value, tuple):
        return [str(one) for one in value]
    if isinstance(value, Enum):
        return [str(value.value)]
    if isinstance(value, Mapping):
        return [shlex.quote(json.dumps(dict(value), sort_keys=True))]
    return [f"{value:g}" if isinstance(value, float) else str(value)]


def add_odb_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--odb*` flags; pass as Megatron's `extra_args_provider`."""
    group = parser.add_argument_group(title="online dynamic batching")
    for name, setting in SETTINGS.items():
        flag = "--" + _dest(name).replace("_", "-")
        text = _HELP[name]
        if setting.baseline and not setting.dest:
            text += " Holds without --odb too."
        default = setting.default or getattr(setting.value, "value", setting.value)
        if default or default is False:
            text += f" Default: {default or 'off'}."
        if not setting.metavar:
            group.add_argument(flag, action="store_true", help=text)
            continue
        nargs = "+" if setting.many else None
        group.add_argument(flag, nargs=nargs, metavar=setting.metavar, help=text)
    return parser
