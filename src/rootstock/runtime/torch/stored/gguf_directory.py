"""Directory in the user's cache that stands for a GGUF file: its metadata as the files that transformers reads."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers
import xxhash
from gguf import GGMLQuantizationType, GGUFReader
from transformers import AutoTokenizer
from transformers.integrations.gguf import GgufHeader, read_gguf_metadata
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from rootstock.errors import ModelFileInvalid, ModelPathNotFound, shown
from rootstock.runtime.gguf_files import TABLE, GgufTensor, stamp_of, stands_for_gguf
from rootstock.runtime.model_files import GENERATION_CONFIG, user_cache_folder
from rootstock.runtime.torch.stored.gguf_config import ENDS, INVALID, configs_of

_log = logging.getLogger(__name__)

_VERSION = 2  # of the files that are written


def directory_of(model: str, files: Sequence[Path]) -> Path:
    """Returns the directory with the configuration, the tokenizer and the table of tensors of GGUF files.

    It is written if the cache does not have it. Raises ModelPathNotFound, ModelFileInvalid or ModelUnsupported.
    """
    stamp = xxhash.xxh3_128(f"{_VERSION} {transformers.__version__}".encode())
    for file in files:
        if not file.is_file():
            raise ModelPathNotFound(model, f"there is no {file.name}")
        stamp.update(f"\0{file.resolve()}\0{stamp_of(file)}".encode())
    target = user_cache_folder() / "gguf" / f"{files[0].stem}-{stamp.hexdigest()[:16]}"
    if stands_for_gguf(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(model, [file.absolute() for file in files], made)
        try:
            made.rename(target)
        except OSError:
            if not stands_for_gguf(target):  # no other process was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _write(model: str, files: Sequence[Path], directory: Path) -> None:
    """Writes what stands for the files. The table comes last, because it marks a directory that is complete."""
    first = files[0]
    try:
        metadata, _ = read_gguf_metadata(str(first))
        tensors = [tensor for file in files for tensor in _table(file)]
    except INVALID as error:
        raise ModelFileInvalid(
            model, first.name, f"it is not a GGUF file that can be read: {error}"
        ) from error
    described = metadata.get("split.count") or 1  # 0 where parts were merged
    if described != len(files):
        raise ModelPathNotFound(
            model, f"{first.name} is one of {described} files, and {len(files)} are there"
        )
    try:
        configs = configs_of(model, first, metadata, tensors)
    except INVALID as error:
        raise ModelFileInvalid(model, first.name, f"its metadata cannot be read: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(first.parent), gguf_file=first.name)
        tokenizer.save_pretrained(str(directory))
        count = metadata.get("tokenizer.ggml.tokens", 0)  # a reader of metadata alone has lengths for texts
        _drop_tokens_beyond(directory, count)
        added = tokenizer.added_tokens_decoder.items()
        found = [
            number for number, token in added if number < count and token.content in ENDS and token.special
        ]
    except Exception as error:  # the tokenizer's own code may raise anything
        raise ModelFileInvalid(model, first.name, f"its tokenizer cannot be read: {error}") from error
    ends = configs[GENERATION_CONFIG].setdefault("eos_token_id", [])
    ends += [end for end in dict.fromkeys(found) if end not in ends]
    for name, fields in configs.items():
        (directory / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    _warn_of_other_splits(model, metadata)
    table = {
        "architecture": metadata["general.architecture"],
        "files": {str(file): stamp_of(file) for file in files},
        "tensors": [asdict(one) for one in tensors],
    }
    (directory / TABLE).write_text(json.dumps(table), encoding="utf-8")


def _drop_tokens_beyond(directory: Path, count: int) -> None:
    """Removes the tokens that transformers adds for a class of tokenizers and the file does not have: the model has
    no embeddings of them."""
    files = directory / "tokenizer.json", directory / "tokenizer_config.json"
    tokenizer, config = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    beyond = {token["content"] for token in tokenizer["added_tokens"] if token["id"] >= count}
    if not beyond:
        return
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] < count]
    config = {key: value for key, value in config.items() if not (isinstance(value, str) and value in beyond)}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # others bring tokens of their own
    for file, content in zip(files, (tokenizer, config), strict=True):
        file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _warn_of_other_splits(model: str, metadata: Mapping[str, Any]) -> None:
    kind, rules = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind == "gpt2" and rules not in (None, "default", "gpt-2", *GGUF_PRE_TOKENIZER_SPLITS):
        _log.warning(
            "%s: text is split into words as for GPT-2, because transformers does not know %s", model, rules
        )


def _table(file: Path) -> list[GgufTensor]:
    """Returns the tensors of a file, whose bytes all lie in it."""
    kinds = {kind.value: kind.name for kind in GGMLQuantizationType}
    try:
        header = GgufHeader.from_file(str(file))
    except ValueError:
        # A part names no architecture, or only gguf knows a type of tensors. Its reader takes longer.
        found = [
            (
                t.name,
                int(t.tensor_type),
                [int(n) for n in reversed(t.shape)],
                int(t.data_offset),
                int(t.n_bytes),
            )
            for t in GGUFReader(file).tensors
        ]
    else:
        found = [
            (t.name, t.ggml_type, list(t.shape), header.data_start + t.offset, t.nbytes)
            for t in header.tensors
        ]
    size = file.stat().st_size
    for name, _, _, offset, nbytes in found:
        if not 0 <= offset <= offset + nbytes <= size:
            raise ValueError(f"the file ends before its tensor {shown(name)}")
    return [
        GgufTensor(name, kinds[kind], tuple(shape), str(file), offset, nbytes)
        for name, kind, shape, offset, nbytes in found
    ]
