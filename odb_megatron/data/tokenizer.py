"""Tokenizers of transformers and of Megatron in one form; loading and training.

Nothing is downloaded, and no code that comes with a tokenizer is run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["CHATML_TEMPLATE", "TextTokenizer", "load_tokenizer", "train_bpe"]

CHATML_TEMPLATE = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{% else %}
{{ message['content'] + '<|im_end|>' }}
{%- endif %}
{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Used where a tokenizer has no chat template; also what `train_bpe` writes."""

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_MAX_CONFIG_BYTES = 64 << 20
_USE_HF = "pass --tokenizer-type HuggingFaceTokenizer with --tokenizer-model FOLDER"


class TextTokenizer:
    """What a tokenizer of transformers, or one of Megatron's, does with text.

    Of a fast tokenizer it holds a copy of the backend alone, so it may be shared between threads
    and processes, and truncation that is set later has no effect.

    Attributes:
        chat_template: in Jinja, or several by name; None for ChatML. One that was given to Megatron
            (`--chat-template`, or its metadata file) counts.
        variables: of templates: the special tokens by name.
        special: tokens that are never part of a text.

    Raises:
        ValueError: it cannot tokenize text, or formats chats by its own code.
    """

    def __init__(self, tokenizer: Any) -> None:
        is_hf = hasattr(tokenizer, "get_added_vocab")
        library = tokenizer if is_hf else getattr(tokenizer, "_tokenizer", tokenizer)
        held = (getattr(one, "tokenizer", None) for one in (tokenizer, library))
        hf: Any = next((one for one in (tokenizer, *held) if hasattr(one, "get_added_vocab")), None)
        _check_chat_format(library, hf)
        given = (getattr(one, "chat_template", None) for one in (tokenizer, hf))
        self.chat_template: str | Mapping[str, str] | None = next(filter(None, given), None)
        # False by Megatron's --tokenizer-hf-no-include-special-tokens
        self._adds_special = bool(getattr(library, "include_special_tokens", True))
        self._backend: Any = None
        self._bos_id: int | None = None
        self._is_hf = hf is not None
        if hf is None:
            self.variables: dict[str, object] = {}
            self.special: set[str] = set()
            self._encode: Callable[..., Sequence[int]] = library.text_to_ids
            eos_id = getattr(library, "eos_id", None)
            self._eos_id = eos_id if isinstance(eos_id, int) and eos_id >= 0 else None
            return
        self.variables = dict(hf.special_tokens_map)
        self.special = {*hf.get_added_vocab(), *hf.all_special_tokens}
        self._eos_id, self._bos_id = hf.eos_token_id, hf.bos_token_id
        if not getattr(hf, "is_fast", False):
            self._encode = hf.encode
            return
        self._backend = type(hf.backend_tokenizer).from_str(hf.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = bool(getattr(hf, "split_special_tokens", False))

    def __len__(self) -> int:
        return 0 if self._backend is None else int(self._backend.get_vocab_size())

    def encode(self, text: str, *, special: bool = False) -> tuple[Sequence[int], Any]:
        """Ids of a text, and the characters [start, end) of each, None where not known."""
        if self._backend is not None:
            found = self._backend.encode(text, add_special_tokens=special)
            return found.ids, found.offsets
        options = {"add_special_tokens": special} if self._is_hf else {}
        return self._encode(text, **options), None

    def encode_document(self, text: str) -> list[int]:
        """Ids with what the tokenizer adds by itself: one BOS at most, and one EOS."""
        ids = list(self.encode(text, special=self._adds_special)[0])
        if self._bos_id is not None and ids[:2] == [self._bos_id] * 2:
            ids = ids[1:]  # one from the text, one from the tokenizer
        if self._eos_id is not None and ids[-1:] != [self._eos_id]:
            ids.append(self._eos_id)
        return ids

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Each token as text."""
        if self._backend is None:
            return [str(one) for one in ids]
        return [self._backend.decode([one], skip_special_tokens=False) for one in ids]


def _check_chat_format(library: Any, hf: Any) -> None:
    kind = type(library).__name__
    own = None
    if hf is not None:
        from transformers import PreTrainedTokenizerBase

        own = getattr(type(hf), "apply_chat_template", None)
        own = None if own is PreTrainedTokenizerBase.apply_chat_template else own
    if own is not None or kind.endswith("SFTTokenizer") or "Multimodal" in kind:
        raise ValueError(
            f"{kind} formats chats by its own code, which does not tell where the assistant's text "
            f"is; {_USE_HF}, whose chat_template is used"
        )
    if hf is None and (kind.startswith("Null") or not hasattr(library, "text_to_ids")):
        raise ValueError(f"a {kind} cannot tokenize text; {_USE_HF}")


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the HF tokenizer of a folder, without network and without code from the folder.

    Raises:
        ValueError: it cannot be loaded so.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers and tokenizers raise what they like
        if code := _named_code(Path(folder)):
            raise ValueError(
                f"{folder} names its own code ({code}), which is never run: save the tokenizer "
                "with a class of transformers"
            ) from error
        raise ValueError(
            f"{folder} holds no tokenizer that can be loaded ({str(error)[:500]}): name a folder "
            "with a tokenizer.json and its tokenizer_config.json"
        ) from error
    return tokenizer


def _named_code(folder: Path) -> str:
    """Return the `auto_map` of a tokenizer's configuration as text; "" for none."""
    path = folder / "tokenizer_config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            return ""
        return str(json.loads(path.read_bytes())["auto_map"])[:200]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def train_bpe(texts: Iterable[str], *, vocab_size: int, folder: str | os.PathLike[str]) -> Path:
    """Train a byte-level BPE and save it as a folder that HF and Megatron load.

    Its special tokens are <|endoftext|> (EOS), <|im_start|>, <|im_end|> and <|pad|>, ids 0 to 3;
    its chat template is ChatML with `{% generation %}` marks. The same texts give the same files.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(texts), trainer=trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_SPECIAL_TOKENS[0],
        pad_token=_SPECIAL_TOKENS[-1],
        clean_up_tokenization_spaces=False,
        chat_template=CHATML_TEMPLATE,
    ).save_pretrained(str(folder))
    return Path(folder)
