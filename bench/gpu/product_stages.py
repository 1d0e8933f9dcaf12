"""Products with coded weights in Triton: as exact as with unpacked weights, and how fast beside torch's bfloat16.

Speed: each way is recorded as a CUDA graph over several layers, which together exceed the L2 cache. A tiny model with
weights in FP8 is also loaded as a server would do it, with its codes on the device.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from attention_stages import BEYOND_CACHES, ROUNDS, relative_error
from devices import Bench, as_graph, seconds
from isolation import Row
from model_stages import triton_everywhere, warnings_logged
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import VOCAB, save
from rootstock.config import ModelConfig
from rootstock.kernels.cuda.triton_coded import TritonCodedLayers
from rootstock.kernels.torch.coded_weight import CENTRED, INTEGERS, NORMAL, UNSIGNED, CodedWeight, Numbers
from rootstock.runtime.torch import runner
from rootstock.runtime.torch.stored.coded_tensor import CodedTensor
from twins.torch_models import logit_errors

FP8 = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
ALLOWED = 1.05  # times the error of a product with weights rounded to bfloat16
MOST_LAYERS = 32


def coded_weights(bench: Bench, shape: tuple[int, int, int], seed: int) -> Iterator[tuple[str, CodedWeight]]:
    """Yields random weights [experts, out, in] of the most common formats, on the device."""
    random = torch.Generator(bench.device).manual_seed(seed)
    experts, outputs, inputs = shape

    def scales(group: int) -> Tensor:
        groups = -(-inputs // group)
        return 0.01 * (0.5 + torch.rand(experts, outputs, groups, generator=random, device=bench.device))

    def of_super() -> Numbers:
        own = torch.randint(
            1, 64, (experts, outputs, -(-inputs // 32)), generator=random, device=bench.device
        )
        shared = scales(256).half() / 64
        return Numbers(own.to(torch.uint8), shared, 8)

    for name, values, group in (
        ("4 bits, groups of 128", CENTRED, 128),
        ("4 bits, groups of 64, table", NORMAL, 64),
        ("Q4_K", UNSIGNED, 32),
        ("Q8_0", INTEGERS, 32),
        ("8 bits, whole rows", INTEGERS, inputs),
        ("FP8, groups of 128", FP8, 128),
    ):
        bits = 4 if len(values) == 16 else 8
        codes = torch.randint(
            0, 256, (experts, outputs, inputs * bits // 8), generator=random, device=bench.device
        )
        codes[codes % 128 == 127] = 0  # not a number in FP8
        own = of_super() if name == "Q4_K" else Numbers(scales(group).half())
        minima = of_super() if name == "Q4_K" else None
        yield name, CodedWeight(codes.to(torch.uint8), values.to(bench.device), own, minima, group)


def coded_products(bench: Bench) -> Iterator[Row]:
    """Compares products with float32, and times them beside torch's with weights in bfloat16."""
    shapes, counts = [(4096, 4096), (14336, 4096), (4096, 14336)], (1, 4, 16, 64, 256, 2048)
    if bench.interpreted:
        shapes, counts = [(72, 256)], (1, 70)
    for outputs, inputs in shapes:
        for name, weight in coded_weights(bench, (1, outputs, inputs), 0):
            first = TritonCodedLayers(weight, torch.bfloat16)
            exact = weight.widened()[0]
            plain = exact.bfloat16()
            layers = min(MOST_LAYERS, max(1, BEYOND_CACHES // weight.nbytes)) if not bench.interpreted else 1
            coded = [first, *(TritonCodedLayers(_copy(weight), torch.bfloat16) for _ in range(layers - 1))]
            wide = [plain, *(plain.clone() for _ in range(layers - 1))]
            for rows in counts:
                x = torch.randn(rows, inputs, device=bench.device).bfloat16()
                expected = x.double() @ exact.double().T
                error, own = (
                    relative_error(got, expected)
                    for got in (first.multiply(x), (x.float() @ plain.float().T).bfloat16())
                )
                ways: dict[str, Callable[[], object]] = {
                    "coded": lambda x=x, coded=coded: [each.multiply(x) for each in coded],
                    "bfloat16": lambda x=x, wide=wide: [F.linear(x, each) for each in wide],
                }
                replays = {way: as_graph(bench, call) for way, call in ways.items()}
                rounds = [
                    {way: seconds(bench, replay) for way, replay in replays.items()} for _ in range(ROUNDS)
                ]
                coded_s, wide_s = (statistics.median(each[way] for each in rounds) for way in ways)
                yield {
                    "format": name,
                    "outputs": outputs,
                    "inputs": inputs,
                    "rows": rows,
                    "error": error,
                    "error_unpacked": own,
                    "coded_us": coded_s / layers * 1e6,
                    "bfloat16_us": wide_s / layers * 1e6,
                    "coded_to_bfloat16": statistics.median(
                        each["coded"] / each["bfloat16"] for each in rounds
                    ),
                    "gb_per_s": weight.nbytes * layers / coded_s / 1e9,
                    "ok": error <= ALLOWED * own,
                }
                del replays
            del coded, wide, first, plain, exact
            bench.release_memory()
    yield from _experts(bench)


def _copy(weight: CodedWeight) -> CodedWeight:
    return weight.rebuilt(each.clone() for each in weight.tensors())


def _experts(bench: Bench) -> Iterator[Row]:
    """Checks products of rows that are sorted by expert."""
    experts, outputs, inputs = (3, 40, 128) if bench.interpreted else (64, 1536, 2048)
    for name, weight in coded_weights(bench, (experts, outputs, inputs), 1):
        layers = TritonCodedLayers(weight, torch.bfloat16)
        for rows in (8, 60) if bench.interpreted else (8, 4096):
            x = torch.randn(rows, inputs, device=bench.device).bfloat16()
            chosen = torch.randint(0, experts, (rows,), device=bench.device)
            got, off, size = layers.multiply(x, chosen), 0.0, 0.0
            for expert in chosen.unique().tolist():
                its = chosen == expert
                expected = x[its].double() @ weight.part(expert, expert + 1).widened()[0].double().T
                off += float((got[its].double() - expected).square().sum())
                size += float(expected.square().sum())
            error = (off / size) ** 0.5
            yield {"format": name, "experts": experts, "rows": rows, "error": error, "ok": error <= 2**-8}
        bench.release_memory()


def coded_model(bench: Bench) -> Iterator[Row]:
    """Loads a tiny model in FP8 with its codes on the device, and compares its logits with float32's."""
    with tempfile.TemporaryDirectory() as folder, warnings_logged() as warnings:
        plain = save(Path(folder) / "plain", "llama", hidden_size=128, intermediate_size=192)
        stored = save(Path(folder) / "stored", "llama", hidden_size=128, intermediate_size=192)
        _quantize(stored, plain)
        began = time.monotonic()
        with triton_everywhere(bench):
            loaded = runner.load_model(ModelConfig(str(stored), str(bench.device.type), "bfloat16"))
            seconds_to_load = time.monotonic() - began
            off, own = logit_errors(loaded, plain, VOCAB)
        left = sum(isinstance(each, CodedTensor) for each in loaded._model.parameters())
        yield {
            "weights": loaded.description.weights,
            "execution_mode": loaded.description.execution_mode,
            "warnings": list(warnings),
            "seconds": seconds_to_load,
            "not_packed": left,
            "error": off,
            "error_in_bfloat16": own,
            "ok": off <= 1.5 * own and not left and not warnings,
        }


def _quantize(stored: Path, plain: Path) -> None:
    """Rounds the linear layers in `stored` to FP8, with a scale for each output. Writes the numbers to `plain`."""
    tensors = load_file(stored / "model.safetensors")
    numbers = dict(tensors)
    for name, tensor in numbers.items():
        if not name.endswith("_proj.weight"):
            continue
        scale = tensor.float().abs().amax(1, keepdim=True) / 448
        codes = (tensor.float() / scale).to(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{name}_scale": scale}
        numbers[name] = codes.float() * scale
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    declared = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
