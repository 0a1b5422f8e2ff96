"""Image parts of a chat record: each becomes a text part, and its source is listed.

Pure: opens nothing. What a record means otherwise is `chat_record`'s part, which sees text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

__all__ = ["MAX_IMAGES", "lift_images"]

MAX_IMAGES = 256
"""Most pictures of a record."""

_KINDS = ("image", "image_url")
_SOURCES = ("image", "image_url", "path", "url")
_COLUMNS = ("images", "image")


def lift_images(record: Mapping[str, object], text: str) -> tuple[dict[str, object], list[str]]:
    """Return the record with `text` for each image part, and the pictures in order.

    A part is of type `image_url` (OpenAI: `image_url` is an object with `url`, or the URL) or
    `image` (`image`, `path` or `url`). One of type `image` without any of these takes the next of
    the record's column `images` (or `image`), all of which must be taken.

    Raises:
        ValueError: a part or column that is none of these, or too many.
    """
    listed = _listed(record)
    found: list[str] = []
    rest = iter(listed)
    lifted = {
        name: _lift(value, name, text, found, rest)
        for name, value in record.items()
        if name not in _COLUMNS or not listed
    }
    if (left := len(list(rest))) > 0:
        raise ValueError(
            f"the record lists {len(listed)} images, and {left} of them have no part of type "
            "'image' in a message: add the parts where the pictures belong"
        )
    if len(found) > MAX_IMAGES:
        raise ValueError(f"the record has {len(found)} pictures; up to {MAX_IMAGES} are taken")
    return lifted, found


def _listed(record: Mapping[str, object]) -> list[str]:
    columns = [name for name in _COLUMNS if record.get(name) not in (None, [], "")]
    if not columns:
        return []
    value = record[columns[0]]
    values = value if isinstance(value, list) else [value]
    return [_name(one, f"{columns[0]}[{at}]") for at, one in enumerate(values)]


def _lift(value: object, path: str, text: str, found: list[str], rest: Iterator[str]) -> object:
    """Replace image parts in every list of messages."""
    if not isinstance(value, list):
        return value
    return [
        {
            key: _parts(content, f"{path}[{at}].{key}", text, found, rest)
            if key in ("content", "value")
            else content
            for key, content in message.items()
        }
        if isinstance(message, Mapping)
        else message
        for at, message in enumerate(value)
    ]


def _parts(content: object, path: str, text: str, found: list[str], rest: Iterator[str]) -> object:
    if not isinstance(content, list):
        return content
    parts: list[object] = []
    for at, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in _KINDS:
            parts.append(part)
            continue
        found.append(_source(part, f"{path}[{at}]", rest))
        parts.append({"type": "text", "text": text})
    return parts


def _source(part: Mapping[str, object], path: str, rest: Iterator[str]) -> str:
    given = [key for key in _SOURCES if part.get(key) is not None]
    if not given:
        picture = next(rest, None)
        if picture is None:
            raise ValueError(
                f"{path} is an image without a source; expected image_url, image, path or url in "
                "it, or one more in the record's column images"
            )
        return picture
    if len(given) > 1:
        raise ValueError(f"{path} has {' and '.join(given)}; expected one of them")
    value = part[given[0]]
    where = f"{path}.{given[0]}"
    if given[0] != "image_url" or not isinstance(value, Mapping):
        return _name(value, where)
    if value.get("detail") not in (None, "auto", "high"):
        raise ValueError(
            f"{where}.detail is {str(value['detail'])[:40]!r}, and pictures have one size rule: "
            "drop it, and set --odb-image-max-pixels"
        )
    return _name(value.get("url"), f"{where}.url")


def _name(value: object, path: str) -> str:
    if isinstance(value, Mapping):
        value = value.get("path") or value.get("url")
    if not isinstance(value, str) or not value:
        raise ValueError(f"{path} is a {type(value).__name__}; expected a path or a data: URI")
    return value
