"""Content blocks of a message as parts of a chat's message.

No block makes a request fail because of its kind: it is in a history that its client sends again with each turn.
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as NoBase64
from typing import TYPE_CHECKING, Any, Final

from proxy.common.errors import BadRequest
from proxy.dialects.left_out import base64_bytes, described, joined, kind_name, lines, media_name, note
from proxy.dialects.requests import object_in, objects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.dialects.left_out import LeftOut

    Part = dict[str, Any]

# Nobody but Anthropic can read them, or they are for the model that wrote them; references mean something in results.
_SILENT: Final = frozenset({"thinking", "redacted_thinking", "tool_reference"})
# Anthropic's blocks hold others two levels deep; without a bound one body could use up the stack.
_MAX_DEPTH: Final = 4


def text_part(text: str) -> Part:
    """A part that is text."""
    return {"type": "text", "text": text}


def parts_of(block: Mapping[str, Any], left_out: LeftOut, depth: int = 0) -> list[Part]:
    """The parts, text and images, that tell a model what a block says. Raises BadRequest for a block that is broken.

    `depth`: the number of blocks around it.
    """
    match block.get("type"):
        case "text":
            return [text_part(text_of(block))]
        case "image":
            return [_image(block, left_out)]
        case "document":
            return _document(block, left_out, depth)
        case "search_result":
            heading = [str(block.get(name) or "") for name in ("title", "source")]
            return [text_part(lines([*heading, joined(_parts_in(block.get("content"), left_out, depth))]))]
        case kind if isinstance(kind, str) and kind in _SILENT:
            return []
        case kind:
            return _other(kind, block, left_out, depth)


def text_of(block: Mapping[str, Any]) -> str:
    """The text of a text block. Raises BadRequest."""
    text = block.get("text")
    if not isinstance(text, str):
        raise BadRequest("a text block must have text", param="messages")
    return text


def _image(block: Mapping[str, Any], left_out: LeftOut) -> Part:
    source = object_in(block, "source")
    kind, url, data = source.get("type", "base64"), source.get("url"), source.get("data")
    if kind == "base64" and isinstance(data, str):
        url = f"data:{source.get('media_type') or 'image/jpeg'};base64,{data}"
    elif kind != "url":  # a file that is kept at another service
        left_out.add("content", "image")
        return text_part(note("image", name=source.get("file_id")))
    if not isinstance(url, str):
        raise BadRequest("an image block must have its source", param="messages")
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Mapping[str, Any], left_out: LeftOut, depth: int) -> list[Part]:
    """A document whose text is there is told in full, with its title and context."""
    source = object_in(block, "source")
    title, context = (str(block.get(name) or "") for name in ("title", "context"))
    read = _parts_in(source.get("content"), left_out, depth) if source.get("type") == "content" else _read(source)
    if read is not None:
        heading = lines((title, context))
        return [text_part(heading), *read] if heading else read
    left_out.add("content", "document")
    data = source.get("data")
    size_bytes = base64_bytes(data) if isinstance(data, str) else None
    name = title or source.get("url") or source.get("file_id")
    # Anthropic fetches nothing but PDFs.
    what = "PDF" if source.get("type") == "url" else media_name(source.get("media_type"))
    return [text_part(lines((note(what, name=name, size_bytes=size_bytes), context)))]


def _read(source: Mapping[str, Any]) -> list[Part] | None:
    """Return the text of a document's source; None: it is no text."""
    data, media_type = source.get("data"), source.get("media_type")
    if not isinstance(data, str):
        return None
    if source.get("type") == "text":
        return [text_part(data)]
    if isinstance(media_type, str) and media_type.startswith("text/"):
        try:
            return [text_part(b64decode(data, validate=True).decode())]
        except (NoBase64, UnicodeDecodeError):
            return None
    return None


def _other(kind: object, block: Mapping[str, Any], left_out: LeftOut, depth: int) -> list[Part]:
    """A block of any other kind: the text and images in its content, or its readable members, or a note."""
    content = block.get("content")
    if isinstance(content, str) or (isinstance(content, list) and _has_blocks(content)):
        parts = _parts_in(content, left_out, depth)
        if parts:
            return parts
    told = described(kind, block)
    if told is None:
        left_out.add("content", kind)
        told = note(f"content {kind_name(kind)}")
    return [text_part(told)]


def _has_blocks(content: list[Any]) -> bool:
    """Whether these are blocks that a user may send, and not results in the words of another service."""
    return all(isinstance(each, dict) and each.get("type") in ("text", "image", "document") for each in content)


def _parts_in(content: object, left_out: LeftOut, depth: int) -> list[Part]:
    """The parts of content inside a block, which is text or a list of blocks."""
    if isinstance(content, str):
        return [text_part(content)]
    if depth == _MAX_DEPTH:
        return [text_part(note("content"))]
    return [part for each in objects(content or [], "messages") for part in parts_of(each, left_out, depth + 1)]
