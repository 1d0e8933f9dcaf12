"""Images, audio, video and files in messages: a model that cannot read one reads a line of text in its place.

Clients send the whole history with every request, so that refusing an image would end the conversation: its later
requests would be refused, too. The line depends on the kind and the name of the medium alone. Nothing is decoded or
fetched, and the line is the same at every later turn, so that the prefix behind it stays cached.

A model that reads images gets a marker in the place of each (`text/images.py`). An image that cannot be read is an
error: its client learns at once what is wrong with it.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rootstock.cache.image_tokens import ImageLayout
from rootstock.errors import ImageUnusable, InvalidParameter, Unsupported
from rootstock.text.conversation.types import (
    Conversation,
    IgnoredField,
    Medium,
    MediumKind,
    Message,
    MessagePart,
    PrefixMark,
    Text,
    ToolReference,
    ToolResult,
)
from rootstock.text.images import marker_of
from rootstock.text.limits import (
    MAX_CONTENT_PARTS,
    MAX_IMAGE_BYTES,
    MAX_IMAGES,
    MAX_IMAGES_PIXELS,
    MAX_IMAGES_SECONDS,
    refuse_more_than,
)

MAX_MEDIUM_NAME_CHARS = 128  # of a file's name in its line; a longer name is cut

# The types of parts in OpenAI's chats, OpenAI's Responses and Anthropic's messages, and in the requests of vLLM,
# SGLang and Mistral. Each API takes all of them, because clients mix them. Messages read the text of a `document`.
_KINDS: Mapping[str, MediumKind] = {
    "image": "image",
    "image_embeds": "image",
    "image_file": "image",
    "image_pil": "image",
    "image_url": "image",
    "input_image": "image",
    "output_image": "image",
    "computer_screenshot": "image",
    "audio": "audio",
    "audio_embeds": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "output_audio": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "file": "file",
    "input_file": "file",
    "container_upload": "file",
    "document": "file",
    "document_url": "file",
}
_IN_WORDS: Mapping[MediumKind, tuple[str, str]] = {
    "image": ("an image", "see"),
    "audio": ("an audio recording", "hear"),
    "video": ("a video", "see"),
    "file": ("a file", "read"),
}


def medium_of(part: Mapping[str, Any], path: str, mark: PrefixMark | None = None) -> Text | None:
    """Returns the line for a part of a message, or None if the part is no medium."""
    type = part.get("type")
    kind = _KINDS.get(type) if isinstance(type, str) else None
    if kind is None:
        return None
    return medium_line(kind, path, name_of(part), mark, _source_of(part) if kind == "image" else "")


def _source_of(part: Mapping[str, Any]) -> str:
    """Returns the file of an image in base64, or its address, as the client has sent it. "": neither."""
    for name in ("image_url", "image", "source"):
        value = part.get(name)
        if isinstance(value, Mapping):
            value = next((value[each] for each in ("url", "data") if isinstance(value.get(each), str)), None)
        if isinstance(value, str) and value:
            return value
    return ""


def name_of(part: Mapping[str, Any]) -> str:
    """Returns the name of a part's file as its line shows it; "" if it has none."""
    file = part.get("file")  # OpenAI's chats nest the name
    return _shown((file if isinstance(file, Mapping) else part).get("filename"))


def medium_line(
    kind: MediumKind, path: str, name: Any = None, mark: PrefixMark | None = None, source: str = ""
) -> Text:
    """Returns the line for a medium. `path` is its place in the client's body, and `name` is any value."""
    noun, verb = _IN_WORDS[kind]
    shown = _shown(name)
    if kind == "file" and shown:
        noun = f"the file {shown!r}"
    medium = Medium(kind, path, source=source)
    return Text(f"[{noun[0].upper()}{noun[1:]}, which this model cannot {verb}]", mark, (medium,))


def image_lines(images: Any, path: str) -> list[Text]:
    """Returns the lines of the images in a field of a message beside its content."""
    if not isinstance(images, list):
        return [medium_line("image", path)]
    refuse_more_than(MAX_CONTENT_PARTS, images, path)
    sources = (_source_of(each if isinstance(each, Mapping) else {"image": each}) for each in images)
    return [medium_line("image", f"{path}[{i}]", source=source) for i, source in enumerate(sources)]


def _shown(name: Any) -> str:
    """Returns a name as one line without control characters. A shown name is shown as it is.

    Special tokens in it are escaped as in any other text.
    """
    if not isinstance(name, str):
        return ""
    spaced = "".join(char if char.isprintable() else " " for char in name[: 4 * MAX_MEDIUM_NAME_CHARS])
    return " ".join(spaced.split())[:MAX_MEDIUM_NAME_CHARS].rstrip()


def mentioned(media: Sequence[Medium]) -> list[IgnoredField]:
    """Returns a warning for each kind of the media, with the first one's place."""
    warnings = []
    for kind in dict.fromkeys(medium.kind for medium in media):
        fields = [medium.field for medium in media if medium.kind == kind]
        others = f" and for {len(fields) - 1:,} more" if len(fields) > 1 else ""
        reason = f"the model does not read it: a line of the prompt stands for this {kind}{others}"
        warnings.append(IgnoredField(fields[0], reason))
    return warnings


def refuse_media(media: Sequence[Medium]) -> None:
    """Raises Unsupported, for the first of the media."""
    if media:
        noun, _ = _IN_WORDS[media[0].kind]
        raise Unsupported(media[0].field, f"It is {noun}, and the model does not read it. Leave it out.")


# ---- images for models that read them

ReadImage = Callable[[bytes, str], ImageLayout]  # takes a file and its field; raises ImageUnusable
SentImages = list[tuple[ImageLayout, bytes]]  # with their files, in the order of the conversation


def with_markers(conversation: Conversation, read: ReadImage) -> tuple[Conversation, SentImages]:
    """Returns the conversation with a marker in the place of each image, and the images. Images beside other texts
    in a document of Anthropic's stay lines. Decodes files: not for an event loop.

    Raises InvalidParameter for too many images, before any is decoded, and ImageUnusable.
    """
    images = [text.media[0] for message in conversation.messages for text in _lines_of_images(message.parts)]
    if not images:
        return conversation, []
    if len(images) > MAX_IMAGES:
        raise InvalidParameter(
            "messages", images[MAX_IMAGES].field, f"without images after {MAX_IMAGES} of them"
        )
    sent: SentImages = []
    until = time.monotonic() + MAX_IMAGES_SECONDS

    def marker(text: Text) -> Text:
        image = text.media[0]
        if time.monotonic() > until:
            reason = f"the images before it took more than {MAX_IMAGES_SECONDS} s to decode"
            raise ImageUnusable(image.field, reason, "Send fewer or smaller ones.")
        data = _file_of(image)
        layout = read(data, image.field)
        sent.append((layout, data))
        if sum(each.pixels for each, _ in sent) > MAX_IMAGES_PIXELS:
            reason = f"the images up to it have more than {MAX_IMAGES_PIXELS:,} pixels together"
            raise ImageUnusable(image.field, reason, "Send fewer or smaller ones.")
        return replace(text, text=marker_of(layout), media=(), is_image=True)

    def with_images(message: Message) -> Message:
        found = {id(text): marker(text) for text in _lines_of_images(message.parts)}
        return _replaced(message, found) if found else message

    return replace(conversation, messages=[with_images(message) for message in conversation.messages]), sent


def _lines_of_images(parts: Sequence[MessagePart]) -> list[Text]:
    found: list[Text] = []
    for part in parts:
        if isinstance(part, ToolResult):
            found += _lines_of_images(part.parts)
        elif isinstance(part, Text) and len(part.media) == 1 and part.text == _LINE_OF_IMAGE:
            found.append(part)
    return found


def _replaced(message: Message, found: Mapping[int, Text]) -> Message:
    def of_result(part: Text | ToolReference) -> Text | ToolReference:
        return found.get(id(part), part)

    parts = [
        replace(part, parts=tuple(map(of_result, part.parts)))
        if isinstance(part, ToolResult)
        else found.get(id(part), part)
        for part in message.parts
    ]
    return replace(message, parts=tuple(parts))


def _file_of(image: Medium) -> bytes:
    """Returns the bytes of an image's file. Raises ImageUnusable."""
    source = image.source
    if not source or re.match(r"(?!(?i:data):)[A-Za-z][A-Za-z0-9+.-]{0,20}:", source):
        reason = "it is not in the request, and this server fetches no addresses"
        raise ImageUnusable(image.field, reason, "Send the file itself, in base64.")
    if len(source) > MAX_IMAGE_BYTES * 4 // 3 + 1_024:
        reason = f"its file has more than {MAX_IMAGE_BYTES // 1024**2} MiB"
        raise ImageUnusable(image.field, reason, "Send a smaller one.")
    coded = source
    if source[:5].lower() == "data:":
        head, _, coded = source.partition(",")
        if not head.lower().endswith(";base64"):
            raise ImageUnusable(
                image.field, "its data: URL is not in base64", "Send data:image/png;base64,…."
            )
    try:
        coded = "".join(coded.split()).translate(_URL_SAFE).rstrip("=")
        data = base64.b64decode(coded + "=" * (-len(coded) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ImageUnusable(image.field, "it is not valid base64", "Send the file in base64.") from None
    if not data:
        raise ImageUnusable(image.field, "its file is empty", "Send the file in base64.")
    return data


_URL_SAFE = str.maketrans("-_", "+/")  # of base64's other alphabet
_LINE_OF_IMAGE = medium_line("image", "").text
