"""Decoding of clients' image files, in a process of its own.

The libraries that decode PNG, JPEG, WebP and GIF are native code, and a file is any client's. A file that makes one
of them crash costs its own request: the next file gets a new process. Pixels, memory and time are bounded. Nothing
that the process sends is executed: it is a picture's size and bytes, or a reason.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
import threading
import weakref
from typing import IO

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # [height, width, 3] red, green, blue

MOST_PIXELS = 40_000_000  # of a picture
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_SECONDS = 10.0  # for one file, with the start of the process
MOST_SCANS = 64  # of a JPEG file: each is decoded over all pixels, and costs its sender a few bytes
MOST_MEMORY = 4 * 1024**3  # addresses of the process
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")
_LENGTH = struct.Struct("<Q")
_SIZE = struct.Struct("<QQ")  # width and height, or 0 and the length of a reason
_START = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from rootstock.runtime.image_files import serve
serve(int(sys.argv[2]))
"""


class UndecodableImage(Exception):
    """Error: a file is no image that can be decoded. Its text completes "it …"."""


class ImageDecoder:
    """Decoder of image files. Any thread may call it; files are decoded one after another.

    Its process starts with the first file. It ends with this object, and with the process that has it.
    """

    def __init__(self, most_pixels: int = MOST_PIXELS) -> None:
        self._most_pixels = most_pixels
        self._lock = threading.Lock()  # guards the process
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[..., ImageDecoder] | None = None

    def decode(self, data: bytes) -> Pixels:
        """Decodes a file. Of an animation, the first picture counts. Raises UndecodableImage."""
        with self._lock:
            process = self._started()
            timer = threading.Timer(MOST_SECONDS, process.kill)
            timer.start()
            try:
                return self._answer(process, data)
            except OSError as error:  # the process has ended
                self.close()
                reason = "makes the decoder fail" if timer.is_alive() else "takes too long to decode"
                raise UndecodableImage(reason) from error
            finally:
                timer.cancel()

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._process = None
        if self._ending is not None:
            self._ending()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            paths = json.dumps([path for path in sys.path if path])
            command = [sys.executable, "-I", "-c", _START, paths, str(self._most_pixels)]
            kept = {
                name: os.environ[name] for name in _ENVIRONMENT if name in os.environ
            }  # no keys of services
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept)
            self._ending = weakref.finalize(self, _end, self._process)
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], data: bytes) -> Pixels:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(_LENGTH.pack(len(data)) + data)
        process.stdin.flush()
        width, height = _SIZE.unpack(_read(process.stdout, _SIZE.size))
        if not width:
            raise UndecodableImage(_read(process.stdout, min(height, 1_024)).decode(errors="replace"))
        if width * height > self._most_pixels:  # a process in which a file has taken over may send anything
            raise BrokenPipeError
        pixels = np.frombuffer(bytearray(_read(process.stdout, 3 * width * height)), np.uint8)
        return pixels.reshape(height, width, 3)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(OSError):  # bytes that were not sent
        process.communicate()


def _read(source: IO[bytes], length: int) -> bytes:
    """Reads so many bytes. Raises BrokenPipeError if the source ends before."""
    found = source.read(length)
    if len(found) < length:
        raise BrokenPipeError
    return found


# ---- in the process


def serve(most_pixels: int) -> None:
    """Decodes the files that come in, until no more come."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, and the server this
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(BrokenPipeError):
        while True:
            (length,) = _LENGTH.unpack(_read(source, _LENGTH.size))
            found = decoded(_read(source, length), most_pixels)
            if isinstance(found, str):
                reason = found.encode()[:1_024]
                sink.write(_SIZE.pack(0, len(reason)) + reason)
            else:
                height, width, _ = found.shape
                sink.write(_SIZE.pack(width, height) + found.tobytes())
            sink.flush()


def decoded(data: bytes, most_pixels: int) -> Pixels | str:
    """Decodes a file. Returns the reason if it cannot be decoded, which completes "it …"."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # checked here, with a clear reason
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > most_pixels:
                return f"has {width:,} × {height:,} pixels, more than {most_pixels:,}"
            if opened.format == "JPEG" and data.count(b"\xff\xda") > MOST_SCANS:
                return f"has more than {MOST_SCANS} scans"
            picture = ImageOps.exif_transpose(opened).convert("RGB")
    except UnidentifiedImageError:
        return f"is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file"
    except MemoryError:
        return "takes too much memory to decode"
    except Exception as error:  # the library raises any of a dozen for broken files
        said = str(error).splitlines() or [""]
        return f"is broken ({type(error).__name__}: {said[0][:200]})"
    return np.asarray(picture)
