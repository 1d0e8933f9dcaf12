"""Weights of 8, 6 or 4 bits: scale · value of a code + minimum, by groups of inputs.

The form is an exact rewriting of most formats in which quantized weights are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

INTEGERS = torch.arange(128.0)  # of codes with a sign and seven bits
OF_SIX, CENTRED_SIX = torch.arange(64.0), torch.arange(-32.0, 32.0)
CENTRED, UNSIGNED = torch.arange(-8.0, 8.0), torch.arange(16.0)
# Values with the least squared error for normally distributed weights in groups of 64: Lloyd's iterations (1982) from
# the values of NF4 (Dettmers et al. 2023, arXiv 2305.14314), rounded to bfloat16.
NORMAL = torch.tensor(
    [-235, -180, -139, -105.5, -76.5, -49.75, -24.75, 0, 20.375, 42.25, 65.5, 91, 118.5, 151, 192, 256]
) / 256  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Scales or minima of groups: `own`, times `shared` where there are such factors."""

    own: Tensor  # […, out, groups] float32, bfloat16, float16, uint8 or int8
    shared: Tensor | None = None  # […, out, groups / of_shared] float16
    of_shared: int = 1  # groups

    def widened(self) -> Tensor:
        """Returns […, out, groups] float32."""
        if self.shared is None:
            return self.own.float()
        factors = self.shared.float().repeat_interleave(self.of_shared, -1)[..., : self.own.shape[-1]]
        return self.own.float() * factors


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """Weights […, out, in]."""

    codes: Tensor  # […, out, in] uint8, or […, out, in / 2] with two codes of 4 bits, the first one low
    # [16], [64] or [128] float32, which loops round to bfloat16. A code of 8 bits is a place, plus 128 if negative.
    values: Tensor
    scales: Numbers  # of the groups
    minima: Numbers | None
    group: int  # inputs of a group, an even number; the last group may have fewer
    in_scales: bool = False  # whether minima are multiples of the scales
    order: Tensor | None = (
        None  # [in] int64: the rows' input of each input of the codes; None: the same order
    )

    @property
    def bits(self) -> int:
        return {16: 4, 64: 6}.get(len(self.values), 8)

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.codes.shape[:-1], self.codes.shape[-1] * (2 if self.bits == 4 else 1)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def problem(self) -> str:
        """Returns in words which tensors do not fit together; "" if all do."""
        if self.order is not None and not torch.equal(self.order.sort().values, torch.arange(self.shape[-1])):
            return "the order of its inputs leaves some out"
        if self.group <= 0 or len(self.values) not in (16, 64, 128):
            return f"groups of {self.group} inputs, {len(self.values)} values"
        *leading, inputs = self.shape
        groups = -(-inputs // self.group)
        for numbers in (self.scales, self.minima):
            if numbers is None:
                continue
            if list(numbers.own.shape) != [*leading, groups]:
                return (
                    f"numbers of groups of shape {list(numbers.own.shape)} for weights of {list(self.shape)}"
                )
            shared = numbers.shared
            if shared is not None and list(shared.shape) != [*leading, -(-groups // numbers.of_shared)]:
                return f"shared factors of shape {list(shared.shape)} for weights of {list(self.shape)}"
        return ""

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors that have the axes of the weights."""
        yield self.codes
        for numbers in (self.scales, self.minima):
            if numbers is not None:
                yield numbers.own
                if numbers.shared is not None:
                    yield numbers.shared

    def rebuilt(self, tensors: Iterator[Tensor]) -> CodedWeight:
        """Returns the weights with other tensors, in the order of `tensors`."""
        codes = next(tensors)
        scales, minima = (
            None
            if numbers is None
            else replace(numbers, own=next(tensors), shared=None if numbers.shared is None else next(tensors))
            for numbers in (self.scales, self.minima)
        )
        assert scales is not None
        return replace(self, codes=codes, scales=scales, minima=minima)

    def to(self, device: torch.device) -> CodedWeight:
        """Returns the weights with all tensors on a device."""
        moved = self.rebuilt(each.to(device) for each in self.tensors())
        order = None if self.order is None else self.order.to(device)
        return replace(moved, values=self.values.to(device), order=order)

    def part(self, first: int, end: int) -> CodedWeight:
        """Returns some of the weights along their first axis."""
        return self.rebuilt(each[first:end] for each in self.tensors())

    def places(self) -> Tensor:
        """Returns the codes […, out, in], one in a byte."""
        if self.bits != 4:
            return self.codes
        return torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(-2)

    def with_bytes(self) -> CodedWeight:
        """Returns a weight of 6 bits as one of 8: a code has a byte here either way. The values of places that no
        code has continue those of the others."""
        if self.bits != 6:
            return self
        step = self.values[1] - self.values[0]
        more = self.values[-1] + step * torch.arange(1.0, 65.0, device=self.values.device)
        return replace(self, values=torch.cat([self.values, more]))

    def widened(self) -> Tensor:
        """Returns the weights in float32."""
        of_byte = (self.values if self.bits == 6 else torch.cat([self.values, -self.values]))[:, None]
        if self.bits == 4:
            of_byte = torch.stack([self.values.repeat(16), self.values.repeat_interleave(16)], -1)
        weights = of_byte.index_select(0, self.codes.flatten().int()).view(self.shape)
        whole = self.shape[-1] // self.group * self.group  # the last group may be shorter
        scales = self.scales.widened()
        minima = None if self.minima is None else self.minima.widened()
        if minima is not None and self.in_scales:
            minima = minima * scales
        for first, count in ((0, whole), (whole, self.shape[-1] - whole)):
            if count:
                part = torch.unflatten(weights[..., first : first + count], -1, (-1, min(count, self.group)))
                of_part = slice(first // self.group, first // self.group + part.shape[-2])
                part.mul_(scales[..., of_part, None])
                if minima is not None:
                    part.add_(minima[..., of_part, None])
        return weights if self.order is None else weights[..., self.order.argsort()]


def signed_codes(q: Tensor) -> Tensor:
    """Returns codes of 8 bits, a sign and a size, of q […] int8 from -127 to 127."""
    return q.abs().view(torch.uint8) | (q < 0).to(torch.uint8) << 7


def nibbles(codes: Tensor) -> Tensor:
    """Packs codes of 4 bits […, in] to two in a byte […, in / 2]."""
    return codes[..., ::2] | codes[..., 1::2] << 4
