"""Images, audio, video and files in messages: the model reads a line of text in the place of each.

Clients send the whole history with every request, so that refusing an image would end the conversation: its later
requests would be refused, too. The line depends on the kind and the name of the medium alone. Nothing is decoded or
fetched, and the line is the same at every later turn, so that the prefix behind it stays cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rootstock.errors import Unsupported
from rootstock.text.conversation.types import IgnoredField, Medium, MediumKind, PrefixMark, Text

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
    return None if kind is None else medium_line(kind, path, name_of(part), mark)


def name_of(part: Mapping[str, Any]) -> str:
    """Returns the name of a part's file as its line shows it; "" if it has none."""
    file = part.get("file")  # OpenAI's chats nest the name
    return _shown((file if isinstance(file, Mapping) else part).get("filename"))


def medium_line(kind: MediumKind, path: str, name: Any = None, mark: PrefixMark | None = None) -> Text:
    """Returns the line for a medium. `path` is its place in the client's body, and `name` is any value."""
    noun, verb = _IN_WORDS[kind]
    shown = _shown(name)
    if kind == "file" and shown:
        noun = f"the file {shown!r}"
    return Text(f"[{noun[0].upper()}{noun[1:]}, which this model cannot {verb}]", mark, (Medium(kind, path),))


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
        reason = f"the model reads only text: a line of the prompt stands for this {kind}{others}"
        warnings.append(IgnoredField(fields[0], reason))
    return warnings


def refuse_media(media: Sequence[Medium]) -> None:
    """Raises Unsupported, for the first of the media."""
    if media:
        noun, _ = _IN_WORDS[media[0].kind]
        raise Unsupported(media[0].field, f"It is {noun}, and the model reads only text. Leave it out.")
