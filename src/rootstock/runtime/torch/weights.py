"""Weight files: hashes them and reads them into a transformers model. `model_files` finds and checks them before."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    GenerationMixin,
)
from transformers.quantizers.auto import get_hf_quantizer
from transformers.utils import logging as transformers_logging

from rootstock.errors import ModelFileInvalid, ModelUnsupported, ModelWeightsMissing
from rootstock.runtime.gguf_files import GgufTensor, architecture_in, stands_for_gguf, tensors_in
from rootstock.runtime.model_files import (
    CONFIG,
    GENERATION_CONFIG,
    StoredTensor,
    first_line,
    in_one_line,
    read_configs,
    read_json,
    weight_files,
)
from rootstock.runtime.model_formats import (
    MLX,
    Quantization,
    names_in,
    quantization_of,
    quantization_of_tensors,
    quantization_settings,
)
from rootstock.runtime.torch.stored.checkpoint import lazy_state, with_names_of_mlx
from rootstock.runtime.torch.stored.formats import StoredFormat, UndecodableWeight, formats_of
from rootstock.runtime.torch.stored.gguf import UNPACKED, gguf_state
from rootstock.runtime.torch.stored.placement import place_coded
from rootstock.units import in_units

_log = logging.getLogger(__name__)

# Models whose numbers mlx-lm stores as transformers does, but for their names and the order of axes. Of others it
# changes norms, or splits and scales weights.
_SAME_IN_MLX = {
    *("gemma2", "gemma3_text", "granite", "lfm2", "llama", "mistral", "olmo2", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
}


def read_config(model: str, directory: Path, *, trust_remote_code: bool) -> Any:
    """Reads config.json, and checks generation_config.json, which loading reads too.

    Raises ModelFileInvalid, or ModelUnsupported if transformers does not know the architecture.
    """
    read_configs(model, directory)
    if (directory / GENERATION_CONFIG).exists():
        try:
            with quiet():
                GenerationConfig.from_pretrained(directory)
        except Exception as error:  # transformers compares fields of any types with each other
            raise ModelFileInvalid(model, GENERATION_CONFIG, in_one_line(error)) from error
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "trust_remote_code" in str(error):
            reason = "it comes with its own code; read that code, then allow it with --trust-remote-code"
        else:
            reason = first_line(error)
        raise ModelUnsupported(model, reason) from error
    except Exception as error:  # the code that reads a configuration checks it, and may raise anything
        raise ModelFileInvalid(model, CONFIG, in_one_line(error)) from error
    _refuse_quantization(model, directory, config)
    return config


def _refuse_quantization(model: str, directory: Path, config: Any) -> None:
    """Raises ModelUnsupported for quantized weights that transformers does not read, by itself or with the packages
    that are installed."""
    declared = _declared(model, directory)
    if declared is None or _coded_formats(model, directory):
        return
    if not declared.method or declared.method == MLX:
        raise ModelUnsupported(model, declared.refusal())
    try:
        with quiet():  # the configuration is copied, because the quantizer changes it
            found = get_hf_quantizer(copy.deepcopy(config), None, None, True, {})[0]
    except Exception as error:  # ImportError, ValueError, RuntimeError and others for missing parts
        raise ModelUnsupported(model, declared.refusal(in_one_line(error))) from error
    if found is None:
        raise ModelUnsupported(model, declared.refusal())


def refuse_quantized_tensors(
    model: str, directory: Path, stored: Sequence[StoredTensor] | Sequence[GgufTensor]
) -> None:
    """Raises ModelUnsupported for quantized weights of which config.json says nothing: they would be read as they
    are, without their scales."""
    if _declared(model, directory) is not None or stands_for_gguf(directory):
        return
    if (found := quantization_of_tensors((tensor.name, tensor.dtype) for tensor in stored)) is not None:
        described = quantization_of({}, names_in(directory))
        raise ModelUnsupported(model, (described or found).refusal(f"{CONFIG} does not say so"))


def kind_of(model: str, config: Any) -> Any:
    """Returns transformers' class that finds the architecture of a configuration: of models of text, or of models of
    text and images, where no class of the text alone exists, where the configuration declares that class, or where a
    processor lies beside. Raises ModelUnsupported for models that do not write text token by token."""
    declared = (getattr(config, "architectures", None) or [""])[0]
    if declared.endswith("Classification"):
        raise ModelUnsupported(model, f"it is a {declared}, which classifies and writes no text")
    tables = {
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    }
    known = {kind: table[type(config)] for kind, table in tables.items() if type(config) in table}
    if (of_images := known.get(AutoModelForImageTextToText)) is not None:
        processors = ("processor_config.json", "preprocessor_config.json")
        beside = any((Path(config.name_or_path) / name).is_file() for name in processors)
        if beside or declared == of_images.__name__:
            known.pop(AutoModelForCausalLM, None)
    kind, found = next(iter(known.items()), (AutoModelForCausalLM, None))
    if not getattr(config, "auto_map", None):  # the tables say nothing about code that a model brings
        if found is None:
            raise ModelUnsupported(
                model, f"transformers has no decoder of text for a {type(config).__name__}"
            )
        if not issubclass(found, GenerationMixin):
            raise ModelUnsupported(model, f"{found.__name__} does not write text token by token")
    return kind


def empty_model(model: str, config: Any, *, trust_remote_code: bool, kind: Any = None) -> nn.Module:
    """Builds the architecture without weights, on the meta device. Raises ModelUnsupported.

    `kind` is transformers' class that finds the architecture of a configuration. None: `kind_of` the configuration.
    """
    kind = kind or kind_of(model, config)
    try:
        with torch.device("meta"), quiet():
            built = kind.from_config(config, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise ModelUnsupported(model, f"it needs another package ({in_one_line(error)})") from error
    except Exception as error:  # the architecture's own code may raise anything
        raise ModelUnsupported(model, first_line(error)) from error
    assert isinstance(built, nn.Module)
    return built


def read_weights(
    model: str,
    directory: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool,
    moved: Mapping[str, str] | None = None,
) -> nn.Module:
    """Loads the model with its weights on the CPU, and weights that stay coded on the device. Raises
    ModelWeightsMissing, ModelUnsupported. `moved`: patterns of tensors' names, and what the model has in their place.

    transformers fills a parameter that the files do not hold with random numbers. Here that is an error.
    """
    try:
        with quiet(), contextlib.ExitStack() as opened:
            options: dict[str, Any] = {
                "dtype": dtype,
                "output_loading_info": True,
                "ignore_mismatched_sizes": True,  # otherwise the error names none; they are refused below
            }
            of_gguf, formats = tensors_in(directory), _coded_formats(model, directory)
            if of_gguf or formats:
                config = _unquantized(config)
                empty: Any = empty_model(model, copy.deepcopy(config), trust_remote_code=trust_remote_code)
                state: dict[str, Any]
                if of_gguf:
                    state = gguf_state(of_gguf, architecture_in(directory), empty, dtype)
                else:
                    state = lazy_state(weight_files(model, directory), formats, dtype, opened)
                    if (declared := _declared(model, directory)) and declared.method == MLX:
                        state = with_names_of_mlx(state)
                    for pattern, name in (moved or {}).items():
                        state = {re.sub(pattern, name, stored): lazy for stored, lazy in state.items()}
                loaded, info = type(empty).from_pretrained(None, config=config, state_dict=state, **options)
            else:
                options |= {"trust_remote_code": trust_remote_code, "use_safetensors": True}
                if moved:
                    options["key_mapping"] = dict(moved)
                loaded, info = kind_of(model, config).from_pretrained(directory, config=config, **options)
    except UndecodableWeight as error:
        raise ModelUnsupported(model, f"its weights cannot be read as they are stored: {error}") from error
    except ImportError as error:  # the package of a quantization method is not installed
        raise ModelUnsupported(model, first_line(error)) from error
    except Exception as error:  # RuntimeError, ValueError, OSError and others for bad weights
        raise ModelWeightsMissing(model, first_line(error)) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelWeightsMissing(model, f"{len(missing)} parameters are missing, {_some(missing)}")
    mismatched = [
        f"{name} ({list(stored)} in the files, {list(expected)} by {CONFIG})"
        for name, stored, expected in sorted(info["mismatched_keys"])
    ]
    if mismatched:
        raise ModelWeightsMissing(
            model, f"{len(mismatched)} parameters have another shape, {_some(mismatched)}"
        )
    if info["error_msgs"]:
        raise ModelWeightsMissing(model, first_line(info["error_msgs"][0]))
    assert isinstance(loaded, nn.Module)
    if of_gguf and (unused := sorted(info["unexpected_keys"])):
        raise ModelUnsupported(model, f"its architecture does not use {len(unused)} tensors, {_some(unused)}")
    if of_gguf or formats:
        place_coded(loaded, device)
        if (directory / GENERATION_CONFIG).exists():  # a model without a directory lacks its settings
            loaded.generation_config = GenerationConfig.from_pretrained(directory)
    if unpacked := [each for each in of_gguf if each.dtype in UNPACKED]:
        _log.warning(
            "%d of %d tensors are of types that no code keeps, %s: they take %s instead of %s",
            len(unpacked),
            len(of_gguf),
            " and ".join(sorted({each.dtype for each in unpacked})),
            in_units(sum(each.elements for each in unpacked) * dtype.itemsize),
            in_units(sum(each.nbytes for each in unpacked)),
        )
    was_quantized = getattr(config, "quantization_config", None) is not None
    if was_quantized and getattr(loaded.config, "quantization_config", None) is None:
        loaded = loaded.to(dtype)  # transformers has dequantized the weights, to a dtype of its own choice
    return loaded


def stored_in_words(
    model: str, directory: Path, files: Sequence[Path], stored: Sequence[StoredTensor] | Sequence[GgufTensor]
) -> str:
    """Returns the format of a model's files and their size."""
    elements: Counter[str] = Counter()
    for tensor in stored:
        elements[tensor.dtype] += tensor.elements
    size = in_units(sum(file.stat().st_size for file in files))
    if stands_for_gguf(directory):
        kinds = [kind for kind, _ in elements.most_common(3)]
        return f"GGUF ({', '.join(kinds)}), {size}"
    declared = _declared(model, directory)
    return f"{declared.name if declared else f'safetensors ({elements.most_common(1)[0][0]})'}, {size}"


def _coded_formats(model: str, directory: Path) -> list[StoredFormat]:
    """Returns the formats of weights that are kept as stored; none for a model that is not quantized so."""
    fields = read_json(model, directory, CONFIG)
    declared = quantization_of(fields)
    if declared is None or (declared.method == MLX and fields.get("model_type") not in _SAME_IN_MLX):
        return []
    return formats_of(declared.method, quantization_settings(fields))


def _declared(model: str, directory: Path) -> Quantization | None:
    """Returns the quantization that config.json declares."""
    return quantization_of(read_json(model, directory, CONFIG))


def _unquantized(config: Any) -> Any:
    """Returns a copy of a configuration that declares no quantization."""
    plain = copy.deepcopy(config)
    for inner in (plain, getattr(plain, "text_config", None)):
        for key in ("quantization_config", "quantization", "compression_config"):
            if getattr(inner, key, None) is not None:
                delattr(inner, key)
    return plain


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' progress bars and warnings. The important ones become errors here."""
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _some(names: list[str]) -> str:
    return f"among them {', '.join(names[:3])}" if len(names) > 3 else ", ".join(names)
